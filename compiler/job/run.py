"""The devices of a job, from their start to their close."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import (
    CheckpointError,
    HardwareError,
    NonFiniteLoss,
    PenstockError,
    PlanError,
    StaleModelWarning,
    WorkerError,
)
from ...ir.program import Program
from ...runtime import scratch
from ...runtime.device.file import device_file_name
from ...runtime.optimizer.saving import other_settings, own_settings
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.processes.driver import Driver
from ...runtime.processes.interrupt import finishing
from ...runtime.processes.local import start_driver
from ...runtime.processes.setup import RunSetup
from ...runtime.processes.torchrun import TorchrunDriver
from ...runtime.source.trust import Trust
from ...runtime.state import durable
from ...runtime.state.base_identity import BaseIdentity
from ...runtime.state.checkpoint import open_checkpoint
from ...runtime.state.rng_state import restore_rng_state
from ...runtime.state.weights import (
    DirectoryWeights,
    LiveWeights,
    WeightSource,
    frozen_in_files,
    open_directory,
    stage_buffers,
    weights_to_read,
)
from ..folder import Folder
from ..stale import Unsynced, allow_gradient_readers, hide_marks, mark, tell_if_marked, unmark
from .bad_values import nan_text
from .changes.tensors import OwnTensors, load_state_dict, shorten
from .feed import Feed
from .outputs import Outputs, StepLoss, join
from .preflight import require_constants, require_machine
from .state import Held, identity_of, load_checkpoint, require_base, require_one_checkpoint, stage_states, sync_model
from .step_report import StepReport

REPORTS = 1000  # of ended steps that are kept for `take_reports`
ABSENT = "absent and start from their initialiser"  # of weights that a directory lacks


class JobRun:
    """The devices of a job: their start, their steps and what these report, where their weights are from, and what
    broke off. They start at the first use of `driver`.

    `directory`: the files that the devices read; written to a temporary one where there is none.
    """

    def __init__(
        self, model: nn.Module, folder: Folder, programs: Sequence[Program], feed: Feed,
        directory: str | Path | None, trust: Trust,
    ):  # fmt: skip
        self.model, self.folder, self.programs, self.feed, self.trust = model, folder, programs, feed, trust
        self.directory = None if directory is None else Path(directory)
        self.step_count = 0
        self.base: BaseIdentity | None = None  # of the frozen weights, if they are where `source` has them
        self.eager_blocks: dict[str, dict[str, str]] = {}  # as the last step reported
        self.ungraphed: dict[str, str] = {}  # the same
        self.broken = ""  # the error after which the devices may hold half a step
        self._last: StepReport | None = None
        self._unfinished: float | None = None  # the loss of a step whose report is not there yet
        self._ended: deque[StepReport] = deque(maxlen=REPORTS)  # that `take_reports` has not handed out
        self._scratch: scratch.Scratch | None = None
        self._driver: Driver | None = None
        self._closed = False
        self._stale: Unsynced | None = None  # since the model's weights are older than those of the devices
        self.own = OwnTensors(model, folder.interface)

    # --- the devices

    @property
    def live_driver(self) -> Driver | None:
        """The devices, if they were started and not closed."""
        return self._driver

    @property
    def driver(self) -> Driver:
        """The running devices, at the end of the last step; at the first use they are started and given their weights.

        Raises `WorkerError` where they broke off, `PlanError` after `close`.
        """
        self._start_once()
        self.finish_step()
        return self.running()

    def running(self) -> Driver:
        """As `driver`, while the last step may still be under way. What the script wrote into the model since the last
        sync goes to the devices first."""
        driver = self._start_once()
        if self._stale is None and (changed := self.own.changes(whole=True)) and not self.own.other_parameter():
            self.finish_step()
            if self.own.take_over(driver, changed):
                self.base = None  # the frozen weights are no longer those of the source
        return driver

    def require_own(self, call: str) -> bool:
        """Whether the script wrote into the model, for the devices to take over. Raises `PlanError` where the model has
        older weights than the devices, or another parameter in one's place."""
        changed = self.own.changes(whole=self._stale is None)
        if changed and (name := self.own.other_parameter()):
            raise PlanError(
                f"{call}: {name} is another parameter than at the last sync, or none; an optimizer would go on with "
                "the old one. Write into it (with torch.no_grad(): parameter.copy_(values)), or call "
                "job.load_state_dict(state)"
            )
        if changed and self._stale is not None:
            raise PlanError(
                f"{call}: {shorten(changed)} of the model changed since the last step, and there the model has older "
                "weights than the devices. Call job.sync(), which drops that change, and make it again; or call "
                "job.load_state_dict(state)"
            )
        return bool(changed)

    def _start_once(self) -> Driver:
        if self.broken or (self._driver is not None and self._driver.closed):
            raise WorkerError(
                f"the devices broke off and may hold half a step ({self.broken or 'they were stopped'}). Go on from a "
                "checkpoint with job.resume(directory), or begin anew with penstock.compile(..., plan=job.plan)"
            )
        if self._closed:
            raise PlanError(
                "the job was closed, and what it had trained went with its devices: step, read, evaluate and save "
                "before job.close(); go on from a checkpoint with job.resume(directory), or begin anew with "
                "penstock.compile(..., plan=job.plan)"
            )
        if self._driver is None:
            tell_if_marked(self.model)
            source, refused = self._try_source()
            driver = self._start(source, refused)
            try:
                assert source is not None
                for spec in self.folder.interface.stages.values():
                    driver.load_stage(spec.name, weights_to_read(source, spec), stage_buffers(source, spec))
                base = self._identity(source)
            except BaseException:
                driver.close()
                raise
            driver.end_loading()
            self._driver, self.base = driver, base
            self.own.note()
        return self._driver

    def _try_source(self) -> tuple[WeightSource | None, PenstockError | None]:
        """The source, or why there is none, which other ranks are told at the start."""
        try:
            return self.source(), None
        except PenstockError as error:
            return None, error

    def _start(self, source: WeightSource | None, refused: PenstockError | None = None) -> Driver:
        """The devices, without weights yet, at step 0. `source`: of the weights, whose files the devices may read in
        place. Raises `HardwareError` where this machine is not what the plan is for: too few GPUs, too little DRAM, no
        directory for files; else `refused`."""
        try:
            require_machine(self.folder.hardware, self.programs, self.folder.settings.ssd_dirs)
            require_constants(self.folder)
            if self.directory is None:
                self._scratch = scratch.temporary("job")
                self.directory = self.folder.write(self._scratch.path)
        except (HardwareError, PlanError) as error:
            refused = error
        except OSError as error:
            refused = HardwareError(f"the programs cannot be written: {error}; TMPDIR says where temporary files go")
        self.step_count, self._last, self._unfinished = 0, None, None
        stages = self.folder.interface.stages.items()
        in_files = {name: {} if source is None else frozen_in_files(source, spec) for name, spec in stages}
        return start_driver(replace(self.setup(self.directory or Path()), in_files=in_files), refused)

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Note an error in the body: after it the devices no longer agree on anything."""
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}".split("\n")[0]
            raise

    def setup(self, directory: Path) -> RunSetup:
        """The run of the files in a directory."""
        settings = self.folder.settings
        return RunSetup(
            files=[directory / device_file_name(device) for device in sorted(self.folder.files)],
            interface=self.folder.interface,
            hardware=self.folder.hardware,
            optimizer=OptimizerSpec.from_json(settings.optimizer),
            precision=settings.precision,
            seed=settings.seed,
            timeout_s=settings.timeout_s,
            ssd_dirs=settings.ssd_dirs,
            ssd_verify=settings.ssd_verify,
            compile_stages=settings.compile_stages,
            stop_on_nan=settings.stop_on_nan,
            trust=self.trust,
        )

    def source(self) -> WeightSource:
        """The source of the weights. Raises `PlanError` for a model on meta without files, `CheckpointError` where the
        files lack a frozen weight of one."""
        directory = self.folder.settings.weights
        if directory is not None:
            with hide_marks(self.model):
                found = open_directory(directory, self.model, missing_ok=True, seed=self.folder.settings.seed)
            self._require_frozen(directory, found)
            for what, names in (
                (ABSENT, found.fresh_names),
                ("not used", found.unexpected_keys),
            ):
                if names:
                    warnings.warn(f"weights {directory}: {len(names)} {what}: {', '.join(names[:6])}", stacklevel=2)
            return found
        if not self.has_source:
            raise PlanError(
                "the model is on the meta device; compile(..., weights=DIRECTORY) says where its weights are"
            )
        return LiveWeights(self.model)

    def _require_frozen(self, directory: str | Path, found: DirectoryWeights) -> None:
        """A frozen weight that no file has would be random for ever."""
        frozen = {name for name, p in self.model.named_parameters() if p.is_meta and not p.requires_grad}
        lost = [name for name in found.fresh_names if name in frozen]
        if lost:
            keys = ", ".join(found.unexpected_keys[:4])
            instead = f"; the files have {keys} instead, which may be another format's" if keys else ""
            raise CheckpointError(
                f"weights {directory}: no file has {', '.join(lost[:4])} ({len(lost)} frozen weights){instead}: give "
                "files that have them, in a format that the model's layers read, or train them"
            )

    @property
    def has_source(self) -> bool:
        return self.folder.settings.weights is not None or not any(p.is_meta for p in self.model.parameters())

    def states(self) -> Iterator[Held]:
        """One stage at a time: its spec, weights (fp32) and buffers. The devices start at the call."""
        return stage_states(self.driver, self.folder.interface)

    def close(self) -> None:
        """Stop the devices; a later `resume` starts them again."""
        driver, self._driver = self._driver, None
        self._closed = True
        if self._stale is not None:
            self._stale.closed = True
        allow_gradient_readers(self.model)
        if driver is not None:
            driver.close()
        self.broken = ""
        self.feed.forget()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch, self.directory = None, None

    # --- steps

    def step(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """One step on these leaves of a batch. Returns the loss; the step may still be under way."""
        driver = self._start_once()
        with self.breaking():
            empty = self._trains_nothing(leaves)
            values = driver.begin_step(leaves, stop_on_nan=not empty)
            refused = driver.undo_bad_step()
        loss = torch.stack([_promote_to_fp32(value) for value in values["loss"]]).mean().as_subclass(StepLoss)
        if self._unfinished is not None:
            self._end_step(self._unfinished, driver.report_before())
        self.feed.advance()
        if refused is not None:
            raise self._left_out(driver, refused, leaves)
        self.step_count += 1
        self._mark()
        self._unfinished = float(loss)
        if self._last is None:
            self.finish_step()  # the devices have seen the end of their first step
        if not empty:
            self._require_finite(float(loss))
        driver.stop_if_interrupted()
        return loss

    def evaluate(self, leaves: Mapping[str, Tensor], loss_only: bool) -> Outputs:
        """The forward pass on these leaves of a batch."""
        driver = self._start_once()
        self.finish_step()
        with self.breaking():
            result = driver.evaluate(leaves, loss_only)
        if result.refusal is not None:
            raise result.refusal
        driver.stop_if_interrupted()
        return Outputs({name: join(values) for name, values in result.values.items() if values})

    @property
    def has_stepped(self) -> bool:
        return self._last is not None or self._unfinished is not None

    @property
    def last(self) -> StepReport | None:
        """The report of the last step, for whose end it waits; None before the first one."""
        self.finish_step()
        return self._last

    def take_reports(self) -> list[StepReport]:
        """The reports of steps that have ended since the last call."""
        reports = list(self._ended)
        self._ended.clear()
        return reports

    def finish_step(self) -> None:
        """Wait for the end of the last step. Raises what broke it off after its loss was known."""
        loss, driver = self._unfinished, self._driver
        if loss is None or driver is None or self.broken:
            return
        with finishing("last"), self.breaking():
            report = driver.finish_step()
            self._end_step(loss, report)

    def _end_step(self, loss: float, report: Mapping[str, Any]) -> None:
        self._unfinished, self._last = None, self._report(loss, report)
        self._ended.append(self._last)
        self._tell_eager(self._last.eager_blocks)
        self._tell_ungraphed(self._last.ungraphed)

    def _report(self, loss: float, report: Mapping[str, Any]) -> StepReport:
        predicted = self.folder.plan.predicted
        return StepReport(
            step=self.step_count,
            loss=loss,
            predicted_s=predicted.step_s if predicted else None,
            **{**report, "learning_rates": tuple(report["learning_rates"])},
        )

    def _tell_eager(self, found: dict[str, dict[str, str]]) -> None:
        """Warn of each class of blocks, or chain of calls, that is to be compiled and is not, once."""
        for stage, reasons in found.items():
            for name, reason in reasons.items():
                if name not in self.eager_blocks.get(stage, {}):
                    warnings.warn(f"{name} of {stage} runs eagerly: {reason}", stacklevel=6)
        self.eager_blocks = found

    def _tell_ungraphed(self, found: dict[str, str]) -> None:
        """Warn of each stage that is to run from CUDA graphs and does not, once."""
        for stage, reason in found.items():
            if stage not in self.ungraphed:
                warnings.warn(f"cuda_graphs: {stage} runs as written: {reason}", stacklevel=6)
        self.ungraphed = found

    def _left_out(self, driver: Driver, refused: PenstockError, leaves: Mapping[str, Tensor]) -> PenstockError:
        """The error of a step that was undone."""
        if not isinstance(refused, NonFiniteLoss):
            return refused
        place = next(filter(None, driver.gather(nan_text(leaves))), "")  # all ranks raise the same
        return NonFiniteLoss(
            f"{refused} in step {self.step_count + 1}{place}: the step was left out; weights, states and "
            "step_count are as before it. Go on with another batch, lower the learning rate, set max_grad_norm, or "
            "compile with stop_on_nan=False"
        )

    def _trains_nothing(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether nothing counts in a batch, so that its loss is 0 / 0 and its gradients are zero, as in eager."""
        empty = [term for term in self.folder.settings.loss if term.input in leaves and not leaves[term.input].any()]
        return bool(empty) and all(term.of_targets for term in empty)

    def _require_finite(self, loss: float) -> None:
        if math.isfinite(loss) or not self.folder.settings.stop_on_nan:
            return
        self.finish_step()
        if self._last is not None and not self._last.skipped:
            raise NonFiniteLoss(
                f"the loss of step {self.step_count} is {loss}; the weights have taken that step, the last "
                "checkpoint has not. Lower the learning rate, set max_grad_norm, or compile with stop_on_nan=False"
            )

    # --- state

    def _mark(self) -> None:
        if self._stale is None:
            self._stale = mark(self.model)
        self._stale.closed = False

    def sync(self, ties: Mapping[str, str]) -> None:
        """Give the user's model the weights of the devices."""
        states, source = self.states(), self.source() if self.has_source else None
        dropped = self.own.changes(whole=True)
        sync_model(self.model, ties, states, source)
        unmark(self.model)
        self._stale = None
        self.own.note()
        if dropped:
            warnings.warn(
                f"sync has replaced what was written into {shorten(dropped)} of the model while it had older weights "
                "than the devices: change weights after job.sync()",
                StaleModelWarning,
                stacklevel=6,
            )

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool) -> None:
        """Give the devices these weights and buffers; their optimizer states stay."""
        with hide_marks(self.model):
            frozen = load_state_dict(self.driver, self.model, self.folder.interface, state, strict)
        if frozen:
            self.base = None
        self._mark()
        self.own.note()

    def resume(self, directory: str | Path, options: str = "checkpoint") -> dict[str, Any]:
        """Go on from a checkpoint, on the devices or, where they broke off or were closed, on new ones."""
        if options not in ("checkpoint", "script"):
            raise PlanError(f'resume(options={options!r}): it is "checkpoint" or "script"')
        checkpoint = open_checkpoint(directory)
        spec, held = OptimizerSpec.from_json(self.folder.settings.optimizer), checkpoint.progress
        if options == "script":
            optimizer, schedule = own_settings(spec, held.optimizer, held.scheduler.get("last_epoch", held.step))
            checkpoint.progress = replace(held, optimizer=optimizer, scheduler=schedule)
        elif differences := other_settings(spec, held.optimizer, held.scheduler):
            warnings.warn(
                f"resume: what the checkpoint has holds, not what this script has: {'; '.join(differences)}. "
                'job.resume(directory, options="script") goes on with what the script has',
                stacklevel=4,
            )
        checkpoint.require(*self.folder.interface.stages.values())
        source = self.source() if checkpoint.base is not None else None
        base = None if source is None else self._identity(source)
        require_base(checkpoint, base)
        if self.broken or (self._driver is not None and self._driver.closed):
            self.close()
        if self._driver is None:
            self._driver = self._start(source)
        self.finish_step()
        self.broken, self._closed, self._unfinished = "", False, None
        with self.breaking():
            require_one_checkpoint(self._driver, checkpoint)
            load_checkpoint(self._driver, self.folder.interface, checkpoint, directory, source)
            self._driver.end_loading()
            self.base = base
            restore_rng_state(dict(checkpoint.progress.rng))
            self.step_count = checkpoint.progress.step
            self._mark()
            self.own.note()
            self.feed.load(checkpoint.progress.data)
        return dict(checkpoint.progress.data)

    def _identity(self, source: WeightSource) -> BaseIdentity | None:
        with hide_marks(self.model):
            return identity_of(self.model, self.folder.interface, source, self.folder.settings.weights)

    def any_has(self, directory: str | Path) -> bool:
        """Whether any rank sees a checkpoint of that name: a rank that does not see it must not begin anew while others
        go on."""
        here = durable.locate(directory) is not None
        return any(self.driver.gather(here)) if TorchrunDriver.is_present() else here


def _promote_to_fp32(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))
