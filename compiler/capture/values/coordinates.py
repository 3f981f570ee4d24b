"""Tensors by coordinates (`torch.sparse_coo_tensor`), which are dense in a program: the same numbers, and the memory of
all of them.

In: a call as the user's code made it, and `call`, which records another one. Out: the result of the dense call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.torch_names import number_of_entries
from .fixed_sizes import Caller

NO_COORDINATES = object()


class Coordinates:
    """The tensors of a run of forward that are sparse in the user's code."""

    def __init__(self) -> None:
        self._dense: dict[int, Tensor] = {}  # by their ids
        self._indices: dict[int, Tensor] = {}  # id(dense) -> its indices, until those that are the same are joined

    def perform(self, func: Any, args: tuple, kwargs: dict[str, Any], call: Caller) -> Any:
        """The result of a call that makes or takes such a tensor; NO_COORDINATES for other calls."""
        if func is torch.sparse_coo_tensor:
            return self._make(*args, call=call, **kwargs)
        if not self._dense or not any(id(arg) in self._dense for arg in args):
            return NO_COORDINATES
        if func is torch.sparse.mm:
            return call(torch.mm, *args)
        if func is Tensor.coalesce:
            self._indices.pop(id(args[0]), None)
            return args[0]
        if func is number_of_entries and id(args[0]) in self._indices:
            return call(Tensor.size, self._indices[id(args[0])], 1)
        return NO_COORDINATES

    def _make(self, indices: Any, values: Any, size: Any = None, *, call: Caller, dtype: Any = None, **_: Any) -> Any:
        if size is None or not isinstance(indices, Tensor) or not isinstance(values, Tensor):
            return NO_COORDINATES
        values = values if dtype is None else call(Tensor.to, values, dtype)
        places = tuple(call(Tensor.__getitem__, indices, row) for row in range(indices.shape[0]))
        dense = call(torch.index_put, call(Tensor.new_zeros, values, tuple(size)), places, values, True)
        self._dense[id(dense)], self._indices[id(dense)] = dense, indices
        return dense
