"""Costs of blocks as expressions in batch `b` and sequence `s`.

In: an op graph traced with dynamic sizes. Out: per distinct block hash its FLOPs, traffic, saved bytes, parameter bytes
and boundary bytes as sympy polynomials, also in the meta of the block's nodes: "block", "block_hash" and "block_cost".

Each distinct block is measured on plain numbers, as `costs` does for any plan, at a few sizes put in for the symbols,
and the polynomial through these points (degree 1 in b, 2 in s: attention is quadratic) is proved at one more point.
Running blocks on symbolic fake tensors instead would give the same where it works, but every comparison in a kernel's
shape rule may fix a symbol or fail, in a way that changes from release to release. Boundaries need no measuring: they
follow from the symbolic shapes of the values. Peaks of memory are maxima of polynomials, not polynomials, so they are
left out.

No pass decides by these expressions yet: they are for plans that hold for every batch and sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ....ir.errors import PassError
from ..blocks import Block, BlockCost
from ..coarsen import find_blocks
from ..costs import measure
from ..opgraph import OpGraph, value_tensors

B, S = sympy.symbols("b s", positive=True, integer=True)
SYMBOLS = {"b": B, "s": S}
DEGREE = {"b": 1, "s": 2}
QUANTITIES = ("forward_flops", "backward_flops", "forward_traffic_bytes", "backward_traffic_bytes", "kept_bytes")


@dataclass(frozen=True)
class SymbolicCost:
    """Polynomials in `B` and `S` with rational coefficients; see `BlockCost` for what each counts."""

    forward_flops: sympy.Expr
    backward_flops: sympy.Expr
    forward_traffic_bytes: sympy.Expr
    backward_traffic_bytes: sympy.Expr
    kept_bytes: sympy.Expr
    param_bytes: sympy.Integer
    input_bytes: sympy.Expr  # bytes of the values that the block takes from other blocks, each once
    output_bytes: sympy.Expr  # bytes of the values that the block gives to other blocks

    def at(self, b: int, s: int = 1) -> dict[str, int]:
        """All costs as numbers for one batch and sequence."""
        return {name: int(value.subs({B: b, S: s})) for name, value in vars(self).items()}


def annotate_costs(graph: OpGraph, device_kind: str = "cpu") -> dict[str, SymbolicCost]:
    """Costs by block hash. Raises `PassError` for a graph without symbols, for one with symbols other than b and s, and
    for a block whose costs are not polynomials of these degrees."""
    sizes = _sizes(graph)
    known: dict[str, SymbolicCost] = {}
    blocks = find_blocks(graph)
    for block in blocks:
        if block.hash not in known:
            known[block.hash] = _interpolate(graph, blocks, block, sizes, device_kind)
        for node in block.nodes:
            node.meta.update(block=block.name, block_hash=block.hash, block_cost=known[block.hash])
    return known


def _sizes(graph: OpGraph) -> dict[str, int]:
    """The size that each symbol was traced with, by name."""
    if not graph.symbols:
        raise PassError("costs in b and s need a graph traced with dynamic=True; this one has fixed sizes")
    more = [name for name in graph.symbols if name not in DEGREE]
    if more:
        raise PassError(f"costs in b and s need inputs of one batch and one sequence size; there is {', '.join(more)}")
    found = {name: int(size.node.hint) for name, size in graph.symbols.items()}
    if found.get("s", 4) < 4:
        raise PassError(f"the sequence was traced with length {found['s']}; at least 4 tells its powers apart")
    return found


def _points(name: str, traced: int) -> list[int]:
    """Sizes to measure at, and as the last one a size to prove the result. Sequences get no longer than the traced one,
    as models have a longest."""
    if name == "b":
        return [traced, traced + 1, traced + 2]
    step = max(1, traced // 4)
    return [traced, traced - step, traced - 2 * step, traced - 1 if step > 1 else traced - 3]


def _interpolate(
    graph: OpGraph, blocks: Sequence[Block], block: Block, sizes: Mapping[str, int], device_kind: str
) -> SymbolicCost:
    names = list(sizes)
    points = {name: _points(name, sizes[name]) for name in names}
    grid = list(itertools.product(*(points[name][:-1] for name in names)))
    proof = tuple(points[name][-1] for name in names)
    measured = {at: measure(graph, block, device_kind, dict(zip(names, at))) for at in (*grid, proof)}
    powers = list(itertools.product(*(range(DEGREE[name] + 1) for name in names)))
    solve = sympy.Matrix([[_power(at, power) for power in powers] for at in grid]).inv()
    basis = [_power([SYMBOLS[name] for name in names], power) for power in powers]
    found = {}
    for quantity in QUANTITIES:
        values = [_whole(measured[at], quantity) for at in grid]
        polynomial = sympy.expand(sum(c * term for c, term in zip(solve * sympy.Matrix(values), basis)))
        foreseen = polynomial.subs({SYMBOLS[name]: size for name, size in zip(names, proof)})
        if foreseen != _whole(measured[proof], quantity):
            at = ", ".join(f"{name}={size}" for name, size in zip(names, proof))
            raise PassError(
                f"{quantity} of block {block.name!r} is no polynomial of degree 1 in b and 2 in s: {polynomial} at "
                f"{at} gives {foreseen}, measured {_whole(measured[proof], quantity)}; measure it at the sizes wanted"
            )
        found[quantity] = polynomial
    of_blocks = {node for other in blocks for node in other.nodes}
    return SymbolicCost(
        **found,
        param_bytes=sympy.Integer(block.param_bytes),
        input_bytes=_bytes_of(graph, (node for node in block.inputs if node in of_blocks)),
        output_bytes=_bytes_of(graph, (n for n in block.outputs if any(u in of_blocks for u in n.users))),
    )


def _bytes_of(graph: OpGraph, nodes: Iterable[fx.Node]) -> sympy.Expr:
    """Bytes of the nodes' values, in `B` and `S`."""
    own = {graph.symbols[name].node.expr: symbol for name, symbol in SYMBOLS.items() if name in graph.symbols}
    total = sympy.Integer(0)
    for tensor in (t for node in nodes for t in value_tensors(node.meta.get("val"))):
        sizes = [size.node.expr.subs(own) if isinstance(size, torch.SymInt) else size for size in tensor.shape]
        total += sympy.Mul(tensor.element_size(), *sizes)
    return sympy.expand(total)


def _power(base: Sequence[sympy.Expr | int], power: Sequence[int]) -> sympy.Expr:
    return sympy.Mul(*(sympy.sympify(x) ** p for x, p in zip(base, power)))


def _whole(cost: BlockCost, quantity: str) -> int:
    return int(getattr(cost, quantity))
