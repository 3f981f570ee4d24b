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


def fp4_values(packed: Tensor) -> Tensor:
    """The fp32 values of bytes with two each, the low bits first: the last dimension doubles."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=packed.device)
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
    scales = parts["weight_scales"][rows].int().unsqueeze(-1)
    first = scales >> 1
    values = fp4_values(parts["weight_blocks"][rows]) * _power_of_two(first - 63)
    return (values * _power_of_two(scales - first - 64)).flatten(-2)[:, : shape[1]]


def _power_of_two(exponents: Tensor) -> Tensor:
    """In fp32, of exponents from -126 to 127: exact, as powers and `exp2` are not everywhere."""
    return ((exponents + 127) << 23).view(torch.float32)


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
    values = fp4_values(parts["weight_packed"][rows]).view(len(scales), -1, NV_GROUP)
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
