"""The members of a module as the lines of its `__init__`: leaf modules, parameters, buffers, scopes, blocks.

In: the graph module (the user's own leaf modules and tensors under the user's names) and the names that are used.
Out: lines that build members of the same names, shapes, dtypes and flags, without values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from ..ir.names import is_index
from ..ir.units import format_bytes
from .layers import layer_call
from .layout import Line, type_text
from .paths import is_under, member, owners, quote
from .segments import BlockCall


def used_members(nodes: Iterable[fx.Node]) -> list[str]:
    """Dotted names of the leaf modules and tensors that nodes use, without tensors inside of those modules."""
    found: dict[str, bool] = {}
    for node in nodes:
        if node.op in ("call_module", "get_attr"):
            found[str(node.target)] = found.get(str(node.target), False) or node.op == "call_module"
    modules = {name for name, is_module in found.items() if is_module}
    return [name for name in found if not any(owner in modules for owner in owners(name))]


class Members:
    """Collects the lines of one `__init__`. `base` is the dotted path of the module that is built."""

    def __init__(self, root: nn.Module, base: str = "", dtypes: Mapping[str, str] | None = None):
        self.root, self.base = root, base
        self.dtypes = dtypes or {}  # of the computation, by dotted name, where not the user's own
        self.lines: list[Line] = []
        self.scopes: set[str] = set()

    def scope(self, name: str) -> None:
        """Make sure that the owner of `name` exists."""
        owner = name.rpartition(".")[0]
        if owner and is_under(self.base, owner) and owner not in self.scopes:
            self.scope(owner)
            self.scopes.add(owner)
            self.lines.append(Line(0, [f"{self.text(owner)} = Scope()"]))

    def text(self, name: str) -> str:
        return member("self", self.base, name)

    def add(self, name: str) -> None:
        """Build the leaf module, parameter or buffer of this dotted name."""
        owner, _, last = name.rpartition(".")
        value = getattr(self.root.get_submodule(owner), last)
        self.scope(name)
        if isinstance(value, nn.Module):
            return self._leaf(name, value)
        dtype = self._dtype(name, value)
        comment = f"{type_text(value.shape, dtype)} {format_bytes(value.numel() * dtype.itemsize)}"
        given = "" if dtype is torch.float32 else f", dtype={dtype}"
        empty = f"torch.empty({', '.join(map(str, value.shape)) or '()'}{given})"
        if isinstance(value, nn.Parameter):
            frozen = "" if value.requires_grad else ", requires_grad=False"
            self.lines.append(Line(0, [f"{self.text(name)} = nn.Parameter({empty}{frozen})"], comment))
        else:
            kept = last in self.root.get_submodule(owner)._non_persistent_buffers_set
            place = member("self", self.base, owner) if owner and owner != self.base else "self"
            rest = ", persistent=False" if kept else ""
            self.lines.append(Line(0, [f'{place}.register_buffer({quote(last)}, {empty}{rest})'], comment))

    def _leaf(self, name: str, leaf: nn.Module) -> None:
        tensors = dict(leaf.named_parameters())
        dtypes = {key: self._dtype(f"{name}.{key}", t) for key, t in tensors.items()}
        call = layer_call(leaf)
        assert call is not None, f"{name} is no leaf"
        text = call.text
        if len(set(dtypes.values())) == 1 and set(dtypes.values()) != {torch.float32} and not list(leaf.buffers()):
            text += f".to({next(iter(dtypes.values()))})"
        num_bytes = sum(t.numel() * dtypes[key].itemsize for key, t in tensors.items())
        comment = size(sum(t.numel() for t in tensors.values()), num_bytes)
        trained = {p.requires_grad for p in tensors.values()}
        if trained == {False}:
            text += ".requires_grad_(False)"
        if not leaf.training:
            text += ".eval()"
        self.lines.append(Line(0, [f"{self.text(name)} = {text}"], comment))
        if len(trained) == 2:
            for key, parameter in tensors.items():
                if not parameter.requires_grad:
                    tensor = self.text(f"{name}.{key}")
                    self.lines.append(Line(0, [f"{tensor}.requires_grad_(False)"]))

    def _dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        return getattr(torch, self.dtypes[name]) if name in self.dtypes else tensor.dtype

    def add_all(self, names: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
        """Build all of `names`; each of `groups` lists the names of one tensor."""
        aliases = {name for group in groups for name in group[1:]}
        for name in names:
            if name not in aliases:
                self.add(name)
        for first, *others in groups:
            for name in others:
                self._tie(first, name, name in names)

    def _tie(self, first: str, name: str, is_plain: bool) -> None:
        """Register the tensor called `first` as `name` too. `is_plain`: it is not inside a leaf module or a block."""
        owner, _, last = name.rpartition(".")
        if is_plain:
            self.scope(name)
        text = f"{self.text(name)} = {self.text(first)}"
        if is_plain and not isinstance(getattr(self.root.get_submodule(owner), last), nn.Parameter):
            place = self.text(owner) if owner and owner != self.base else "self"
            text = f'{place}.register_buffer({quote(last)}, {self.text(first)})'
        self.lines.append(Line(0, [text], "tied"))

    def blocks(self, calls: Sequence[BlockCall], class_name: str) -> None:
        """Build equal blocks of one owner: a line, or a loop over their indices."""
        paths = [call.path for call in calls]
        self.scope(paths[0])
        owner = paths[0].rpartition(".")[0]
        indices = [int(i) for path in paths if is_index(i := path.rpartition(".")[2])]
        if len(paths) < 2 or len(indices) < len(paths):
            for path in paths:
                self.lines.append(Line(0, [f"{self.text(path)} = {class_name}()"]))
            return
        self.lines.append(Line(0, [f"for i in {_range(sorted(indices))}:"]))
        self.lines.append(Line(1, [f"{self.text(owner) if owner else 'self'}[i] = {class_name}()"]))


def ties(root: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Groups of dotted names, of tensors and inside of leaf modules, that are one parameter or buffer."""
    groups: dict[int, list[str]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        value: Any = getattr(root.get_submodule(owner), last)
        rows = {name: value}
        if isinstance(value, nn.Module):
            inside = (*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False))
            rows = {f"{name}.{key}": tensor for key, tensor in inside}
        for key, tensor in rows.items():
            groups.setdefault(id(tensor), []).append(key)
    return [group for group in groups.values() if len(group) > 1]


def parameters_of(root: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The distinct parameters of leaf modules and tensors with these dotted names, by their own dotted name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        value = getattr(root.get_submodule(owner), last)
        inside = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        for key, tensor in inside:
            if isinstance(tensor, nn.Parameter):
                found.setdefault(id(tensor), (f"{name}.{key}" if key else name, tensor))
    return dict(found.values())


def size(numel: int, num_bytes: int) -> str:
    """`1,024 parameters, 4.00 KiB`, or nothing where there are none."""
    return f"{numel:,} parameters, {format_bytes(num_bytes)}" if numel else ""


def _range(indices: list[int]) -> str:
    steps = {b - a for a, b in pairwise(indices)}
    if len(steps) > 1:
        return f"({', '.join(map(str, indices))})"
    step, stop = steps.pop(), indices[-1] + 1
    if step > 1:
        return f"range({indices[0]}, {stop}, {step})"
    return f"range({indices[0]}, {stop})" if indices[0] else f"range({stop})"
