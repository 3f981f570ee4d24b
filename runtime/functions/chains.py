"""A chain of pointwise calls as one: backward computes it again from what enters it, and nothing inside is saved.

As it is written, the chain runs call by call, and backward goes back through it by autograd: the same bits as without.
Where kernels were made for it (`runtime/compiled/chain_kernels.py`), these run instead, one forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ChainBody = Callable[..., Tensor]
CountCall = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]  # takes what a kernel would read and write


def fuse(
    body: ChainBody, operands: Sequence[Tensor], needed: Sequence[int], one_call: CountCall | None = None,
    variant: Hashable = (),
) -> Tensor:  # fmt: skip
    """`body(*operands)`, a tensor of its own. `needed`: the places of the operands whose values backward reads; only
    these are saved. `one_call`: what forward and backward run in, for costs. `variant`: what else the body's result
    depends on."""
    kind = operands[0].device.type
    modes = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    call = Chain(body, tuple(needed), kind, *modes, one_call, variant)
    for seen in _noting:
        seen.append((call, tuple(operands)))
    made: Tensor = _Fused.apply(call, *operands)
    return made


@dataclass(frozen=True)
class ChainKernels:
    """The kernels of one chain on operands of one layout. `forward` takes these. `backward`, by `backward_key`, takes
    the gradient of the result and the needed operands, and gives the gradients that are wanted. `code`: the body's,
    whose identity must last."""

    code: CodeType
    forward: Callable[..., Sequence[Tensor]]
    backward: dict[tuple[Any, ...], Callable[..., Sequence[Tensor]]] = field(default_factory=dict)

    def has_backward(self, wanted: tuple[bool, ...]) -> bool:
        """Whether there is a kernel for these gradients, if any is wanted."""
        return not any(wanted) or any(key[: len(wanted)] == wanted for key in self.backward)


class Chain(NamedTuple):
    """A chain as it is called: its body, and the modes of forward, which hold in backward, too."""

    body: ChainBody
    needed: tuple[int, ...]
    kind: str
    autocasts: bool
    dtype: torch.dtype
    one_call: CountCall | None = None
    variant: Hashable = ()

    def run(self, *operands: Tensor) -> Tensor:
        # Without the cache: what a forward without autograd has cast must not serve one with it.
        with torch.autocast(self.kind, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False):
            made: Tensor = self.body(*operands)
        return made

    def gradients(self, grad: Tensor, operands: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
        """The gradients of the operands that are wanted, by autograd."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(want) for x, want in zip(operands, wanted)]
            made = self.run(*leaves)
        sources = [leaf for leaf, want in zip(leaves, wanted) if want]
        return list(torch.autograd.grad(made, sources, grad))

    def key(self, operands: Sequence[Tensor]) -> tuple[Any, ...]:
        """Equal for calls that the same kernels serve. (Codes of two files may be equal and mean other modules.)"""
        assert isinstance(self.body, FunctionType)
        return id(self.body.__code__), operands[0].device, self.autocasts, self.dtype, self.variant, *_layouts(operands)


def backward_key(wanted: Sequence[bool], given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Equal for backwards that the same kernel serves. `wanted`: whether each operand gets a gradient; `given`: the
    gradient of the result, which may have another layout than that, and the needed operands."""
    return *wanted, *_layouts(given)


def _layouts(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


KERNELS: dict[tuple[Any, ...], ChainKernels] = {}  # of this process, by the key of a call
_noting: list[list[tuple[Chain, tuple[Tensor, ...]]]] = []


@contextmanager
def note_chains() -> Iterator[list[tuple[Chain, tuple[Tensor, ...]]]]:
    """Collect the calls of `fuse` within this."""
    found: list[tuple[Chain, tuple[Tensor, ...]]] = []
    _noting.append(found)
    try:
        yield found
    finally:
        _noting.remove(found)


def is_noting() -> bool:
    """Whether calls of `fuse` are collected."""
    return bool(_noting)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Chain, *operands: Tensor) -> Tensor:
        kernels = KERNELS.get(call.key(operands)) if KERNELS else None
        ctx.call, ctx.kernels = call, kernels
        ctx.likes = [None if i in call.needed else (x.shape, x.dtype, x.device) for i, x in enumerate(operands)]
        ctx.save_for_backward(*(operands[i] for i in call.needed))
        if kernels is not None:
            return kernels.forward(*operands)[0]
        with nullcontext() if call.one_call is None else call.one_call(operands) as tell:
            made = call.run(*operands)
            if tell is not None:
                tell([made])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, kernels, wanted = ctx.call, ctx.kernels, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        kernel = None if kernels is None else kernels.backward.get(backward_key(wanted, (grad, *saved)))
        if kernel is not None:
            found = iter(kernel(grad, *saved))
        else:
            left = iter(saved)
            operands = [next(left) if like is None else _unread(*like) for like in ctx.likes]
            with nullcontext() if call.one_call is None else call.one_call([grad, *saved]) as tell:
                gradients = call.gradients(grad, operands, wanted)
                if tell is not None:
                    tell(gradients)
            found = iter(gradients)
        return None, *(next(found) if want else None for want in wanted)


def _unread(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor in the place of one whose values no gradient depends on: one element, which nobody has written."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
