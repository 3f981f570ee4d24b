"""One pass over memory: a step of torch's fused kernels in tiles that stay in a CPU's caches.

The torch optimizer's own `step` runs, with its options, counts and states. When it calls a fused kernel on whole
tensors, that call is made tile by tile instead, and with each call all else that a tile's elements need: their
gradients are converted and multiplied, weights that have no masters become fp32, and the new weights are written in
their own precision. Each element is updated as in the whole tensor, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ir.precision import TILED_ELEMENTS
from ..threads import share_among
from ..torch_names import TorchDispatchMode, foreach_copy_
from .gradients import times_in_full
from .importable import resolve
from .probe import FAILURES, tiny
from .spec import OptimizerSpec

# Their steps read gradients and parameters in a fused kernel only.
CLASSES: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
)  # fmt: skip
_GRADIENTS = "grads"  # an argument that no other operators have
_STEPS = "state_steps"  # the argument of the kernels that has one number for each parameter
# Of a thread's tile. Measured: smaller ones lose time in calls, larger ones leave the caches.
ELEMENTS_PER_THREAD = 1 << 18
LANES = 64  # pieces begin at multiples of it, so that vectors and single elements are those of the whole tensor

Tile = tuple[tuple[int, int, int], ...]  # of each piece: the number of its tensor, its first element, its size


@dataclass(frozen=True)
class Tiled:
    """A parameter that is stepped in tiles, all tensors flat. `converted`: its gradient is converted, or multiplied;
    `weight` follows it. With a `store` it is made of the weights `param` for its step alone: the function takes its new
    values, the piece of `param` to write them to, and the index of the first one."""

    param: Tensor
    grad: Tensor
    converted: bool
    weight: Tensor | None = None
    store: Callable[[Tensor, Tensor, int], None] | None = None


def tile_elements() -> int:
    """The size of the tiles that the calling thread's number of threads has at a time, all together: no more than
    DRAM's account has."""
    return min(ELEMENTS_PER_THREAD * torch.get_num_threads(), TILED_ELEMENTS)


@lru_cache(maxsize=256)
def cut(sizes: tuple[int, ...], most: int) -> tuple[Tile, ...]:
    """Tensors of these sizes in tiles of at most `most` elements, which is at least `LANES`."""
    tiles: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            left = size - begin
            take = left if left <= room else room - room % LANES
            if take:
                tiles[-1].append((index, begin, take))
                begin, room = begin + take, room - take
            else:
                tiles.append([])
                room = most
    return tuple(tuple(tile) for tile in tiles if tile)


def steps_in_tiles(spec: OptimizerSpec) -> bool:
    """Whether a host steps all groups in tiles."""
    return all(lacks_for_tiles(spec, index) == "" for index in range(len(spec.all_groups)))


def lacks_for_tiles(spec: OptimizerSpec, index: int) -> str:
    """The reason for which a host does not step a group in tiles; "" if it does."""
    if resolve(spec.class_of(index)[0]) not in CLASSES:
        return "only " + ", ".join(cls.__name__ for cls in CLASSES) + " can be divided"
    return "" if is_fused(spec, index, torch.device("cpu")) else "its options choose no fused kernel"


def is_fused(spec: OptimizerSpec, index: int, device: torch.device) -> bool:
    """Whether a group is stepped by a fused kernel of torch on this device."""
    try:
        (group,) = spec.build_alone(index, [tiny((2,), device)]).param_groups
    except FAILURES:  # an optimizer for matrices only
        return False
    return bool(group.get("fused"))


class InTiles(TorchDispatchMode):
    """While it is on, a fused kernel's call on parameters of `work`, by id, is made in tiles. `factor`: see
    `StageOptimizer.step`; `scratch` lends a buffer of at least its argument's bytes, with any contents."""

    def __init__(self, work: Mapping[int, Tiled], factor: Tensor | None, scratch: Callable[[int], Tensor]):
        super().__init__()
        self.work, self.factor, self.scratch = work, factor, scratch
        self.single = None if factor is None else factor.to("cpu", torch.float32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(argument.name == _GRADIENTS for argument in func._schema.arguments):
            return self._step(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _step(self, kernel: Any, lists: Sequence[Sequence[Tensor]], options: Mapping[str, Any]) -> None:
        params, _, *states = lists
        work = [self.work[id(param)] for param in params]
        whole = [argument.name == _STEPS for argument in kernel._schema.arguments[2 : len(lists)]]
        flats = [own if single else [t.view(-1) for t in own] for own, single in zip(states, whole)]
        sizes, most = tuple(w.param.numel() for w in work), tile_elements()
        # Threads have tiles of their own, which together are one of `most`; a smaller step is divided by the kernels.
        threads = min(torch.get_num_threads(), most // LANES) if sum(sizes) >= most else 1
        rooms = _rooms(self.scratch, params[0].dtype, threads, min(most, sum(sizes)) // threads, work)

        def step(thread: int, tile: Tile) -> None:
            rows = [
                [own[i] if single else own[i].narrow(0, begin, size) for i, begin, size in tile] if own else []
                for own, single in zip(flats, whole)
            ]
            lasting = [work[i].param.narrow(0, begin, size) for i, begin, size in tile]
            room = rooms[thread]
            full = room.cast_to_step(lasting) if room.has_params else lasting
            kernel(full, self._gradients(work, tile, room), *rows, **options)
            _write(work, tile, full, lasting)

        share_among(threads, cut(sizes, most // threads), step)

    def _gradients(self, work: Sequence[Tiled], tile: Tile, room: _Room) -> list[Tensor]:
        given = [work[i].grad.narrow(0, begin, size) for i, begin, size in tile]
        chosen = [at for at, (i, _, _) in enumerate(tile) if work[i].converted]
        if not chosen:
            return given
        sources = [given[at] for at in chosen]
        made = room.gradients(sources)
        self._convert(made, sources)
        for at, grad in zip(chosen, made):
            given[at] = grad
        return given

    def _convert(self, made: list[Tensor], grads: list[Tensor]) -> None:
        if self.factor is None or self.single is None:
            foreach_copy_(made, grads)
            return
        for full, grad in zip(made, grads):
            if torch.float64 in (full.dtype, grad.dtype):
                full.copy_(times_in_full(grad, self.factor))
            elif grad.dtype == full.dtype:
                torch.mul(grad, self.single, out=full)
            else:
                full.copy_(grad).mul_(self.single)


class _Room:
    """Places for the gradients of a tile, and, where no masters exist, for its parameters."""

    def __init__(self, grads: Tensor, params: Tensor):
        self._grads, self._params = grads, params
        self.has_params = params.numel() > 0

    def gradients(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Places of these sizes."""
        return _places(self._grads, like)

    def cast_to_step(self, weights: list[Tensor]) -> list[Tensor]:
        """The weights in the precision of the step."""
        full = _places(self._params, weights)
        foreach_copy_(full, weights)
        return full


def _rooms(
    scratch: Callable[[int], Tensor], dtype: torch.dtype, threads: int, elements: int, work: Sequence[Tiled]
) -> list[_Room]:
    """A room for each thread's tile of this number of elements."""
    needed = any(w.converted for w in work), any(w.store is not None for w in work)
    sizes = [elements * part for part in needed]
    total = threads * sum(sizes)
    flat = scratch(total * dtype.itemsize)[: total * dtype.itemsize].view(dtype)
    return [_Room(*own.split(sizes)) for own in flat.view(threads, sum(sizes))]


def _places(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [t.numel() for t in like]
    return list(flat.narrow(0, 0, sum(sizes)).split(sizes))


def _write(work: Sequence[Tiled], tile: Tile, full: Sequence[Tensor], lasting: Sequence[Tensor]) -> None:
    """Write new values to what follows them."""
    for (i, begin, size), new, low in zip(tile, full, lasting):
        weight, store = work[i].weight, work[i].store
        if weight is not None:
            weight.narrow(0, begin, size).copy_(new)
        if store is not None:
            store(new, low, begin)
