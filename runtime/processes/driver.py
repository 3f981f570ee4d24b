"""What a training script holds of the devices: one interface, whether they are here, in local workers, or in torchrun.

`step` and `evaluate` take the global batch and give what all devices returned; `call` asks one device for one of
`commands.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from torch import Tensor

from ...ir import errors, ops
from ...ir.errors import PenstockError, PlanError, WorkerError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, place_of
from ..device.session import DeviceSession, StepResult, check_batch
from ..simulate import Span, Timeline
from .commands import COMMANDS, Answer, Tensors, unpack_result
from .setup import Setup


class Driver:
    """Common part of all drivers. Not for use by several threads at once."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.closed = False

    # --- what a kind of driver provides

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        """Run one of `commands.COMMANDS` on a device and give its answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all that runs. May be called twice."""
        raise NotImplementedError

    def _run_all(self, command: str, batch: Mapping[str, Tensor]) -> list[StepResult]:
        raise NotImplementedError

    # --- what all do

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step on the global batch. Raises `BatchError` before anything has run, else `WorkerError`."""
        return self._run("run_step", "step", batch)

    def evaluate(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Forward only, in evaluation mode."""
        return self._run("run_evaluate", "evaluate", batch)

    def _run(self, command: str, function: str, batch: Mapping[str, Tensor]) -> StepResult:
        self._require_open()
        if any(function not in programs for programs in self.setup.roles):
            raise PlanError(f"the files have no `{function}`")
        self._check(function, batch)
        return merge_results(self._run_all(command, batch), self.setup.hardware)

    def _check(self, function: str, batch: Mapping[str, Tensor]) -> None:
        check_batch(batch, self.setup.whole, self.inputs[function])

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """Per function the inputs of the batch that must be handed over here."""
        names: dict[str, set[str]] = {}
        for programs in self._own_programs():
            for function, program in programs.items():
                names.setdefault(function, set()).update(loaded_names(program))
        return {function: sorted(found) for function, found in names.items()}

    def _own_programs(self) -> list[dict[str, Program]]:
        """Those which the devices behind this driver run."""
        return self.setup.roles

    def part(self, batch: Mapping[str, Tensor], device: int) -> dict[str, Tensor]:
        """The rows of a batch that a device takes: those of its lane, whose micro-batches lie side by side. A batch
        that holds no more than them stays as it is."""
        lane, _ = place_of(self.setup.interface, device)
        found = {}
        for name, tensor in batch.items():
            rows = self._lane_rows(name)
            found[name] = tensor[lane * rows : (lane + 1) * rows] if len(tensor) > rows else tensor
        return found

    def _lane_rows(self, name: str) -> int:
        interface = self.setup.interface
        return interface.batch[name].shape[0] * interface.micro_batches

    def agree_on_batch(self, what: str, kind: str, refused: PenstockError | None) -> None:
        """Before a run: raise where this process, or another rank, cannot go on (`refused`), or ranks were given
        batches of different kinds ("" goes with any)."""
        if refused is not None:
            raise refused

    def gather(self, value: Any) -> list[Any]:
        """A plain value of every process that runs the script."""
        return [value]

    def load_stage(self, stage: str, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set a stage's weights and buffers on all devices that hold it."""
        tensors = {f"weights/{name}": t for name, t in weights.items()}
        tensors |= {f"buffers/{name}": t for name, t in buffers.items()}
        for device in self.setup.stage_holders[stage]:
            self.call("load_stage", device, {"stage": stage}, tensors)

    def timeline(self) -> Timeline:
        """What ran when in the last step, on all devices."""
        names = [device.name for device in self.setup.hardware.devices]
        return Timeline.from_spans(without_waiting(self._spans()), names)

    def _spans(self) -> list[Span]:
        """Of all devices, on one clock."""
        rows = [row for i in range(self.setup.interface.world_size) for row in self.call("spans", i)[0]["spans"]]
        return [Span(*row) for row in rows]

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return True

    def _require_open(self) -> None:
        if self.closed:
            raise WorkerError("the devices have been stopped; start again and resume from a checkpoint")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InProcessDriver(Driver):
    """The only device of a plan, in this process."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        if setup.interface.world_size != 1:
            raise PlanError(f"one process can run one device, the plan has {setup.interface.world_size}")
        from .worker import build_session

        own = {**setup.for_device(0), "store": None, "hostname": None, "num_threads": None}
        self.session: DeviceSession = build_session(own, None)

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        self._require_open()
        return COMMANDS[command](self.session, args or {}, tensors or {})

    def _run_all(self, command: str, batch: Mapping[str, Tensor]) -> list[StepResult]:
        return [self.session.step(batch) if command == "run_step" else self.session.evaluate(batch)]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.session.close()


def loaded_names(program: Program) -> set[str]:
    """The inputs of the batch that a program loads."""
    return {str(node.args[1]) for node in program.ops() if node.target is ops.load}


def remote_error(failure: Mapping[str, Any], device: int, who: str) -> PenstockError:
    """What another process raised (see `worker.describe_error`), as an error of this one."""
    kind = getattr(errors, failure["type"], None)
    if isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not WorkerError:
        found = kind(failure["message"])
        vars(found).update(failure["details"])
        return found
    message = failure["message"] if kind is WorkerError else f"{who}: {failure['type']}: {failure['message']}"
    return WorkerError(message, device=device, line=failure["line"], remote=failure["traceback"])


def result_of(answer: Answer) -> StepResult:
    return unpack_result(*answer)


def merge_results(results: Sequence[StepResult], hardware: Hardware) -> StepResult:
    """One result of all devices: DRAM peaks of one host and bytes of one route are added, the rest is per device."""
    values: dict[str, list[Tensor]] = {}
    peak_bytes: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}
    for result in results:
        for name, tensors in result.values.items():
            values[name] = [*values.get(name, []), *tensors]  # devices that share a batch have it in their order
        for total, key in ((peak_bytes, "peak_bytes"), (moved_bytes, "moved_bytes")):
            for name, amount in result.report[key].items():
                total[name] = total.get(name, 0) + amount
    reports = [result.report for result in results]
    report = {
        "seconds": max(r["seconds"] for r in reports),
        "busy_share": {hardware.devices[i].name: r["busy_share"] for i, r in enumerate(reports)},
        "moved_bytes": moved_bytes,
        "peak_bytes": peak_bytes,
        "gradient_norm": next((r["gradient_norm"] for r in reports if r["gradient_norm"] is not None), None),
        "loss_scale": reports[0]["loss_scale"],
        "skipped": any(r["skipped"] for r in reports),
    }
    return StepResult(values, report)


def without_waiting(spans: Sequence[Span]) -> list[Span]:
    """Spans of sends and receives cut to the time when both sides were there.

    Each side's stream is occupied from when it is ready; the transfer begins with the later one. The clock is one for
    all processes of a host.
    """
    begin_s: dict[tuple[int, int, str], float] = {}
    keys = [_message_of(span) for span in spans]
    for span, key in zip(spans, keys):
        if key is not None:
            begin_s[key] = max(span.start_s, begin_s.get(key, span.start_s))
    cut = []
    for span, key in zip(spans, keys):
        start_s = span.start_s if key is None else min(begin_s[key], span.end_s)
        cut.append(Span(**{**asdict(span), "start_s": start_s}))
    return cut


def _message_of(span: Span) -> tuple[int, int, str] | None:
    """Sender, receiver and tag, from the op's text."""
    if ops.ALL[span.op].meets != ops.PEER:
        return None
    fields = dict(part.split("=", 1) for part in span.text.rstrip(")").split(", ") if "=" in part.partition("(")[0])
    other = int(fields["dst" if span.op == "send" else "src"])
    pair = (span.device, other) if span.op == "send" else (other, span.device)
    return (*pair, fields["tag"])
