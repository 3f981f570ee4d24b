"""The dimensions of a traced batch without a fixed size, and the branches of the model on such a size."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ...ir.errors import CaptureError
from ...ir.program import SizeRange
from ...runtime.torch_names import FakeTensorMode, PythonPrinter
from .lines import SourceLines

LEAST_TRACED = 2  # torch takes sizes of 0 and 1 for constants; what holds for 2 and more holds for 1
MOST_CHECKED = 1 << 16  # combinations of sizes that each branch is checked for


class SizeBranch(CaptureError):
    """The model does one thing for some sizes, and another for others. `size`: the first of their names."""

    size = ""


class LinedShapeEnv(ShapeEnv):
    """Takes, for the place of a branch on a size, the model's line and not one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = SourceLines()

    def _get_user_frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._lines.is_shown(frame.f_code):
            frame = frame.f_back
        return frame


@dataclass(frozen=True)
class DynamicDims:
    """`ranges`: what each named size may be. `dims`: per input, for each dimension None where it is fixed, else the
    size's name and how many entries the dimension has for each."""

    ranges: Mapping[str, SizeRange]
    dims: Mapping[str, tuple[tuple[str, int] | None, ...]]


@dataclass
class TracedSizes:
    """The symbols of one trace."""

    dynamic: DynamicDims
    fake_mode: FakeTensorMode
    symbols: dict[str, Any] = field(default_factory=dict)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """The shape of an input with symbols for the sizes that are not fixed."""
        dims = self.dynamic.dims.get(name, ())
        return tuple(self._size(dim, size) for dim, size in zip(dims or [None] * len(shape), shape, strict=True))

    def _size(self, dim: tuple[str, int] | None, size: int) -> Any:
        if dim is None:
            return size
        name, each = dim
        if name not in self.symbols:
            from ...runtime.torch_names import ConstantSource  # late, as all of Dynamo takes half a second to import

            shape_env = self.fake_mode.shape_env
            assert shape_env is not None, "dynamic inputs need a shape environment"
            source, of = ConstantSource(f"size_{name}"), self.dynamic.ranges[name]
            hint = max(size // each, LEAST_TRACED)
            made = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            least = max(of.least, LEAST_TRACED)
            shape_env.constrain_symbol_range(made, compiler_min=least, compiler_max=max(of.most, least))
            self.symbols[name] = shape_env.create_symintnode(made, hint=hint, source=source)
        return self.symbols[name] * each if each > 1 else self.symbols[name]


def require_any_size(symbols: Mapping[str, Any], ranges: Mapping[str, SizeRange]) -> None:
    """Raise `SizeBranch` with the line where the model does one thing for some of these sizes, and another for others.

    Only sizes of 2 and more are looked at.
    """
    if not symbols:
        return
    shape_env: ShapeEnv = next(iter(symbols.values())).node.shape_env
    own = {size.node._expr: name for name, size in symbols.items()}  # `expr` is what it was found equal to
    for symbol, name in own.items():
        fixed = shape_env.replacements.get(symbol)
        if fixed is not None:
            raise _size_branch(name, _fixed_size_text(name, fixed, own, shape_env))
    for guard in shape_env.guards:
        _require(guard.expr, own, ranges, guard.sloc.framework_loc)


def _size_branch(size: str, message: str) -> SizeBranch:
    error = SizeBranch(message)
    error.size = size
    return error


def _fixed_size_text(name: str, fixed: Any, own: Mapping[Any, str], shape_env: ShapeEnv) -> str:
    other = own.get(fixed)
    what = f"to be equal to {other}" if other else f"to {fixed}"
    line = next((_line(g.sloc.framework_loc) for g in reversed(shape_env.guards) if isinstance(g.expr, sympy.Eq)), "")
    return (
        f"{line}\n  size {name} was fixed {what} by the model (a comparison or reshape with a number): "
        f"leave {name} out of dynamic_shapes, or remove the dependence on that size"
    )


def _require(guard: Any, own: Mapping[Any, str], ranges: Mapping[str, SizeRange], place: Any) -> None:
    found = sorted(guard.free_symbols & own.keys(), key=str)
    names = [own[each] for each in found]
    if not names or guard.free_symbols - own.keys():
        return
    condition = PythonPrinter().doprint(guard.subs({each: sympy.Symbol(own[each]) for each in found}))
    holds = eval(f"lambda {', '.join(names)}: bool({condition})", {"math": math})
    count = math.ceil(MOST_CHECKED ** (1 / len(names)))
    sizes = [_samples(ranges[name], count) for name in names]
    good = [at for at in itertools.product(*sizes) if holds(*at)]
    if len(good) == math.prod(map(len, sizes)):
        return
    first, of = names[0], ranges[names[0]]
    may = f"One program holds for {_ranges(sizes[0], [at[0] for at in good])}: give " if len(names) == 1 else "Give "
    raise _size_branch(
        first,
        f"{_line(place)}\n  the model does one thing where {condition}, and another elsewhere; "
        f"{first} may be {of.least} to {of.most}. {may}"
        f'torch.export.Dim("{first}", min=..., max=...) a range on one side, or remove the branch',
    )


def _samples(of: SizeRange, count: int) -> list[int]:
    """All sizes of a range, or if they are too many, runs of them at both ends and steps between: runs, as a branch
    may ask for multiples of the step."""
    least, end = min(max(of.least, LEAST_TRACED), of.most), of.most + 1
    if end - least <= count:
        return list(range(least, end))
    third = count // 3
    return sorted({*range(least, least + third), *range(least, end, (end - least) // third), *range(end - third, end)})


def _ranges(sizes: list[int], holds: list[int]) -> str:
    """Runs of sizes among all those that were looked at."""
    chosen, runs = set(holds), list[list[int]]()
    for before, size in zip([None, *sizes], sizes):
        if size in chosen:
            if runs and runs[-1][1] == before:
                runs[-1][1] = size
            else:
                runs.append([size, size])
    texts = [f"{a} to {b}" if a < b else str(a) for a, b in runs]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "") if texts else "none of them"


def _line(place: Any) -> str:
    name, number = getattr(place, "filename", ""), getattr(place, "lineno", 0)
    return SourceLines().text(name, number) if name else ""
