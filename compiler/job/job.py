"""`Job`: a compiled training run. No device starts before the first step, or another call that needs the devices."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from ...ir.errors import CheckpointError, HardwareError, NonFiniteLoss, PenstockError, PlanError, WorkerError
from ...ir.program import Program, place_of
from ...runtime import scratch
from ...runtime.device.file import device_file_name
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.processes.driver import Driver, loaded_names
from ...runtime.processes.interrupt import finishing
from ...runtime.processes.local import start_driver
from ...runtime.processes.rehearse import rehearse
from ...runtime.processes.setup import RunSetup
from ...runtime.processes.torchrun import TorchrunDriver
from ...runtime.simulate import Straggler, Timeline, find_stragglers, slow_devices
from ...runtime.source.trust import ONLY_VERIFIED, Trust
from ...runtime.state import durable, pretrained
from ...runtime.state.base_identity import BaseIdentity
from ...runtime.state.checkpoint import open_checkpoint
from ...runtime.state.rng_state import restore_rng_state
from ...runtime.state.weights import LiveWeights, WeightSource, open_directory, stage_buffers, stage_weights
from ..batches.shape import BatchShape, as_dicts, number_of_rows
from ..folder import COUNTS_FILE, Folder
from ..pipeline import PassRecord
from ..replanner import Replanner
from ..report.compiled import compiled_text, find_blocks
from ..report.explain import explain
from ..report.graphs import graphs_text
from ..report.lengths import StepsOfAnySize, Throughput
from ..report.page.content import ReportInputs, report_facts
from ..report.page.write import frame_of, page_of, require_writable, write_page
from ..search.offer import Offer
from ..search.what_helps import Help
from ..stale import Unsynced, mark, tell_if_marked, unmark, unmarked
from ..steps import simulate_here
from .any_size import AnySizes
from .background import BackgroundSave
from .changed_model import Taken
from .counts import BatchCounts, LossWeight
from .feed import Feed
from .one_call import OneCall, one_call
from .outputs import Outputs, joined
from .preflight import own_device, require_constants, require_machine
from .sampler import RankSampler
from .state import (
    Held,
    identity_of,
    load_checkpoint,
    require_base,
    require_one_checkpoint,
    save_checkpoint,
    stage_states,
    state_dict_of,
    sync_model,
)
from .step_inputs import StepInputs, counted_buffers
from .step_report import StepReport

REPORTS = 1000  # of ended steps that are kept for `take_reports`


class Job:
    """A compiled run: `step`, `evaluate`, `explain`, `simulate`, `code`, `write`, `save`, `resume`, `sync`, `close`.

    Calls that need the devices may come from any thread, one after another; `calls` refuses one while another is under
    way.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Folder,
        programs: Sequence[Program],
        *,
        ties: Mapping[str, str],
        records: Sequence[PassRecord] = (),
        directory: str | Path | None = None,
        trust: Trust = ONLY_VERIFIED,
        loss_weight: LossWeight | None = None,
        replanner: Replanner | None = None,
    ):
        self.model, self.folder, self.programs = model, folder, list(programs)
        self.plan, self.hardware = folder.plan, folder.hardware
        self.step_count = 0
        self._last: StepReport | None = None
        self._unfinished: float | None = None  # the loss of a step whose report is not there yet
        self._ended: deque[StepReport] = deque(maxlen=REPORTS)  # that `take_reports` has not handed out
        self._ties, self._records, self.trust = dict(ties), records, trust
        self.replanner = replanner  # None for a job that was loaded, which has no graph to plan again
        self._helps: list[Help] | None = None
        self._directory = Path(directory) if directory is not None else None
        self._scratch: scratch.Scratch | None = None
        self._driver: Driver | None = None
        self._save: BackgroundSave | None = None  # the last one
        self._saves = 0  # in the background, since the job began
        self.calls = OneCall()
        self._eager_blocks: dict[str, dict[str, str]] = {}  # as the last step reported
        self._ungraphed: dict[str, str] = {}  # the same
        self._base: BaseIdentity | None = None  # of the frozen weights, if they are where `_source` has them
        self._broken = ""  # the error after which the devices may hold half a step
        self._closed = False
        self._stale: Unsynced | None = None  # since the model's weights are older than those of the devices
        leaves = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in folder.settings.batch}
        shape = BatchShape(leaves, number_of_rows([dims[0] for dims, _ in leaves.values()]), folder.settings.flags)
        device = own_device() if TorchrunDriver.is_present() else None
        self._feed = Feed(model, shape, folder.interface, device, _any_sizes(model, shape, folder))
        self._inputs = StepInputs(self._feed, folder, self._counter)
        self._taken = Taken(model, folder.interface)
        self.loss_weight = loss_weight
        self._any_size: StepsOfAnySize | None = None
        if (sizes := folder.settings.sizes) is not None:
            at = None if replanner is None else replanner.stages_at
            self._any_size = StepsOfAnySize(self.programs, self.hardware, self.plan.precision, sizes, at)

    # --- what it is

    def explain(self) -> str:
        """Why this plan: stages, prediction, bounds, what would help, rivals.

        The first call plans what would help, for up to half a minute.
        """
        if self._helps is None and self.replanner is not None:
            self._helps = self.replanner.helps()
        known = self.folder.settings
        spec = OptimizerSpec.from_json(known.optimizer)
        page = explain(
            self.plan, self.programs, self.hardware, self._records, self._helps, known.loss, known.rows, spec
        )
        page = f"{page}\n\n{self._compiled_text()}" if known.compile_stages else page
        if self._any_size is not None and self._any_size.stages_at is not None:
            page = f"{page}\n\n{self._any_size.table()}"
        return f"{page}\n\n{graphs_text(self.programs, self._ungraphed)}" if self._has_graphs else page

    def report(
        self,
        path: str | Path,
        what_if: bool = True,
        machines: Sequence[Mapping[str, Any]] = (),
        price_per_hour: float | None = None,
    ) -> Path:
        """Write the plan, and the last step beside it if there was one, as one self-contained page of HTML.

        what_if: plan for machines with more of one thing, which takes up to half a minute the first time. machines:
        what other machines would do, a mapping with "machine", "step_s" and prices for each. price_per_hour: in
        dollars, where the hardware document has no price. Under torchrun all ranks call it and the first one writes.
        Raises `PlanError` for a path that cannot be written, and then plans nothing.
        """
        is_main = self._feed.device in (None, 0)
        if is_main:
            require_writable(path)
        if what_if and self._helps is None and self.replanner is not None:
            self._helps = self.replanner.helps()
        page = self._page(machines, price_per_hour)
        return write_page(path, page) if is_main else Path(path)

    def _page(self, machines: Sequence[Mapping[str, Any]] = (), price_per_hour: float | None = None) -> str:
        ids = [shape for name, (shape, _) in self._feed.shape.leaves.items() if name.endswith("input_ids")]
        measured = self.timeline() if self._last is not None or self._unfinished is not None else None
        return page_of(
            report_facts(
                ReportInputs(
                    self.plan,
                    self.programs,
                    self.hardware,
                    self.folder,
                    measured,
                    self._helps or (),
                    sum(math.prod(shape) for shape in ids) or None,
                    machines,
                    price_per_hour,
                )
            )
        )

    def _repr_html_(self) -> str:
        """The report, as notebooks show it."""
        return frame_of(self._page())

    @property
    def _has_graphs(self) -> bool:
        return self.folder.interface.cuda_graphs

    def _compiled_text(self) -> str:
        with scratch.temporary("explain") as directory:
            self.folder.write(directory)
            blocks = find_blocks(directory, self.folder.interface, self.trust)
        return compiled_text(blocks, self._eager_blocks)

    def simulate(self, **sizes: int) -> Timeline:
        """One step on the described hardware, without running anything. Its `step_s` is of one step among many.

        `sizes`: those of each micro-batch, by the names in `dynamic_shapes`, as in `simulate(sequence=512)`; by default
        the most of each. Raises `PlanError` for a size that the plan does not have.
        """
        if self._any_size is not None:
            return self._any_size.simulate(sizes)
        if sizes:
            raise PlanError(f"simulate({', '.join(sizes)}=...): the job was compiled without dynamic_shapes")
        return simulate_here(self.programs, self.hardware, self.plan.precision)

    def throughput(self, lengths: Iterable[Any]) -> Throughput:
        """Tokens a second, simulated, over batches of these lengths, or over the batches of a loader.

        Raises `PlanError` for a job without one length in `dynamic_shapes`, or a length beyond its range.
        """
        if self._any_size is None:
            raise PlanError("throughput: the job was compiled without dynamic_shapes, all its batches have one length")
        return self._any_size.throughput(lengths)

    def rehearse(self, time_scale: float = 1.0) -> Timeline:
        """One step in real time, in the processes that would run it, with waits in place of computation and transfers.

        Needs none of the hardware. With `time_scale` 10 everything takes ten times as long, and the result is given in
        the hardware's seconds. Raises `PlanError` for another scale than a positive number.
        """
        with scratch.temporary("rehearsal") as directory:
            return rehearse(self._setup(self.folder.write(directory)), time_scale)

    def code(self, device: int = 0) -> str:
        """The text of the file that a device runs."""
        if device not in self.folder.files:
            raise PlanError(f"device={device}; there are 0 to {len(self.folder.files) - 1}")
        return self.folder.files[device]

    def write(self, directory: str | Path) -> Path:
        """Write the files; `penstock.load` runs them, also after an edit."""
        return self.folder.write(directory)

    # --- running

    @one_call
    def step(self, batch: Any) -> Tensor:
        """One training step on a global batch of the compiled shapes, or on a list of its micro-batches. Returns the
        loss of the whole batch, of which `explain` says how micro-batches make it.

        A rank of torchrun may hand over just its own part, the rows `rows` (`sampler` reads those), or None where it
        loads nothing. Raises `BatchError` for another batch, on all ranks and before anything has run; `NonFiniteLoss`
        after a whole step; `WorkerError` or `BudgetExceeded` where the step broke off: then only `resume` or `close` is
        possible; `CheckpointError`, before anything has run, where a save in the background has failed. Ctrl-C raises
        KeyboardInterrupt after the step, on all ranks after the same one; a second Ctrl-C breaks the step off. Raises
        `PlanError` after `close`, and where `requires_grad` of a parameter is another than at compile.
        """
        self._tell_failed_save()
        self._taken.require_unchanged()
        leaves = self._given("step", batch)
        driver = self._running()
        with finishing("step"):
            with self._breaking():
                values = driver.begin_step(leaves)
            loss = torch.stack([_at_least_fp32(value) for value in values["loss"]]).mean()
            if self._unfinished is not None:
                self._end_step(self._unfinished, driver.report_before())
            self.step_count += 1
            self._mark()
            self._feed.trained()
            self._unfinished = float(loss)
            if self._last is None:
                self._finish_step()  # the devices have seen the end of their first step
            self._require_finite(float(loss))
            driver.stop_if_interrupted()
        return loss

    def _tell_eager(self, found: dict[str, dict[str, str]]) -> None:
        """Warn of each class of blocks that is to be compiled and is not, once."""
        for stage, reasons in found.items():
            for name, reason in reasons.items():
                if name not in self._eager_blocks.get(stage, {}):
                    warnings.warn(f"compile_stages: {name} of {stage} runs eagerly: {reason}", stacklevel=5)
        self._eager_blocks = found

    def _tell_ungraphed(self, found: dict[str, str]) -> None:
        """Warn of each stage that is to run from CUDA graphs and does not, once."""
        for stage, reason in found.items():
            if stage not in self._ungraphed:
                warnings.warn(f"cuda_graphs: {stage} runs as written: {reason}", stacklevel=5)
        self._ungraphed = found

    @property
    def last(self) -> StepReport | None:
        """What the last step did; None before the first one. Waits for the step's end, which `step` does not.

        A rank of torchrun may read it alone. Raises `WorkerError` naming a rank that ended before its report came.
        """
        self._finish_step()
        return self._last

    def take_reports(self) -> list[StepReport]:
        """The reports of steps that have ended since the last call, in their order, at most the last 1000. Waits for
        nothing: a step's report is there as soon as the next step is, or `last` is read, or the job closed."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken

    def _finish_step(self) -> None:
        """Wait for the end of the last step. Raises what broke it off after its loss was known."""
        loss, driver = self._unfinished, self._driver
        if loss is None or driver is None or self._broken:
            return
        with self._breaking():
            report = driver.finish_step()
        self._end_step(loss, report)

    def _end_step(self, loss: float, report: Mapping[str, Any]) -> None:
        self._unfinished, self._last = None, self._report(loss, report)
        self._ended.append(self._last)
        self._tell_eager(self._last.eager_blocks)
        self._tell_ungraphed(self._last.ungraphed)

    def _require_finite(self, loss: float) -> None:
        if math.isfinite(loss) or not self.folder.settings.stop_on_nan:
            return
        self._finish_step()
        if self._last is not None and not self._last.skipped:
            raise NonFiniteLoss(
                f"the loss of step {self.step_count} is {loss}; the weights have taken that step, the last "
                "checkpoint has not. Lower the learning rate, set max_grad_norm, or compile with stop_on_nan=False"
            )

    @one_call
    def evaluate(self, batch: Any, outputs: bool = True) -> Outputs:
        """Forward only, in evaluation mode: the loss and the model's outputs, for the whole batch. With `outputs=False`
        the loss only: logits of a large vocabulary stay where they are."""
        if self.folder.settings.evaluation is not None:
            raise PlanError(
                f"this model cannot be evaluated through its programs: {self.folder.settings.evaluation}; call "
                "job.sync() and evaluate the model itself"
            )
        leaves = self._given("evaluate", batch, "evaluate" if outputs else "evaluate(outputs=False)")
        driver = self.driver
        with finishing("evaluate"):
            with self._breaking():
                result = driver.evaluate(leaves, loss_only=not outputs)
            driver.stop_if_interrupted()
        return Outputs({name: joined(values) for name, values in result.values.items() if values})

    @property
    def rows(self) -> range:
        """The rows of a global batch that this process may hand over: all, or on a rank of torchrun its lane's."""
        return self._feed.rows

    @property
    def inputs(self) -> list[str]:
        """The inputs of a batch that this process's devices load in a step; a rank that has none may hand over None."""
        device = self._feed.device
        roles = self.programs if device is None else [self.programs[place_of(self.folder.interface, device)[1]]]
        return self._inputs.needed(set().union(*(loaded_names(program) for program in roles)))

    def sampler(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        last: str = "carry",
        start: int | None = None,
    ) -> RankSampler:
        """The `batch_sampler` of a `DataLoader` that reads this process's rows of every batch; see `RankSampler`.

        Each `step` counts as one of its batches. `save` keeps its position, `resume` restores it, whether the sampler
        is made before or after, on any number of ranks. `start`: begin at this position, in samples. `seed`: of the
        order; default: the job's. A sampler made later replaces this one. Raises `PlanError` for data sets without a
        length and what `RankSampler` refuses, `CheckpointError` where the resumed run read other data.
        """
        seed = self.folder.settings.seed if seed is None else seed
        return self._feed.sample(dataset, shuffle, seed, last, start)

    def _given(self, function: str, batch: Any, call: str = "") -> dict[str, Tensor]:
        """What the devices load; a rank of torchrun starts its device first, and learns from the others."""
        driver = None if self._feed.device is None else self.driver
        return self._inputs.of(function, as_dicts(batch), call or function, driver)

    def _counter(self) -> BatchCounts:
        """Counts batches, with the running devices' buffers (class weights). Under torchrun it asks other ranks."""
        rules = self.folder.settings.counts
        if not rules.means:
            return BatchCounts(rules, loss_weight=self.loss_weight)
        driver = self.driver
        assert self._directory is not None
        buffers = counted_buffers(self.folder, driver, self._source)
        return BatchCounts.from_file(rules, self._directory / COUNTS_FILE, buffers, self.trust)

    @one_call
    def timeline(self) -> Timeline:
        """The last step as measured."""
        driver = self.driver
        with finishing("timeline"):
            return driver.timeline()

    def stragglers(self) -> list[Straggler]:
        """The devices that held up the last step, the costliest first: slower than their equals, or than the plan lets
        one expect. Under torchrun all ranks must call it."""
        return find_stragglers(self.timeline(), self.programs, self.hardware, precision=self.plan.precision)

    def offer(self, timelines: Sequence[Timeline] = ()) -> Offer | None:
        """A faster plan for this machine as steps have shown it, in words and to compile again; None where no device
        computes slower than its equals, or than planned beside the others, or where no plan found saves 5 %.

        timelines: the steps to judge by, of which the median counts; default: the last one alone. Plans for up to 20 s.
        Under torchrun all ranks call it. Raises `PlanError` for a job that `load` made, which has no graph to plan
        again.
        """
        steps = list(timelines) or [self.timeline()]
        times = slow_devices(steps, self.programs, self.hardware, precision=self.plan.precision)
        if not times:
            return None
        if self.replanner is None:
            raise PlanError("a job that was loaded cannot be planned again: make it with compile, then ask it")
        found = self.replanner.offer(times) if self._feed.device in (None, 0) else None
        first = self.of_all_ranks(None if found is None else found.to_data())[0]
        return None if first is None else Offer.from_data(first)

    @one_call
    def of_all_ranks(self, value: Any) -> list[Any]:
        """The plain `value` of each rank of torchrun, in their order; elsewhere just this one. All ranks must call it,
        after the same step, for whose end it does not wait."""
        return self._running().gather(value)

    @property
    def driver(self) -> Driver:
        """The running devices, at the end of the last step; at the first use they are started and given their weights.

        Raises `WorkerError` where they broke off, `PlanError` after `close`.
        """
        self._running()
        self._finish_step()
        return self._running()

    def _running(self) -> Driver:
        """As `driver`, while the last step may still be under way."""
        if self._broken or (self._driver is not None and self._driver.closed):
            raise WorkerError(
                f"the devices broke off and may hold half a step ({self._broken or 'they were stopped'}). Go on from a "
                "checkpoint with job.resume(directory), or begin anew with penstock.compile(..., plan=job.plan)"
            )
        if self._closed:
            raise PlanError(
                "the job was closed, and what it had trained went with its devices: step, read, evaluate and save "
                "before job.close(); go on from a checkpoint with job.resume(directory), or begin anew with "
                "penstock.compile(..., plan=job.plan)"
            )
        if self._driver is None:
            driver = self._start()
            tell_if_marked(self.model)
            try:
                source = self._source()
                for spec in self.folder.interface.stages.values():
                    driver.load_stage(spec.name, stage_weights(source, spec, own=False), stage_buffers(source, spec))
            except BaseException:
                driver.close()
                raise
            self._driver, self._base = driver, self._identity(source)
        return self._driver

    def _start(self) -> Driver:
        """The devices, without weights yet, at step 0. Raises `HardwareError` where this machine is not what the
        plan is for: too few GPUs, too little DRAM, no directory for files."""
        refused: PenstockError | None = None
        try:
            require_machine(self.hardware, self.programs, self.folder.settings.ssd_dirs)
            require_constants(self.folder)
            if self._directory is None:
                self._scratch = scratch.temporary("job")
                self._directory = self.folder.write(self._scratch.path)
        except (HardwareError, PlanError) as error:
            refused = error
        except OSError as error:
            refused = HardwareError(f"the programs cannot be written: {error}; TMPDIR says where temporary files go")
        self.step_count, self._last, self._unfinished = 0, None, None
        return start_driver(self._setup(self._directory or Path()), refused)

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Note an error in the body: after it the devices no longer agree on anything."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}".split("\n")[0]
            raise

    def _setup(self, directory: Path) -> RunSetup:
        settings = self.folder.settings
        return RunSetup(
            files=[directory / device_file_name(device) for device in sorted(self.folder.files)],
            interface=self.folder.interface,
            hardware=self.hardware,
            optimizer=OptimizerSpec.from_json(settings.optimizer),
            precision=settings.precision,
            seed=settings.seed,
            timeout_s=settings.timeout_s,
            ssd_dirs=settings.ssd_dirs,
            ssd_verify=settings.ssd_verify,
            compile_stages=settings.compile_stages,
            trust=self.trust,
        )

    def _source(self) -> WeightSource:
        directory = self.folder.settings.weights
        if directory is not None:
            with unmarked(self.model):
                found = open_directory(directory, self.model, missing_ok=True, seed=self.folder.settings.seed)
            for what, names in (
                ("absent and start from their initialiser", found.fresh_names),
                ("not used", found.unexpected_keys),
            ):
                if names:
                    warnings.warn(f"weights {directory}: {len(names)} {what}: {', '.join(names[:6])}", stacklevel=2)
            return found
        if not self._has_source():
            raise PlanError(
                "the model is on the meta device; compile(..., weights=DIRECTORY) says where its weights are"
            )
        return LiveWeights(self.model)

    def _has_source(self) -> bool:
        return self.folder.settings.weights is not None or not any(p.is_meta for p in self.model.parameters())

    # --- state

    def states(self) -> Iterator[Held]:
        """One stage at a time: its spec, weights (fp32) and buffers."""
        with self.calls.serving("states"):
            found = self._states()
            while True:
                with finishing("states"):
                    held = next(found, None)
                if held is None:
                    return
                yield held

    def _states(self) -> Iterator[Held]:
        """As `states`; the devices are started before the first is asked for."""
        return stage_states(self.driver, self.folder.interface)

    @one_call
    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers under the model's own names, tied names included."""
        states = self._states()
        with finishing("state_dict"), unmarked(self.model):
            return state_dict_of(self.model, self._ties, states)

    @one_call
    def sync(self) -> None:
        """Give the user's own model the trained weights and buffers, in place; a meta model becomes real.

        From the first step to this call the model has the weights from before; whoever then uses, copies or saves it is
        told by a `StaleModelWarning`.
        """
        states, source = self._states(), self._source() if self._has_source() else None
        with finishing("sync"):
            sync_model(self.model, self._ties, states, source)
            unmark(self.model)
            self._stale = None

    def _mark(self) -> None:
        if self._stale is None:
            self._stale = mark(self.model)
        self._stale.closed = False

    @one_call
    def save_pretrained(self, directory: str | Path, merge: bool = False) -> Path:
        """Weights as safetensors that `from_pretrained` loads, one stage in memory at a time. Of a PeftModel, its
        adapters, or with `merge` the model without PEFT that computes the same; of another module than transformers',
        its state dict for `safetensors.torch.load_model`.

        Under torchrun the first rank writes; the others take part. Raises `PlanError`, before anything is written, for
        a model whose files no `from_pretrained` would read back, such as a wrapper with a head of its own, and for
        `merge` where there is no adapter.
        """
        with unmarked(self.model):
            pretrained.require_savable(self.model, merge)
        states = self._states()
        source = self._source() if self.driver.is_main and self._has_source() else None
        with finishing("save_pretrained"), unmarked(self.model):
            if self.driver.is_main:
                return pretrained.save_pretrained(directory, states, self.model, source=source, merge=merge)
            for _ in states:
                pass
        return Path(directory)

    @overload
    def save(
        self, directory: str | Path, data: Mapping[str, Any] | None = None, wait: Literal[True] = True
    ) -> Path: ...

    @overload
    def save(
        self, directory: str | Path, data: Mapping[str, Any] | None = None, *, wait: Literal[False]
    ) -> BackgroundSave: ...

    def save(
        self, directory: str | Path, data: Mapping[str, Any] | None = None, wait: bool = True
    ) -> Path | BackgroundSave:
        """A checkpoint to resume from: weights, optimizer, scheduler, counters, `data` and the position of `sampler`.

        Frozen weights, as those under adapters, are not in it: `resume` takes them from where the job's weights are
        from, and refuses others.
        Atomic: an older checkpoint of that name stays until the new one is complete. Raises `CheckpointError`.

        With `wait=False` it returns when the state has been copied to DRAM; threads write the files while the next
        steps run. The room for the copy stays taken for the next save; where the plan leaves too little, this raises
        `NoRoomForCopy`. States on SSD are not copied: an update waits until they have been read. A save first waits
        for the one before, as `resume` and `close` do. What goes wrong in the background is raised by the next call of
        `step`, `save`, `resume` or `close`, or by `wait()` of the result.
        """
        with self.calls.serving("save"):
            self._await_save()
            driver, found = self.driver, self._feed.state(data or {})
            interface = self.folder.interface
            with finishing("save"):
                if wait:
                    return save_checkpoint(driver, interface, self._ties, directory, found, self._base)
                self._saves += 1
                self._save = BackgroundSave(self._saves, driver, interface, self._ties, directory, found, self._base)
            return self._save

    def _await_save(self, only_warn: bool = False) -> None:
        """Wait for the save in the background. Raises what went wrong with it, unless `wait()` has; only warns where
        something else went wrong before."""
        if self._save is None:
            return
        save, self._save = self._save, None
        try:
            save.finish()
        except CheckpointError as error:
            if not (only_warn or self._broken):
                raise
            warnings.warn(str(error), stacklevel=4)

    def _tell_failed_save(self) -> None:
        """Raise what went wrong with the save in the background; under torchrun on all ranks at the same step."""
        if self._driver is not None and self._driver.save_failed:
            self._await_save()

    @one_call
    def resume(self, directory: str | Path, missing_ok: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint, whatever partition and devices it was saved from. Returns its `data`. With
        `missing_ok`, and where nothing was saved yet, it does nothing and returns an empty dict.

        After an error or `close` it starts the devices again. A checkpoint that is damaged or of another model raises
        `CheckpointError`; where that shows only while devices read it, they need a whole checkpoint before they can go
        on.
        """
        self._await_save()
        if missing_ok and not self._any_has(directory):
            return {}
        found = open_checkpoint(directory)
        found.require(*self.folder.interface.stages.values())
        source = self._source() if found.base is not None else None
        base = None if source is None else self._identity(source)
        require_base(found, base)
        if self._broken or (self._driver is not None and self._driver.closed):
            self._close()
        if self._driver is None:
            self._driver = self._start()
        self._finish_step()
        self._broken, self._closed, self._unfinished = "", False, None
        self._inputs.forget()
        with finishing("resume"), self._breaking():
            require_one_checkpoint(self._driver, found)
            load_checkpoint(self._driver, self.folder.interface, found, directory, source)
            self._base = base
            restore_rng_state(dict(found.progress.rng))
            self.step_count = found.progress.step
            self._mark()
            self._feed.load(found.progress.data)
        return dict(found.progress.data)

    def _identity(self, source: WeightSource) -> BaseIdentity | None:
        with unmarked(self.model):
            return identity_of(self.model, self.folder.interface, source, self.folder.settings.weights)

    def _any_has(self, directory: str | Path) -> bool:
        """Whether any rank sees a checkpoint of that name: a rank that does not see it must not begin anew while others
        go on."""
        here = durable.locate(directory) is not None
        return any(self.driver.gather(here)) if TorchrunDriver.is_present() else here

    @one_call
    def close(self) -> None:
        """Stop the devices; what they had trained is gone, unless it was saved or synced. May be called twice.

        Afterwards only `resume` starts the devices again, to go on from a checkpoint. Raises what broke off the last
        step after its loss was known, or a save in the background, for which it waits.
        """
        try:
            try:
                self._finish_step()
            finally:
                self._await_save()
        finally:
            self._close()

    def _close(self) -> None:
        driver, self._driver = self._driver, None
        self._closed = True
        if self._stale is not None:
            self._stale.closed = True
        if driver is not None:
            driver.close()
        self._broken = ""
        self._feed.forget()
        self._inputs.forget()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch, self._directory = None, None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._await_save(only_warn=True)
        self.close()

    def _report(self, loss: float, report: Mapping[str, Any]) -> StepReport:
        return StepReport(
            step=self.step_count,
            loss=loss,
            predicted_s=self.plan.predicted.step_s if self.plan.predicted else None,
            **{**report, "learning_rates": tuple(report["learning_rates"])},
        )


def _at_least_fp32(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _any_sizes(model: nn.Module, shape: BatchShape, folder: Folder) -> AnySizes | None:
    settings = folder.settings
    if settings.sizes is None:
        return None
    alike = [term for term in settings.loss if term.kind not in ("counted", "weighted")]
    uneven = f"the loss of {alike[0].source or 'the model'} is a mean to which each adds alike" if alike else ""
    return AnySizes(model, shape, settings.sizes, folder.interface.total_micro_batches, uneven)
