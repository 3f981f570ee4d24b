"""One device of a rehearsal, in its own process: real threads, events, messages and accounts, but no data.

Tensors that a step would hold are on the meta device or absent. A message is a token of one byte, sent twice: when both
sides are there, and when the transfer is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.program import FIRST_FORM, Program, StageHome, StageSpec
from ..device.file import DeviceFile
from ..device.issuing import Handle, ResultsOf, Run
from ..device.named_streams import Streams
from ..device.pacing import Pacing
from ..device.prepare import Issue, Issues
from ..device.runtime import DeviceRuntime
from ..device.session import DeviceSession, StepResult
from ..device.setup import DeviceSetup
from ..device.state import DeviceState, SessionMemory
from ..device.streams import Stream, ThreadStream
from ..stage.arena import allocate, weights_layout
from ..stage.shards import FlatStage

NOWHERE = torch.device("meta")


class EmptyStore:
    """Replaces a stage's store: it has the sizes, but no memory."""

    def __init__(self, spec: StageSpec, flat_stage: FlatStage | None):
        self.spec, self.flat_stage, self.runner = spec, flat_stage, None
        self.of_forms = {FIRST_FORM: None}
        self.part = spec if flat_stage is None else flat_stage.part
        self.layout = weights_layout(spec) if flat_stage is None else flat_stage.own
        self.flat = allocate(self.layout.total_bytes, NOWHERE)
        self.weights: dict[str, Tensor] = {}
        self.staying: dict[str, Tensor] = {}
        self.file = None

    def commit(self) -> None:
        """Nothing is stored."""


class NoMemory(SessionMemory):
    """A session's memory that keeps accounts only."""

    def open_files(self, directories: Sequence[str], verify: bool, arena_bytes: int) -> None:
        """Nothing is stored."""


class RehearsedState(DeviceState):
    """A device's state that has the sizes only."""

    def _take_memory(self, setup: DeviceSetup, plans: Mapping[str, Issues]) -> SessionMemory:
        return NoMemory(setup, plans, NOWHERE, NOWHERE)

    def _make_store(self, stage: str, home: StageHome, setup: DeviceSetup, file: DeviceFile) -> Any:
        return EmptyStore(self.interface.stages[stage], self._flat_stage(stage, home.group))

    def eager_blocks(self) -> dict[str, dict[str, str]]:
        return {}


class RehearsedStreams(Streams):
    """Streams that are threads, whatever the device is."""

    def name_of(self, work: ops.Work) -> str:
        return work.stream

    def streams_of(self, plan: Issues) -> dict[str, Stream]:
        return {name: self._stream(name) for name in plan.streams}

    def _stream(self, name: str) -> Stream:
        if name not in self.made:
            slot = ops.STREAMS.index(name)
            self.made[name] = ThreadStream(name, self._notices, self.board, slot, 1)
        return self.made[name]


class RehearsedPacing(Pacing):
    """Waits for as long as an op would take."""

    def wait(self, issue: Issue) -> None:
        assert self.paces.waits_s is not None and self.links is not None
        seconds = self.paces.waits_s[issue.index]
        if seconds is None:
            self.links.begin(issue.index)()
        else:
            time.sleep(seconds)


class RehearsedRuntime(DeviceRuntime):
    """The runtime's own ops, issued as ever, but each waits in place of doing its work."""

    pacing: RehearsedPacing

    def load(self, batch: Mapping[str, Tensor], name: str, *, micro_batch: int) -> Handle:
        return self._launch(self._next("load"), (), lambda run: [])[0]

    def _launch(
        self, issue: Issue, reads: Sequence[Handle | None], work: ResultsOf, *memory: Sequence[Handle], **more: Any
    ) -> tuple[Handle, ...]:
        act = self._act_of(issue)

        def no_values(run: Run, *values: Any) -> list[Any]:
            act()
            return [None] * len(issue.results)

        return super()._launch(issue, reads, no_values, *memory, **more)

    def _act_of(self, issue: Issue) -> Callable[[], None]:
        group = issue.group
        if issue.op == "send":
            return lambda: self._send(issue)
        if issue.op == "recv":
            return lambda: self._receive(issue)
        if group and self.link is not None and len(self.link.groups[group]) > 1:
            return lambda: self._meet(issue, group)
        return lambda: self.pacing.wait(issue)

    def _send(self, issue: Issue) -> None:
        link = self._link()
        link.meet_receiver(issue.peer, issue.tag)
        self.pacing.wait(issue)
        link.meet_receiver(issue.peer, issue.tag)

    def _receive(self, issue: Issue) -> None:
        link = self._link()
        link.meet_sender(issue.peer, issue.tag)
        link.meet_sender(issue.peer, issue.tag)

    def _meet(self, issue: Issue, group: str) -> None:
        """All members begin and end together; the first of them waits for the time of the collective."""
        link = self._link()
        link.meet_all(group)
        if link.groups[group][0] == self.index:
            self.pacing.wait(issue)
        link.meet_all(group)


class RehearsedSession(DeviceSession):
    """A device that waits for as long as its step would take."""

    state_kind, streams_kind = RehearsedState, RehearsedStreams
    pacing_kind, runtime_kind = RehearsedPacing, RehearsedRuntime

    def _find_device(self) -> torch.device:
        return NOWHERE

    def _try_kernels(self, program: Program, form: int = FIRST_FORM) -> None:
        """A rehearsal has no blocks."""

    @property
    def batch_names(self) -> list[str]:
        """A rehearsal needs no batch."""
        return []

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        run = self._issue("step", {})
        report = self._end(run, run.number)
        self.state.forget_values()
        return StepResult({}, report)

    def _gradient_norm(self, run: Run) -> tuple[float | None, bool]:
        return None, False
