"""A lower bound for all numbers of stages at once: a program over what each device holds in all.

In: a `MipProblem`, a range of numbers of stages, for some devices whether they are resident, and how many are. Out:
seconds that no such partition is faster than. Per device and kind of block it has the blocks that the device holds and
those whose saved tensors stay until their backward; each device has a whole number of blocks in all. A device works for
all micro-batches of all its blocks; whatever the stages,

    G >= fill_d + M F_d + after_d              H >= G + before_d + M B_d + drain_d

where G is the end of forward, H that of stage 1's last backward, F_d and B_d the seconds of device d's blocks for one
micro-batch. The first micro-batch passes the stages before d's first one (fill), the last one those after its last
one (after), and backward the same in reverse: these hold at least one block each, so at least the first, or last,
blocks of the model. Memory bounds how many saved tensors may stay (all others run their forward again), root complexes
what swapped devices fetch, and the update follows H: on the device for resident ones, on the host for all others. The
order of the blocks between the ends is left out, so blocks of one kind are one row however many runs they form. The
first micro-batch also passes all stages, and the others the one that takes longest,

    G >= sum F_d + (S - 1) c + (M - 1) t           t >= sum F_d / S

the same for backward, where S, the number of stages, is a variable. Both 1 / S and the sum of the S - 1 least messages
are convex, so tangents bound them from below. A `Largest` stage says more of t. If one with at least `least` blocks
runs its forward again, all micro-batches pass it; if none does, those that do are smaller, so that there are more of
them. Where devices can take each other's places, one program speaks of all choices of resident ones (`anywhere`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mip
import numpy as np

from .closed_form import fastest
from .limits import ANY_LARGEST, BlockLimits, Largest

GB = 1e9


TANGENTS = 7  # of 1 / S, and of what grows with S


class TotalsModel:
    """`model` minimises `end`, for every number of stages from `fewest` to `count`. `residents`: by device; with
    `anywhere`, `number` of the devices, which can take each other's places, are resident. `largest`: of the stages.
    `kept`: the most common blocks that keep their saved tensors."""

    def __init__(
        self,
        limits: BlockLimits,
        fewest: int,
        count: int,
        residents: Sequence[bool | None],
        number: int | None = None,
        anywhere: bool = False,
        largest: Largest = ANY_LARGEST,
        kept: float = math.inf,
    ):
        p = limits.p
        self.limits, self.p, self.fewest, self.n, self.m = limits, p, fewest, len(p.units), p.micro_batches
        self.count, self.anywhere, self.of_largest = count, anywhere, largest
        if anywhere:
            residents, number = [d < (number or 0) for d in range(self.n)], None
        self.swapped = self.n if None in residents else residents.count(False)  # devices at most
        self.used = min(self.n, count)  # devices that may have a stage
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
        if kept < math.inf:
            keeping = [held[part] for held in self.held for part in ("kept", "saved") if part in held]
            self.row(kept, mip.xsum(each[limits.common] for each in keeping))
        self.end = self.real()
        self.model.objective = self.end
        self.points = sorted({round(fewest * (count / fewest) ** (i / (TANGENTS - 1))) for i in range(TANGENTS)})
        self.stages = self.num_stages()
        self.memory()
        self.time()

    def real(self) -> Any:
        return self.model.add_var(lb=0.0)

    def row(self, left: Any, right: Any) -> None:
        """left >= right"""
        self.model += left >= right

    def rounds(self, d: int) -> int:
        """The least number of stages of device d."""
        return self.fewest // self.n if self.anywhere else len(range(d, self.fewest, self.n))

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
        if not self.anywhere:
            self.row(self.number(0, kinds[0]), 1)

    def number(self, d: int, kind: int) -> Any:
        """The number of blocks of a kind that device d has."""
        return mip.xsum(self.held[d][part][kind] for part in ("stay", "swap") if part in self.held[d])

    def amount(self, d: int, parts: Sequence[str], sums: Sequence[float], unit: float = GB) -> Any:
        """The sum of an amount over some blocks of device d."""
        return mip.xsum(
            (sums[self.first[k] + 1] - sums[self.first[k]]) / unit * x
            for part in parts
            if part in self.held[d]
            for k, x in self.held[d][part].items()
        )

    def add_windows(self, stages: Any) -> None:
        """All stages but the first x have only blocks after the first x, and all but the last x those before the last
        x: bound the number of blocks of these kinds on each device from below."""
        kinds, length, known = self.p.kinds, self.p.num_blocks, set[frozenset[int]]()
        for x in range(1, length):
            for some in (frozenset(kinds[x:]), frozenset(kinds[: length - x])):
                if some not in known and len(some) < len(self.blocks):
                    known.add(some)
                    for d in range(self.used):
                        number = mip.xsum(self.number(d, k) for k in some)
                        self.row(number, (1 / self.n) * (stages - x - self.n + 1))

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> None:
        """All stages begin with different blocks, each of which brings its inputs for all micro-batches."""
        p, m = self.p, self.m
        scratch, ending = min(self.limits.scratches) / GB, self.limits.scratches[-1] / GB  # of any, of the last stage
        once, again = [0.0, *accumulate(self.limits.added)], [(m - 1) * kept for kept in p.kept_bytes]
        least = sorted(self.limits.entering)
        most = max(max(row) for row in p.input_bytes[1:]) * m / GB
        inputs = [self.real() for _ in range(self.used)]
        for point in self.points:
            more = least[point - 1] * (self.stages - point)
            self.row(mip.xsum(inputs), m / GB * (math.fsum(least[:point]) + more))
        for d in range(self.used):
            budget = p.units[d].budget_bytes / GB
            self.row(most * len(range(0 if self.anywhere else d, p.num_blocks, self.n)), inputs[d])
            self.row(inputs[d], math.fsum(least[: self.rounds(d)]) * m / GB)
            free = budget - scratch - inputs[d] - (ending - scratch) * self.last[d]
            if "stay" in self.held[d]:
                lasting = self.amount(d, ["stay"], p.weight_bytes)
                lasting = lasting + p.update.state_bytes * self.amount(d, ["stay"], p.params)
                held = lasting + self.amount(d, ["kept"], once) + self.amount(d, ["kept"], again)
                self.row(free + budget * (1 - self.resident[d]), held)
                self.row((budget - scratch) * self.resident[d], held)  # weaker where it is resident, else stronger
                self.row(budget * self.resident[d], lasting + self.amount(d, ["stay"], p.grad_bytes))
            if "swap" in self.held[d]:
                for part in ("tail", "saved"):
                    held = self.amount(d, [part], p.weight_bytes) + self.amount(d, [part], p.grad_bytes)
                    held = held + self.amount(d, [part], once)
                    held = held + (self.amount(d, [part], again) if part == "saved" else 0.0)
                    self.row(free + budget * self.resident[d], held)
                    self.row((budget - scratch) * (1 - self.resident[d]), held)

    # -- time -----------------------------------------------------------------------------------------------------

    def time(self) -> None:
        forward_end, backward_end = self.real(), self.real()
        f, b = self.seconds()
        if self.anywhere:
            self.works_anywhere(forward_end, backward_end, f, b)
        else:
            self.works(forward_end, backward_end, f, b)
        self.passes(forward_end, backward_end, mip.xsum(f), mip.xsum(b))
        self.links(backward_end)
        self.update(forward_end, backward_end)

    def seconds(self) -> tuple[list[Any], list[Any]]:
        """By device, forward and backward of its blocks for one micro-batch."""
        p, devices, held = self.p, range(self.used), ("stay", "swap")
        forward = [self.amount(d, held, p.forward_s[d], 1.0) for d in devices]
        backward = [self.amount(d, held, np.add(p.backward_s[d], p.again_s[d]).tolist(), 1.0) for d in devices]
        return forward, [b - self.amount(d, ("kept", "saved"), p.again_s[d], 1.0) for d, b in enumerate(backward)]

    def works(self, forward_end: Any, backward_end: Any, forward: Sequence[Any], backward: Sequence[Any]) -> None:
        """Each device for all of its blocks, but while the first and the last micro-batch are elsewhere."""
        p, m = self.p, self.m
        first, last = fastest(p.forward_s), fastest(p.backward_s)
        there, back = (self.hop_s(step) for step in (1, -1))
        for d, (f, b) in enumerate(zip(forward, backward)):
            own_s = self.rounds(d) * p.units[d].own_s
            fill = drain = 0.0
            after = before = 0.0
            if self.fewest > d:  # else it may have no stage, and waits for nothing
                fill = math.fsum(first[:d]) + d * there
                drain = math.fsum(last[:d]) + d * back
            if self.fewest >= self.n:
                for e in range(self.used):
                    num = (e - d) % self.n  # the number of stages after d's last one if the last one is e's
                    after = after + (math.fsum(first[len(first) - num :]) + num * there) * self.last[e]
                    before = before + (math.fsum(last[len(last) - num :]) + num * back) * self.last[e]
            self.row(forward_end, fill + m * (f + own_s) + after)
            self.row(backward_end, forward_end + before + m * (b + own_s) + drain)

    def works_anywhere(self, forward_end: Any, backward_end: Any, forward: list[Any], backward: list[Any]) -> None:
        """The same where devices may be in any place: together they wait as long as the same number of devices in the
        places where that is shortest."""
        p, m, n = self.p, self.m, self.n
        own_s = self.fewest // n * p.units[0].own_s
        stays = [d for d in range(n) if "stay" in self.held[d]]
        groups = [[d] for d in range(n)] + [stays, [d for d in range(n) if d not in stays], [*range(n)]]
        for group in groups:
            alone_s = []
            for sums, step in ((p.forward_s, 1), (p.backward_s, -1)):
                took, hop_s = fastest(sums), self.hop_s(step)
                ways = (took[:d] for d in range(n)), (took[len(took) - d :] for d in range(n))
                waits = [sorted(math.fsum(blocks) + d * hop_s for d, blocks in enumerate(way)) for way in ways]
                alone_s.append(math.fsum(math.fsum(way[: len(group)]) for way in waits))
            f, b = (mip.xsum(took[d] + own_s for d in group) for took in (forward, backward))
            self.row(len(group) * forward_end, alone_s[0] + m * f)
            self.row(len(group) * backward_end, len(group) * forward_end + alone_s[1] + m * b)

    def passes(self, forward_end: Any, backward_end: Any, forward: Any, backward: Any) -> None:
        """One micro-batch passes all stages, and the others the longest."""
        p, m, own_s = self.p, self.m, min(unit.own_s for unit in self.p.units)
        stages, points, least_s = self.stages, self.points, self.limits.common_s(self.of_largest)
        sides = ((p.forward_s, forward, 0.0, forward_end, 1), (p.backward_s, backward, forward_end, backward_end, -1))
        for (sums, took, begin, end, step), common_s in zip(sides, least_s):
            least = fastest(sums)
            whole_s, longest = math.fsum(least), self.model.add_var(lb=max(common_s, *least))
            for d in (d for d in range(self.used) if "tail" in self.held[d]):  # one stage
                tail_s = self.amount(d, ["tail"], sums[d], 1.0)
                if step == -1:
                    tail_s += self.amount(d, ["tail"], p.again_s[d], 1.0) - self.amount(d, ["saved"], p.again_s[d], 1.0)
                self.row(longest, tail_s)
            for point in points:
                share = whole_s / point - whole_s / point**2 * (stages - point)
                self.row(longest, share + (1 / self.count) * (took - whole_s))
            self.row(end, begin + took + m * own_s + self.hops_s(step) + (m - 1) * longest)

    def hops_s(self, step: int) -> Any:
        """The least seconds of all stages' own but one, and of the messages over all cuts."""
        p, own_s = self.p, min(unit.own_s for unit in self.p.units)
        ways = [(d, (d + step) % self.n) for d in range(self.n)]
        latency_s, byte_s = min(p.message_latency_s[d][e] for d, e in ways), min(p.message_s[d][e] for d, e in ways)
        sizes, messages_s = sorted(p.message_bytes[1:-1]), self.real()
        for cuts in (point - 1 for point in self.points):
            more = byte_s * max(sizes[:cuts], default=0.0) * (self.stages - 1 - cuts)
            self.row(messages_s, byte_s * math.fsum(sizes[:cuts]) + more)
        return messages_s + (own_s + latency_s) * (self.stages - 1)

    def num_stages(self) -> Any:
        """The number of stages, as a variable. Each has a block at least."""
        stages, kind, number = self.model.add_var(lb=self.fewest, ub=self.count), self.limits.common, self.blocks
        least, most = self.of_largest.least, self.of_largest.most
        for d in range(self.used):
            num = self.n - 1 if self.anywhere else d  # where it has fewest of them
            self.row(mip.xsum(self.number(d, k) for k in number), (1 / self.n) * (stages - num))
        self.add_windows(stages)
        if most is not None:
            self.row(most * stages, number[kind])
        if self.of_largest.reruns is False:
            kept = mip.xsum(held[part][kind] for held in self.held for part in ("kept", "saved") if part in held)
            again = self.model.add_var(lb=0.0, ub=self.count if least > 1 else 0.0)  # stages with common blocks
            self.row((least - 1) * again, number[kind] - kept)
            self.row(stages, again)
            if most is not None:
                self.row(most * stages - (most - least + 1) * again, number[kind])
        return stages

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
        complexes = len({unit.complex for unit in p.units}) if self.anywhere else 1  # through all of them together
        for d in range(self.used):
            unit = p.units[d]
            fetched = 2 * GB * self.amount(d, ["swap"], p.weight_bytes) - GB * self.amount(d, ["tail"], p.weight_bytes)
            self.row(backward_end, unit.fetch_s * fetched)
            key = 0 if self.anywhere else unit.complex
            passed[key] = passed.get(key, 0.0) + unit.shared_fetch_s * fetched
        for work in passed.values():
            self.row(complexes * backward_end, work)

    def update(self, forward_end: Any, backward_end: Any) -> None:
        """On the host for swapped stages: with a barrier after all of backward, else after all of forward at least."""
        p = self.p
        work: dict[int, Any] = {}
        self.row(self.end, backward_end)
        for d in range(self.used):
            unit = p.units[d]
            took = p.update.params_s[unit.host] * GB * self.amount(d, ["swap"], p.params)
            if p.update.barrier:
                took = took + p.update.clip_s(unit.host, self.swapped) * GB * self.amount(d, ["swap"], p.grad_bytes)
                clip_s = 2 * unit.byte_s * self.amount(d, ["stay"], p.grad_bytes)
                self.row(self.end, backward_end + GB * (clip_s + unit.step_s * self.amount(d, ["stay"], p.params)))
            work[unit.host] = work.get(unit.host, 0.0) + took
        for took in work.values():
            self.row(self.end, (backward_end if p.update.barrier else forward_end) + took)
