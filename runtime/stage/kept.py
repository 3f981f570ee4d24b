"""The values that a forward keeps for its backward: the autograd graph, a slot of CUDA graphs, or tensors by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...ir.program import aligned
from ..torch_names import FunctionBase
from .graphed_stage import GraphSlot
from .saved_classes import Aside


class Kept:
    """The values that a forward keeps for its backward, with the edges where gradients of outputs enter and those of
    inputs leave.

    It holds edges of the autograd graph, not the outputs, so that an output which backward does not need can be freed.
    A partial one holds no graph, only `tensors` (class name to kept tensor): backward runs forward again, without
    computing these. The tensors can be moved by `placed_in` and `copied_to`; what is `aside` (by class) stays.
    """

    __slots__ = ("aside", "edges", "is_partial", "leaves", "num_bytes", "slot", "tensors")

    def __init__(self, outputs: Sequence[Tensor | None], leaves: Sequence[Tensor], num_bytes: int):
        self.edges: Sequence[GradientEdge | None] = [
            _edge_of(o) if o is not None and o.requires_grad else None for o in outputs
        ]
        self.leaves = leaves
        self.num_bytes = num_bytes
        self.is_partial = False
        self.slot: GraphSlot | None = None
        self.tensors: dict[str, Tensor] = {}
        self.aside: dict[str, Aside] = {}

    @classmethod
    def partial(cls, tensors: Mapping[str, Tensor], aside: Mapping[str, Aside] | None = None) -> Kept:
        """A partial one of these tensors by class. `num_bytes` is their size in one buffer, each aligned."""
        made = cls((), (), sum(aligned(t.nbytes) for t in tensors.values()))
        made.is_partial, made.tensors, made.aside = True, dict(tensors), dict(aside or {})
        return made

    def placed_in(self, flat: Tensor) -> Kept:
        """A partial one whose tensors are in a flat buffer of at least `num_bytes` bytes, in order, each aligned. They
        have the shapes and strides of this one's tensors, and the values that are in the buffer."""
        return Kept.partial(self.places_in(flat), self.aside)

    def places_in(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of `placed_in`, by class."""
        assert self.is_partial
        tensors, start = {}, 0
        whole: dict[torch.dtype, Tensor] = {}
        for name, tensor in self.tensors.items():
            dtype = tensor.dtype
            if dtype not in whole:
                whole[dtype] = flat.view(dtype)
            first = whole[dtype].storage_offset() + start // dtype.itemsize
            tensors[name] = whole[dtype].as_strided(tensor.shape, tensor.stride(), first)
            start += aligned(tensor.nbytes)
        return tensors

    def copied_to(self, flat: Tensor) -> Kept:
        """`placed_in`, with this one's values. Does not wait for copies between a GPU and pinned memory."""
        return self.copied_into(self.places_in(flat))

    def copy_on(self, device: torch.device) -> Kept:
        """Copy the tensors of a partial `Kept` to a device, each into memory of its own."""
        found = {}
        for name, t in self.tensors.items():
            place = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            found[name] = place.copy_(t, non_blocking=True)
        return Kept.partial(found, self.aside)

    def copied_into(self, places: Mapping[str, Tensor]) -> Kept:
        """`copied_to`, where the places are known."""
        for name, tensor in self.tensors.items():
            places[name].copy_(tensor, non_blocking=True)
        return Kept.partial(places, self.aside)

    @classmethod
    def from_graph(cls, slot: GraphSlot, num_bytes: int) -> Kept:
        """The values that a graphed forward keeps in its slot."""
        made = cls([], [], num_bytes)
        made.slot = slot
        return made

    def drop(self) -> None:
        """Let go of the graph and all that it saved."""
        self.edges, self.leaves, self.tensors, self.aside = (), (), {}, {}


def _edge_of(output: Tensor) -> GradientEdge:
    """The edge where the gradient of an output enters. The nodes of torch itself need no more to live on."""
    node = output.grad_fn
    if node is None or isinstance(node, FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)
