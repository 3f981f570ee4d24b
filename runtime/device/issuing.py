"""Issue the ops of a program on a device: the memory that they allocate and free, and the stream that runs them.

A program is bound to its device once: its file's function is called, and each op becomes a call that knows its stream,
the events it waits for, its operands and all else that is the same in every run. A run makes these calls one after
another, and holds what is its own: batch, seeds, events, values.

torch's allocator gives each stream memory of its own, and hands out what was let go of at once, because the stream's
next task comes after all that it has run. A reader on another stream is no such task. `record_stream` would let the
host find out when the reader is over, and makes it wait for that where memory runs short: for ever, if the reader is a
message that another device answers only after one that this host has still to send. A loan is let go of where the
stream that took the memory has itself been told to wait for the reader, as the program's order says
(`ir/program/order.py`). So the host waits for nothing, and what is reserved follows from the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from ...ir import ops
from ...ir.errors import BudgetExceeded
from ...ir.program import FIRST_FORM, FORM, Sizes
from ..accelerator import storage_of, storages_of
from ..optimizer.gradients import Grads, LossScales
from ..optimizer.stage_optimizer import Workspace
from ..quantised.pieces import lending
from ..stage.draws import evaluation_seed, micro_batch_seed
from ..stage.kept import Kept
from .named_streams import Streams
from .pacing import Pacing
from .peers import PeerLink
from .prepare import Issue, Issues
from .state import DeviceState
from .streams import Event, Fault, Stream, StreamRecord

VALUE = attrgetter("value")


class Box:
    """A value that may not exist yet. All its users hold the box; the memory is free once the last of them lets go, and
    no loan of it is left.

    `stream`: that from whose memory the value was taken, None for memory that is not given back in a step. `others`:
    tensors in it that other streams took.
    """

    __slots__ = ("others", "stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None):
        self.stream = stream
        self.value = value
        self.others: tuple[tuple[Stream, list[Tensor]], ...] = ()

    def inherit(self, old: Box, before: set[int]) -> None:
        """Belong to whom `old` belonged to, in the place of which a task made this box's value. `before`: the storages
        that were in it then."""
        maker, self.stream = self.stream, old.stream
        self.others += old.others
        if maker is not None and maker is not old.stream:
            now = tensors_in(self.value)
            if not storages_of(now) <= before:
                self.others += ((maker, [t for t in now if storage_of(t) not in before]),)

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
    """A value that the program's text names: its number among the values of a run. `maker`: the number of the op that
    makes it on a stream. `stream`: that of its box; `is_mixed`: whether the box may have tensors of others."""

    __slots__ = ("is_mixed", "maker", "number", "stream")

    def __init__(self, number: int, maker: int | None = None, stream: Stream | None = None):
        self.number, self.maker, self.stream = number, maker, stream
        self.is_mixed = False

    def is_lent_to(self, reader: Stream | None) -> bool:
        return self.is_mixed or (self.stream is not None and self.stream is not reader)


ABSENT = Handle(0)  # the number of a box without a value
ResultsOf = Callable[..., Sequence[Any]]  # of a run and the values of an op's operands: its results
BoundOp = Callable[["Run"], None]  # an op, bound


class Seeds(dict[int, int]):
    """The seed of each micro-batch of a run, by its number in the whole batch, from the `seed_of` that number."""

    def __init__(self, seed_of: Callable[[int], int]):
        super().__init__()
        self.seed_of = seed_of

    def __missing__(self, micro_batch: int) -> int:
        found = self[micro_batch] = self.seed_of(micro_batch)
        return found


class Run:
    """One run of a bound program. `number`: of the step, from 1; `before`: the run of the step before, if that is still
    under way; `begun_s`, `records`: when it began, and what its streams record of it."""

    begun_s: float
    records: dict[Stream, StreamRecord]

    def __init__(
        self,
        bound: Issuing,
        batch: Mapping[str, Tensor],
        sizes: Sequence[Sizes],
        number: int,
        before: Run | None = None,
    ):
        state, plan = bound.state, bound.plan
        self.bound, self.batch, self.number, self.before = bound, batch, number, before
        self.sizes = sizes  # per micro-batch, where they differ
        self.boxes: list[Box | None] = [Box(), *[None] * bound.num_values]
        self.events: list[Event | None] = [None] * len(plan.ops)
        self.loss_scale = state.gradient_scale
        self.scales: LossScales | None = None  # of an asynchronous step, whose mini-batches have each its own
        if state.loss_scale is not None and state.interface.asynchronous:
            self.scales = LossScales(state.loss_scale, state.interface.scale_lag)
        self.squares: Tensor | None = None  # the gradients' sum of squares, once an op has used it
        self.learning_rates: tuple[float, ...] = ()  # of the last update in this run
        self.updates: dict[tuple[str, str], int] = {}  # of each stage, and part of its gradients, in this run
        self.live_before = {memory: account.live_bytes for memory, account in state.memory.accounts.items()}
        self.accounted = plan.counted is None or plan.counted[0] != self.live_before  # else it would find the same
        self.pinned: dict[str, Sequence[Tensor]] = {}  # inputs of the batch by micro-batch, as they are copied to a GPU
        self.evaluation = state.step_count, state.evaluation_count  # the steps, and then evaluations, before this run
        self.step_count = state.step_count
        seed_of = partial(micro_batch_seed, state.seed, state.step_count)
        self.seeds = Seeds(seed_of if plan.trains else partial(evaluation_seed, state.seed, *self.evaluation))
        self.stop_on_nan = state.stop_on_nan
        self.judged_as = state.bad_step.number if plan.trains and state.bad_step is not None else 0  # as it counts
        self.losses: list[tuple[Issue, Tensor]] = []  # of a GPU, in host memory once the op is over
        self.zeroed: set[tuple[str, int | None]] = set()  # stage and micro-batch of forwards that failed
        # Of a GPU's memory alone: on a CPU device it is given back when nobody holds it, whatever thread did.
        self.loans: Loans = Loans() if before is None else before.loans
        self.first = self.loans.begin(len(plan.ops))

    def value(self, handle: Handle) -> Any:
        """A value that the run has made and holds."""
        box = self.boxes[handle.number]
        assert box is not None
        return box.value

    def form_of(self, micro_batch: int) -> int:
        """The number of a micro-batch's form."""
        return self.sizes[micro_batch].get(FORM, FIRST_FORM) if self.sizes else FIRST_FORM

    def wait(self) -> None:
        """Wait until all ops are over, or skipped after one that failed. Any thread may call it."""
        for event in self.events:
            if event is not None:
                event.wait()

    def end(self) -> None:
        """Let go of the values of this run that no result holds. Called when all streams are done with it."""
        self.before = None
        self.loans.end(self.first + len(self.events))


class Issuing:
    """One program, bound to the device's state, streams and pacing by the `function` of its file; `link` joins it to
    the other devices. `results`: the values that the program returns."""

    def __init__(
        self,
        state: DeviceState,
        plan: Issues,
        streams: Streams,
        pacing: Pacing,
        link: PeerLink | None,
        function: Callable[..., dict[str, list[Handle]]],
    ):
        self.state, self.plan, self.all_streams, self.pacing, self.link = state, plan, streams, pacing, link
        self.streams, self.issues, self.on_gpu = streams.streams_of(plan), plan.ops, streams.spec.kind == "cuda"
        self.interface, self.index, self.device, self.stores = state.interface, state.index, state.device, state.stores
        self.bad_step = state.bad_step
        self.num_values = 0
        self.calls: list[BoundOp] = []
        self._cursor = 0
        self.results = function(self, {})
        assert self._cursor == len(self.issues), "the file's function and its parsed text differ"

    def issue(self, run: Run) -> None:
        """Issue all ops. The accounts are changed by the values that each takes over and makes, which are the same in
        each run from the same start."""
        is_quiet, accounted = self.all_streams.is_quiet, run.accounted
        for issue, call in zip(self.issues, self.calls, strict=True):
            if not is_quiet():
                self.all_streams.raise_fault()
            if accounted:
                self.account(issue)
            call(run)

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

    # --- binding

    def _next(self, op: str) -> Issue:
        """The next op of the text."""
        issue = self.issues[self._cursor]
        assert issue.op == op, f"the file runs {op} where its text has `{issue.text}`"
        self._cursor += 1
        return issue

    def _handle(self, maker: int | None = None, stream: Stream | None = None) -> Handle:
        self.num_values += 1
        return Handle(self.num_values, maker, stream)

    def _hold(self, value_of: Callable[[Run], Any]) -> Handle:
        """Bind an op whose result is there at once: it takes no memory, and no stream makes it."""
        handle = self._handle()
        number = handle.number

        def call(run: Run) -> None:
            run.boxes[number] = Box(None, value_of(run))

        self.calls.append(call)
        return handle

    def _pace(self, issue: Issue, work: ResultsOf) -> ResultsOf:
        """The work of a transfer that ends no earlier than the described links would."""
        if issue.shared is None and not issue.least_s:
            return work

        def work_at_pace(run: Run, *values: Any) -> Sequence[Any]:
            rest = self.pacing.begin(issue)
            found = work(run, *values)
            rest()
            return found

        return work_at_pace

    def _launch(
        self,
        issue: Issue,
        reads: Sequence[Handle | None],
        work: ResultsOf,
        over: Sequence[Handle] = (),
        part_of: Sequence[Handle] = (),
        *,
        gone: Sequence[Handle | None] = (),
        weights: Sequence[Handle] = (),
    ) -> tuple[Handle, ...]:
        """Bind an op to its stream: `work(run, *values)`, of the values of `weights` and `reads`, gives its results.
        Returns their handles.

        `weights`: what is not lent, because its memory is not given back during a step. `over`: those of `reads` whose
        memory the last results take over, one each. `part_of`: those of which the last result keeps a part. `gone`:
        those that the op takes from the program.
        """
        stream, index, results = self.streams[issue.stream], issue.index, len(issue.results)
        owner = stream if issue.memory == ops.DEVICE else None
        owners = [owner] * results
        operands = [ABSENT if handle is None else handle for handle in (*weights, *reads)]
        handles = tuple(self._handle(index, owner) for _ in range(results))
        task = self._task(stream, operands, len(weights), handles, work, index, over, part_of)
        numbers, start, end = [handle.number for handle in operands], self.num_values - results + 1, self.num_values + 1
        freed = [handle.number for handle in gone if handle is not None]
        waits, before = issue.waits, issue.before

        def call(run: Run) -> None:
            boxes, events, earlier = run.boxes, run.events, run.before
            after: list[Any] = [*filter(None, map(events.__getitem__, waits))] if waits else []
            if before and earlier is not None:
                after += filter(None, map(earlier.events.__getitem__, before))
            given = [*map(boxes.__getitem__, numbers)]
            for number in freed:
                boxes[number] = None
            boxes[start:end] = made = [*map(Box, owners)]
            event = events[index] = stream.issue(partial(task, run, given, made, after), after, issue)
            event.number = run.first + index

        self.calls.append(call)
        return handles

    def _task(
        self,
        stream: Stream,
        operands: Sequence[Handle],
        num_weights: int,
        handles: Sequence[Handle],
        work: ResultsOf,
        index: int,
        over: Sequence[Handle],
        part_of: Sequence[Handle],
    ) -> Callable[[Run, Sequence[Any], Sequence[Box], Sequence[Event]], None]:
        """The task of an op, of a run, the boxes of its operands and of its results, and what it waits for. All of it
        is in the task: what a thread makes does not exist before."""
        if not self.on_gpu:
            return partial(self._work_on_cpu, work, self.state.workspaces.get(self.issues[index].stream))
        lent = [i for i, handle in enumerate(operands) if i >= num_weights and handle.is_lent_to(stream)]
        inherited: list[tuple[int, int]] = []  # the numbers of a result and of the operand whose memory it takes over
        for i, old in enumerate(over, len(handles) - len(over)):
            if old.is_mixed or old.stream is not handles[i].stream:
                inherited.append((i, operands.index(old)))
                handles[i].is_mixed = old.is_mixed or handles[i].stream is not None
            handles[i].stream = old.stream
        parts = [operands.index(old) for old in part_of if old.is_lent_to(handles[-1].stream)]
        if parts:
            handles[-1].is_mixed = True

        def task(run: Run, given: Sequence[Any], made: Sequence[Box], waits: Sequence[Event]) -> None:
            run.loans.settle(stream, waits)
            for i in lent:
                run.loans.lend(given[i], stream, run.first + index)
            before = [storages_in(given[i].value) for _, i in inherited] if inherited else []
            for box, value in zip(made, work(run, *map(VALUE, given)), strict=True):
                box.value = value
            for (i, old), storages in zip(inherited, before):
                made[i].inherit(given[old], storages)
            for old in parts:
                made[-1].keep(given[old])

        return task

    def _work_on_cpu(
        self,
        work: ResultsOf,
        workspace: Workspace | None,
        run: Run,
        given: Sequence[Any],
        made: Sequence[Box],
        waits: Sequence[Event],
    ) -> None:
        """The task of an op on a CPU device, where memory is given back when nobody holds it."""
        with lending(None if workspace is None else workspace.row):
            for box, value in zip(made, work(run, *map(VALUE, given)), strict=True):
                box.value = value
        if self.state.trimmer is not None:
            self.state.trimmer.trim()


def join_calls(first: BoundOp, then: BoundOp) -> BoundOp:
    """Both calls as one."""

    def both(run: Run) -> None:
        first(run)
        then(run)

    return both


def storages_in(value: Any) -> set[int]:
    return storages_of(tensors_in(value))


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Grads):
        return [*value.tensors.values(), *value.flats, *([] if value.factor is None else [value.factor])]
    return list(value.tensors.values()) if isinstance(value, Kept) else []
