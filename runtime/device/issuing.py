"""Issue the ops of a program on a device: the memory that they allocate and free, and the stream that runs them.

torch's allocator gives each stream memory of its own, and hands out what was let go of at once, because the stream's
next task comes after all that it has run. A reader on another stream is no such task. `record_stream` would let the
host find out when the reader is over, and makes it wait for that where memory runs short: for ever, if the reader is a
message that another device answers only after one that this host has still to send. A loan is let go of where the
stream that took the memory has itself been told to wait for the reader, as the program's order says
(`ir/program/order.py`). So the host waits for nothing, and what is reserved follows from the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...ir import ops
from ...ir.errors import BudgetExceeded
from ...ir.program import FIRST_FORM, FORM, Sizes
from ..optimizer.gradients import Grads, LossScales
from ..quantised.pieces import lending
from ..stage.kept import Kept
from .named_streams import Streams
from .pacing import Pacing
from .peers import PeerLink
from .prepare import Issue, Issues
from .state import DeviceState
from .streams import Event, Fault, Stream

NONE: frozenset[int] = frozenset()


class Box:
    """A value that may not exist yet. All its users hold the box; the memory is free once the last of them lets go, and
    no loan of it is left.

    `stream`: that from whose memory the value was taken, None for memory that is not given back in a step. `others`:
    tensors in it that other streams took. `maker`: the number of the op that makes it on a stream.
    """

    __slots__ = ("maker", "others", "stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None, maker: int | None = None):
        self.stream = stream
        self.value = value
        self.others: tuple[tuple[Stream, list[Tensor]], ...] = ()
        self.maker = maker

    def inherit(self, old: Box, before: Collection[int]) -> None:
        """Belong to whom `old` belonged to, in the place of which a task made this box's value. `before`: the storages
        that were in it then."""
        maker, self.stream = self.stream, old.stream
        self.others += old.others
        if maker is not None and maker is not old.stream:
            fresh = [t for t in tensors_in(self.value) if t.untyped_storage().data_ptr() not in before]
            self.others += ((maker, fresh),) if fresh else ()

    def keep(self, old: Box) -> None:
        """Have parts of `old` within, of which this box's maker knows only that they may be there."""
        if old.stream is not None and old.stream is not self.stream:
            self.others += ((old.stream, tensors_in(old.value)),)
        self.others += old.others


class Loans:
    """The loans of runs one right after another. Ops are named by numbers that grow along each stream, from run to
    run."""

    def __init__(self) -> None:
        self._count = 0  # of the ops of all runs
        self._over = 0  # the number of ops, of the first runs, that the host has seen the end of
        self._unreturned: set[Stream] = set()  # streams whose loans to these ops are still to be let go of
        self._open: dict[Stream, dict[Stream, deque[tuple[int, list[Tensor]]]]] = {}  # by taker, then by reader

    def begin(self, num_ops: int) -> int:
        """Begin a run of `num_ops` ops: the number of its first op."""
        self._count += num_ops
        return self._count - num_ops

    def settle(self, stream: Stream, waits: Sequence[Event]) -> None:
        """Let go of what readers have borrowed from a stream up to these ops, as its next task waits for them. Called
        by that task, after its waits."""
        readers = self._open.get(stream)
        if readers is None:
            return
        for event in waits:
            _let_go(readers.get(event.stream), event.number)
        if stream in self._unreturned:
            self._unreturned.discard(stream)
            for rows in list(readers.values()):  # the issuing thread may add one meanwhile
                _let_go(rows, self._over - 1)

    def end(self, count: int) -> None:
        """Let go of what the first `count` ops have borrowed, as all streams are done with them. Of a stream that goes
        on with a later run, its next task does it."""
        self._over = count
        self._unreturned |= self._open.keys()
        if count == self._count:
            self._open.clear()

    def lend(self, box: Box, reader: Stream, index: int) -> None:
        """Hold a value that the op `index` on the stream `reader` reads."""
        if box.stream is not None and box.stream is not reader:
            self._lend(box.stream, tensors_in(box.value), reader, index)
        for taker, tensors in box.others:
            if taker is not reader:
                self._lend(taker, tensors, reader, index)

    def _lend(self, taker: Stream, tensors: list[Tensor], reader: Stream, index: int) -> None:
        if tensors:
            self._open.setdefault(taker, {}).setdefault(reader, deque()).append((index, tensors))


def _let_go(rows: deque[tuple[int, list[Tensor]]] | None, last: int) -> None:
    """Let go of loans up to this op."""
    while rows and rows[0][0] <= last:
        rows.popleft()


class Handle:
    """A value that the program's text names; empty once the value is freed or taken over."""

    __slots__ = ("box",)

    def __init__(self, box: Box):
        self.box = box

    def release(self) -> None:
        del self.box


class Issuing:
    """One run of one program on the device's state, streams and pacing; `link` joins it to the other devices. `before`:
    the run of the step before, if that is still under way."""

    def __init__(
        self,
        state: DeviceState,
        plan: Issues,
        streams: Streams,
        pacing: Pacing,
        link: PeerLink | None = None,
        before: Issuing | None = None,
    ):
        self.state, self.all_streams, self.pacing, self.link = state, streams, pacing, link
        self.streams, self.issues = streams.streams_of(plan), plan.ops
        self.interface, self.index, self.device, self.stores = state.interface, state.index, state.device, state.stores
        self.loss_scale = state.gradient_scale
        self.scales: LossScales | None = None  # of an asynchronous step, whose mini-batches have each its own
        if state.loss_scale is not None and state.interface.asynchronous:
            self.scales = LossScales(state.loss_scale, state.interface.scale_lag)
        self.squares: Box | None = None  # the gradients' sum of squares, once an op has used it
        self.learning_rates: tuple[float, ...] = ()  # of the last update in this run
        self.updates: dict[tuple[str, str], int] = {}  # of each stage, and part of its gradients, in this run
        self.live_before = {memory: account.live_bytes for memory, account in state.memory.accounts.items()}
        self.accounted = plan.counted is None or plan.counted[0] != self.live_before  # else it would find the same
        self.pinned: dict[str, Sequence[Tensor]] = {}  # inputs of the batch by micro-batch, as they are copied to a GPU
        self.step_count = state.step_count  # the number of steps before this one
        self.bad_step, self.stop_on_nan = state.bad_step, state.stop_on_nan
        self.number = self.bad_step.number if plan.trains and self.bad_step is not None else 0  # as it counts steps
        self.losses: list[tuple[Issue, Tensor]] = []  # of a GPU, in host memory once the op is over
        self.zeroed: set[tuple[str, int | None]] = set()  # stage and micro-batch of forwards that failed
        self.events: list[Event | None] = [None] * len(plan.ops)
        self._before = before
        self._cursor = 0
        self._is_quiet = streams.is_quiet
        self._seeds: dict[int, int] = {}  # per micro-batch
        self.sizes: Sequence[Sizes] = ()  # the same, where they differ
        # On a CPU device memory is given back when nobody holds it, whatever thread did.
        self.loans: Loans | None = None
        if streams.spec.kind == "cuda":
            self.loans = Loans() if before is None or before.loans is None else before.loans
        self._first = 0 if self.loans is None else self.loans.begin(len(plan.ops))

    def form_of(self, micro_batch: int) -> int:
        """The number of a micro-batch's form."""
        return self.sizes[micro_batch].get(FORM, FIRST_FORM) if self.sizes else FIRST_FORM

    @property
    def complete(self) -> bool:
        """Whether every op has been issued."""
        return self._cursor == len(self.issues)

    def end(self) -> None:
        """Let go of the values of this run that no result holds. Called when all streams are done with it."""
        self._before = None
        if self.loans is not None:
            self.loans.end(self._first + len(self.issues))

    def _next(self, op: str) -> Issue:
        """The next op of the text, after the accounts were changed by the values that it takes over and makes. They are
        the same in each run from the same start."""
        issue = self.issues[self._cursor]
        assert issue.op == op, f"the file runs {op} where its text has `{issue.text}`"
        if not self._is_quiet():
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

    def _launch(
        self,
        issue: Issue,
        reads: Sequence[Box],
        run: Callable[[], Sequence[Any]],
        over: Sequence[Box] = (),
        part_of: Sequence[Box] = (),
    ) -> list[Handle]:
        """Issue `run`, which reads the boxes and gives the op's results; return their handles.

        Weights are not among the boxes, because their memory is not given back during a step. `over`: the boxes whose
        memory the last results take over, one each. `part_of`: boxes of which the last result keeps a part.
        """
        stream, events, index = self.streams[issue.stream], self.events, issue.index
        waits = [event for i in issue.waits if (event := events[i]) is not None] if issue.waits else []
        if issue.before and self._before is not None:
            waits += [event for i in issue.before if (event := self._before.events[i]) is not None]
        owner = stream if issue.memory == ops.DEVICE else None
        made = [Box(owner, None, index) for _ in issue.results]
        if self.loans is None:
            task = partial(self._work, issue, made, run)
        else:
            task = partial(self._work_with_loans, self.loans, stream, waits, index, reads, made, run, over, part_of)
        event = events[index] = stream.issue(task, waits, issue)
        event.number = self._first + index
        return [Handle(box) for box in made]

    def _work(self, issue: Issue, made: Sequence[Box], run: Callable[[], Sequence[Any]]) -> None:
        """The task of an op on a CPU device, where memory is given back when nobody holds it."""
        workspace, trimmer = self.state.workspaces.get(issue.stream), self.state.trimmer
        with lending(None if workspace is None else workspace.row):
            for box, value in zip(made, run(), strict=True):
                box.value = value
        if trimmer is not None:
            trimmer.trim()

    def _work_with_loans(
        self,
        loans: Loans,
        stream: Stream,
        waits: Sequence[Event],
        index: int,
        reads: Sequence[Box],
        made: Sequence[Box],
        run: Callable[[], Sequence[Any]],
        over: Sequence[Box],
        part_of: Sequence[Box],
    ) -> None:
        """The task of an op on a GPU. All of it is in the task: what a thread makes does not exist before."""
        loans.settle(stream, waits)
        for box in reads:
            if box.others or (box.stream is not None and box.stream is not stream):
                loans.lend(box, stream, self._first + index)
        before = [storages_in(old.value) if old.stream is not stream else NONE for old in over] if over else []
        for box, value in zip(made, run(), strict=True):
            box.value = value
        if over:
            for box, old, storages in zip(reversed(made), reversed(over), reversed(before)):
                box.inherit(old, storages)
        for old in part_of:
            made[-1].keep(old)


def storages_in(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Grads):
        return [*value.tensors.values(), *value.flats, *([] if value.factor is None else [value.factor])]
    if isinstance(value, Kept):
        return list(value.tensors.values())
    return [value] if isinstance(value, Tensor) else []
