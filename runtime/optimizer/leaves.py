"""The plain tensors that an optimizer's state is made of: itself, or those inside a tensor of a library's own class, as
codes and scales are inside a state of 8 bits. They have the state's name, or "state.inner" inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..torch_names import is_traceable_wrapper_subclass


def leaves_of(key: str, value: Any) -> dict[str, Tensor]:
    """The tensors inside a state by name; none for a state that is no tensor."""
    if not isinstance(value, Tensor):
        return {}
    if not is_traceable_wrapper_subclass(value):
        return {key: value}
    inner, _ = value.__tensor_flatten__()
    return {leaf: tensor for name in inner for leaf, tensor in leaves_of(f"{key}.{name}", getattr(value, name)).items()}


def row_leaves(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors inside all states of a parameter."""
    return {leaf: tensor for key, value in row.items() for leaf, tensor in leaves_of(key, value).items()}


def rebuilt(key: str, like: Any, leaves: Mapping[str, Tensor]) -> Any:
    """A state like `like`, made of those of `leaves` that are inside it, and for the rest of its own."""
    if not isinstance(like, Tensor) or not is_traceable_wrapper_subclass(like):
        return leaves.get(key, like)
    names, context = like.__tensor_flatten__()
    inner = {name: rebuilt(f"{key}.{name}", getattr(like, name), leaves) for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
