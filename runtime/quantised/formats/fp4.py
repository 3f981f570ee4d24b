"""Weights of 4 bits that are floats (E2M1), and their scales: MXFP4 of gpt-oss, and NVFP4 of compressed-tensors.

MXFP4: 32 values share a power of two of 8 bits. transformers' `convert_moe_packed_tensors` unpacks it. NVFP4: 16 values
share a scale of type float8_e4m3fn, and all one in fp32, by which the others are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .record import Format, Layout, MatrixShape, PackedTensors, Types, require

MX_GROUP, NV_GROUP = 32, 16
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_HALF, *(-value for value in _HALF))


def fp4_values(packed: Tensor, dtype: torch.dtype, times: float = 1.0) -> Tensor:
    """The values of bytes with two each, the low bits first, multiplied by a number: the last dimension doubles."""
    values = torch.tensor(VALUES, dtype=dtype, device=packed.device) * times
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    return F.embedding(packed.int(), pairs).flatten(-2)


def _mx_options(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _mx_types(shape: MatrixShape, options: Layout) -> Types:
    rows, columns = shape
    groups = -(-columns // MX_GROUP)
    blocks = (rows, groups, MX_GROUP // 2)
    return {"weight_blocks": (blocks, torch.uint8), "weight_scales": ((rows, groups), torch.uint8)}


def _mx_unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    """In bf16, which has all of these values. Powers of two are made of bits, as `exp2` is not exact everywhere; those
    of fp32 end at 127, so that they are less by two, and values four times as large."""
    scales = parts["weight_scales"][rows].int().unsqueeze(-1)
    factors = torch.where(scales > 2, (scales - 2) << 23, 1 << 20 + scales).view(torch.float32)
    values = fp4_values(parts["weight_blocks"][rows], torch.bfloat16, 4.0)
    return torch.mul(values, factors, out=torch.empty_like(values)).flatten(-2)[:, : shape[1]]


def _nv_options(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "num_bits", (4,))
    require(config, "group_size", (NV_GROUP,))
    require(config, "symmetric", (True,), True)
    return {}


def _nv_types(shape: MatrixShape, options: Layout) -> Types:
    rows, columns = shape
    return {
        "weight_packed": ((rows, -(-columns // 2)), torch.uint8),
        "weight_scale": ((rows, -(-columns // NV_GROUP)), torch.float8_e4m3fn),
        "weight_global_scale": ((1,), torch.float32),
    }


def _nv_unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    scales = parts["weight_scale"][rows].to(torch.bfloat16) / parts["weight_global_scale"]
    values = fp4_values(parts["weight_packed"][rows], torch.float32).view(len(scales), -1, NV_GROUP)
    return (values * scales.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)


MXFP4 = Format("mxfp4", ("mxfp4",), _mx_options, _mx_types, _mx_unpack)
NVFP4 = Format(
    "nvfp4",
    ("compressed-tensors/nvfp4-pack-quantized",),
    _nv_options,
    _nv_types,
    _nv_unpack,
    extras=("input_global_scale", "input_scale"),
)
