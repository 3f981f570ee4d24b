"""`Job`: a compiled training run. Nothing starts before the first step (or whatever first needs the devices)."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import checkpoint, pretrained
from ..codegen.file import device_file
from ..runtime.commands import split
from ..runtime.drivers import Driver, Setup
from ..runtime.errors import NonFiniteLoss, PlanError
from ..runtime.launcher import start_driver
from ..runtime.optimizer import OptimizerSpec
from ..runtime.program import Program, StageSpec
from ..runtime.plain_json import encode
from ..runtime.rng_state import restore_rng_state, rng_state
from ..runtime.simulate import simulate
from ..runtime.timeline import Timeline
from ..runtime.weights import LiveWeights, WeightSource, open_directory, stage_buffers, stage_weights
from .batch import BatchShape
from .folder import Folder
from .report import explain
from .strategies import PassRecord


@dataclass
class StepReport:
    """What the last step did. Shares are of `seconds`; bytes are per memory or route, over all devices."""

    step: int
    loss: float
    seconds: float
    predicted_s: float | None
    busy_share: dict[str, dict[str, float]] = field(default_factory=dict)  # device name -> stream -> share
    moved_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


class Outputs(dict[str, Tensor]):
    """Results by name, also as attributes: `out.loss`, `out["logits"]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(self)}") from None


class Job:
    """See DESIGN: `step`, `evaluate`, `explain`, `simulate`, `code`, `write`, `save`, `resume`, `sync`, `close`."""

    def __init__(
        self,
        model: nn.Module,
        folder: Folder,
        programs: Sequence[Program],
        *,
        ties: Mapping[str, str],
        records: Sequence[PassRecord] = (),
        directory: str | Path | None = None,
    ):
        self.model, self.folder, self.programs = model, folder, list(programs)
        self.plan, self.hardware = folder.plan, folder.hardware
        self.last: StepReport | None = None
        self.step_count = 0
        self._ties, self._records = dict(ties), records
        self._directory = Path(directory) if directory is not None else None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._driver: Driver | None = None
        leaves = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in folder.settings.batch}
        self._shape = BatchShape(leaves, next(iter(leaves.values()))[0][0])

    # --- what it is

    def explain(self) -> str:
        """Why this plan: stages, prediction, bounds, what would help, rivals."""
        return explain(self.plan, self.programs, self.hardware, self._records)

    def simulate(self) -> Timeline:
        """One step on the described hardware, without running anything."""
        return simulate(self.programs, self.hardware, precision=self.plan.precision)

    def code(self, device: int = 0) -> str:
        """The text of the file that a device runs."""
        if device not in self.folder.files:
            raise PlanError(f"device={device}; there are 0 to {len(self.folder.files) - 1}")
        return self.folder.files[device]

    def write(self, directory: str | Path) -> Path:
        """Write the files; `penstock.load` runs them, also after an edit."""
        return self.folder.write(directory)

    # --- running

    def step(self, batch: Any) -> Tensor:
        """One training step on a global batch of the compiled shapes. Returns the mean loss over its micro-batches.

        Raises `BatchError` for another batch, `NonFiniteLoss`, `WorkerError`, `BudgetExceeded`.
        """
        leaves = self._shape.check(self.model, batch)
        result = self.driver.step(leaves)
        loss = torch.stack([value.detach().float() for value in result.values["loss"]]).mean()
        self.step_count += 1
        self.last = self._report(float(loss), result.report)
        if self.folder.settings.stop_on_nan and not math.isfinite(float(loss)) and not self.last.skipped:
            raise NonFiniteLoss(
                f"the loss of step {self.step_count} is {float(loss)}; the weights have taken that step, the last "
                "checkpoint has not. Lower the learning rate, set max_grad_norm, or compile with stop_on_nan=False"
            )
        return loss

    def evaluate(self, batch: Any) -> Outputs:
        """Forward only, in evaluation mode: the loss and the model's outputs, for the whole batch."""
        if self.folder.settings.evaluation is not None:
            raise PlanError(
                f"this model cannot be evaluated through its programs: {self.folder.settings.evaluation}; call "
                "job.sync() and evaluate the model itself"
            )
        result = self.driver.evaluate(self._shape.check(self.model, batch))
        return Outputs({name: _joined(values) for name, values in result.values.items() if values})

    def timeline(self) -> Timeline:
        """The last step as measured."""
        return self.driver.timeline()

    @property
    def driver(self) -> Driver:
        """Starts the devices at the first use, and gives them their weights."""
        if self._driver is None:
            if self._directory is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="penstock-")
                self._directory = self.folder.write(self._scratch.name)
            driver = start_driver(self._setup(self._directory))
            try:
                source = self._source()
                for spec in self.folder.interface.stages.values():
                    driver.load_stage(spec.name, stage_weights(source, spec, own=False), stage_buffers(source, spec))
            except BaseException:
                driver.close()
                raise
            self._driver = driver
        return self._driver

    def _setup(self, directory: Path) -> Setup:
        settings = self.folder.settings
        return Setup(
            files=[directory / device_file(device) for device in sorted(self.folder.files)],
            interface=self.folder.interface,
            hardware=self.hardware,
            optimizer=OptimizerSpec.from_json(settings.optimizer),
            precision=settings.precision,
            seed=settings.seed,
        )

    def _source(self) -> WeightSource:
        directory = self.folder.settings.weights
        if directory is not None:
            found = open_directory(directory, self.model, missing_ok=True, seed=self.folder.settings.seed)
            for what, names in (
                ("absent and start from their initialiser", found.fresh_names),
                ("not used", found.unexpected_keys),
            ):
                if names:
                    warnings.warn(f"weights {directory}: {len(names)} {what}: {', '.join(names[:6])}", stacklevel=2)
            return found
        if any(p.is_meta for p in self.model.parameters()):
            raise PlanError(
                "the model is on the meta device; compile(..., weights=DIRECTORY) says where its weights are"
            )
        return LiveWeights(self.model)

    # --- state

    def states(self) -> Iterator[tuple[StageSpec, dict[str, Tensor], dict[str, Tensor]]]:
        """One stage at a time: its spec, weights (fp32) and buffers."""
        for stage, device in self.driver.setup.stage_devices.items():
            _, tensors = self.driver.call("stage_state", device, {"stage": stage, "optimizer": False})
            parts = split(tensors)
            yield self.folder.interface.stages[stage], parts.get("weights", {}), parts.get("buffers", {})

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers under the model's own names, tied names included."""
        found: dict[str, Tensor] = {}
        for _, weights, buffers in self.states():
            for name, tensor in (weights | buffers).items():
                found.setdefault(self._ties.get(name, name), tensor)
        for alias, name in self._ties.items():
            if name in found:
                found[alias] = found[name]
        known = self.model.state_dict(keep_vars=True)
        return {name: found[name] for name in known if name in found}

    def sync(self) -> None:
        """Give the user's own model the trained weights and buffers, in place; a meta model becomes real."""
        for _, weights, buffers in self.states():
            for name, tensor in (weights | buffers).items():
                _assign(self.model, name, tensor, [a for a, n in self._ties.items() if n == self._ties.get(name, name)])

    def save_pretrained(self, directory: str | Path) -> Path:
        """Weights as safetensors that `from_pretrained` loads, one stage in memory at a time.

        Under torchrun the first rank writes; the others take part.
        """
        if self.driver.is_main:
            return pretrained.save_pretrained(directory, self.states(), self.model, source=self._source())
        for _ in self.states():
            pass
        return Path(directory)

    def save(self, directory: str | Path, data: Mapping[str, Any] | None = None) -> Path:
        """A checkpoint to resume from: weights, optimizer, scheduler, counters, `data` (the position in the data).

        Atomic: an older checkpoint of that name stays until the new one is complete.
        """
        driver = self.driver
        need_bytes = int((4 + self.folder.interface.state_bytes_per_param) * self._num_trained())
        begun, _ = driver.call("begin_checkpoint", 0, {"directory": str(directory), "need_bytes": need_bytes})
        temporary = begun["temporary"]
        try:
            shards, groups, schedulers = [], {}, {}
            for stage, device in driver.setup.stage_devices.items():
                args = {"stage": stage, "temporary": temporary, "ties": self._ties}
                answer, _ = driver.call("write_shard", device, args)
                shards.append(answer["record"])
                groups.update(answer["group"])
                schedulers.update(answer["scheduler"] or {})
            counters, _ = driver.call("counters", 0)
            progress = {
                "step": counters["step"],
                "seed": counters["seed"],
                "optimizer": groups,
                "scheduler": schedulers,
                "loss_scale": {"state": counters["loss_scale"]} if counters["loss_scale"] else {},
                "data": dict(data or {}),
                "rng": rng_state(),
            }
            done, _ = driver.call(
                "commit_checkpoint",
                0,
                {
                    "temporary": temporary,
                    "directory": str(directory),
                    "shards": shards,
                    "progress": encode(progress, "progress"),
                    "ties": self._ties,
                },
            )
            return Path(done["path"])
        except BaseException:
            if not driver.closed:
                driver.call("abort_checkpoint", 0, {"temporary": temporary})
            raise

    def resume(self, directory: str | Path) -> dict[str, Any]:
        """Go on where `save` stood, whatever partition and devices it was saved from. Returns its `data`."""
        found = checkpoint.open_checkpoint(directory)
        found.require(*self.folder.interface.stages.values())
        progress = found.progress
        for stage, device in self.driver.setup.stage_devices.items():
            args = {
                "stage": stage,
                "directory": str(directory),
                "group": dict(progress.optimizer),
                "scheduler": dict(progress.scheduler) or None,
            }
            self.driver.call("read_shard", device, args)
        counters = {"step": progress.step, "seed": progress.seed, "loss_scale": progress.loss_scale.get("state")}
        for device in range(self.folder.interface.num_devices):
            self.driver.call("load_counters", device, counters)
        restore_rng_state(progress.rng)
        self.step_count = progress.step
        return dict(progress.data)

    def _num_trained(self) -> int:
        return sum(spec.trained_params for spec in self.folder.interface.stages.values())

    def close(self) -> None:
        """Stop the devices. A later step would start anew from the model's own weights."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch, self._directory = None, None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _report(self, loss: float, report: Mapping[str, Any]) -> StepReport:
        return StepReport(
            step=self.step_count,
            loss=loss,
            predicted_s=self.plan.predicted.step_s if self.plan.predicted else None,
            **report,
        )


def _joined(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0) if values[0].dim() == 0 else torch.cat(values)


def _assign(model: nn.Module, name: str, tensor: Tensor, aliases: list[str]) -> None:
    owner_path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_path)
    old = getattr(owner, leaf)
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(tensor)
        return
    made: Tensor = tensor.to(old.dtype)
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(made, requires_grad=old.requires_grad)
    for path in {name, *aliases}:
        owner_path, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner_path), leaf, made)
