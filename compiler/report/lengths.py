"""Simulates steps at other sizes than the largest, for which the plan was made.

In: the programs of a plan and the costs of its stages as expressions of sizes. Out: simulated steps at any sizes, and
tokens a second for lengths as they are in a person's own data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...graph.sizes.symbolic import StageExpressions, StagesAt
from ...ir.errors import PlanError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, Sizes, StageSpec, infer_all
from ...ir.units import format_seconds
from ...runtime.simulate import Timeline
from ...runtime.torch_names import tree_leaves
from ..batches.sizes import BatchSizes
from ..steps import simulate_here


@dataclass(frozen=True)
class Throughput:
    """Tokens a second over batches of these lengths, each batch as long as it is, and were all padded to the most."""

    tokens_per_s: float
    padded_tokens_per_s: float
    mean_step_s: float
    mean_length: float


class StepsOfAnySize:
    """The steps of one plan at any sizes; the first question measures the stages at a few."""

    def __init__(
        self,
        programs: Sequence[Program],
        hardware: Hardware,
        precision: str,
        sizes: BatchSizes,
        stages_at: StagesAt | None,
    ):
        self.programs, self.hardware, self.precision = programs, hardware, precision
        self.sizes, self.stages_at = sizes, stages_at
        self.ranges = programs[0].interface.sizes
        self._simulated: dict[tuple[tuple[str, int], ...], Timeline] = {}

    @functools.cached_property
    def expressions(self) -> StageExpressions:
        """Raises `PlanError` for a job that was read from files, which have no expressions."""
        if self.stages_at is None:
            raise PlanError(
                "costs at other sizes need the model's graph, which files do not have: ask the job that compile made"
            )
        return StageExpressions(self.stages_at, self.ranges, self.sizes.rows)

    def simulate(self, sizes: Sizes) -> Timeline:
        """A step whose micro-batches all have these sizes; those that are not given have the most. Raises `PlanError`
        for sizes that the plan does not have."""
        for name, size in sizes.items():
            if name not in self.ranges:
                raise PlanError(f"simulate({name}={size}): the sizes that differ are {', '.join(self.ranges)}")
            if size not in self.ranges[name]:
                of = self.ranges[name]
                raise PlanError(f"simulate({name}={size}): a micro-batch was compiled for {of.least} to {of.most}")
        whole = {name: sizes.get(name, of.most) for name, of in self.ranges.items()}
        key = tuple(whole.items())
        if key not in self._simulated:
            is_largest = all(size == self.ranges[name].most for name, size in key)
            programs = self.programs if is_largest else resize(self.programs, self.expressions.evaluate(whole), whole)
            self._simulated[key] = simulate_here(programs, self.hardware, self.precision)
        return self._simulated[key]

    @property
    def length(self) -> str:
        """The size that is a length. Raises `PlanError` where it is not clear which one is."""
        names = [name for name in self.ranges if name != self.sizes.rows]
        if len(names) != 1:
            raise PlanError(f"the sizes {', '.join(self.ranges)} are not one length and a number of rows")
        return names[0]

    def throughput(self, lengths: Iterable[Any]) -> Throughput:
        """`lengths`: of the batches to come, as whole numbers, or the batches themselves (a loader). Raises `PlanError`
        where a length is beyond what was compiled, or there is none."""
        name = self.length
        counts = Counter(_lengths(lengths))
        if not counts:
            raise PlanError("lengths is empty; hand over the lengths of some batches, or a loader")
        rows = next(s.shape[0] for s in self.programs[0].interface.batch.values() if name in s.dims)
        each = rows * self.programs[0].interface.total_micro_batches  # tokens of a batch for each of its length
        total_s = sum(n * self.simulate({name: length}).step_s for length, n in counts.items())
        tokens = sum(n * length for length, n in counts.items()) * each
        steps = counts.total()
        return Throughput(
            tokens_per_s=tokens / total_s,
            padded_tokens_per_s=tokens / (steps * self.simulate({}).step_s),
            mean_step_s=total_s / steps,
            mean_length=tokens / each / steps,
        )

    def table(self) -> str:
        """Steps of a few lengths, for `explain`."""
        name = self.length
        of = self.ranges[name]
        rows = []
        for length in sorted({max(of.least, of.most * part // 8) for part in (1, 2, 4, 8)}):
            found, step_s = self.throughput([length]), self.simulate({name: length}).step_s
            rows.append(f"  {name} {length:6}: {format_seconds(step_s)} a step, {found.tokens_per_s:,.0f} tokens/s")
        return "\n".join([f"steps of other lengths ({of.least} to {of.most}; memory is for the most)", *rows])


def resize(programs: Sequence[Program], stages: Mapping[str, StageSpec], sizes: Sizes) -> list[Program]:
    """The programs with the stages' costs, and all shapes, at these sizes."""
    found = []
    for program in programs:
        batch = {name: row.with_sizes(sizes) for name, row in program.interface.batch.items()}
        made = program.copy().with_interface(stages=dict(stages), batch=batch)
        infer_all(made)
        found.append(made)
    return found


def _lengths(given: Iterable[Any]) -> Iterator[int]:
    """Lengths as they are, or the second dimension of the first tensor of a batch that has one."""
    for each in given:
        if isinstance(each, int):
            yield each
            continue
        length = next((t.shape[1] for t in tree_leaves(each) if isinstance(t, Tensor) and t.dim() > 1), None)
        if length is None:
            raise PlanError(f"lengths has a {type(each).__name__}, which is neither a length nor a batch with one")
        yield int(length)
