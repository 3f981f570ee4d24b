"""One operator call as the rules see it, and the table that the rules are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class GpuSize:
    """The number of a GPU's multiprocessors, and of threads that each of them holds."""

    processors: int
    threads: int


LARGEST = GpuSize(132, 2048)  # an H100 or H200


class WorkspaceCall:
    """A call of an operator: arguments by the names of its schema, and the GPU that it is for."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any, gpu: GpuSize):
        names = [argument.name for argument in func._schema.arguments]
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, args)), **kwargs}
        self.name = str(func._schema.name).rpartition("::")[2].rstrip("_")
        self.out, self.gpu = out, gpu

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def tensor(self, name: str) -> Tensor:
        value = self.given[name]
        assert isinstance(value, Tensor), name
        return value


WorkspaceRule = Callable[[WorkspaceCall], int]
RULES: dict[str, WorkspaceRule] = {}


def rule(*names: str) -> Callable[[WorkspaceRule], WorkspaceRule]:
    """Enter a rule for operators of these names; in-place forms have the name without the last underscore."""

    def enter(function: WorkspaceRule) -> WorkspaceRule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def ceil_div(size: int, part: int) -> int:
    return -(-size // part)
