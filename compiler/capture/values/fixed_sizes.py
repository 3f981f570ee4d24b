"""Calls whose results have a size by a value, in a form of a fixed size: by a mask, a count or a number that is the
same at every step; and values that are written to the places of a mask, of which backward would have such a size.

In: a call as the user's code made it, and `call`, which records another one. Out: the call that takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....runtime.torch_names import assert_async

Caller = Callable[..., Any]
OtherCall = tuple[Callable[..., Any], tuple, dict[str, Any]]


@dataclass(frozen=True)
class MaskedPut:
    """Values, which get a gradient, that are written to places of which masks tell, or added there.

    `func`: the function that the user called. `adds`: whether it adds.
    """

    func: Callable[..., Any]
    target: Tensor
    key: tuple
    values: Tensor
    adds: bool

    @property
    def masks(self) -> list[Tensor]:
        return [*filter(is_mask, self.key)]

    def begins_with_its_mask(self) -> bool:
        """Whether there is one mask, of the first dimensions."""
        rest = (item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in self.key[1:])
        inner = self.target.dim() - self.masks[0].dim()
        fits = self.values.dtype == self.target.dtype and 0 <= inner >= self.values.dim() - 1
        return is_mask(self.key[0]) and all(rest) and fits

    def record(self, call: Caller, line: Callable[[], str]) -> Any:
        """Record it as calls of a fixed size, with a check of the number of values. Returns the target with them."""
        (mask,), values, target = self.masks, self.values, self.target
        inner = target.dim() - mask.dim()
        places = call(Tensor.__getitem__, mask, (..., *(None,) * inner))
        base = call(torch.zeros_like, target) if self.adds else target
        if values.dim() <= inner or values.shape[0] == 1:  # the same at all places
            each = values if values.dim() <= inner else call(Tensor.squeeze, values, 0)
            filled = call(torch.where, places, each, base)
        else:
            number = call(Tensor.size, values, 0)
            text = f"{line()}: the mask has another number of places than there are values"
            call(assert_async, call(torch.eq, call(Tensor.sum, mask), number), text)
            sizes = [call(Tensor.size, target, i - inner) for i in range(inner)]
            filled = call(Tensor.masked_scatter, base, places, call(Tensor.expand, values, number, *sizes))
        filled = call(torch.add, target, filled) if self.adds else filled
        return filled if self.func.__name__ == "index_put" else call(Tensor.copy_, target, filled)

    def use_places(self, call: Caller) -> OtherCall:
        """The call with the numbers of the places, for masks that are the same at every step."""
        key = tuple(place for item in self.key for place in _places(item, call, is_mask(item)))
        return self.func, (self.target, key, self.values, *[True] * self.adds), {}


def masked_put(func: Any, args: tuple, kwargs: dict[str, Any]) -> MaskedPut | None:
    """The write of `x[mask] = values` or `index_put`; None for other calls, and for values without a gradient."""
    if getattr(func, "__name__", "") not in ("__setitem__", "index_put", "index_put_"):
        return None
    target, indices, values, adds = _put_arguments(*args, **kwargs)
    key = tuple(indices) if isinstance(indices, (tuple, list)) else (indices,)
    trained = isinstance(values, Tensor) and values.requires_grad and any(map(is_mask, key))
    return MaskedPut(func, target, key, values, adds) if trained else None


def _put_arguments(target: Any, indices: Any, values: Any, accumulate: bool = False) -> tuple[Any, ...]:
    return target, indices, values, accumulate


def joined_numbers(key: Any, call: Caller) -> Any:
    """A key in which one tensor takes the place of a sequence of numbers that are tensors, which torch reads one by one
    (`rows, columns = zip(*places); x[rows, columns]`)."""
    if not isinstance(key, tuple):
        return key
    is_joined = [
        isinstance(item, (tuple, list)) and any(isinstance(each, Tensor) and each.dim() == 0 for each in item)
        for item in key
    ]
    return tuple(call(torch.stack, [*item]) if joined else item for item, joined in zip(key, is_joined))


def use_known_values(
    func: Any, args: tuple, kwargs: dict[str, Any], call: Caller, is_known: Callable[[Tensor], bool]
) -> OtherCall:
    """A call with masks, counts and numbers whose values are known."""

    def number(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and leaf.dim() == 0 and is_known(leaf)
        return call(Tensor.item, leaf) if is_number else leaf

    name = getattr(func, "__name__", "")
    if name == "masked_select":
        value, mask = *args, *kwargs.values()
        shape = torch.broadcast_shapes(value.shape, mask.shape)
        func, args, kwargs = Tensor.__getitem__, tuple(call(Tensor.expand, each, shape) for each in (value, mask)), {}
    if name in ("__getitem__", "masked_select"):
        key = args[1] if isinstance(args[1], tuple) else (args[1],)
        known = [is_mask(item) and is_known(item) for item in key]
        args = args[0], tuple(place for item, is_it in zip(key, known) for place in _places(item, call, is_it))
    elif name == "repeat_interleave":
        value, counts, dim = _repeat_arguments(*args, **kwargs)
        if isinstance(counts, Tensor) and counts.numel() > 1 and is_known(counts):
            value = call(Tensor.flatten, value) if dim is None else value
            return torch.index_select, (value, dim or 0, call(torch.repeat_interleave, counts)), {}
    return func, (*args[:1], *map_leaves(number, args[1:])), map_leaves(number, kwargs)


def _repeat_arguments(input: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> tuple[Any, ...]:
    return input, repeats, dim


def map_leaves(change: Callable[[Any], Any], nest: Any) -> Any:
    """A nest of arguments with other leaves; those of slices are among them."""
    if isinstance(nest, (tuple, list)):
        items = (map_leaves(change, item) for item in nest)
        return [*items] if isinstance(nest, list) else tuple(items)
    if isinstance(nest, dict):
        return {key: map_leaves(change, item) for key, item in nest.items()}
    if isinstance(nest, slice):
        return slice(*(change(item) for item in (nest.start, nest.stop, nest.step)))
    return change(nest)


def _places(item: Any, call: Caller, is_known_mask: bool) -> tuple:
    """An item of a key; in place of a mask, the numbers of its places in each dimension."""
    return call(Tensor.nonzero, item, as_tuple=True) if is_known_mask else (item,)


def is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool
