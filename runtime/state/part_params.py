"""Parts of parameters (rows that are a parameter of their own in stages) put together, and cut anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...ir.program import ParamSpec, RowPart, TeamPart


def member_part(whole: Tensor, param: ParamSpec, member: int) -> Tensor:
    """The part of a whole parameter, or of a state of its shape, that member number `member` of a team has; copied."""
    part = _part_of(param)
    before, after = whole.shape[: part.dim], whole.shape[part.dim + 1 :]
    rows = whole.reshape(*before, part.blocks, part.members, -1, *after)
    return rows.select(part.dim + 1, member).reshape(*before, -1, *after).contiguous()


def whole_of_members(parts: Sequence[Tensor], param: ParamSpec) -> Tensor:
    """A whole parameter or state out of what each member has of it, in order."""
    part = _part_of(param)
    before, after = parts[0].shape[: part.dim], parts[0].shape[part.dim + 1 :]
    rows = [tensor.reshape(*before, part.blocks, 1, -1, *after) for tensor in parts]
    return torch.cat(rows, part.dim + 1).reshape(*before, -1, *after)


def _part_of(param: ParamSpec) -> TeamPart:
    assert isinstance(param.part, TeamPart), f"members have all of {param.name}"
    return param.part


class PartJoiner:
    """Puts whole parameters together from parts that come one stage after another."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}  # rows

    def add(self, params: Iterable[ParamSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a stage under the model's own names: its whole ones, and those whose last part is here. Parts
        that another stage owns are left out."""
        params = list(params)
        parts = {param.name: param for param in params if isinstance(param.part, RowPart)}
        own = {param.name: param.whole_name for param in params if param.name not in parts}  # members' parts are whole
        done = {own.get(name, name): tensor for name, tensor in tensors.items() if name not in parts}
        for name, param in parts.items():
            if not isinstance(param.part, RowPart) or not param.owner or name not in tensors:
                continue
            whole, tensor = param.whole, tensors[name]
            if whole.name not in self._pending:
                self._pending[whole.name] = torch.empty(whole.shape, dtype=tensor.dtype)
                self._missing[whole.name] = param.part.total
            self._pending[whole.name][param.part.rows] = tensor.detach()
            self._missing[whole.name] -= param.part.end - param.part.begin
            if not self._missing[whole.name]:
                done[whole.name] = self._pending.pop(whole.name)
        return done


class PartIndex:
    """The rows of parameters among stored names: `parts` has those names that are parts."""

    def __init__(self, parts: Mapping[str, RowPart]):
        self.parts = parts
        self._of: dict[str, list[str]] = defaultdict(list)
        for name in sorted(parts, key=lambda name: parts[name].begin):
            self._of[parts[name].parameter].append(name)

    def parameter_of(self, name: str) -> str:
        """The parameter that a stored name is, or is a part of."""
        return self.parts[name].parameter if name in self.parts else name

    def pieces(self, parameter: str, part: RowPart | None) -> list[tuple[str, slice]]:
        """The stored names that hold a parameter or, with `part`, those rows of it; and which rows of each these."""
        stored = self._of.get(parameter)
        if stored is None:
            return [(parameter, slice(None) if part is None else part.rows)]
        found = []
        for name in stored:
            own = self.parts[name]
            begin, end = (own.begin, own.end) if part is None else (max(own.begin, part.begin), min(own.end, part.end))
            if begin < end:
                found.append((name, slice(begin - own.begin, end - own.begin)))
        return found


def joined_rows(pieces: Sequence[tuple[Tensor, slice]]) -> Tensor:
    """The rows of tensors one after the other. A number, such as a count of steps, is that of the first."""
    first, rows = pieces[0]
    if not first.dim():
        return first
    if len(pieces) == 1:
        whole = rows == slice(None) or rows == slice(0, first.shape[0])
        return first if whole else first[rows].clone()
    return torch.cat([tensor[rows] for tensor, rows in pieces])
