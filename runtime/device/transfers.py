"""The ops of the device runtime that move values between memories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.program import part_of_form
from ..accelerator import GpuStream, on_stream, timed_event
from ..optimizer.gradients import Grads
from ..stage.arena import Arena, grads_layout
from ..stage.kept import Kept
from ..stage.store import StageStore
from ..turns import TurnClient
from .issuing import Handle, Issuing, Run
from .prepare import Issue

NOTHING = nullcontext()
FIRST_TURN = -1  # before the turn of any stage


@dataclass(frozen=True)
class StoredActivation:
    """An activation in the file of activations. `like`: its shapes and dtypes, on the meta device."""

    offset_bytes: int
    like: Any


class Transfers(Issuing):
    """The ops `load` to `free`."""

    def load(self, batch: Mapping[str, Tensor], name: str, *, micro_batch: int) -> Handle:
        issue, spec = self._next("load"), self.interface.batch[name]
        rows, device = spec.shape[0], self.device

        def cut(run: Run, given: Tensor) -> Tensor:
            own = self.state.forms[run.form_of(micro_batch)].batch.get(name, spec)
            if own.shape != spec.shape:
                return part_of_form(given, own)
            return given[spec.part_at(run.sizes[micro_batch])] if spec.dims else given

        if device.type == "cpu":  # a view: it takes no memory and need not wait
            first, last = micro_batch * rows, (micro_batch + 1) * rows  # `batch` holds the rows of this lane
            return self._hold(lambda run: cut(run, run.batch[name][first:last].cpu()))
        is_cut = bool(self.interface.sizes)

        def work(run: Run) -> list[Any]:
            pinned = run.pinned.get(name)
            if pinned is None:  # all rows at once: page-locked memory is dear to ask for
                whole = run.batch[name] if run.batch[name].is_cuda else run.batch[name].pin_memory()
                pinned = run.pinned[name] = whole.split(rows)
            moved = pinned[micro_batch].to(device, copy=True, non_blocking=True)
            return [cut(run, moved) if is_cut else moved]

        return self._launch(issue, (), work)[0]

    def resident(self, name: str, *, group: str | None = None) -> Handle:
        self._next("resident")
        stage = name.partition(".")[0]
        return self._hold(lambda run: self.state.resident[stage])

    def fetch(
        self,
        what: str | Handle,
        begun: Handle | None = None,
        *,
        params: int | None = None,
        group: str | None = None,
        link_turn: int | None = None,
    ) -> Handle:
        issue = self._next("fetch")
        if isinstance(what, Handle) and not issue.pieces:
            return self._fetch_activation(issue, what)
        store, copy = self.stores[issue.stage], self._copy_of(issue.link_turn)
        place, value, start, end = _place_of(issue, self.state.memory.device_arena, store, group is not None)

        def work(run: Run, given: Tensor | None = None) -> list[Any]:
            source = store.flat if given is None else given
            copy(place, source if end - start == source.numel() else source[start:end])
            return [value]

        reads = [what] if isinstance(what, Handle) else []
        return self._launch(issue, reads, self._pace(issue, work), gone=(begun,))[0]

    def _copy_of(self, turn: int | None) -> Callable[[Tensor, Tensor], object]:
        """The function that copies to a place on the device from a source in DRAM; with a turn on the link, in chunks
        that each wait for it."""
        turns, chunk_bytes = self.pacing.turns, self.pacing.chunk_bytes

        def copy_in_turn(place: Tensor, source: Tensor) -> None:
            assert turns is not None and turn is not None
            with self._issued_apart():
                for start in range(0, len(place), chunk_bytes):
                    with turns.hold(turn):
                        self._copy_chunk(place[start : start + chunk_bytes], source[start : start + chunk_bytes])

        def copy_apart(place: Tensor, source: Tensor) -> None:
            with self._issued_apart():
                _copy(place, source)

        if turns is not None and turn is not None:
            return copy_in_turn
        return _copy if self.all_streams.copies is None else copy_apart

    def _copy_chunk(self, place: Tensor, source: Tensor) -> None:
        """Copy a chunk, and wait until it is there, of a GPU all but the bytes that are under way while the turn is
        handed on."""
        copies, alone = self.all_streams.copies, len(place) - self.pacing.hand_over_bytes
        if copies is None:
            rest = self.pacing.begin_chunk(len(place))
            place.copy_(source)
            rest()
            return
        if alone > 0:
            place[:alone].copy_(source[:alone], non_blocking=True)
            passed = timed_event(blocking=True)
            passed.record(copies)
            place[alone:].copy_(source[alone:], non_blocking=True)
            passed.synchronize()
        else:
            place.copy_(source, non_blocking=True)

    def _fetch_activation(self, issue: Issue, value: Handle) -> Handle:
        def work(run: Run, given: Any) -> list[Any]:
            with self._alone():
                if isinstance(given, Kept):
                    return [given.copy_on(self.device)]
                return [torch.empty_like(given, device=self.device).copy_(given, non_blocking=True)]

        return self._launch(issue, (value,), self._pace(issue, work))[0]

    def _alone(self) -> AbstractContextManager[None]:
        """If fetches have turns, let an activation come before all weights."""
        return self._issued_apart() if self.pacing.turns is None else self._issue_first(self.pacing.turns)

    @contextmanager
    def _issue_first(self, turns: TurnClient) -> Iterator[None]:
        with turns.hold(FIRST_TURN), self._issued_apart():
            yield

    def _issued_apart(self) -> AbstractContextManager[None]:
        """Issue the copies of a thread of a GPU's host on its own CUDA stream, and wait for them."""
        copies = self.all_streams.copies
        return NOTHING if copies is None else _wait_for_copies(copies)

    def offload(self, value: Handle) -> Handle:
        issue = self._next("offload")
        place, num_bytes = issue.place, issue.place_bytes

        def work(run: Run, given: Any) -> list[Any]:
            if place is None:  # a result that the step returns
                host = torch.empty_like(given, device="cpu", pin_memory=given.is_cuda)
                return [host.copy_(given, non_blocking=True)]
            return [self._copy_to_place(run, given, place, num_bytes, issue)]

        return self._launch(issue, (value,), self._pace(issue, work))[0]

    def _copy_to_place(self, run: Run, given: Any, place: int, num_bytes: int, issue: Issue) -> Any:
        """A copy of gradients, of a tensor or of what a forward kept, at its place in DRAM."""
        arena = self.state.memory.dram_arena
        if isinstance(given, Tensor) and not run.sizes:
            own = arena.once((id(issue), place), lambda: _first_bytes(arena.range(place, num_bytes), given))
            return own.copy_(given, non_blocking=True)
        flat = arena.once((place, num_bytes), lambda: arena.range(place, num_bytes))
        flat_stage = self.stores[issue.stage].flat_stage if isinstance(given, Grads) and given.flats else None
        if flat_stage is not None:
            places, copies = flat_stage.own_grads.views(flat), flat_stage.grad_slices(flat)
            for copy, shard in zip(copies, given.flats, strict=True):
                copy.copy_(shard, non_blocking=True)
            for name, grad in given.tensors.items():  # that of a tied parameter may have come from another stage alone
                if all(grad.untyped_storage().data_ptr() != s.untyped_storage().data_ptr() for s in given.flats):
                    places[name].copy_(grad, non_blocking=True)
            return Grads({name: places[name] for name in given.tensors}, given.factor, flats=copies)
        if isinstance(given, Grads):
            part = self.stores[issue.stage].part
            places = arena.once((issue.stage, place), lambda: grads_layout(part).views(flat))
            tensors = {name: places[name].copy_(grad, non_blocking=True) for name, grad in given.tensors.items()}
            return Grads(tensors, given.factor)
        if isinstance(given, Kept):
            if run.sizes:  # which the places follow
                return given.copied_to(flat)
            return given.copied_into(arena.once((id(issue), place), lambda: given.places_in(flat)))
        return _first_bytes(flat, given).copy_(given, non_blocking=True)

    def read(self, what: str | Handle, *, group: str | None = None) -> Handle:
        issue = self._next("read")
        assert issue.place is not None
        flat = self.state.memory.dram_arena.range(issue.place, issue.place_bytes)
        if isinstance(what, Handle):
            return self._read_activation(issue, what, flat)
        file = self.stores[issue.stage].file

        def work(run: Run) -> list[Any]:
            assert file is not None
            if what.endswith(".weights"):
                file.read_weights(flat)
                return [flat]
            file.read(flat)
            return [file.views(flat)]

        return self._launch(issue, (), self._pace(issue, work))[0]

    def _read_activation(self, issue: Issue, value: Handle, flat: Tensor) -> Handle:
        def work(run: Run, there: StoredActivation) -> list[Any]:
            assert self.state.memory.ssd_arena is not None
            self.state.memory.ssd_arena.read(there.offset_bytes, flat)
            if isinstance(there.like, Kept):
                return [there.like.placed_in(flat)]
            return [_first_bytes(flat, there.like)]

        return self._launch(issue, (value,), self._pace(issue, work))[0]

    def write(self, value: Handle, *, to: str | None = None) -> Handle | None:
        issue = self._next("write")
        file = None if to is None else self.stores[to.partition(".")[0]].file

        def work(run: Run, given: Any) -> list[Any]:
            if file is None:
                return [self._write_activation(given, issue)]
            file.write(given.flat)
            return []

        made = self._launch(issue, (value,), self._pace(issue, work))
        return made[0] if made else None

    def _write_activation(self, given: Any, issue: Issue) -> StoredActivation:
        assert self.state.memory.ssd_arena is not None and issue.place is not None
        first = next(iter(given.tensors.values())) if isinstance(given, Kept) else given
        _, flat = self.state.memory.dram_arena.pages_of(first, issue.place_bytes)
        self.state.memory.ssd_arena.write(issue.place, flat)
        if isinstance(given, Kept):
            like = Kept.partial({name: t.to("meta") for name, t in given.tensors.items()}, given.aside)
            return StoredActivation(issue.place, like)
        return StoredActivation(issue.place, given.to("meta"))

    def free(self, *values: Handle) -> None:
        self._next("free")
        numbers = [handle.number for handle in values]

        def call(run: Run) -> None:
            boxes = run.boxes
            for number in numbers:
                boxes[number] = None

        self.calls.append(call)


def _copy(place: Tensor, source: Tensor) -> None:
    place.copy_(source, non_blocking=True)


def _first_bytes(flat: Tensor, like: Tensor) -> Tensor:
    """The first bytes of a buffer, as a tensor of this shape and dtype."""
    return flat[: like.nbytes].view(like.dtype).view(like.shape)


@contextmanager
def _wait_for_copies(copies: GpuStream) -> Iterator[None]:
    with on_stream(copies):
        yield
        copies.synchronize()


def _place_of(issue: Issue, arena: Arena, store: StageStore, is_shard: bool) -> tuple[Tensor, Any, int, int]:
    """The place of what a fetch brings, the value that is there then, and the bytes of the weights that it brings."""
    offset_bytes, first, last = issue.pieces[-1]
    layout = store.layout
    start, end = layout.start_of(first), layout.start_of(last)
    place = arena.range(offset_bytes, end - start)
    # Nothing is computed with a shard: it is passed on as it is.
    if is_shard:
        return place, place, start, end
    views = arena.views(issue.stage, layout, issue.pieces)
    if store.staying:
        views = arena.once((issue.stage, issue.pieces), lambda: {**views, **store.staying})
    return place, views, start, end
