"""Integers of 4 bits as AWQ packs them (layout "gemm"): 32 bits hold eight rows of one column, in an order of its own.

AutoAWQ computes `(weight - zeros) * scales` in the type of the scales, for groups of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .record import (
    Format,
    Layout,
    MatrixShape,
    PackedTensors,
    Types,
    expand_groups,
    group_size,
    nibbles,
    number_of_groups,
    require,
)

PACKED = 8  # numbers in 32 bits
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in 32 bits of each of eight rows


def _read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "bits", (4,), config.get("w_bit"))
    require({"version": str(config.get("version") or config.get("format") or "gemm").lower()}, "version", ("gemm",))
    return {"group_size": group_size(config, "group_size" if "group_size" in config else "q_group_size")}


def _types(shape: MatrixShape, options: Layout) -> Types:
    rows, columns = shape
    groups = number_of_groups(columns, options["group_size"])
    return {
        "qweight": ((columns, rows // PACKED), torch.int32),
        "qzeros": ((groups, rows // PACKED), torch.int32),
        "scales": ((groups, rows), options.get("scale", torch.float16)),
    }


def _unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    words = slice(rows.start // PACKED, -(-rows.stop // PACKED))
    weight, zeros = _rows(parts["qweight"][:, words]), _rows(parts["qzeros"][:, words])
    scales, size = parts["scales"][:, rows].t(), options["group_size"]
    return (weight - expand_groups(zeros, shape[1], size)) * expand_groups(scales, shape[1], size)


def _rows(words: Tensor) -> Tensor:
    """[columns, words] as numbers [rows, columns]."""
    places = nibbles(words).to(torch.int8).view(len(words), -1, PACKED)
    return places[..., list(ORDER)].flatten(1).t()


AWQ = Format("awq", ("awq",), _read_options, _types, _unpack, scale="scales", row_step=lambda options: PACKED)
