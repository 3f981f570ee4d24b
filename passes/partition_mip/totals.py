"""A lower bound for all numbers of stages at once: a program over what each device holds in all.

In: a `MipProblem`, a range of numbers of stages, for some devices whether they are resident, and how many are. Out:
seconds that no such partition is faster than. Per device and kind of block it has the blocks that the device holds and
those whose saved tensors stay until their backward; each device has a whole number of blocks in all. A device works for
all micro-batches of all its blocks; whatever the stages,

    G >= fill_d + M F_d + after_d              H >= G + before_d + M B_d + drain_d

where G is the end of forward, H that of stage 1's last backward, F_d and B_d the seconds of device d's blocks for one
micro-batch. The first micro-batch passes the stages before d's first one (fill), the last one those behind its last
one (after), and backward the same in reverse: these hold at least one block each, so at least the first, or last,
blocks of the model. Memory bounds how many saved tensors may stay (all others run their forward again), root complexes
what swapped devices fetch, and the update follows H: on the device for resident ones, on the host for all others. The
order of the blocks between the ends is left out, so blocks of one kind are one row however many runs they form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mip

from .limits import BlockLimits

GB = 1e9


class TotalsModel:
    """`model` minimises `end`, for every number of stages from `fewest` to `most`. `residents`: by device."""

    def __init__(
        self,
        limits: BlockLimits,
        fewest: int,
        most: int,
        residents: Sequence[bool | None],
        number: int | None = None,
    ):
        p = limits.p
        self.limits, self.p, self.fewest, self.n, self.m = limits, p, fewest, len(p.units), p.micro_batches
        self.used = min(self.n, most)  # devices that may have a stage
        self.blocks = Counter(p.kinds)
        self.first = {kind: p.kinds.index(kind) for kind in self.blocks}
        self.model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.HIGHS)
        self.model.verbose = 0
        self.resident = [
            self.model.add_var(var_type=mip.BINARY) if stays is None else int(stays) for stays in residents[: self.used]
        ]
        if number is not None and None in residents[: self.used]:
            self.model += mip.xsum(self.resident) == number
        self.last = [self.model.add_var(var_type=mip.BINARY) for _ in range(self.used)]  # whose stage is the last one
        self.model += mip.xsum(self.last) == 1
        self.held = [self.place(residents[d], self.resident[d]) for d in range(self.used)]
        self.everything_somewhere()
        self.end = self.real()
        self.model.objective = self.end
        self.memory()
        self.time()

    def real(self) -> Any:
        return self.model.add_var(lb=0.0)

    def row(self, left: Any, right: Any) -> None:
        """left >= right"""
        self.model += left >= right

    def rounds(self, d: int) -> int:
        """The least number of stages of device d."""
        return len(range(d, self.fewest, self.n))

    # -- which blocks ---------------------------------------------------------------------------------------------

    def place(self, stays: bool | None, resident: Any) -> dict[str, dict[int, Any]]:
        """Blocks by kind: `stay` on a resident device, `kept` of them with saved tensors; `swap`ped ones, those of the
        device's `tail` (its last stage), which is not fetched again, `saved` of them with saved tensors."""
        parts = (*(("stay", "kept") if stays is not False else ()), *(("swap", "tail", "saved") if not stays else ()))
        found: dict[str, dict[int, Any]] = {
            part: {k: self.model.add_var(lb=0.0, ub=size) for k, size in self.blocks.items()} for part in parts
        }
        for k, size in self.blocks.items():
            if stays is None:
                self.row(size * resident, found["stay"][k])
                self.row(size * (1 - resident), found["swap"][k])
            for part, whole in (("kept", "stay"), ("tail", "swap"), ("saved", "tail")):
                if part in found:
                    self.row(found[whole][k], found[part][k])
        return found

    def everything_somewhere(self) -> None:
        kinds = self.p.kinds
        for k, size in self.blocks.items():
            self.model += mip.xsum(self.number(d, k) for d in range(self.used)) == size
        for d, held in enumerate(self.held):
            whole = self.model.add_var(lb=self.rounds(d), ub=self.p.num_blocks, var_type=mip.INTEGER)
            self.model += whole == mip.xsum(self.number(d, k) for k in self.blocks)
            ending = [held[part][kinds[-1]] for part in ("stay", "tail") if part in held]
            self.row(mip.xsum(ending), self.last[d])
        self.row(self.number(0, kinds[0]), 1)

    def number(self, d: int, kind: int) -> Any:
        """How many blocks of a kind device d has."""
        return mip.xsum(self.held[d][part][kind] for part in ("stay", "swap") if part in self.held[d])

    def of(self, d: int, parts: Sequence[str], sums: Sequence[float], unit: float = GB) -> Any:
        """The sum of an amount over some blocks of device d."""
        return mip.xsum(
            (sums[self.first[k] + 1] - sums[self.first[k]]) / unit * x
            for part in parts
            if part in self.held[d]
            for k, x in self.held[d][part].items()
        )

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> None:
        """All stages begin with different blocks, each of which brings its inputs for all micro-batches."""
        p, m = self.p, self.m
        scratch, ending = min(self.limits.scratches) / GB, self.limits.scratches[-1] / GB  # of any, of the last stage
        once, again = [0.0, *accumulate(self.limits.added)], [(m - 1) * kept for kept in p.kept_bytes]
        least = sorted(self.limits.entering)
        most = max(max(row) for row in p.input_bytes[1:]) * m / GB
        inputs = [self.real() for _ in range(self.used)]
        self.row(mip.xsum(inputs), math.fsum(least[: self.fewest]) * m / GB)
        for d in range(self.used):
            budget = p.units[d].budget_bytes / GB
            self.row(most * len(range(d, p.num_blocks, self.n)), inputs[d])
            self.row(inputs[d], math.fsum(least[: self.rounds(d)]) * m / GB)
            free = budget - scratch - inputs[d] - (ending - scratch) * self.last[d]
            if "stay" in self.held[d]:
                lasting = self.of(d, ["stay"], p.weight_bytes) + p.update.state_bytes * self.of(d, ["stay"], p.params)
                held = lasting + self.of(d, ["kept"], once) + self.of(d, ["kept"], again)
                self.row(free + budget * (1 - self.resident[d]), held)
                self.row((budget - scratch) * self.resident[d], held)  # weaker where it is resident, else stronger
                self.row(budget * self.resident[d], lasting + self.of(d, ["stay"], p.grad_bytes))
            if "swap" in self.held[d]:
                for part in ("tail", "saved"):
                    held = self.of(d, [part], p.weight_bytes) + self.of(d, [part], p.grad_bytes)
                    held = held + self.of(d, [part], once) + (self.of(d, [part], again) if part == "saved" else 0.0)
                    self.row(free + budget * self.resident[d], held)
                    self.row((budget - scratch) * (1 - self.resident[d]), held)

    # -- time -----------------------------------------------------------------------------------------------------

    def time(self) -> None:
        p, m = self.p, self.m
        forward_end, backward_end = self.real(), self.real()
        forward, backward = _fastest(p.forward_s), _fastest(p.backward_s)
        there, back = (self.hop_s(step) for step in (1, -1))
        for d in range(self.used):
            own_s = self.rounds(d) * p.units[d].own_s
            f = self.of(d, ("stay", "swap"), p.forward_s[d], 1.0) + own_s
            b = self.of(d, ("stay", "swap"), p.backward_s[d], 1.0) + own_s
            b = b + self.of(d, ("stay", "swap"), p.again_s[d], 1.0) - self.of(d, ("kept", "saved"), p.again_s[d], 1.0)
            fill = drain = 0.0
            after = before = 0.0
            if self.fewest > d:  # else it may have no stage, and waits for nothing
                fill = math.fsum(forward[:d]) + d * there
                drain = math.fsum(backward[:d]) + d * back
            if self.fewest >= self.n:
                for e in range(self.used):
                    behind = (e - d) % self.n  # the number of stages behind d's last one if the last one is e's
                    after = after + (math.fsum(forward[len(forward) - behind :]) + behind * there) * self.last[e]
                    before = before + (math.fsum(backward[len(backward) - behind :]) + behind * back) * self.last[e]
            self.row(forward_end, fill + m * f + after)
            self.row(backward_end, forward_end + before + m * b + drain)
        self.links(backward_end)
        self.update(forward_end, backward_end)

    def hop_s(self, step: int) -> float:
        """The least seconds of a stage's own, and of a message to the next one."""
        p, n = self.p, self.n
        size = min(p.message_bytes[1:-1], default=0.0)
        ways = [(d, (d + step) % n) for d in range(n)]
        message_s = min(p.message_latency_s[d][e] + size * p.message_s[d][e] for d, e in ways)
        return min(unit.own_s for unit in p.units) + message_s

    def links(self, backward_end: Any) -> None:
        """Swapped weights are fetched twice, but those of each device's last stage."""
        p = self.p
        passed: dict[int, Any] = {}
        for d in range(self.used):
            unit = p.units[d]
            fetched = 2 * GB * self.of(d, ["swap"], p.weight_bytes) - GB * self.of(d, ["tail"], p.weight_bytes)
            self.row(backward_end, unit.fetch_s * fetched)
            passed[unit.complex] = passed.get(unit.complex, 0.0) + unit.shared_fetch_s * fetched
        for work in passed.values():
            self.row(backward_end, work)

    def update(self, forward_end: Any, backward_end: Any) -> None:
        """On the host for swapped stages: with a barrier after all of backward, else after all of forward at least."""
        p = self.p
        work: dict[int, Any] = {}
        self.row(self.end, backward_end)
        for d in range(self.used):
            unit = p.units[d]
            took = p.update.params_s[unit.host] * GB * self.of(d, ["swap"], p.params)
            if p.update.barrier:
                took = took + p.update.clip_s(unit.host, self.n) * GB * self.of(d, ["swap"], p.grad_bytes)
                clip_s = 2 * unit.byte_s * self.of(d, ["stay"], p.grad_bytes)
                self.row(self.end, backward_end + GB * (clip_s + unit.step_s * self.of(d, ["stay"], p.params)))
            work[unit.host] = work.get(unit.host, 0.0) + took
        for took in work.values():
            self.row(self.end, (backward_end if p.update.barrier else forward_end) + took)


def _fastest(sums: list[list[float]]) -> list[float]:
    """Per block its time on the fastest device."""
    return [min(row[i + 1] - row[i] for row in sums) for i in range(len(sums[0]) - 1)]
