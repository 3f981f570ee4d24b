"""The modules that stand for quantised layers: the same parameters as plain bytes, and one call of a function.

A library keeps a quantised weight in a tensor class of its own, beside tensors that no module registers. Everything
that follows knows parameters only, so these layers have each of those tensors as a frozen parameter of bytes. A live
layer's memory is shared; for a layer on the meta device the shapes are those that its library would make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from .libraries import bitsandbytes
from .linear_4bit import NESTED_BLOCKSIZE, Format4bit, linear_4bit
from .linear_8bit import linear_8bit
from .linear_torchao import WEIGHT_ONLY, TorchaoFormat, linear_torchao
from .quantisers import Quantiser4bit, Quantiser8bit, parts_of_state
from .raw_bytes import as_bytes, tensor_from_bytes

NESTED_CODES = 256  # of an absmax of 8 bits
TensorTypes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Replaced:
    """The module that another one replaces: neither one of its modules, nor copied with it."""

    layer: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Replaced:
        return self


class QuantisedLinear(nn.Module):
    """A linear layer of which all weights but the bias are bytes. `was` is the layer of the library.

    `types` has the shape and the type of each of its tensors, by the name of the parameter with its bytes.
    """

    is_of_files = False  # whether the user's own layer is plain, and files alone have its weight quantised
    types: TensorTypes
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, was: nn.Linear):
        super().__init__()
        self.shape: tuple[int, ...] = (was.out_features, was.in_features)
        self.replaced = Replaced(was)
        self.training = was.training
        self.register_parameter("bias", was.bias)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Register the tensors as frozen parameters of bytes."""
        self.types = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(as_bytes(tensor), requires_grad=False))

    def take_shapes(self, types: TensorTypes) -> None:
        """As `take`, on the meta device."""
        self.take({name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in types.items()})

    extras: tuple[str, ...] = ()  # tensors of it in files that nothing here reads

    def file_key(self, front: str, name: str) -> str:
        """The name in files of one of its tensors; `front`: the layer's, with a dot."""
        return f"{front}{name}"

    @property
    def more_params(self) -> int:
        """The number of parameters that it stands for, less its bytes."""
        return math.prod(self.shape) - sum(self.get_parameter(name).numel() for name in self.types)

    def quantiser(self) -> Quantiser4bit | Quantiser8bit | None:
        """The function that makes the tensors of a whole weight; None where only files with these tensors can be read.
        """
        return None

    @property
    def plain_dtype(self) -> torch.dtype | None:
        """The type that the weight had before; None where its bytes do not say so."""
        return None

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight in this type, of the bytes of its tensors by name, as its library unpacks it."""
        raise NotImplementedError

    def give_back(self, layer: Any) -> None:
        """Let the library's layer have these weights."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.replaced.layer._save_to_state_dict(destination, prefix, keep_vars)

    @property
    def is_transposed(self) -> bool:
        return getattr(getattr(self.replaced.layer, "source_cls", None), "__name__", "") == "Conv1D"


class Linear4bitBytes(QuantisedLinear):
    """Stands for bitsandbytes' `Linear4bit`."""

    absmax: nn.Parameter
    nested_absmax: nn.Parameter
    nested_quant_map: nn.Parameter
    nested_offset: nn.Parameter

    def __init__(self, was: Any):
        super().__init__(was)
        weight: Any = was.weight
        self.compute_dtype = was.compute_dtype
        self.quant_type, self.blocksize = weight.quant_type, weight.blocksize
        self.is_nested = bool(weight.compress_statistics)
        state = weight.quant_state
        if state is None:
            self.dtype = weight.dtype
            self.take_shapes(self._types_on_meta())
            return
        if getattr(state, "packing_format_for_cpu", False):
            was.state_dict()  # the library's way back from the order that inference on a CPU has
            state = weight.quant_state
        self.quant_type, self.blocksize, self.dtype = state.quant_type, state.blocksize, state.dtype
        self.is_nested = bool(state.nested)
        self.take({"weight": weight.data, **parts_of_state(state)})

    def forward(self, input: Tensor) -> Tensor:
        nested = (self.nested_absmax, self.nested_quant_map, self.nested_offset) if self.is_nested else ()
        return linear_4bit(
            input, self.weight, self.absmax, self.bias, *nested, shape=self.shape, blocksize=self.blocksize,
            quant_type=self.quant_type, dtype=self.dtype, compute_dtype=self.compute_dtype,
        )  # fmt: skip

    @property
    def plain_dtype(self) -> torch.dtype:
        found: torch.dtype = self.dtype
        return found

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        nested = [parts.get(name) for name in ("nested_absmax", "nested_quant_map", "nested_offset")]
        form = Format4bit(self.shape, self.blocksize, self.quant_type, self.dtype)
        return form.unpack(parts["weight"], parts["absmax"], nested, dtype)

    def quantiser(self) -> Quantiser4bit:
        return Quantiser4bit(self.dtype, self.blocksize, self.quant_type, self.is_nested, self.is_transposed)

    def give_back(self, layer: Any) -> None:
        layer.weight = type(layer.weight)(
            self.weight.data,
            requires_grad=False,
            quant_state=self._state(),
            blocksize=self.blocksize,
            compress_statistics=self.is_nested,
            quant_type=self.quant_type,
            module=layer,
            bnb_quantized=True,
        )
        layer.quant_state, layer.bias = layer.weight.quant_state, self.bias

    def _state(self) -> Any:
        nested = (self.nested_absmax, self.nested_quant_map, self.nested_offset) if self.is_nested else (None,) * 3
        state = Format4bit(self.shape, self.blocksize, self.quant_type, self.dtype).state(self.absmax.data, nested)
        state.code = bitsandbytes().functional.get_4bit_type(self.quant_type, device=self.weight.device)
        return state

    def _types_on_meta(self) -> TensorTypes:
        numel = self.shape[0] * self.shape[1]
        blocks = -(-numel // self.blocksize)
        types: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((-(-numel // 2), 1), torch.uint8)}
        if not self.is_nested:
            return {**types, "absmax": ((blocks,), torch.float32)}
        return {
            **types,
            "absmax": ((blocks,), torch.uint8),
            "nested_absmax": ((-(-blocks // NESTED_BLOCKSIZE),), torch.float32),
            "nested_quant_map": ((NESTED_CODES,), torch.float32),
            "nested_offset": ((), torch.float32),
        }


class Linear8bitBytes(QuantisedLinear):
    """Stands for bitsandbytes' `Linear8bitLt` with weights of 8 bits."""

    SCB: nn.Parameter

    def __init__(self, was: Any):
        super().__init__(was)
        self.threshold = float(was.state.threshold)
        weight: Any = was.weight
        scb = weight.SCB if getattr(weight, "SCB", None) is not None else was.state.SCB
        if scb is None:
            self.take_shapes({
                "weight": ((was.out_features, was.in_features), torch.int8),
                "SCB": ((was.out_features,), torch.float32),
            })  # fmt: skip
            return
        self.take({"weight": weight.data, "SCB": scb})

    def forward(self, input: Tensor) -> Tensor:
        return linear_8bit(
            input, self.weight, self.SCB, self.bias, threshold=self.threshold, training=self.training
        )

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scb = tensor_from_bytes(parts["weight"], torch.int8), tensor_from_bytes(parts["SCB"], torch.float32)
        found: Tensor = bitsandbytes().functional.int8_vectorwise_dequant(packed, scb)
        return found.to(dtype)

    def give_back(self, layer: Any) -> None:
        packed, scb = tensor_from_bytes(self.weight.data, torch.int8), tensor_from_bytes(self.SCB.data, torch.float32)
        layer.weight = type(layer.weight)(packed, requires_grad=False, has_fp16_weights=False, CB=packed, SCB=scb)
        layer.bias = self.bias

    def quantiser(self) -> Quantiser8bit:
        return Quantiser8bit(self.is_transposed)


class LinearTorchaoBytes(QuantisedLinear):
    """Stands for a linear layer with a quantised weight of torchao."""

    def __init__(self, was: nn.Linear, path: str):
        super().__init__(was)
        weight: Any = was.weight
        self.kind = type(weight).__name__
        names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ())]
        others = [*weight.tensor_attribute_names, *getattr(weight, "optional_tensor_attribute_names", ())]
        inner = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
        kept = {name: getattr(weight, name) for name in others}
        wrong = [name for name in (*inner, *kept) if name.startswith("act") and (name in inner or kept[name])]
        if self.kind not in WEIGHT_ONLY or wrong:
            what = f"{self.kind} with {wrong[0]}" if wrong else self.kind
            raise PlanError(
                f"model: {path}.weight is torchao's {what}, which is not trained around here; quantise weights only, "
                "with Float8WeightOnlyConfig, Int8WeightOnlyConfig or IntxWeightOnlyConfig"
            )
        needed = weight.tensor_attribute_names  # the others are what they are where they are not given
        self.attributes = {n: _plain(value) for n, value in kept.items() if n in needed or _is_plain(value)}
        self.dtypes = {name: tensor.dtype for name, tensor in inner.items()}
        self.take({f"weight_{name}": tensor for name, tensor in inner.items()})

    def forward(self, input: Tensor) -> Tensor:
        parts = [getattr(self, f"weight_{name}") for name in self.dtypes]
        return linear_torchao(
            input, self.bias, *parts, kind=self.kind, dtypes=self.dtypes, attributes=self.attributes
        )

    @property
    def plain_dtype(self) -> torch.dtype:
        return self.replaced.layer.weight.dtype  # type: ignore[no-any-return]

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        found: Tensor = self._tensor(parts).dequantize()
        return found.to(dtype)

    def give_back(self, layer: Any) -> None:
        parts = {name: self.get_parameter(name).data for name in self.types}
        layer.weight, layer.bias = nn.Parameter(self._tensor(parts), requires_grad=False), self.bias

    def _tensor(self, parts: Mapping[str, Tensor]) -> Any:
        form = TorchaoFormat(self.kind, self.dtypes, self.attributes)
        return form.tensor([parts[f"weight_{name}"] for name in self.dtypes])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, list, tuple, torch.dtype))
