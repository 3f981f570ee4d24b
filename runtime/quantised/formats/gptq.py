"""Integers of 4 and 8 bits as GPTQ packs them: 32 bits hold neighbouring columns of one row.

GPTQModel computes `scales * (weight - zeros)` in the type of the scales, each of a column's group, which `g_idx` names.
Files of the form "gptq" hold zero points less one, which it adds to whole integers of 32 bits; those of "gptq_v2" hold
them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .record import Format, Layout, MatrixShape, PackedTensors, Types, group_size, nibbles, number_of_groups, require

_ONES = {4: 0x11111111, 8: 0x01010101}  # one in each number of 32 bits


def _read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    require({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2"))
    return {
        "bits": require(config, "bits", (4, 8)),
        "group_size": group_size(config),
        "less_one": form == "gptq",
    }


def _types(shape: MatrixShape, options: Layout) -> Types:
    (rows, columns), bits = shape, options["bits"]
    groups = number_of_groups(columns, options["group_size"])
    return {
        "qweight": ((columns * bits // 32, rows), torch.int32),
        "qzeros": ((groups, rows * bits // 32), torch.int32),
        "scales": ((groups, rows), options.get("scale", torch.float16)),
        "g_idx": ((columns,), torch.int32),
    }


def _unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    bits, scales = options["bits"], parts["scales"][:, rows]
    packed = parts["qweight"][:, rows].t().contiguous()
    zeros = parts["qzeros"] + (_ONES[bits] if options["less_one"] else 0)
    weight, offsets = _numbers(packed, bits), _numbers(zeros, bits)[:, rows]
    groups = parts["g_idx"].long()
    return scales[groups].t() * (weight - offsets[groups].t())


def _numbers(words: Tensor, bits: int) -> Tensor:
    small = nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)
    return small.to(torch.int16)


GPTQ = Format("gptq", ("gptq",), _read_options, _types, _unpack, scale="scales")
