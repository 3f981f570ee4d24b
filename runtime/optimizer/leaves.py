"""The plain tensors that an optimizer's state is made of: itself, those in a list, tuple or dict, as SOAP's matrices
are, or those inside a tensor of a library's own class, as codes and scales are inside a state of 8 bits. They have the
state's name, or "state.inner" inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...ir.errors import PlanError
from ..torch_names import is_traceable_wrapper_subclass, tree_leaves


def leaves_of(key: str, value: Any) -> dict[str, Tensor]:
    """The tensors inside a state by name; none for a state that is no tensor."""
    inside = entries_of(value)
    if inside is not None:
        return {leaf: t for name, each in inside.items() for leaf, t in leaves_of(f"{key}.{name}", each).items()}
    if not isinstance(value, Tensor):
        return {}
    if not is_traceable_wrapper_subclass(value):
        return {key: value}
    inner, _ = value.__tensor_flatten__()
    return {leaf: tensor for name in inner for leaf, tensor in leaves_of(f"{key}.{name}", getattr(value, name)).items()}


def entries_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a list, tuple or dict by index or key; None of another value."""
    return dict(value) if isinstance(value, dict) else dict(enumerate(value)) if type(value) in (list, tuple) else None


def require_movable(row: Mapping[str, Any], what: str) -> None:
    """Raises `PlanError` for a state in which tensors are hidden: in an object, or in a container beside numbers."""
    for key, value in row.items():
        if isinstance(value, Tensor | bool | int | float | str | None):
            continue
        inside = entries_of(value)
        kinds = {Tensor if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(value)}
        tensors = leaves_of(key, value)
        if inside is None or (tensors and kinds != {Tensor}) or any(t.dim() == 0 for t in tensors.values()):
            inner = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise PlanError(
                f"{what}: its state {key!r} is {type(value).__name__} of {inner}; a plan counts, moves and saves "
                "states that are tensors, numbers, or lists, tuples and dicts of tensors alone. Use one with such "
                "states, like torch.optim.AdamW"
            )


def row_leaves(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors inside all states of a parameter."""
    return {leaf: tensor for key, value in row.items() for leaf, tensor in leaves_of(key, value).items()}


def rebuilt(key: str, like: Any, leaves: Mapping[str, Tensor]) -> Any:
    """A state like `like`, made of those of `leaves` that are inside it, and for the rest of its own."""
    inside = entries_of(like)
    if inside is not None:
        own = {name: rebuilt(f"{key}.{name}", each, leaves) for name, each in inside.items()}
        return type(like)(own if isinstance(like, dict) else own.values())
    if not isinstance(like, Tensor) or not is_traceable_wrapper_subclass(like):
        return leaves.get(key, like)
    names, context = like.__tensor_flatten__()
    inner = {name: rebuilt(f"{key}.{name}", getattr(like, name), leaves) for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
