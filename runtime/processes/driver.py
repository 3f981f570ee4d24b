"""A training script's handle on its devices: the same in this process, with local workers, and under torchrun.

`step` and `evaluate` take the global batch and return the results of all devices; `call` runs one command of
`commands.py` on one device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from ...ir import ops
from ...ir.errors import BatchError, NonFiniteLoss, PenstockError, PlanError, WorkerError
from ...ir.machine.hardware import Hardware
from ...ir.program import SIZES, Interface, Program, place_of
from ..bad_step import BadStep
from ..device.host import Trimmer, trim_memory
from ..device.session import DeviceSession, StepResult
from ..scratch import Keeper
from ..simulate import Span, Timeline
from ..state.tensor_file import Reads
from .commands import COMMANDS, Answer, Tensors, unpack_result
from .setup import RunSetup


class DifferentCalls(BatchError):
    """The ranks make different calls, and none of these has begun."""


class Driver:
    """The common part of all drivers. Only one thread at a time may use a driver.

    `keeper` removes what the script's process and its workers leave on disks if they are killed.
    """

    def __init__(self, setup: RunSetup):
        self.setup = setup
        self.closed = False
        self.save_failed_here = False  # whether a save in the background has failed of which no call has told yet
        self._begun: list[StepResult] = []  # of the step that began last, with the reports of the one before
        self.keeper = Keeper([tempfile.gettempdir(), *setup.all_ssd_dirs])

    # --- what a kind of driver provides

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        """Run one of `commands.COMMANDS` on a device and return its answer."""
        raise NotImplementedError

    def call_all(self, command: str, requests: Mapping[int, tuple[Mapping[str, Any], Tensors]]) -> list[dict[str, Any]]:
        """Run one command on all devices at once: per device its arguments and tensors. Returns the plain answers."""
        raise NotImplementedError

    def await_saved(self, number: int) -> list[dict[str, Any]]:
        """The report of each device on its part of a save in the background (see `Saver`), once all have reported. For
        a thread of its own. Raises `PenstockError` where a device will never tell."""
        raise NotImplementedError

    def publish(self, number: int, finish: Callable[[], str]) -> str:
        """The result of `finish`, which one process calls for all; raises, there and elsewhere, what it raises. For a
        thread of its own."""
        return finish()

    def close(self) -> None:
        """Stop the devices. May be called twice."""
        raise NotImplementedError

    def finish_step(self) -> dict[str, Any]:
        """Wait for the end of the step that `begin_step` began, and return its report. Raises what the step would."""
        raise NotImplementedError

    def _run_all(self, command: str, batch: Mapping[str, Tensor], args: Mapping[str, Any]) -> list[StepResult]:
        raise NotImplementedError

    @property
    def save_failed(self) -> bool:
        """`save_failed_here` of any process that runs the script, for all of them as of the last step."""
        return self.save_failed_here

    # --- what all do

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step on the global batch. Raises `BatchError` before anything has run, else `WorkerError`."""
        values = self.begin_step(batch)
        return StepResult(values, self.finish_step())

    def begin_step(self, batch: Mapping[str, Tensor], stop_on_nan: bool = True) -> dict[str, list[Tensor]]:
        """As `step`, but it returns the results as soon as they are there; the devices may still be at work when the
        next step begins. Any other call must come after `finish_step`."""
        self._begun = self._run("begin_step", "step", batch, {"stop_on_nan": stop_on_nan})
        return merge_values(self._begun)

    def undo_bad_step(self) -> PenstockError | None:
        """Undo the step that began last, where a device has found it bad. Returns why it has."""
        found = refusal_of(self._begun)
        if found is not None:
            self.finish_step()
            self.call_all("undo_step", {device: ({}, {}) for device in range(self.setup.interface.world_size)})
        return found

    def take_form(self, number: int, files: RunSetup, room: Interface) -> list[dict[str, Any]]:
        """Let the devices run micro-batches of another form, by the stages of these files, from the next step on.
        `room`: the interface with room for all forms."""
        args = {"number": number, "form": files.interface.to_json(), "room": room.to_json()}
        devices = range(room.world_size)
        answers = self.call_all("take_form", {d: ({**args, "path": str(files.file_of(d))}, {}) for d in devices})
        self.setup = replace(self.setup, interface=room)
        self.__dict__.pop("inputs", None)
        return answers

    def report_before(self) -> dict[str, Any]:
        """The report of the step before the one that began last, for which nothing waits: it came with that one. There
        must have been such a step since the driver began."""
        return merge_results([StepResult({}, result.report) for result in self._begun], self.setup.hardware).report

    def evaluate(self, batch: Mapping[str, Tensor], loss_only: bool = False) -> StepResult:
        """Forward only, in evaluation mode. With `loss_only` devices keep all other outputs to themselves. What has a
        `refusal` is no result."""
        results = self._run("run_evaluate", "evaluate", batch, {"loss_only": loss_only})
        return replace(merge_results(results, self.setup.hardware), refusal=refusal_of(results))

    def _run(
        self, command: str, function: str, batch: Mapping[str, Tensor], args: Mapping[str, Any]
    ) -> list[StepResult]:
        self._require_open()
        if any(function not in programs for programs in self.setup.roles):
            raise PlanError(f"the files have no `{function}`")
        self._check(function, batch)
        results = self._run_all(command, batch, args)
        if self.setup.interface.team == 1:
            return results
        speaks = self.setup.whole.speaks
        return [r if speaks(device) else StepResult({}, r.report, r.refusal) for device, r in enumerate(results)]

    def _check(self, function: str, batch: Mapping[str, Tensor]) -> None:
        self.setup.whole.check_batch(batch, self.inputs[function])

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """For each function, the inputs of the batch that this process must be given."""
        names: dict[str, set[str]] = {}
        for programs in self._own_programs():
            for function, program in programs.items():
                names.setdefault(function, set()).update(loaded_names(program))
        sizes = {SIZES} if self.setup.interface.sizes else set[str]()
        return {function: sorted(found | sizes) for function, found in names.items()}

    def _own_programs(self) -> list[dict[str, Program]]:
        """The programs that the devices of this process run, by name."""
        return self.setup.roles

    def part(self, batch: Mapping[str, Tensor], device: int) -> dict[str, Tensor]:
        """The rows of a batch that a device takes: those of its lane, whose micro-batches are adjacent. A batch that
        holds only these rows stays as it is."""
        interface = self.setup.interface
        lane, _ = place_of(interface, device)
        first, count = interface.first_micro_batch(lane), interface.micro_batches_of(lane)
        found = {}
        for name, tensor in batch.items():
            each = interface.batch[name].shape[0]
            is_whole = len(tensor) > each * count
            found[name] = tensor[each * first : each * (first + count)] if is_whole else tensor
        return found

    def _own(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a step on a device in the script's process: a copy, as the script may reuse its batch."""
        return {name: batch[name].clone() for name in self.inputs["step"]}

    def agree_on_batch(self, what: str, kind: str, refused: PenstockError | None, counts: Any = None) -> list[Any]:
        """Raise before a run if this process or another rank cannot go on (`refused`), or if the ranks were given
        batches of different kinds ("" matches any). Returns the plain `counts` of every process that runs the script.
        """
        if refused is not None:
            raise refused
        return [counts]

    def gather(self, value: Any) -> list[Any]:
        """The plain `value` of every process that runs the script."""
        return [value]

    def stop_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if the last run's ranks agreed on it, because one of them had got a Ctrl-C."""

    def load_stage(self, stage: str, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set a stage's weights and buffers on all devices that hold the stage, one tensor after another."""
        trimmer = Trimmer()

        def read(key: str) -> Tensor:
            trimmer.trim()
            kind, _, name = key.partition("/")
            return (weights if kind == "weights" else buffers)[name]

        reads = Reads([*(f"weights/{name}" for name in weights), *(f"buffers/{name}" for name in buffers)], read)
        self.call_holders("load_stage", self.setup.stage_holders[stage], {"stage": stage}, reads)

    def call_holders(
        self, command: str, devices: Sequence[int], args: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """One command to all of these devices, each of which reads the tensors one after another."""
        for device in devices:
            self.call(command, device, args, tensors)

    def end_loading(self) -> None:
        """Give back the memory that loading has taken and freed, here and on all devices of this process."""
        trim_memory()

    def timeline(self) -> Timeline:
        """The timeline of the last step on all devices."""
        names = [device.name for device in self.setup.hardware.devices]
        return Timeline.from_spans(cut_waiting(self._spans()), names)

    def _spans(self) -> list[Span]:
        """The spans of all devices, on one clock."""
        rows = [row for i in range(self.setup.interface.world_size) for row in self.call("spans", i)[0]["spans"]]
        return [Span(*row) for row in rows]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that only one process writes."""
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

    def __init__(self, setup: RunSetup):
        super().__init__(setup)
        if setup.interface.world_size != 1:
            raise PlanError(f"one process can run one device, the plan has {setup.interface.world_size}")
        from .worker import build_session

        own = setup.for_device(0)
        share = replace(own.share, num_threads=None)
        self.session: DeviceSession = build_session(replace(own, share=share), None, bad_step=BadStep.local())
        self.session.shares_generators = self.session.device.type == "cpu"  # a GPU's draws are issued before the return
        self._saved: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        self.session.saver.tell = lambda number, answer: self._saved.put((number, answer))

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        self._require_open()
        return COMMANDS[command](self.session, args or {}, tensors or {})

    def call_all(self, command: str, requests: Mapping[int, tuple[Mapping[str, Any], Tensors]]) -> list[dict[str, Any]]:
        return [self.call(command, device, *request)[0] for device, request in requests.items()]

    def await_saved(self, number: int) -> list[dict[str, Any]]:
        while True:
            told, answer = self._saved.get()
            if told == number:
                return [answer]

    def _run_all(self, command: str, batch: Mapping[str, Tensor], args: Mapping[str, Any]) -> list[StepResult]:
        if command == "begin_step":
            values = self.session.begin_step(self._own(batch), args["stop_on_nan"])
            return [StepResult(values, self.session.report_before, self.session.refusal())]
        return [self.session.evaluate(batch, **args)]

    def finish_step(self) -> dict[str, Any]:
        self._require_open()
        return merge_results([StepResult({}, self.session.finish_step())], self.setup.hardware).report

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.session.close()
            self.keeper.close()


def loaded_names(program: Program) -> set[str]:
    """The inputs of the batch that a program loads."""
    return {str(node.args[1]) for node in program.ops() if node.target is ops.load}


def refusal_of(results: Sequence[StepResult]) -> PenstockError | None:
    """The reason to undo a run: a loss that is not finite may follow from a forward that failed."""
    found = [result.refusal for result in results if result.refusal is not None]
    return min(found, key=lambda error: isinstance(error, NonFiniteLoss), default=None)


def result_of(answer: Answer) -> StepResult:
    return unpack_result(*answer)


def merge_values(results: Sequence[StepResult]) -> dict[str, list[Tensor]]:
    """The results of the programs of all devices; devices that share a batch hold it in their order."""
    values: dict[str, list[Tensor]] = {}
    for result in results:
        for name, tensors in result.values.items():
            values[name] = [*values.get(name, []), *tensors]
    return values


def merge_results(results: Sequence[StepResult], hardware: Hardware) -> StepResult:
    """One result from those of all devices: adds the DRAM peaks of a host and the bytes of a route, the rest is per
    device."""
    peak_bytes: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}
    for result in results:
        for total, key in ((peak_bytes, "peak_bytes"), (moved_bytes, "moved_bytes")):
            for name, amount in result.report[key].items():
                total[name] = total.get(name, 0) + amount
    reports = [result.report for result in results]
    report = {
        "seconds": max(r["seconds"] for r in reports),
        "busy_share": {hardware.devices[i].name: r["busy_share"] for i, r in enumerate(reports)},
        "moved_bytes": moved_bytes,
        "peak_bytes": peak_bytes,
        "allocator": {name: figures for r in reports for name, figures in r["allocator"].items()},
        "gradient_norm": next((r["gradient_norm"] for r in reports if r["gradient_norm"] is not None), None),
        "learning_rates": next((r["learning_rates"] for r in reports if r["learning_rates"]), []),
        "loss_scale": reports[0]["loss_scale"],
        "skipped": any(r["skipped"] for r in reports),
        "eager_blocks": {stage: reasons for r in reports for stage, reasons in r["eager_blocks"].items()},
        "ungraphed": {stage: reason for r in reports for stage, reason in r["ungraphed"].items()},
    }
    return StepResult(merge_values(results), report)


def cut_waiting(spans: Sequence[Span]) -> list[Span]:
    """Cut the spans of sends and receives to the time when both sides were ready.

    Each side's stream is occupied from the moment that side is ready; the transfer begins when the later one is. All
    spans must be on one clock.
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
    """The sender, receiver and tag of a send or receive, read from the op's text; None for any other op."""
    if ops.ALL[span.op].meets != ops.PEER:
        return None
    fields = dict(part.split("=", 1) for part in span.text.rstrip(")").split(", ") if "=" in part.partition("(")[0])
    other = int(fields["dst" if span.op == "send" else "src"])
    pair = (span.device, other) if span.op == "send" else (other, span.device)
    return (*pair, fields["tag"])
