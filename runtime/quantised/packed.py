"""The modules that stand for layers whose weights files have packed: bytes, and one call of a function for a product.

A model on the meta device has plain layers; the tensors of a layer are those that the record of its format names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ir.errors import PlanError
from ..torch_names import grouped_mm
from .layers import QuantisedLinear, Replaced
from .linear_packed import Packing, linear_packed

RANKS = 8  # products in groups take rows of multiples of 16 bytes


class PackedLinear(QuantisedLinear):
    """A linear layer with a packed weight, or the matrices of a layer of experts."""

    is_of_files = True

    def __init__(self, was: nn.Module, packing: Packing, bias: nn.Parameter | None = None):
        nn.Module.__init__(self)
        self.packing, self.shape, self.replaced = packing, packing.shape, Replaced(was)
        self.training = was.training
        self.register_parameter("bias", bias)
        self.take_shapes(packing.types)

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        parts, packing = [self.get_parameter(name) for name in self.types], self.packing
        return linear_packed(
            input, self.bias, *parts, offsets=offsets, form=packing.form, shape=packing.shape, dtype=packing.dtype,
            options=packing.options,
        )  # fmt: skip

    @property
    def extras(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.packing.record.extras

    def file_key(self, front: str, name: str) -> str:
        """The name in files of one of its tensors; `front`: the layer's, with a dot."""
        return key_of(f"{front}weight" if len(self.shape) == 2 else front.removesuffix("."), name)

    @property
    def plain_dtype(self) -> torch.dtype:
        return self.packing.dtype

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return self.packing.unpack([parts[name] for name in self.types], dtype)

    def give_back(self, layer: Any) -> None:
        """The plain layer has no place for packed tensors, but its bias."""
        if self.bias is not None:
            layer.bias = self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super(QuantisedLinear, self)._save_to_state_dict(destination, prefix, keep_vars)


class PackedExperts(nn.Module):
    """Experts of transformers with packed matrices: tokens are sorted by expert, and each is multiplied with its
    experts' matrices, as the library's implementation "grouped_mm" does.

    In: the library's module, of whose parameters `packings` are packed. All others are shared with it.
    """

    has_gate: bool
    has_bias: bool
    num_experts: int
    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, was: Any, packings: Mapping[str, Packing]):
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(was).items() if not name.startswith("_")})
        self.training, self.replaced = was.training, Replaced(was)
        for name, param in was._parameters.items():
            if name not in packings:
                self.register_parameter(name, param)
        for name, buffer in was._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in was._non_persistent_buffers_set)
        for name, child in was._modules.items():
            self.add_module(name, child)
        for name, packing in packings.items():
            self.add_module(name, PackedLinear(was, packing))
        self.apply_gate = Gate(type(was))

    def give_back(self) -> None:
        """Let the library's module have all but the matrices."""
        was = self.replaced.layer
        was._parameters.update(self._parameters)
        was._buffers.update(self._buffers)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
        adapters: tuple[PackedWrapper, ...] = (),
    ) -> Tensor:  # fmt: skip
        chosen = top_k_index.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1))
        counts = torch.histc(experts.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = hidden_states[order // chosen]
        first = "gate_up_proj" if self.has_gate else "up_proj"
        inner = self._product(first, rows, offsets, experts, adapters)
        inner = self.apply_gate(self, inner) if self.has_gate else self.act_fn(inner)
        rows = self._product("down_proj", inner, offsets, experts, adapters)
        rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        sums = rows[back].view(hidden_states.shape[0], chosen, -1).sum(dim=1)
        return sums.to(hidden_states.dtype)

    def _product(
        self, name: str, rows: Tensor, offsets: Tensor, experts: Tensor, adapters: tuple[PackedWrapper, ...]
    ) -> Tensor:
        found: Tensor = self.get_submodule(name)(rows, offsets)
        for adapter in adapters:
            if adapter.parameter_name == name:
                found = found + adapter.change(rows, offsets)
        return found + getattr(self, f"{name}_bias")[experts] if self.has_bias else found


class Gate:
    """The function between the products of a class of experts, which is a method of the class."""

    def __init__(self, experts: type):
        self.experts = experts

    def __call__(self, module: nn.Module, rows: Tensor) -> Tensor:
        found: Tensor = self.experts._apply_gate(module, rows)  # type: ignore[attr-defined]
        return found


def key_of(weight: str, name: str) -> str:
    """The name in files of a tensor of the parameter `weight`, by its name for a parameter called "weight"."""
    front, _, own = weight.rpartition(".")
    leaf = f"{own}{name.removeprefix('weight')}" if name.startswith("weight") else name
    return f"{front}.{leaf}" if front else leaf


def packed_layer(module: Any, packings: Mapping[str, Packing]) -> nn.Module | None:
    """The module that stands for a module of which these parameters are packed; None for one of another kind, whose
    weights are unpacked while they are read."""
    if type(module).forward is nn.Linear.forward and packings.keys() == {"weight"}:
        return PackedLinear(module, packings["weight"], module.bias)
    if is_experts(module) and set(packings) <= {"gate_up_proj", "up_proj", "down_proj"}:
        missing = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"} - set(packings)
        if missing or getattr(module, "has_post_expert_norm", False):
            return None
        return PackedExperts(module, packings)
    return None


def is_experts(module: Any) -> bool:
    """Whether it is a layer of experts of transformers, all of whose implementations compute the same."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def has_matrices_transposed(module: Any) -> bool:
    """Whether a module has its matrices as [columns, rows]."""
    return type(module).__name__ == "Conv1D" or (is_experts(module) and bool(module.is_transposed))


class PackedWrapper(nn.Module):
    """Stands for PEFT's adapter on a stack of experts' matrices (`target_parameters`) that is packed. PEFT adds the
    factors' product to the whole stack; here rows are multiplied by the factors of their experts."""

    parameter_name: str
    num_experts: int
    base_layer: nn.Module

    def forward(self, *args: Tensor, adapters: tuple[PackedWrapper, ...] = ()) -> Tensor:
        wrapper: Any = self
        own = () if wrapper.disable_adapters else (self,)
        found: Tensor = self.base_layer(*args, adapters=(*adapters, *own))
        return found

    def change(self, rows: Tensor, offsets: Tensor) -> Tensor | int:
        """The sum that the active adapters add to the product of rows that are sorted by expert; 0 where none is on
        this stack."""
        wrapper: Any = self
        names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        return sum(self._change_by(wrapper, name, rows, offsets) for name in names)

    def _change_by(self, wrapper: Any, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
        first, second = (factors[name].weight.to(rows.dtype) for factors in (wrapper.lora_A, wrapper.lora_B))
        down = first.reshape(self.num_experts, -1, first.shape[-1])
        up = second.reshape(second.shape[0], -1, self.num_experts).permute(2, 1, 0).contiguous()
        more = -up.shape[1] % RANKS
        if more:
            down, up = F.pad(down, (0, 0, 0, more)), F.pad(up, (0, 0, 0, more))
        down = down.transpose(-2, -1)
        found: Tensor = grouped_mm(grouped_mm(rows, down, offs=offsets), up, offs=offsets)
        return found.mul(wrapper.scaling[name])


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is PEFT's adapter on a parameter."""
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def require_packed_experts(module: Any, path: str) -> None:
    """Raise `PlanError` for such an adapter around anything else."""
    while is_wrapper(module):
        module = module.base_layer
    if not isinstance(module, PackedExperts):
        raise PlanError(
            f"model: target_parameters of {path}, a {type(module).__name__}, on weights that files have packed; "
            "allowed are stacks of experts' matrices: name linear layers in target_modules"
        )


@functools.cache
def wrapper_class(was: Any) -> Any:
    """PEFT's class, which others look for, with the forward of `PackedWrapper`."""
    return type(was.__name__, (PackedWrapper, was), {"__module__": was.__module__})
