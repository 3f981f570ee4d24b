"""Costs of stages as expressions of named sizes.

In: the stages of a plan at a few sizes. Out: for each cost a polynomial through these, of degree 1 in rows and 2 in
every other size (attention is quadratic in its length), proved at one more point; and from these the stages at any
sizes. Running blocks on symbolic fake tensors instead would give the same where it works, but every comparison in a
kernel's shape rule may fix a symbol or fail, in a way that changes from release to release. Peaks of memory are maxima
of polynomials, not polynomials: they stay those of the largest sizes, for which memory is planned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy

from ...ir.program import SizeRange, Sizes, StageSpec
from .named import symbol

SUMS = ("forward_flops", "backward_flops", "forward_traffic_bytes", "backward_traffic_bytes", "kept_bytes")
CALLS = ("forward_mix", "backward_mix", "saved", "again")  # the calls that make up these sums, for a device's rates
TOLERANCE = 0.01  # how far a polynomial may be from what was measured
StagesAt = Callable[[Sizes], Mapping[str, StageSpec]]


class StageExpressions:
    """The costs of a plan's stages for any sizes in these ranges. `rows`: the name of the number of rows, or ""."""

    def __init__(self, stages_at: StagesAt, ranges: Mapping[str, SizeRange], rows: str = ""):
        self.stages_at, self.names = stages_at, list(ranges)
        self.points = [_points(of, 1 if name == rows else 2) for name, of in ranges.items()]
        grid = [dict(zip(self.names, at)) for at in itertools.product(*(fitted for fitted, _ in self.points))]
        proof = dict(zip(self.names, (proof for _, proof in self.points)))
        self.powers = list(itertools.product(*(range(len(fitted)) for fitted, _ in self.points)))
        basis = sympy.Matrix([[_term(list(at.values()), power) for power in self.powers] for at in grid])
        self.solve = basis.inv()
        measured = [stages_at(at) for at in grid]
        proved = stages_at(proof)
        self.largest, self.grid, self.measured = measured[0], grid, measured
        self.costs: dict[str, dict[str, list[sympy.Expr]]] = {}  # stage -> cost -> an expression for each number in it
        self.is_exact = all(self._fit(name, measured, proved, proof) for name in self.largest)

    def _fit(
        self, name: str, measured: Sequence[Mapping[str, StageSpec]], proved: Mapping[str, StageSpec], proof: Sizes
    ) -> bool:
        """Find the expressions of a stage. Returns whether its sums are what was measured at the proof."""
        found = self.costs[name] = {}
        for cost in (*SUMS, *CALLS):
            rows = [list(_numbers(getattr(stages[name], cost))) for stages in measured]
            wanted = list(_numbers(getattr(proved[name], cost)))
            if all(len(row) == len(wanted) for row in rows):
                made = [self._polynomial([row[i] for row in rows]) for i in range(len(wanted))]
                if all(math.isclose(self._value(e, proof), w, rel_tol=TOLERANCE) for e, w in zip(made, wanted)):
                    found[cost] = made
        return found.keys() >= set(SUMS)

    def _polynomial(self, values: Sequence[float]) -> sympy.Expr:
        if len(set(values)) == 1:
            return sympy.Rational(values[0])
        exact = sympy.Matrix([sympy.Rational(value) for value in values])
        terms = [_term([symbol(name) for name in self.names], power) for power in self.powers]
        return sympy.expand(sum(c * term for c, term in zip(self.solve * exact, terms)))

    def _value(self, expression: sympy.Expr, sizes: Sizes) -> float:
        return float(expression.subs({symbol(name): size for name, size in sizes.items()}))

    def evaluate(self, sizes: Sizes) -> Mapping[str, StageSpec]:
        """The stages at these sizes: of the expressions, or measured where these do not hold."""
        if not self.is_exact:
            return self.stages_at(sizes)
        return {name: self._stage(name, sizes) for name in self.largest}

    def _stage(self, name: str, sizes: Sizes) -> StageSpec:
        distances = [sum(abs(at[n] - size) / size for n, size in sizes.items()) for at in self.grid]
        nearest = distances.index(min(distances))
        spec, costs = self.largest[name], self.costs[name]
        changed: dict[str, Any] = {"seconds": (), "taking": ()}  # which were measured at the largest sizes
        for cost in (*SUMS, *CALLS):
            if cost in costs:
                values = (self._value(expression, sizes) for expression in costs[cost])
                changed[cost] = _with_numbers(getattr(spec, cost), values)
            else:  # calls that are equal at some sizes are counted together there
                changed[cost] = getattr(self.measured[nearest][name], cost)
        for field in ("inputs", "outputs", "extra_outputs"):
            changed[field] = tuple(row.with_sizes(sizes) for row in getattr(spec, field))
        return dataclasses.replace(spec, **changed)


def _points(of: SizeRange, degree: int) -> tuple[list[int], int]:
    """Sizes to measure at, the largest first, and one to prove the result at. Odd ones are rarely those of other
    things, whose calls would be counted together."""
    least = of.least if of.most < 4 else max(of.least, 2)
    span = of.most - least
    wanted = [of.most, *(least + span * i // (degree + 1) | 1 for i in range(1, degree + 1))]
    fitted = list(dict.fromkeys(min(max(size, least), of.most) for size in wanted))
    return fitted, min(max(least + span * 4 // 5 | 1, least), of.most)


def _term(base: Sequence[Any], power: Sequence[int]) -> Any:
    return sympy.Mul(*(sympy.sympify(x) ** p for x, p in zip(base, power)))


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a cost, in order: of a number itself, of rows and of the fields of each."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _with_numbers(value: Any, numbers: Iterator[float]) -> Any:
    """The same cost with other numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _with_numbers(getattr(value, f.name), numbers) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(_with_numbers(item, numbers) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return round(next(numbers)) if isinstance(value, int) else next(numbers)
