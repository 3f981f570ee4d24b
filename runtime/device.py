"""The device runtime: what `rt` is in a generated `step(rt, batch)` on a real device.

The function runs once, fast, on the calling thread: every op returns handles at once and is issued to its stream, where
it starts when its inputs are ready. Memory is taken and given back in issue order under the budgets of the device and
of DRAM, so exceeding one raises at the op that would, whatever has run so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arena import grads_layout, weights_layout
from .clipping import Grads, Verdict, clip_factor, judge, speculative_factor, sum_of_squares
from .errors import BudgetExceeded, PlanError
from .execute import Kept, micro_batch_seed
from .issue import Issue, Issues
from .link import Link
from .reduce import reduce_grads, reduce_norms, reduce_whole
from .shards import gathered, packed, unpacked
from .stage_file import Staged
from .streams import CudaStream, Event, Fault, Stream
from .turns import CHUNK_BYTES

if TYPE_CHECKING:
    from .session import DeviceSession

FIRST_TURN = -1  # before that of any stage


class Box:
    """A value that may not exist yet. Who still needs it holds the box; the last one to let go frees the memory."""

    __slots__ = ("stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None):
        self.stream = stream
        self.value = value


class Handle:
    """What the program's text has a name for; empty once it is freed or taken over."""

    __slots__ = ("box",)

    def __init__(self, box: Box):
        self.box = box

    def release(self) -> None:
        del self.box


@dataclass(frozen=True)
class OnSsd:
    """An activation in the file of activations. `like`: its shapes and dtypes, on the meta device."""

    offset_bytes: int
    like: Any


class DeviceRuntime:
    """One run of one program on `session`, the device with its state; its methods are the ops."""

    def __init__(self, session: DeviceSession, plan: Issues, streams: Mapping[str, Stream]):
        self.session, self.streams, self.issues = session, streams, plan.ops
        self.face, self.index, self.device, self.stores = session.face, session.index, session.device, session.stores
        self.loss_scale = 1.0 if session.loss_scale is None else session.loss_scale.scale
        self.squares: Box | None = None  # the gradients' sum of squares, once an op has used it
        self._events: list[Event | None] = [None] * len(plan.ops)
        self._cursor = 0

    @property
    def complete(self) -> bool:
        """Whether every op has been issued."""
        return self._cursor == len(self.issues)

    # --- issuing

    def _next(self, op: str) -> Issue:
        """The op that the text has next: give back what it takes over, take what it makes."""
        issue = self.issues[self._cursor]
        assert issue.op == op, f"the file runs {op} where its text has `{issue.text}`"
        self.session.raise_fault()
        self._cursor += 1
        accounts = self.session.accounts
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
        return issue

    def _launch(self, issue: Issue, reads: Sequence[Box], run: Callable[[], Sequence[Any]]) -> list[Handle]:
        """Issue `run`, which reads the boxes and gives the op's results; return their handles.

        Weights are not among the boxes: nobody gives their memory back during a step.
        """
        stream = self.streams[issue.stream]
        made = [Box(stream) for _ in issue.results]

        def task() -> None:
            if isinstance(stream, CudaStream):  # here, as what a thread makes is not there before
                for box in reads:
                    if box.stream is not None and box.stream is not stream:
                        stream.hold(_tensors_in(box.value))
            for box, value in zip(made, run(), strict=True):
                box.value = value

        events = self._events
        if isinstance(stream, CudaStream) and self.session.link is None:
            self._make_room(issue)
        events[issue.index] = stream.issue(task, [e for i in issue.waits if (e := events[i]) is not None], issue)
        return [Handle(box) for box in made]

    def _make_room(self, issue: Issue) -> None:
        """Let torch's allocator find the memory that the account has: it hands out what crossed streams only when they
        are past it, and would else take more from the GPU, the further the issuing runs ahead.

        The op waits for the same on the GPU anyway. Not with several devices: the issuing of a send behind this op
        would wait too, and with it a device on which this one may depend.
        """
        for index in issue.room:
            event = self._events[index]
            if event is not None:
                event.wait()

    def _pace(self, issue: Issue) -> Callable[[], None]:
        """A transfer begins: what this returns waits until slower links would have moved it as well."""
        if issue.shared is not None:
            assert self.session.link_server is not None
            return self.session.link_server.begin(issue.shared)
        end_s = time.perf_counter() + issue.least_s

        def rest() -> None:
            rest_s = end_s - time.perf_counter()
            if issue.least_s and rest_s > 0:
                time.sleep(rest_s)

        return rest

    # --- ops: data and weights

    def load(self, batch: Mapping[str, Tensor], name: str, *, micro_batch: int) -> Handle:
        issue = self._next("load")
        rows = self.face.batch[name].shape[0]
        piece = batch[name][micro_batch * rows : (micro_batch + 1) * rows]
        if self.device.type == "cpu":  # a view: no memory is taken, nothing need be waited for
            return Handle(Box(None, piece))

        def run() -> list[Any]:
            host = piece if piece.is_cuda else piece.pin_memory()
            return [host.to(self.device, copy=True, non_blocking=True)]

        return self._launch(issue, [], run)[0]

    def resident(self, name: str) -> Handle:
        self._next("resident")
        return Handle(self.session.resident[name.partition(".")[0]])

    def fetch(
        self,
        what: str | Handle,
        begun: Handle | None = None,
        *,
        params: int | None = None,
        group: str | None = None,
    ) -> Handle:
        issue = self._next("fetch")
        if begun is not None:
            begun.release()
        if isinstance(what, Handle) and not issue.pieces:
            return self._fetch_activation(issue, what.box)
        stage = issue.stage
        store, box = self.stores[stage], what.box if isinstance(what, Handle) else None
        offset_bytes, first, last = issue.pieces[-1]
        start, end = store.layout.start_of(first), store.layout.start_of(last)
        place = self.session.arena.range(offset_bytes, end - start)
        # Of a shard nothing is computed: it goes on as it is.
        value = place if group is not None else self.session.arena.views(stage, store.layout, issue.pieces)

        def run() -> list[Any]:
            rest = self._pace(issue)
            source = store.flat if box is None else box.value
            self._copy_in(place, source[start:end], issue.turn)
            rest()
            return [value]

        return self._launch(issue, [] if box is None else [box], run)[0]

    def _copy_in(self, place: Tensor, source: Tensor, turn: int) -> None:
        """From DRAM to the device; where fetches have turns, in chunks, each when its turn has come."""
        session = self.session
        if session.turns is None or session.copies is None:
            place.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(session.copies):
            for start in range(0, len(place), CHUNK_BYTES):
                with session.turns.hold(turn):
                    end = min(start + CHUNK_BYTES, len(place))
                    place[start:end].copy_(source[start:end], non_blocking=True)
                    session.copies.synchronize()

    def _fetch_activation(self, issue: Issue, box: Box) -> Handle:
        def run() -> list[Any]:
            rest = self._pace(issue)
            given: Any = box.value
            with self._alone():
                if isinstance(given, Kept):
                    moved: Any = given.copied_to(torch.empty(given.num_bytes, dtype=torch.uint8, device=self.device))
                else:
                    moved = torch.empty_like(given, device=self.device).copy_(given, non_blocking=True)
            rest()
            return [moved]

        return self._launch(issue, [box], run)[0]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Where fetches have turns, activations come before all weights, and are there when this ends."""
        session = self.session
        if session.turns is None or session.copies is None:
            yield
            return
        with torch.cuda.stream(session.copies), session.turns.hold(FIRST_TURN):
            yield
            session.copies.synchronize()

    def offload(self, value: Handle) -> Handle:
        issue = self._next("offload")
        box, place = value.box, issue.place
        num_bytes = issue.place_bytes

        def run() -> list[Any]:
            rest = self._pace(issue)
            given: Any = box.value
            if place is None:  # a result of the step, which is handed out
                moved: Any = torch.empty_like(given, device="cpu", pin_memory=given.is_cuda).copy_(
                    given, non_blocking=True
                )
            else:
                moved = self._placed(given, self.session.dram_arena.range(place, num_bytes), issue)
            rest()
            return [moved]

        return self._launch(issue, [box], run)[0]

    def _placed(self, given: Any, flat: Tensor, issue: Issue) -> Any:
        """A copy of gradients, of a tensor or of what a forward kept, in its place in DRAM."""
        if isinstance(given, Grads):
            places = grads_layout(self.stores[issue.stage].part).views(flat)
            tensors = {name: places[name].copy_(grad, non_blocking=True) for name, grad in given.tensors.items()}
            return Grads(tensors, given.factor)
        if isinstance(given, Kept):
            return given.copied_to(flat)
        return flat[: given.nbytes].view(given.dtype).view(given.shape).copy_(given, non_blocking=True)

    def read(self, what: str | Handle) -> Handle:
        issue = self._next("read")
        assert issue.place is not None
        flat = self.session.dram_arena.range(issue.place, issue.place_bytes)
        if isinstance(what, Handle):
            return self._read_activation(issue, what.box, flat)
        file = self.stores[issue.stage].file

        def run() -> list[Any]:
            rest = self._pace(issue)
            assert file is not None
            if what.endswith(".weights"):
                file.read_weights(flat)
            else:
                file.read(flat)
            rest()
            return [flat if what.endswith(".weights") else file.views(flat)]

        return self._launch(issue, [], run)[0]

    def _read_activation(self, issue: Issue, box: Box, flat: Tensor) -> Handle:
        def run() -> list[Any]:
            rest = self._pace(issue)
            there: OnSsd = box.value
            assert self.session.ssd_arena is not None
            self.session.ssd_arena.read(there.offset_bytes, flat)
            rest()
            if isinstance(there.like, Kept):
                return [there.like.placed_in(flat)]
            num_bytes = there.like.numel() * there.like.element_size()
            return [flat[:num_bytes].view(there.like.dtype).view(there.like.shape)]

        return self._launch(issue, [box], run)[0]

    def write(self, value: Handle, *, to: str | None = None) -> Handle | None:
        issue, box = self._next("write"), value.box
        file = None if to is None else self.stores[to.partition(".")[0]].file

        def run() -> list[Any]:
            rest = self._pace(issue)
            given = box.value
            if file is not None:
                file.write(given.flat)
                rest()
                return []
            there = self._write_activation(given, issue)
            rest()
            return [there]

        made = self._launch(issue, [box], run)
        return made[0] if made else None

    def _write_activation(self, given: Any, issue: Issue) -> OnSsd:
        assert self.session.ssd_arena is not None and issue.place is not None
        first = next(iter(given.tensors.values())) if isinstance(given, Kept) else given
        _, flat = self.session.dram_arena.pages_of(first, issue.place_bytes)
        self.session.ssd_arena.write(issue.place, flat)
        if isinstance(given, Kept):
            return OnSsd(issue.place, Kept.partial({name: t.to("meta") for name, t in given.tensors.items()}))
        return OnSsd(issue.place, given.to("meta"))

    def free(self, *values: Handle) -> None:
        self._next("free")
        for handle in values:
            handle.release()

    # --- ops: compute

    def forward(
        self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int, keep: bool = True
    ) -> tuple[Handle, ...]:
        issue = self._next("forward")
        runner, bound, boxes = self.stores[stage].runner, weights.box, [h.box for h in inputs]
        seed = micro_batch_seed(self.session.seed, self.session.step_count, stage, micro_batch)

        def run() -> list[Any]:
            runner.bind(bound.value)
            outputs, kept = runner.forward([box.value for box in boxes], seed, keep)
            return [*outputs, kept] if keep else outputs

        return tuple(self._launch(issue, boxes, run))

    def evaluate(self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int) -> tuple[Handle, ...]:
        issue = self._next("evaluate")
        runner, bound, boxes = self.stores[stage].runner, weights.box, [h.box for h in inputs]

        def run() -> list[Any]:
            runner.bind(bound.value)
            return runner.evaluate([box.value for box in boxes])

        return tuple(self._launch(issue, boxes, run))

    def backward(
        self,
        stage: str,
        weights: Handle,
        kept: Handle | None,
        inputs: Sequence[Handle],
        douts: Sequence[Handle | float | None],
        grads: Handle | None = None,
        *,
        micro_batch: int,
    ) -> tuple[Handle, ...]:
        issue = self._next("backward")
        runner, bound = self.stores[stage].runner, weights.box
        boxes = [h.box for h in inputs]
        kept_box = Box() if kept is None else kept.box
        grads_box = Box() if grads is None else grads.box
        scaled = [Box(None, d * self.loss_scale) if isinstance(d, float) else d for d in douts]
        given = [d.box if isinstance(d, Handle) else d for d in scaled]
        seed = micro_batch_seed(self.session.seed, self.session.step_count, stage, micro_batch)
        if grads is not None:
            grads.release()

        def run() -> list[Any]:
            runner.bind(bound.value)
            so_far = None if grads_box.value is None else grads_box.value.tensors
            values = [None if box is None else box.value for box in given]
            dinputs, total = runner.backward(kept_box.value, [box.value for box in boxes], values, so_far, seed)
            return [*dinputs, Grads(total)]

        return tuple(self._launch(issue, [*boxes, kept_box, grads_box, *(b for b in given if b)], run))

    def add(self, left: Handle, right: Handle) -> Handle:
        issue = self._next("add")
        a, b = left.box, right.box
        left.release()
        return self._launch(issue, [a, b], lambda: [a.value.add_(b.value)])[0]

    # --- ops: between devices

    def send(self, value: Handle, *, dst: int, tag: str) -> None:
        issue = self._next("send")
        box, link, throttled = value.box, self._link(), self.session.throttled

        def run() -> list[Any]:
            if not throttled:
                link.send(box.value.contiguous(), dst, tag)
                return []
            link.meet_receiver(dst, tag)  # the transfer begins when both are there, and ends for both at once
            rest = self._pace(issue)
            link.send(box.value.contiguous(), dst, tag)
            rest()
            link.meet_receiver(dst, tag)
            return []

        self._launch(issue, [box], run)

    def recv(self, like: str, *, src: int, tag: str) -> Handle:
        issue = self._next("recv")
        stage, _, output = like.partition(".")
        spec, link, throttled = self.face.stages[stage].output(output), self._link(), self.session.throttled

        def run() -> list[Any]:
            into = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
            if throttled:
                link.meet_sender(src, tag)
            link.recv(into, src, tag)
            if throttled:
                link.meet_sender(src, tag)
            return [into]

        return self._launch(issue, [], run)[0]

    def all_reduce(self, *values: Handle, group: str) -> tuple[Handle, ...]:
        issue = self._next("all_reduce")
        boxes = [handle.box for handle in values]
        for handle in values:
            handle.release()
        members = [(stage, param) for device, stage, param in self.face.groups[group] if device == self.index]
        link = self.session.link

        def run() -> list[Any]:
            found = [box.value for box in boxes]
            if isinstance(found[0], Grads) and not members[0][1]:
                reduce_whole(found[0].tensors, link, group)
                return found
            if isinstance(found[0], Grads):
                specs = [self.stores[stage].part for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], link, group)
                return found
            return [reduce_norms(found, link, group)] * len(found)

        return tuple(self._launch(issue, boxes, self._together(issue, group, run)))

    def all_gather(self, shard: Handle, *, group: str) -> Handle:
        issue = self._next("all_gather")
        box, stage, link = shard.box, issue.stages[0], self.session.link
        part = self.stores[stage].part
        views = self.session.arena.views(f"{stage}, whole", weights_layout(self.face.stages[stage]), issue.pieces)

        def run() -> list[Any]:
            gathered([box.value] if link is None else link.gather(box.value, group), part, views)
            return [views]

        return self._launch(issue, [], self._together(issue, group, run))[0]

    def reduce_scatter(self, grads: Handle, *, group: str) -> Handle:
        issue = self._next("reduce_scatter")
        box, link = grads.box, self.session.link
        part, count = self.stores[issue.stages[0]].part, len(self.face.members(group))
        grads.release()

        def run() -> list[Any]:
            pieces: dict[str, Tensor] = {}
            for rows, names in packed(box.value.tensors, count).values():
                pieces |= unpacked(rows[0] if link is None else link.scatter_sum(rows, group), names, part)
            return [Grads(pieces)]

        return self._launch(issue, [box], self._together(issue, group, run))[0]

    def _together(self, issue: Issue, group: str, run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """A collective; over slower links it begins when all members are there, and lasts as long as those need."""
        link = self.session.link
        if link is None or not issue.least_s:
            return run

        def held() -> list[Any]:
            link.meet_all(group)
            rest = self._pace(issue)
            found = run()
            rest()
            return found

        return held

    def _link(self) -> Link:
        if self.session.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.session.link

    # --- ops: update

    def norm(self, *grads: Handle) -> Handle:
        issue = self._next("norm")
        boxes = [handle.box for handle in grads]
        specs = [self.face.stages[stage] for stage in issue.stages]

        def run() -> list[Any]:
            return [sum_of_squares((spec, box.value.tensors) for spec, box in zip(specs, boxes, strict=True))]

        return self._launch(issue, boxes, run)[0]

    def clip(self, grads: Handle, norm: Handle, *, max_norm: float) -> Handle:
        issue = self._next("clip")
        box, squares = grads.box, norm.box
        grads.release()
        self.squares = squares

        def run() -> list[Any]:
            box.value.scale(clip_factor(squares.value, max_norm, self.loss_scale))
            return [box.value]

        return self._launch(issue, [box, squares], run)[0]

    def step(
        self,
        stage: str,
        grads: Handle,
        norm: Handle | None = None,
        states: Handle | None = None,
        *,
        speculative: bool = False,
    ) -> Handle | None:
        issue = self._next("step")
        box, squares, store = grads.box, None if norm is None else norm.box, self.stores[stage]
        staged_box = None if states is None else states.box
        factor = speculative_factor(self.loss_scale) if speculative else None
        if squares is not None:
            self.squares = squares
        if states is not None:
            states.release()

        def run() -> list[Any]:
            staged: Staged | None = None if staged_box is None else staged_box.value
            if squares is None or bool(torch.isfinite(squares.value)):
                store.update(box.value, staged, factor)
            return [] if staged is None else [staged]

        made = self._launch(issue, [b for b in (box, squares, staged_box) if b is not None], run)
        return made[0] if made else None

    def redo(self, stage: str, grads: Handle, norm: Handle, *, max_norm: float) -> None:
        issue, box, squares, store = self._next("redo"), grads.box, norm.box, self.stores[stage]
        loss_scale = None if self.session.loss_scale is None else self.loss_scale
        self.squares = squares

        def run() -> list[Any]:
            verdict = judge(squares.value, max_norm, loss_scale)
            if verdict is not Verdict.KEEP:
                clipped = verdict is Verdict.REDO
                store.redo(box.value, clip_factor(squares.value, max_norm, self.loss_scale) if clipped else None)
            return []

        self._launch(issue, [box, squares], run)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Grads):
        return [*value.tensors.values(), *([] if value.factor is None else [value.factor])]
    if isinstance(value, Kept):
        return list(value.tensors.values())
    return [value] if isinstance(value, Tensor) else []
