"""Functions of libraries that make quantised tensors of a whole weight, a few rows at a time. All of it pickles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .libraries import bitsandbytes
from .linear_4bit import NESTED_BLOCKSIZE
from .pieces import row_pieces
from .raw_bytes import as_bytes

ReadRows = Callable[[int, int], Tensor]  # those from the first to before the second


@dataclass(frozen=True)
class Quantiser4bit:
    """bitsandbytes' quantisation to 4 bits of a weight that is taken as `dtype`."""

    dtype: torch.dtype
    blocksize: int
    quant_type: str
    is_nested: bool
    is_transposed: bool = False  # transformers' Conv1D keeps weights the other way round

    def quantise(self, rows: ReadRows, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The bytes of each tensor, by the names of the parameters."""
        library = bitsandbytes().functional

        def quantise_piece(piece: Tensor) -> dict[str, Tensor]:
            packed, state = library.quantize_4bit(
                piece.to(self.dtype), blocksize=self.blocksize, quant_type=self.quant_type
            )
            return {"weight": packed, "absmax": state.absmax}

        found = _join_pieces(quantise_piece, rows, shape, self.blocksize)
        if self.is_nested:  # as the library does with those of a whole weight
            offset = found["absmax"].mean()
            absmax, outer = library.quantize_blockwise(found["absmax"] - offset, blocksize=NESTED_BLOCKSIZE)
            nested = {"nested_absmax": outer.absmax, "nested_quant_map": outer.code, "nested_offset": offset}
            found |= {"absmax": absmax, **nested}
        return {name: as_bytes(tensor) for name, tensor in found.items()}


@dataclass(frozen=True)
class Quantiser8bit:
    """bitsandbytes' quantisation of rows to int8."""

    is_transposed: bool = False

    def quantise(self, rows: ReadRows, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The bytes of each tensor, by the names of the parameters."""

        def quantise_piece(piece: Tensor) -> dict[str, Tensor]:
            made: Any = bitsandbytes().nn.Int8Params(piece, requires_grad=False, has_fp16_weights=False).to("cpu")
            return {"weight": made.data, "SCB": made.SCB}

        return {name: as_bytes(tensor) for name, tensor in _join_pieces(quantise_piece, rows, shape, 1).items()}


def _join_pieces(
    quantise: Callable[[Tensor], Mapping[str, Tensor]], rows: ReadRows, shape: tuple[int, ...], block: int
) -> dict[str, Tensor]:
    """The tensors that `quantise` makes of each piece of a weight, joined."""
    found: dict[str, Tensor] = {}
    filled: Counter[str] = Counter()
    for begin, end in row_pieces(shape, block):
        for name, piece in quantise(rows(begin, end).contiguous()).items():
            if not begin:
                found[name] = piece.new_empty((-(-len(piece) * shape[0] // end), *piece.shape[1:]))
            found[name][filled[name] : filled[name] + len(piece)] = piece
            filled[name] += len(piece)
    return found


def parts_of_state(state: Any) -> dict[str, Tensor]:
    """The tensors of bitsandbytes' description of a weight of 4 bits, less its code, which the format implies."""
    if not state.nested:
        return {"absmax": state.absmax.float()}
    return {
        "absmax": state.absmax,
        "nested_absmax": state.state2.absmax,
        "nested_quant_map": state.state2.code,
        "nested_offset": state.offset,
    }
