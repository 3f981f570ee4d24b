"""The names of a model's parameters and buffers: which are one tensor (ties), and which are never saved."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names, parameters first."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def unsaved_buffers(model: nn.Module) -> set[str]:
    """Names of the buffers that are not part of the state dict: the model computes them itself."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of the model with all tensors on meta; it keeps the ties."""
    memo: dict[int, Tensor] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Each later name of a tensor to its first name. Tensors are told apart by identity, so meta works."""
    first: dict[int, str] = {}
    ties = {}
    for name, tensor in named_tensors(model).items():
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            ties[name] = canonical
    return ties


def aliases_of(ties: dict[str, str]) -> dict[str, list[str]]:
    """Each canonical name of `ties` to all names of its tensor, itself first."""
    groups: dict[str, list[str]] = {}
    for alias, canonical in ties.items():
        groups.setdefault(canonical, [canonical]).append(alias)
    return groups
