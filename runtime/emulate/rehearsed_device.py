"""One device of a rehearsal, in its own process: real threads, events, messages and accounts, and nothing in them.

Tensors that a step would hold are on the meta device or absent. What is sent is a token of one byte, twice: when both
sides are there, and when the transfer is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import ops
from ...ir.program import StageSpec
from ..device.issuing import Box, Handle
from ..device.memories import SessionMemory
from ..device.pacing import LinkClient
from ..device.prepare import Issue, Issues
from ..device.runtime import DeviceRuntime
from ..device.session import DeviceSession, StepResult
from ..device.streams import Stream, ThreadStream
from ..stage.arena import allocate, weights_layout

NOWHERE = torch.device("meta")


class EmptyStore:
    """Stands for a stage's state: sizes, no memory."""

    def __init__(self, spec: StageSpec, part: StageSpec):
        self.spec, self.part, self.runner = spec, part, None
        self.layout = weights_layout(part)
        self.flat = allocate(self.layout.total_bytes, NOWHERE)
        self.weights: dict[str, Tensor] = {}
        self.file = None


class NoMemory(SessionMemory):
    """Accounts alone."""

    def open_files(self, directories: Sequence[str], verify: bool, arena_bytes: int) -> None:
        """Nothing is stored."""


class RehearsedSession(DeviceSession):
    """`waits_s`: per op of the step how long it takes, None where the link server says when it is over."""

    def __init__(self, *args: Any, waits_s: Sequence[float | None], link_server: LinkClient, **options: Any):
        super().__init__(*args, **options, link_server=link_server)
        self.waits_s = waits_s
        self.group_of = [issue.group for issue in self.plans["step"].ops]

    def _find_device(self) -> torch.device:
        return NOWHERE

    def _take_memory(self) -> SessionMemory:
        return NoMemory(self.spec, self.hardware, self.dram_budget_bytes, self.plans, NOWHERE, NOWHERE)

    def _stream_of(self, node: fx.Node, work: ops.Work) -> str:
        return work.stream

    def _make_store(self, stage: str) -> Any:
        return EmptyStore(self.interface.stages[stage], self.interface.part_of(stage, self._homes()[stage].group))

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            slot = ops.STREAMS.index(name)
            self._streams[name] = ThreadStream(name, self._notices, self.board, slot, 1)
        return self._streams[name]

    def _streams_for(self, plan: Issues) -> dict[str, Stream]:
        return {name: self._stream(name) for name in plan.streams}

    @property
    def batch_names(self) -> list[str]:
        """A rehearsal needs no batch."""
        return []

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        plan = self.plans["step"]
        runtime = RehearsedRuntime(self, plan, self._streams_for(plan))
        _, report = self._execute(runtime, "step", {})
        self._forget_results()
        return StepResult({}, report)

    def _gradient_norm(self, runtime: DeviceRuntime) -> tuple[float | None, bool]:
        return None, False


class RehearsedRuntime(DeviceRuntime):
    """The ops as they are, issued as they are, with a wait for what they would run."""

    session: RehearsedSession

    def load(self, batch: Mapping[str, Tensor], name: str, *, micro_batch: int) -> Handle:
        return self._launch(self._next("load"), [], lambda: [])[0]

    def _launch(self, issue: Issue, reads: Sequence[Box], run: Callable[[], Sequence[Any]]) -> list[Handle]:
        act = self._act_of(issue)

        def rehearsed() -> list[Any]:
            act()
            return [None] * len(issue.results)

        return super()._launch(issue, reads, rehearsed)

    def _act_of(self, issue: Issue) -> Callable[[], None]:
        group = self.session.group_of[issue.index]
        if issue.op == "send":
            return lambda: self._send(issue)
        if issue.op == "recv":
            return lambda: self._receive(issue)
        if group and self.session.link is not None and len(self.session.link.groups[group]) > 1:
            return lambda: self._meet(issue, group)
        return lambda: self._wait(issue)

    def _wait(self, issue: Issue) -> None:
        seconds = self.session.waits_s[issue.index]
        if seconds is None:
            assert self.session.link_server is not None
            self.session.link_server.begin(issue.index)()
        else:
            time.sleep(seconds)

    def _send(self, issue: Issue) -> None:
        link = self._link()
        link.meet_receiver(issue.peer, issue.tag)
        self._wait(issue)
        link.meet_receiver(issue.peer, issue.tag)

    def _receive(self, issue: Issue) -> None:
        link = self._link()
        link.meet_sender(issue.peer, issue.tag)
        link.meet_sender(issue.peer, issue.tag)

    def _meet(self, issue: Issue, group: str) -> None:
        """All members begin and end together; the first of them asks for all."""
        link = self._link()
        link.meet_all(group)
        if link.groups[group][0] == self.index:
            self._wait(issue)
        link.meet_all(group)
