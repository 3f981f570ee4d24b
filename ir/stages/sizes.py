"""Named sizes: dimensions that differ from micro-batch to micro-batch, and what other dimensions are made of them.

A plan counts with the most that each may be. What a micro-batch has, its inputs say; every other dimension is an
expression of these, as text that is Python: `sequence`, `2*sequence + 1`.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

SIZES = "micro_batch_sizes"  # the input of a program that has the sizes of each micro-batch
Sizes = Mapping[str, int]
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_POWER = 4
_FUNCTIONS = {"max": max, "min": min}


@dataclass(frozen=True)
class SizeRange:
    """The range of a named size in a micro-batch, both ends included."""

    least: int
    most: int

    def __contains__(self, size: int) -> bool:
        return self.least <= size <= self.most


def value_of(expression: str, sizes: Sizes) -> int:
    """The value of an expression for these sizes. Raises `KeyError` for a name that has none."""
    return _value(_parse(expression), sizes)


def wrong_expression(expression: str, names: Collection[str]) -> str:
    """The reason for which this text is no expression of these names; "" if it is one."""
    try:
        _value(_parse(expression), dict.fromkeys(names, 1))
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError):
        return "is no expression of sizes"
    except KeyError as error:
        return f"names {error.args[0]!r:.60}, which is no size"
    except ZeroDivisionError:
        return ""
    return ""


def sizes_of(ranges: Collection[str], batch: Mapping[str, Tensor]) -> list[Sizes]:
    """The sizes of each micro-batch of a batch, in whose inputs they are; nothing where no size has a name."""
    return [dict(zip(ranges, row, strict=True)) for row in batch[SIZES].tolist()] if ranges else []


def found_sizes(inputs: Iterable[tuple[Collection[str], Collection[int]]]) -> Sizes:
    """The named sizes that are dimensions of these inputs (`TensorSpec.dims` and shape)."""
    return {dim: size for dims, shape in inputs for dim, size in zip(dims, shape) if dim.isidentifier()}


@functools.cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr, sizes: Sizes) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power <= MOST_POWER:
            return int(_value(left, sizes) ** power)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return int(_FUNCTIONS[name](*(_value(arg, sizes) for arg in args)))
    raise ValueError(f"{ast.unparse(node)} is no expression of sizes")
