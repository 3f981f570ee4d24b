"""The saved parameters of a stage, for autograd: a name and a place inside, not an address.

Weights that are fetched are elsewhere in backward than in forward. So a saved tensor that is a view of a parameter is
saved as the parameter's name and the view's place in it, and made again of the tensor to which the parameter is bound
when backward reads it. What is no parameter is saved as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..accelerator import storage_of
from .pointwise import PointwiseAgain


class SavedPlaces:
    """Hooks of autograd for the parameters `params`, by name. `pointwise_again`: pointwise results are saved as
    recipes (`pointwise.py`)."""

    def __init__(self, params: Mapping[str, nn.Parameter], device: torch.device, pointwise_again: bool):
        self.params, self.device, self.pointwise_again = params, device, pointwise_again
        self.held: Collection[int] = ()  # storages of parameters and buffers
        self.starts: list[int] | None = None  # addresses of the bound parameters, ascending; None until asked for
        self.spans: list[tuple[int, str]] = []  # their end addresses and names, in the same order
        self.saving: saved_tensors_hooks | None = None  # those of these parameters, once they were needed

    def forget(self, held: Collection[int]) -> None:
        """The parameters are bound to other tensors. `held`: the storages of these and of buffers."""
        self.held, self.starts, self.saving = held, None, None

    def hooks(self, storages: dict[int, int] | None) -> AbstractContextManager[Any]:
        """Save weights by name and place, so that they may move meanwhile. Note each other storage, with its bytes, in
        `storages`."""
        if self.saving is not None and storages is None:
            return self.saving
        starts, spans, held = self._bound_at(), self.spans, self.held

        def pack(saved: Tensor) -> Tensor | tuple[str, torch.dtype, int, torch.Size, tuple[int, ...]]:
            address = saved.data_ptr()
            row = bisect_right(starts, address) - 1
            if row >= 0 and address < spans[row][0] and storage_of(saved) in held:
                offset_bytes = address - starts[row]
                return spans[row][1], saved.dtype, offset_bytes, saved.shape, saved.stride()
            if storages is not None:
                storages[storage_of(saved)] = saved.untyped_storage().nbytes()
            return saved.detach()  # a saved result would else hold the very graph that saves it

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            name, dtype, offset_bytes, shape, stride = packed
            param = self.params[name]
            start = param.storage_offset() * param.element_size() + offset_bytes
            place = torch.empty(0, dtype=dtype, device=self.device)
            return place.set_(param.untyped_storage(), start // dtype.itemsize, shape, stride)

        if self.pointwise_again:
            weights = {storage_of(p) for p in self.params.values()}
            return PointwiseAgain(pack, unpack, lambda tensor: storage_of(tensor) in weights)
        saving = saved_tensors_hooks(pack, unpack)
        if storages is None:
            self.saving = saving
        return saving

    def _bound_at(self) -> list[int]:
        """The addresses of the bound parameters, ascending."""
        if self.starts is None:
            params = self.params.items()
            rows = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in params)
            self.starts = [start for start, _, _ in rows]
            self.spans = [(end, name) for _, end, name in rows]
        return self.starts


def with_own_storage(tensor: Tensor, taken: set[int], held: Container[int] = ()) -> Tensor:
    """The tensor, copied if its storage is in `taken` already, or `held`; adds the storage of the result to `taken`.

    Autograd may hand out the same memory twice (the gradients of `p.view(-1) + x.view(-1)`), and a stage may hand an
    input through: both would turn the next addition in place into a wrong result elsewhere.
    """
    storage = tensor.untyped_storage().data_ptr()
    if storage != 0 and (storage in taken or storage in held):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        storage = storage_of(tensor)
    taken.add(storage)
    return tensor
