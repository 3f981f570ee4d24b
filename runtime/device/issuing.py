"""How the ops of a program are issued on a device: what they take and give back, and the stream that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...ir.errors import BudgetExceeded
from ..optimizer.gradients import Grads
from ..stage.runner import Kept
from .named_streams import Streams
from .pacing import Pacing
from .peers import PeerLink
from .prepare import Issue, Issues
from .state import DeviceState
from .streams import CudaStream, Event, Fault, Stream


class Box:
    """A value that may not exist yet. All its users hold the box; the memory is free once the last of them lets go."""

    __slots__ = ("stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None):
        self.stream = stream
        self.value = value


class Handle:
    """A value that the program's text names; empty once the value is freed or taken over."""

    __slots__ = ("box",)

    def __init__(self, box: Box):
        self.box = box

    def release(self) -> None:
        del self.box


class Issuing:
    """One run of one program on the device's state, streams and pacing; `link` joins it to the other devices."""

    def __init__(
        self, state: DeviceState, plan: Issues, streams: Streams, pacing: Pacing, link: PeerLink | None = None
    ):
        self.state, self.all_streams, self.pacing, self.link = state, streams, pacing, link
        self.streams, self.issues = streams.of(plan), plan.ops
        self.interface, self.index, self.device, self.stores = state.interface, state.index, state.device, state.stores
        self.loss_scale = state.gradient_scale
        self.squares: Box | None = None  # the gradients' sum of squares, once an op has used it
        self.updates: dict[tuple[str, str], int] = {}  # of each stage, and part of its gradients, in this run
        self.live_before = {memory: account.live_bytes for memory, account in state.memory.accounts.items()}
        self.accounted = plan.counted is None or plan.counted[0] != self.live_before  # else it would find the same
        self.pinned: dict[str, Tensor] = {}  # inputs of the batch, as they are copied to a GPU
        self._events: list[Event | None] = [None] * len(plan.ops)
        self._cursor = 0

    @property
    def complete(self) -> bool:
        """Whether every op has been issued."""
        return self._cursor == len(self.issues)

    def _next(self, op: str) -> Issue:
        """The next op of the text, after the accounts were changed by the values that it takes over and makes. They are
        the same in each run from the same start."""
        issue = self.issues[self._cursor]
        assert issue.op == op, f"the file runs {op} where its text has `{issue.text}`"
        self.all_streams.raise_fault()
        self._cursor += 1
        if self.accounted:
            self.account(issue)
        return issue

    def account(self, issue: Issue) -> None:
        """Change the accounts by the values that an op takes over and makes."""
        accounts = self.state.memory.accounts
        for memory, name in issue.gives:
            accounts[memory].give(name)
        try:
            for memory, name, num_bytes in issue.takes:
                accounts[memory].take(name, num_bytes, issue.text)
            if issue.workspace_bytes:
                accounts[issue.workspace_memory].take("workspace", issue.workspace_bytes, issue.text)
                accounts[issue.workspace_memory].give("workspace")
        except BudgetExceeded as error:
            raise Fault(issue, error) from error

    def _launch(self, issue: Issue, reads: Sequence[Box], run: Callable[[], Sequence[Any]]) -> list[Handle]:
        """Issue `run`, which reads the boxes and gives the op's results; return their handles.

        Weights are not among the boxes, because their memory is not given back during a step.
        """
        stream = self.streams[issue.stream]
        made = [Box(stream) for _ in issue.results]

        def task() -> None:
            if isinstance(stream, CudaStream):  # in the task: what a thread makes does not exist before
                for box in reads:
                    if box.stream is not None and box.stream is not stream:
                        stream.hold(tensors_in(box.value))
            for box, value in zip(made, run(), strict=True):
                box.value = value

        events = self._events
        if isinstance(stream, CudaStream) and self.link is None:
            self._make_room(issue)
        events[issue.index] = stream.issue(task, [e for i in issue.waits if (e := events[i]) is not None], issue)
        return [Handle(box) for box in made]

    def _make_room(self, issue: Issue) -> None:
        """Wait until torch's allocator has the room that the account has: it hands out memory that crossed streams only
        when they are past it, and would otherwise take more from the GPU, the further the issuing runs ahead.

        The op waits for the same on the GPU anyway. With several devices this is left out: the issuing of a send after
        this op would wait too, and with it a device on which this one may depend.
        """
        for index in issue.room:
            event = self._events[index]
            if event is not None:
                event.wait()


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Grads):
        return [*value.tensors.values(), *([] if value.factor is None else [value.factor])]
    if isinstance(value, Kept):
        return list(value.tensors.values())
    return [value] if isinstance(value, Tensor) else []
