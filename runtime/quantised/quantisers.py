"""Functions of libraries that make quantised tensors of a whole weight, one layer at a time. All of it pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .libraries import bitsandbytes
from .raw_bytes import as_bytes


@dataclass(frozen=True)
class Quantiser4bit:
    """bitsandbytes' quantisation to 4 bits of a weight that is taken as `dtype`."""

    dtype: torch.dtype
    blocksize: int
    quant_type: str
    is_nested: bool
    is_transposed: bool = False  # transformers' Conv1D keeps weights the other way round

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The bytes of each tensor, by the names of the parameters."""
        made: Any = bitsandbytes().nn.Params4bit(
            (weight.T if self.is_transposed else weight).to(self.dtype),
            requires_grad=False,
            blocksize=self.blocksize,
            compress_statistics=self.is_nested,
            quant_type=self.quant_type,
        ).to("cpu")
        return {name: as_bytes(t) for name, t in {"weight": made.data, **parts_of_state(made.quant_state)}.items()}


@dataclass(frozen=True)
class Quantiser8bit:
    """bitsandbytes' quantisation of rows to int8."""

    is_transposed: bool = False

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The bytes of each tensor, by the names of the parameters."""
        plain = weight.T if self.is_transposed else weight
        made: Any = bitsandbytes().nn.Int8Params(plain, requires_grad=False, has_fp16_weights=False).to("cpu")
        return {"weight": as_bytes(made.data), "SCB": as_bytes(made.SCB)}


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
