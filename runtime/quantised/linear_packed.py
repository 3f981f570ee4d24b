"""`functions.linear_packed`: a linear layer, or a layer of experts, whose weight is packed as files have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..experts.split_experts import join_part, part_offsets, part_rows
from ..torch_names import FakeTensor, grouped_mm
from . import pieces
from .bias import gradient_of_bias
from .formats.record import Format, PackedTensors, Types
from .formats.table import FORMATS
from .raw_bytes import tensor_from_bytes

GROUP_BYTES = 2**28  # of experts' matrices that are unpacked at a time
GPU_PIECE = 2**22  # elements that a GPU unpacks at a time


@dataclass(frozen=True)
class Packing:
    """The packed form of a weight: the name of its format, its shape, and the type that it is unpacked to. Experts'
    matrices are [experts, rows, columns], each of them packed alone."""

    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    options: Mapping[str, Any]
    experts: int = 0  # of the layer, of which these are some

    @property
    def record(self) -> Format:
        return FORMATS[self.form]

    @property
    def types(self) -> Types:
        """The shape and type of each tensor in files."""
        found = self.record.types(self.shape[-2:], self.options)
        return {name: ((*self.shape[:-2], *shape), dtype) for name, (shape, dtype) in found.items()}

    def unpack(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight, cast to `dtype`, of the bytes of its tensors; the next weight may get the same memory."""
        if torch.compiler.is_compiling():
            matrices = [self._rows(tensors, slice(0, self.shape[-2])) for tensors in self._matrices(parts)]
            return torch.stack(matrices).view(self.shape).to(dtype)
        if isinstance(parts[0], FakeTensor):
            return pieces.fake_weight(parts, self.shape, dtype)
        found = pieces.empty_weight(parts[0], self.shape, dtype)
        for own, tensors in zip(found.view(-1, *self.shape[-2:]), self._matrices(parts)):
            for rows in self.row_pieces(pieces.PIECE if pieces.is_on_host(parts[0]) else GPU_PIECE):
                own[rows] = self._rows(tensors, rows)
        return found

    def unpack_piece(self, parts: Sequence[Tensor], most: int) -> None:
        """Unpack the first piece alone, of about `most` elements, for the memory that it takes."""
        self._rows(next(self._matrices(parts)), next(self.row_pieces(most)))

    def row_pieces(self, most: int) -> Iterator[slice]:
        """The rows of pieces of a matrix that have about `most` elements."""
        rows, columns = self.shape[-2:]
        step = self.record.row_step(self.options)
        step *= max(1, most // max(1, step * columns))
        return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))

    def multiply_experts(self, rows: Tensor, offsets: Tensor, parts: Sequence[Tensor], *, is_backward: bool) -> Tensor:
        """Rows that are sorted by expert, times their experts' matrices, of which a few are unpacked at a time."""
        found: Tensor | None = None
        experts, *matrix = self.shape
        count = max(1, GROUP_BYTES // (matrix[0] * matrix[1] * rows.dtype.itemsize))
        for begin in range(0, experts, count):
            end = min(begin + count, experts)
            group = replace(self, shape=(end - begin, *matrix), experts=experts)
            own = group.unpack([part[begin:end] for part in parts], rows.dtype)
            product = group.product(
                part_rows(rows, offsets, begin),
                own if is_backward else own.transpose(-2, -1),
                part_offsets(offsets, begin, end),
            )
            found = product if count >= experts else join_part(found, product, offsets, begin, end)
        assert found is not None
        return found

    def product(self, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        return grouped_mm(rows, matrices, offs=offsets)

    def _rows(self, tensors: PackedTensors, rows: slice) -> Tensor:
        return self.record.unpack(tensors, rows, self.shape[-2:], self.options).to(self.dtype)

    def _matrices(self, parts: Sequence[Tensor]) -> Iterator[PackedTensors]:
        """The tensors of each matrix."""
        typed = [tensor_from_bytes(raw, dtype).view(shape) for raw, (shape, dtype) in zip(parts, self.types.values())]
        for one in zip(*typed) if len(self.shape) > 2 else (typed,):
            yield dict(zip(self.types, one))


def linear_packed(
    input: Tensor, bias: Tensor | None, *parts: Tensor, offsets: Tensor | None = None, **form: Any
) -> Tensor:
    """`F.linear` with a packed weight: unpacked for the product, and again in backward unless `keep_unpacked_weights`
    says otherwise.

    parts: the bytes of its tensors, in the order of its format. offsets: with experts' matrices the end of each one's
    rows, int32; the rows are sorted by expert. form: the fields of `Packing`.
    """
    if has_torch_function((input,)):
        found: Tensor = handle_torch_function(
            linear_packed, (input,), input, bias, *parts, offsets=offsets, **form
        )  # fmt: skip
        return found
    return apply_packing(input, bias, parts, offsets, Packing(**form))


def apply_packing(
    input: Tensor, bias: Tensor | None, parts: Sequence[Tensor], offsets: Tensor | None, packing: Packing
) -> Tensor:
    kind = input.device.type
    compute = input.dtype
    if offsets is None and torch.is_autocast_enabled(kind):  # which products in groups do not heed
        compute = torch.get_autocast_dtype(kind)
    given = bias if bias is None else bias.to(compute)
    found: Tensor = _LinearPacked.apply(input.to(compute), given, offsets, packing, *parts)
    return found


class _LinearPacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, bias: Tensor | None, offsets: Tensor | None, packing: Packing, *parts: Tensor
    ) -> Tensor:
        ctx.packing, ctx.bias = packing, None if bias is None else (bias.shape, bias.dtype)
        ctx.is_unpacked = bool(pieces.keeps_weights_on()) and offsets is None and ctx.needs_input_grad[0]
        if ctx.is_unpacked:
            with pieces.lending(None):
                kept = packing.unpack(parts, input.dtype)
            ctx.save_for_backward(kept)
            return F.linear(input, kept, bias)
        ctx.save_for_backward(offsets, *parts)
        if offsets is not None:
            return packing.multiply_experts(input, offsets, parts, is_backward=False)
        return F.linear(input, packing.unpack(parts, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, packing = grads[0], ctx.packing
        of_input = of_bias = None
        if ctx.is_unpacked:
            of_input = torch.matmul(grad, ctx.saved_tensors[0])
        elif ctx.needs_input_grad[0]:
            offsets, *parts = ctx.saved_tensors
            if offsets is not None:
                of_input = packing.multiply_experts(grad.contiguous(), offsets, parts, is_backward=True)
            else:
                of_input = torch.matmul(grad, packing.unpack(parts, grad.dtype))
        if ctx.needs_input_grad[1]:
            of_bias = gradient_of_bias(grad, *ctx.bias)
        num_parts = len(packing.types)
        return of_input, of_bias, None, None, *(None for _ in range(num_parts))
