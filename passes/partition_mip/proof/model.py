"""The linear model of a partition into a fixed number of stages, for python-mip.

In: a `MipProblem`, a number of stages S, and the devices that stay resident. Out: a model whose only integers are
counts: how many blocks of each run of identical ones a stage holds. Then T^f, T^b, W and the memory of a stage are
linear and the schedule of the first and the last micro-batch is a longest path, so no big M is needed (the rows are
those of `recurrence`; about 8 S reals and 14 S rows). Every row is a lower bound of the recurrence, so the model's
optimum, also that of its relaxation, is a lower bound of every partition into S stages:
- rematerialised blocks are a share of their stage where saved tensors may stay;
- memory counts gradients and saved tensors, and of workspace, inputs and messages the smallest of the model;
- with `largest` it speaks of the partitions whose largest stage has that many common blocks;
- with `kept` no more of these keep their saved tensors than whole devices and stages can (`most_kept`);
- with `left` it speaks of the partitions whose stages are such intervals of blocks;
- with `fewest` below S it is a bound also for S - N, S - 2N, ... down to `fewest`: the first S - fewest stages may
  be empty, and nothing is charged for their mere existence.
Amounts are in seconds and GB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mip

from .limits import ANY_LARGEST, BlockIntervals, BlockLimits, Largest, StageLimits
from .order import PassedRuns

GB = 1e9
MOST_PLACES = 2500  # runs times stages: of more, order is left out of a relaxation
MOST_RUNS = 12  # of more runs of identical blocks the order is left out, and blocks of one kind are one row


@dataclass(frozen=True)
class CountScope:
    """The partitions that a model speaks of; see the module's docstring."""

    fewest: int | None = None
    cutoff_s: float = math.inf
    largest: Largest = ANY_LARGEST
    kept: float = math.inf
    left: BlockIntervals | None = None


class CountModel:
    """`model` minimises `end`; `cuts` reads a solution. `scope`: the fields of `CountScope`."""

    def __init__(
        self,
        limits: BlockLimits,
        count: int,
        resident: Sequence[bool],
        integer: bool = False,
        ordered: bool = False,
        whole: bool = False,
        **scope: Any,
    ):
        p, within = limits.p, CountScope(**scope)
        self.p, self.count, self.n, self.m = p, count, len(p.units), p.micro_batches
        self.resident = resident
        self.idle = count - (count if within.fewest is None else within.fewest)  # stages that may be empty
        self.model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.HIGHS)
        self.model.verbose = 0
        self.kind = mip.INTEGER if integer else mip.CONTINUOUS
        runs = p.runs()
        if ordered and not integer and len(p.short_runs()) * count <= MOST_PLACES:
            runs, self.ordered = p.short_runs(), True
        else:
            self.ordered = len(runs) <= MOST_RUNS
        self.runs = runs if self.ordered else [(p.kinds.index(k), size) for k, size in Counter(p.kinds).items()]
        self.of_largest = within.largest
        self.limits, self.left = limits, within.left
        self.stages = StageLimits(limits, count, resident, self.idle, within.cutoff_s, within.left)
        self.counts: list[dict[int, Any]] = []
        self.again: list[dict[int, Any]] = []
        self.place_blocks()
        if whole:
            self.whole_on_devices()
        self.bound_the_largest()
        if within.kept < math.inf:
            common = [r for r, (at, _) in enumerate(self.runs) if p.kinds[at] == limits.common]
            pairs = zip(self.counts, self.again)
            self.row(within.kept, mip.xsum(mine[r] - again[r] for mine, again in pairs for r in common if r in mine))
        if integer and self.ordered:
            self.keep_order()
        self.passed = PassedRuns(self) if ordered and self.ordered and not integer else None
        self.stage_sums()
        self.end = self.real()
        self.model.objective = self.end
        self.rooms()
        self.forward()
        self.backward()
        self.update()
        if within.largest.least:
            self.pass_the_largest()

    def real(self) -> Any:
        return self.model.add_var(lb=0.0)

    def row(self, left: Any, right: Any) -> None:
        """left >= right"""
        self.model += left >= right

    # -- which blocks ---------------------------------------------------------------------------------------------

    def place_blocks(self) -> None:
        p = self.p
        for j in range(self.count):
            mine = {}
            window, most = self.stages.windows[j], self.stages.most[j]
            there = set(p.kinds[window.start : window.stop])
            for r, (at, size) in enumerate(self.runs):
                if window.start < at + size and at < window.stop if self.ordered else p.kinds[at] in there:
                    mine[r] = self.model.add_var(lb=0.0, ub=min(size, most), var_type=self.kind)
            self.counts.append(mine)
            if self.stages.fewest[j]:
                self.row(mip.xsum(mine.values()), self.stages.fewest[j])
            if most < len(window):
                self.row(most, mip.xsum(mine.values()))
        for r, (_, size) in enumerate(self.runs):
            self.model += mip.xsum(mine[r] for mine in self.counts if r in mine) == size
        for j, mine in enumerate(self.counts):
            keepable = [r for r in mine if self.stages.keeps(j, self.runs[r][0])]
            self.again.append({r: self.model.add_var(lb=0.0) if r in keepable else mine[r] for r in mine})
            keeps = self.model.add_var(var_type=mip.BINARY) if self.kind == mip.INTEGER and keepable else None
            for r in keepable:
                self.row(mine[r], self.again[j][r])
                if keeps is not None:  # a stage keeps the saved tensors of all its blocks, or none
                    self.row(self.runs[r][1] * keeps, mine[r] - self.again[j][r])
                    self.row(self.runs[r][1] * (1 - keeps), self.again[j][r])
            if keeps is not None and len(keepable) < len(mine):
                for r in mine.keys() - set(keepable):
                    self.row(self.runs[r][1] * (1 - keeps), mine[r])

    def whole_on_devices(self) -> None:
        """Each device has a whole number of blocks in all."""
        for d in range(min(self.n, self.count)):
            number = self.model.add_var(lb=0, ub=self.p.num_blocks, var_type=mip.INTEGER)
            self.model += number == mip.xsum(x for mine in self.counts[d :: self.n] for x in mine.values())

    def bound_the_largest(self) -> None:
        """No stage has more than `most` of the common blocks; and one that runs its forward again has fewer than
        `least`, if none as large as that does: the hull of the two cases."""
        common = {r for r, (at, _) in enumerate(self.runs) if self.p.kinds[at] == self.limits.common}
        least, most = self.of_largest.least, self.of_largest.most
        for j, mine in enumerate(self.counts):
            here = mine.keys() & common
            number = mip.xsum(mine[r] for r in here)
            if here and most is not None:
                self.row(most, number)
            whole = min(self.stages.most[j], self.limits.num_common if most is None else most)
            if here and self.of_largest.reruns is False and whole >= least:
                again = mip.xsum(self.again[j][r] for r in here)
                self.row((least - 1) * whole, (whole - least + 1) * again + (least - 1) * number)

    def keep_order(self) -> None:
        """A run begins in no stage before the one in which the run before it ends."""
        for r in range(len(self.runs) - 1):
            size, following = self.runs[r][1], self.runs[r + 1][1]
            for j in range(self.count):
                done = mip.xsum(mine[r] for mine in self.counts[: j + 1] if r in mine)
                begun = mip.xsum(mine[r + 1] for mine in self.counts[: j + 1] if r + 1 in mine)
                if r + 1 in self.counts[j] or r in self.counts[j]:
                    over = self.model.add_var(var_type=mip.BINARY)
                    self.row(done, size * over)
                    self.row(following * over, begun)

    def stage_sums(self) -> None:
        p = self.p
        firsts = [at for at, _ in self.runs]
        self.tf: list[Any] = []
        self.tb: list[Any] = []
        self.w: list[Any] = []
        self.g: list[Any] = []
        self.q: list[Any] = []
        self.calls: list[Any] = []
        self.kept: list[Any] = []
        self.work: list[Any] = []  # besides weights and gradients, for one micro-batch
        self.crossing: list[Any] = []  # GB of a message into the stage
        self.links: list[dict[str, tuple[Any, Any]]] = []  # by amount: its variable and the row that defines it

        def sum_of(sums: Sequence[float], mine: dict[int, Any], unit: float = 1.0) -> Any:
            each = [(sums[firsts[r] + 1] - sums[firsts[r]]) / unit for r in mine]
            return mip.LinExpr([*mine.values()], each)  # far faster than a sum of products

        for j, mine in enumerate(self.counts):
            d = j % self.n
            own_s = p.units[d].own_s if j >= self.idle else 0.0
            kept = sum_of(p.kept_bytes, mine, GB) - sum_of(p.kept_bytes, self.again[j], GB)
            sums = (
                ("forward", self.tf, sum_of(p.forward_s[d], mine) + own_s),
                ("backward", self.tb, sum_of(p.backward_s[d], mine) + sum_of(p.again_s[d], self.again[j]) + own_s),
                ("weights", self.w, sum_of(p.weight_bytes, mine, GB)),
                ("grads", self.g, sum_of(p.grad_bytes, mine, GB)),
                ("params", self.q, sum_of(p.params, mine, GB)),
                ("calls", self.calls, sum_of(p.tensors, mine)),
                ("kept", self.kept, kept),
            )
            self.links.append({})
            for name, rows, amount in sums:
                total = self.real()
                self.links[j][name] = (total, self.model.add_constr(total == amount))
                rows.append(total)
            once = mip.LinExpr([*mine.values()], [self.limits.added[firsts[r]] / GB for r in mine])
            self.work.append(self.bounded_amount("work", j, once + self.scratch(j)))
            self.crossing.append(0.0)
            if j > self.idle:
                at, end = self.stages.cuts(j)
                first = p.message_bytes[at : end + 1]
                least = [self.passed.lower_mean(j, [x / GB for x in p.message_bytes])] if self.passed else []
                self.crossing[j] = self.bounded_amount("message", j, self.largest([min(first) / GB, *least]))

    def largest(self, amounts: Sequence[Any]) -> Any:
        if len(amounts) == 1:
            return amounts[0]
        found = self.real()
        for amount in amounts:
            self.row(found, amount)
        return found

    def bounded_amount(self, name: str, j: int, least: Any) -> Any:
        """An amount of stage j, known from below; where blocks are unlike, `IntervalTables` may know it better."""
        if not self.limits.unlike:
            return least
        amount = self.model.add_var(lb=-math.inf)
        self.links[j][name] = (amount, self.model.add_constr(amount >= least))
        return amount

    # -- memory ---------------------------------------------------------------------------------------------------

    def rooms(self) -> None:
        """Per swapped device what its activations leave for weights (eq. 4, 5); a resident one holds everything."""
        p, n, m = self.p, self.n, self.m
        entering = self.entering()
        self.room: list[Any] = []
        for d in range(min(n, self.count)):
            stages = range(d, self.count, n)
            budget = p.units[d].budget_bytes / GB
            room = self.model.add_var(lb=0.0, ub=budget)
            self.room.append(room)
            last = stages[-1]
            state = p.update.state_bytes
            lasting = mip.xsum(self.w[j] + state * self.q[j] for j in stages)
            for at, j in enumerate(stages):
                inputs = mip.xsum(entering[i] for i in stages[: at + 1])
                if self.resident[d]:
                    held = mip.xsum(m * self.kept[i] for i in stages[: at + 1]) - self.kept[j]
                    grads = mip.xsum(self.g[i] for i in stages[at:])
                    self.row(budget, lasting + grads + inputs + held + self.work[j] + 2 / m * entering[j])
                else:
                    held = (m - 1) * self.kept[j] + self.work[j]
                    self.row(budget, room + self.g[j] + held + inputs + 2 / m * entering[last])
                    self.row(room, self.w[j])

    def entering(self) -> list[Any]:
        """Per stage the bytes that enter it for all micro-batches: all stages begin with different blocks."""
        giga = self.m / GB
        most = max(max(row) for row in self.p.input_bytes[1:]) * giga
        least = [self.stages.least(self.limits.entering, j) * giga for j in range(self.count)]
        found = [self.model.add_var(lb=low, ub=most) for low in least]
        if self.passed:
            values = [x * giga for x in (*self.limits.entering, self.limits.entering[-1])]
            for j in range(self.idle, self.count):
                self.row(found[j], self.passed.lower_mean(j, values))
        self.row(mip.xsum(found), math.fsum(sorted(self.limits.entering)[: self.count - self.idle]) * giga)
        return [self.bounded_amount("inputs", j, amount) for j, amount in enumerate(found)]

    def scratch(self, j: int) -> Any:
        """The least workspace of stage j in GB; that of its first and its last block."""
        least = [self.least_scratch(j)]
        if self.passed and j >= self.idle:
            values = [x / GB for x in self.limits.scratches]
            least.append(self.passed.lower_mean(j, [*values, values[-1]]))
            least.append(self.passed.lower_mean(j + 1, [values[0], *values]))
        return self.largest(least)

    def least_scratch(self, j: int) -> float:
        """The same as a number; that of a block which the stage is known to have."""
        last = self.count - 1
        if j == last or (j == 0 and not self.idle):
            return self.limits.scratches[-1 if j == last else 0] / GB
        return self.stages.least(self.limits.scratches, j) / GB

    # -- time -----------------------------------------------------------------------------------------------------

    def message(self, cut: int, source: int, target: int) -> tuple[Any, Any]:
        """Seconds of one message over a cut, and GB of all of them through the root complexes."""
        p, d, e = self.p, source % self.n, target % self.n
        if cut <= self.idle:
            return 0.0, 0.0
        a = self.crossing[cut]
        shared = self.m * a if p.message_shares[d][e] else 0.0
        return p.message_latency_s[d][e] + GB * p.message_s[d][e] * a, shared

    def upload(self, j: int, messages: Any, freed: Any) -> Any:
        """No stage from j on begins before the uploads up to j have passed the root complex, however they share it."""
        unit = self.p.units[j % self.n]
        latency_s = unit.latency_s if j >= self.idle else 0.0
        passed, there = self.real(), self.real()
        work_s = GB * unit.shared_fetch_s * (self.w[j] + messages)
        self.row(passed, self.last_up.get(unit.complex, 0.0) + work_s)
        self.row(there, passed + latency_s)
        self.row(there, self.own_up.get(j % self.n, 0.0) + GB * unit.fetch_s * self.w[j] + latency_s)
        if freed is not None:
            self.row(passed, freed + work_s)
            self.row(there, freed + GB * unit.fetch_s * self.w[j] + latency_s)
        self.last_up[unit.complex] = passed
        self.own_up[j % self.n] = there
        return there

    def first_uploads(self) -> None:
        """At the beginning all devices fetch their first stage, and then the next one; these share their root complex
        evenly, so stage j's weights are there when every other device has had as much, or all that it fetches. Of that
        sum, concave in W_j, its chord."""
        p, n = self.p, self.n
        if p.ordered or self.idle:
            return
        least = [self.stages.least(self.limits.weights, j) / GB for j in range(self.count)]
        for j in range(min(n, self.count)):
            unit, high = p.units[j], self.stages.most_of(p.weight_bytes, j) / GB
            if self.resident[j] or high <= least[j]:
                continue
            others = [
                least[k] + (least[k + n] if k + n < self.count else 0.0)
                for k in range(min(n, self.count))
                if k != j and p.units[k].complex == unit.complex and not self.resident[k]
            ]

            def service_s(w: float, others: list[float] = others) -> float:
                return w + math.fsum(min(w, other) for other in others)

            slope = (service_s(high) - service_s(least[j])) / (high - least[j])
            took = service_s(least[j]) + slope * (self.w[j] - least[j])
            self.row(self.there[j], GB * unit.shared_fetch_s * took + unit.latency_s)

    def late(self, j: int, begin: Any, free: Any, before: Any) -> None:
        """Upload the weights that did not fit ahead when the phase before is over (eq. 9)."""
        fetch_s = GB * self.p.units[j % self.n].fetch_s
        self.row(begin, free + fetch_s * (self.w[j] + before - self.room[j % self.n]))

    def forward(self) -> None:
        n, m = self.n, self.m
        self.f: list[Any] = []
        self.l: list[Any] = []
        self.ends: list[Any] = []
        self.last_up: dict[int, Any] = {}
        self.own_up: dict[int, Any] = {}
        self.there: dict[int, Any] = {}
        for j in range(self.count):
            f, last, t = self.real(), self.real(), self.tf[j]
            messages = 0.0
            if j:
                c, messages = self.message(j, j - 1, j)
                self.row(f, self.f[j - 1] + self.tf[j - 1] + c)
                self.row(last, self.l[j - 1] + self.tf[j - 1] + c)
            self.row(last, f + (m - 1) * t)
            if j >= n:
                self.row(f, self.ends[j - n])
            if not self.resident[j % n]:
                received = messages if j >= n + self.idle else 0.0  # the first round's stages fetch before they receive
                there = self.upload(j, received, self.ends[j - 2 * n] if j >= 2 * n else None)
                self.row(f, there)
                self.there[j] = there
                if j >= n:
                    self.late(j, f, self.ends[j - n], self.w[j - n])
            self.f.append(f)
            self.l.append(last)
            self.ends.append(last + t)
        self.first_uploads()

    def backward(self) -> None:
        n, m, last_stage = self.n, self.m, self.count - 1
        self.h_ends: list[Any] = [None] * self.count
        self.ready: list[Any] = [None] * self.count
        left: dict[int, Any] = {}
        both = self.both_ways()
        own_left: dict[int, Any] = {}
        g_next = h_next = None
        for j in reversed(range(self.count)):
            d, unit, t = j % n, self.p.units[j % n], self.tb[j]
            g, h, messages = self.real(), self.real(), 0.0
            if j < last_stage:
                c, messages = self.message(j + 1, j + 1, j)
                self.row(g, g_next + self.tb[j + 1] + c)
                self.row(h, h_next + self.tb[j + 1] + c)
            self.row(h, g + (m - 1) * t)
            self.row(g, self.h_ends[j + n] if j + n <= last_stage else self.ends[j])
            if j + n <= last_stage and not self.resident[d]:
                freed = self.h_ends[j + 2 * n] if j + 2 * n <= last_stage else self.ends[j]
                self.row(g, self.upload(j, messages, freed))
                self.late(j, g, self.h_ends[j + n], self.w[j + n])
            self.h_ends[j] = self.ready[j] = h + t
            if not self.resident[d]:
                latency_s = unit.latency_s if j >= self.idle else 0.0
                out, gone = self.real(), self.real()
                sent = self.message(j, j, j - 1)[1] if j else 0.0
                work_s = GB * unit.shared_offload_s * (self.g[j] + sent)
                self.row(gone, h + t + work_s)
                self.row(gone, left.get(unit.complex, 0.0) + work_s)
                self.row(out, gone + latency_s)
                self.row(out, h + t + GB * unit.offload_s * self.g[j] + latency_s)
                if d in own_left:
                    self.row(out, own_left[d] + GB * unit.offload_s * self.g[j] + latency_s)
                left[unit.complex], own_left[d], self.ready[j] = gone, out, out
                if unit.shared_both_s:
                    again = self.w[j] if j + n <= last_stage else 0.0
                    passed = self.real()
                    self.row(passed, both[unit.complex] + GB * unit.shared_both_s * (self.g[j] + again))
                    self.row(out, passed + latency_s)
                    both[unit.complex] = passed
            g_next, h_next = g, h

    def both_ways(self) -> dict[int, Any]:
        """Per root complex the seconds that forward's weights take through what both directions share."""
        passed: dict[int, Any] = {}
        for j in range(self.count):
            unit = self.p.units[j % self.n]
            if not self.resident[j % self.n]:
                passed[unit.complex] = passed.get(unit.complex, 0.0) + GB * unit.shared_both_s * self.w[j]
        return passed

    def step_s(self, j: int) -> Any:
        """Seconds of the update of a stage on its device, clipping included."""
        unit, there = self.p.units[j % self.n], j >= self.idle
        took = GB * unit.step_s * self.q[j] + unit.call_s * self.calls[j] + unit.own_s * there
        if self.p.update.barrier:
            took = took + 2 * GB * unit.byte_s * self.g[j] + (unit.call_s + unit.own_s) * there
        return took

    def share_ties(self) -> None:
        """The gradient of a parameter that the first block shares with the last one is complete after both stages."""
        p, n, last = self.p, self.n, self.count - 1
        for a, b, size in p.ties:
            if a or b < p.num_blocks - 1 or last == self.idle:
                continue
            took_s, e = math.inf, last % n
            for d in range(min(n, self.count)) if self.idle else [0]:  # of the first stage that is not empty
                shared = 1 + (p.message_shares[d][e] and p.units[d].complex == p.units[e].complex)
                sent_s = 2 * p.message_latency_s[d][e] + size * p.message_s[d][e] * shared
                took_s = min(took_s, sent_s if self.resident[d] else size * p.update.bytes_s[p.units[d].host])
            both = self.real()
            self.row(both, (self.h_ends[0] if self.idle else self.ready[0]) + took_s)
            self.row(both, self.ready[last] + took_s)
            self.ready[last] = both
            if not self.idle:
                self.ready[0] = both

    def update(self) -> None:
        p, n = self.p, self.n
        self.share_ties()
        barrier = self.real() if p.update.barrier else None
        devices = p.units[: self.count]
        swapped = Counter(unit.host for unit, stays in zip(devices, self.resident) if not stays)
        after: dict[int, Any] = {}  # per host the optimizer's work for a stage and those after it in backward
        for j in range(self.count):
            unit = p.units[j % n]
            self.row(self.end, self.ready[j])
            if barrier is not None:
                norm_s = unit.byte_s if self.resident[j % n] else p.update.bytes_s[unit.host]
                own_s = unit.call_s + unit.own_s if self.resident[j % n] and not self.idle else 0.0
                self.row(barrier, self.ready[j] + GB * norm_s * mip.xsum(self.g[j % n :: n]) + own_s)
            if self.resident[j % n]:
                self.row(self.end, self.ready[j] + self.step_s(j))
                continue
            work = self.real()
            took = GB * p.update.params_s[unit.host] * self.q[j]
            if barrier is not None:
                took = took + GB * p.update.clip_s(unit.host, swapped[unit.host]) * self.g[j]
            self.model += work == after.get(unit.host, 0.0) + took
            after[unit.host] = work
            if barrier is None:
                self.row(self.end, self.h_ends[j] + work)
                self.row(self.end, self.ready[j] + took)
        for work in after.values() if barrier is not None else ():
            self.row(self.end, barrier + work)
        for d in range(min(n, self.count)):
            if self.resident[d]:  # all of a device's updates follow its last backward
                begin = barrier if barrier is not None else 0.0 if self.idle else self.h_ends[d]
                self.row(self.end, begin + mip.xsum(self.step_s(j) for j in range(d, self.count, n)))

    def pass_the_largest(self) -> None:
        """Bound the step by its largest stage, which has at least `of_largest` common blocks: the first micro-batch
        passes all stages up to it, all micro-batches pass it, and the last one passes the stages after it."""
        forward_s, backward_s = self.limits.common_s(self.of_largest)
        there = sum(self.message(j, j - 1, j)[0] for j in range(1, self.count))
        back = sum(self.message(j, j, j - 1)[0] for j in range(1, self.count))
        self.row(self.ends[-1], self.f[0] + mip.xsum(self.tf) + there + (self.m - 1) * forward_s)
        self.row(self.h_ends[0], self.ends[-1] + mip.xsum(self.tb) + back + (self.m - 1) * backward_s)

    def cuts(self) -> tuple[int, ...]:
        at, found = 0, [0]
        for mine in self.counts:
            at += sum(round(x.x) for x in mine.values())
            found.append(at)
        return tuple(found)
