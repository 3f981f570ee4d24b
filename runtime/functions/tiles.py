"""A token-wise part of a stage over tiles of tokens, so that its inner values exist for one tile at a time.

Forward runs the part tile by tile without autograd and saves what enters it. Backward runs each tile again, with
autograd, and goes back through it at once: the gradients of what is cut are written tile by tile, those of weights add
up over tiles, in fp32 where they have fewer bits. (Bekman et al. 2025, "Arctic Long Sequence Training", 3.1: TiledMLP,
there written for one layer; here for any part that `tile-sequence` finds on the graph.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Values = Tensor | tuple[Tensor, ...]
TileBounds = Callable[[int, int], Iterable[tuple[int, int]]]


def in_tiles(
    body: Callable[..., Values],
    tokens: int,
    operands: Sequence[Tensor],
    dims: Sequence[int | None],
    results: Sequence[int],
    weights: Sequence[Tensor] = (),
    slices: TileBounds | None = None,
    unread: bool = False,
) -> Values:
    """`body(*operands)`, computed for `tokens` tokens at a time.

    `dims`: the dimension along which each operand has its tokens, None for one that every tile needs whole; `results`:
    the same for each result. `weights`: the parameters inside the body that may get gradients. `slices`: where each
    tile begins and its number of tokens, by the length and `tokens`; `tile_slices` unless given. `unread`: nothing
    reads the results: forward keeps what backward computes tiles of, and computes one token alone, for their shapes;
    they have no memory.
    Raises ValueError where operands have different numbers of tokens, for a body that gives a tile another number, and
    in backward for a trained parameter inside that `weights` lacks.
    """
    lengths = {operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    if len(lengths) != 1:
        raise ValueError(f"what is cut into tiles has {sorted(lengths)} tokens; one number is allowed")
    kind = operands[0].device.type
    state = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    rule = _Rule(
        body, tokens, lengths.pop(), tuple(dims), tuple(results), tuple(weights), kind, *state, slices or tile_slices,
        unread,
    )  # fmt: skip
    made = _InTiles.apply(rule, *operands, *weights)
    return made[0] if len(results) == 1 else made  # type: ignore[no-any-return]


def tile_slices(length: int, tokens: int) -> Iterator[tuple[int, int]]:
    """The beginning of each tile and the number of its tokens; the last tile may have fewer."""
    for start in range(0, length, tokens):
        yield start, min(tokens, length - start)


class _Rule(NamedTuple):
    body: Callable[..., Values]
    tokens: int
    length: int
    dims: tuple[int | None, ...]
    results: tuple[int, ...]
    weights: tuple[Tensor, ...]
    kind: str
    autocasts: bool
    dtype: torch.dtype
    slices: TileBounds
    unread: bool

    def tiles(self) -> Iterable[tuple[int, int]]:
        return self.slices(self.length, self.tokens)

    def tile(self, operands: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
        """The parts of the operands that a tile needs."""
        return [x if dim is None else x.narrow(dim, start, size) for x, dim in zip(operands, self.dims)]

    def run(self, operands: Sequence[Tensor], size: int) -> tuple[Tensor, ...]:
        """The results of one tile."""
        with self._autocast():
            found = self.body(*operands)
        made = (found,) if isinstance(found, Tensor) else found
        if [part.shape[dim] for part, dim in zip(made, self.results, strict=True)] != [size] * len(made):
            raise ValueError(f"a tile of {size} tokens gave results of shapes {[tuple(part.shape) for part in made]}")
        return made

    def _autocast(self) -> AbstractContextManager[Any]:
        # Without the cache: what a forward without autograd has cast must not serve one with it.
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False)


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _Rule, *tensors: Tensor) -> tuple[Tensor, ...]:
        operands = tensors[: len(rule.dims)]
        ctx.rule = rule
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        if rule.unread:
            parts = rule.run(rule.tile(operands, 0, 1), 1)
            return tuple(_expanded_empty(part, dim, rule.length) for part, dim in zip(parts, rule.results))
        whole: list[Tensor] = []
        for start, size in rule.tiles():
            parts = rule.run(rule.tile(operands, start, size), size)
            if not whole:
                whole = [_like(part, dim, rule.length) for part, dim in zip(parts, rule.results)]
            for result, part, dim in zip(whole, parts, rule.results):
                result.narrow(dim, start, size).copy_(part)
            del parts
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rule: _Rule = ctx.rule
        operands, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None] * len(needs)
        given = [i for i, grad in enumerate(grads) if grad is not None]
        for start, size in rule.tiles():
            with torch.enable_grad():
                parts = rule.tile([x.detach() for x in operands], start, size)
                parts = [x.requires_grad_() if need else x for x, need in zip(parts, needs)]
                made = rule.run(parts, size)
            if start == 0:
                _check_weights(made, (*parts, *rule.weights))
            sources = [t for t, need in zip((*parts, *rule.weights), needs) if need]
            ends = [grads[i].narrow(rule.results[i], start, size) for i in given]  # type: ignore[union-attr]
            gradients = iter(torch.autograd.grad([made[i] for i in given], sources, ends, allow_unused=True))
            del made, parts, sources
            for i, need in enumerate(needs):
                gradient = next(gradients) if need else None
                dim = rule.dims[i] if i < len(operands) else None
                if gradient is not None and dim is not None:
                    if found[i] is None:
                        found[i] = _like(operands[i], dim, rule.length)
                    found[i].narrow(dim, start, size).copy_(gradient)  # type: ignore[union-attr]
                elif gradient is not None:
                    found[i] = _add(found[i], gradient)
        return (None, *found)


def _check_weights(made: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Refuse a body with leaves that get gradients and are not known: these would be lost."""
    ids = {id(tensor) for tensor in known}
    stack = [part.grad_fn for part in made]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            raise ValueError(f"a parameter of shape {tuple(leaf.shape)} inside a tile is not among its weights")
        stack += [function for function, _ in node.next_functions]


def _like(part: Tensor, dim: int, length: int) -> Tensor:
    """Memory for the whole of which a tile is a part, laid out as that is."""
    shape = [*part.shape]
    shape[dim] = length
    order = sorted(range(part.dim()), key=lambda d: (part.stride(d), -d), reverse=True)
    return torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)


def _expanded_empty(part: Tensor, dim: int, length: int) -> Tensor:
    """A tensor of the whole's shape, all of whose elements are one that nobody has written."""
    shape = [*part.shape]
    shape[dim] = length
    return part.new_empty(()).expand(shape)


def _add(total: Tensor | None, gradient: Tensor) -> Tensor:
    """A sum over tiles, in fp32 at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if total is None:
        return gradient.to(wide, copy=True)  # it may be that of another weight, too
    return total.add_(gradient)
