"""Make `library_files.safetensors`: small weights that libraries have packed, and as these unpack them.

It runs where compressed-tensors 0.20.1 is installed, beside the sources of AutoAWQ 0.2.9 and GPTQModel 7.7.0:
`python make_library_files.py AUTOAWQ_DIRECTORY GPTQMODEL_DIRECTORY`. The metadata of the file has the
quantization_config of each case.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor, nn

ROWS, COLUMNS = 32, 64
PACKERS: dict[str, Any] = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": NaiveQuantizationCompressor,
    "float-quantized": NaiveQuantizationCompressor,
    "nvfp4-pack-quantized": NVFP4PackedCompressor,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4-group-zeros": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int4-channel-zeros": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8-group": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
    "int8-channel-zeros": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8-zeros": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and largest value of each part of a weight that shares a scale."""
    rows, columns = weight.shape
    view = {
        "tensor": lambda: weight.reshape(1, -1),
        "channel": lambda: weight,
        "group": lambda: weight.view(rows, -1, args.group_size or 1),
        "tensor_group": lambda: weight.view(rows, -1, args.group_size or 1),
        "block": lambda: weight.view(rows // 16, 16, columns // 32, 32).transpose(1, 2).flatten(2),
    }[str(args.strategy)]()
    low, high = view.amin(-1), view.amax(-1)
    return (low.unsqueeze(-1), high.unsqueeze(-1)) if str(args.strategy) == "channel" else (low, high)


def compressed_case(form: str, how: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    args = QuantizationArgs(**how)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    low, high = extremes(weight, args)
    state = {"weight": weight}
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    packed = PACKERS[form].compress(state, scheme)
    return packed, PACKERS[form].decompress(dict(packed), scheme)["weight"]


def awq(directory: Path) -> tuple[dict[str, Tensor], Tensor]:
    """By AutoAWQ's own layer, whose package needs more than its two files that pack and unpack."""
    home = types.ModuleType("awq")
    home.__path__ = [str(directory / "awq")]
    sys.modules["awq"] = home
    for name in ("awq.utils", "awq.modules", "awq.modules.linear"):
        made = types.ModuleType(name)
        made.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = made
    gemm = importlib.import_module("awq.modules.linear.gemm")
    groups = COLUMNS // 32
    linear = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    scales = (torch.rand(ROWS, groups) / 50 + 0.01).half()
    zeros = torch.randint(0, 16, (ROWS, groups)).half()
    grouped = linear.weight.data.view(ROWS, groups, 32)
    numbers = (grouped / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    linear.weight.data = ((numbers - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(ROWS, COLUMNS)
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    packed = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return packed, gemm.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32).t().contiguous()


class Gptq:
    """GPTQModel's own functions that pack and unpack, whose module needs the whole package."""

    NAMES = ("pack_original", "dequantize_weight", "_dequantize_from_codes", "_torch_right_shift")

    def __init__(self, directory: Path, bits: int, g_idx: Tensor):
        text = (directory / "gptqmodel/nn_modules/qlinear/__init__.py").read_text()
        pool = types.SimpleNamespace(threadpool_limits=lambda limit: contextlib.nullcontext())
        self.space: dict[str, Any] = {"t": torch, "nn": nn, "np": numpy, "math": math, "transformers": transformers}
        self.space |= {"THREADPOOLCTL": pool, "_ConvNd": nn.modules.conv._ConvNd}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in self.NAMES:
                node.returns, node.decorator_list = None, []
                exec(ast.unparse(node), self.space)
        self.bits, self.pack_factor, self.maxq, self.planar = bits, 32 // bits, 2**bits - 1, False
        self.pack_dtype_bits, self.pack_dtype = 32, torch.int32
        self.pack_np_dtype, self.pack_np_math_dtype = numpy.int32, numpy.uint32
        self.dequant_dtype = torch.int16 if bits == 8 else torch.int8
        shifts = torch.arange(0, 32, bits, dtype=torch.int32).unsqueeze(0)
        self.wf_unsqueeze_zero, self.wf_unsqueeze_neg_one = shifts.unsqueeze(0), shifts.unsqueeze(-1)
        self.g_idx, self.in_features = g_idx, COLUMNS

    def register_buffer(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, tensor)

    def _init_wf_unsqueeze_buffers(self) -> None:
        pass

    def _dequantize_from_codes(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.space["_dequantize_from_codes"](self, *args, **kwargs)  # type: ignore[no-any-return]

    def outcome(self, is_symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
        groups = int(self.g_idx.max()) + 1
        scales = (torch.rand(ROWS, groups) / 50 + 0.01).half().float()
        middle = torch.full((ROWS, groups), 2.0 ** (self.bits - 1))
        zeros = middle if is_symmetric else torch.randint(1, self.maxq + 1, (ROWS, groups)).float()
        linear = nn.Linear(COLUMNS, ROWS, bias=False)
        self.space["pack_original"](self, linear, scales, zeros, self.g_idx)
        packed = {name: getattr(self, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        return packed, self.space["dequantize_weight"](self).t().contiguous()


def gptq(directory: Path) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Its second form, and the first, whose zero points are less by one."""
    in_order = torch.arange(COLUMNS, dtype=torch.int32) // 32
    found = {
        "gptq-v2": Gptq(directory, 4, in_order).outcome(is_symmetric=False),
        "gptq-8": Gptq(directory, 8, in_order).outcome(is_symmetric=True),
        "gptq": Gptq(directory, 4, in_order[torch.randperm(COLUMNS)]).outcome(is_symmetric=False),
    }
    for name, ones in (("gptq", 0x11111111), ("gptq-8", 0x01010101)):
        found[name][0]["qzeros"] = found[name][0]["qzeros"] - ones
    return found


def main(directory: str, gptqmodel: str) -> None:
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    made = {name: compressed_case(*case) for name, case in CASES.items()}
    for name, (form, how) in CASES.items():
        group = {"targets": ["Linear"], "weights": how}
        configs[name] = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    made["awq"] = awq(Path(directory))
    configs["awq"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    for name, case in gptq(Path(gptqmodel)).items():
        made[name] = case
        form = "gptq_v2" if name == "gptq-v2" else "gptq"
        configs[name] = {"quant_method": "gptq", "bits": 8 if name == "gptq-8" else 4, "group_size": 32}
        configs[name] |= {"checkpoint_format": form, "desc_act": name == "gptq"}
    for name, (packed, unpacked) in made.items():
        tensors |= {f"{name}.{key}": tensor.detach().clone().contiguous() for key, tensor in packed.items()}
        tensors[f"{name}.unpacked"] = unpacked.detach().contiguous()
    metadata = {name: json.dumps(config) for name, config in configs.items()}
    save_file(tensors, Path(__file__).with_name("library_files.safetensors"), metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
