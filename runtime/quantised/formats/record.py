"""The record of a format: one way in which files pack the matrices of weights.

A matrix is [rows, columns], as a linear layer has it. The names of its tensors are those that files have for a
parameter called "weight"; of another parameter, such as "gate_up_proj", its name replaces "weight".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....ir.errors import CheckpointError

MatrixShape = tuple[int, ...]
Layout = Mapping[str, Any]  # plain values, which printed files have
PackedTensors = Mapping[str, Tensor]
Types = dict[str, tuple[MatrixShape, torch.dtype]]


@dataclass(frozen=True)
class Format:
    """`methods`: the `quant_method` of config.json that means this format, after a slash with the `format` of
    compressed-tensors. `scale`: the tensor whose type files choose, which is the option "scale". `row_step`: pieces of
    a matrix begin at multiples of this number of rows. `extras`: tensors in files that unpacking does not read."""

    name: str
    methods: tuple[str, ...]
    read_options: Callable[[Mapping[str, Any]], dict[str, Any]]  # of a quantization_config
    types: Callable[[MatrixShape, Layout], Types]
    unpack: Callable[
        [PackedTensors, slice, MatrixShape, Layout], Tensor
    ]  # rows, in the type that the library computes in
    scale: str = ""
    row_step: Callable[[Layout], int] = lambda options: 1
    extras: tuple[str, ...] = ()


def require(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """The value of a key of a quantization_config. Raises `CheckpointError` for one that is not read here."""
    found = config.get(name, default)
    if found not in allowed:
        raise CheckpointError(
            f"quantization_config: {name} is {found!r}; read here are {', '.join(map(repr, allowed))}. Unpack the "
            "weights with the library that made them, and give these"
        )
    return found


def group_size(config: Mapping[str, Any], name: str = "group_size") -> int:
    """The number of columns that share a scale; -1: all."""
    found = config.get(name)
    return -1 if found is None else int(found)


def number_of_groups(columns: int, size: int) -> int:
    return 1 if size == -1 else -(-columns // size)


def expand_groups(of_groups: Tensor, columns: int, size: int) -> Tensor:
    """The number of each column, from those of groups of `size` columns, [rows, groups]; -1: all."""
    return of_groups.repeat_interleave(columns if size == -1 else size, 1)[:, :columns]


def expand_blocks(scales: Tensor, rows: slice, columns: int, block: Sequence[int]) -> Tensor:
    """The scale of each element of these rows, from a scale for each block of rows and columns."""
    height, width = block
    first = rows.start // height
    own = scales[first : -(-rows.stop // height)].repeat_interleave(width, 1)[:, :columns]
    return own.repeat_interleave(height, 0)[rows.start - first * height :][: rows.stop - rows.start]


def nibbles(words: Tensor) -> Tensor:
    """The numbers of 4 bits in integers, low bits first: the last dimension grows."""
    plain = words.contiguous().view(torch.uint8)
    return torch.stack((plain & 15, plain >> 4), -1).flatten(-2)
