"""The seconds of a step of a contiguous partition: longest paths through it, in O(S) for S stages.

In: a `MipProblem` and cut positions [0, ..., L]. Out: seconds. Of the M micro-batches only the first and the last
count: given a partition, the earliest schedule is a longest path, and all others run between these two (f and l: the
starts of a stage's first and last forward; g and h: of its backward).

`literal_s` is the paper's own objective and constraints (Mobius eq. 3 to 11). `contended_s` adds what the machine does
besides: uploads follow each other through the root complex r(j) of stage j's device, together with the messages,

    u_j >= u_prev(r(j)) + W_j / B_r + i                      i = M a / B_r: messages through the same root complex
    u_j >= l_{j-2N} + T^f_{j-2N} + P_j / B                   the place of the stage before the one before is free
    u_j >= l_{j-N} + T^f_{j-N} + (W_j - P_j) / B             P_j = min(W_j, G - S_{j-N}): what fits ahead (eq. 5)
    f_j >= u_j

Backward has the same rows with x_j, in reverse order, but for the last N stages, whose weights stay; gradients leave by
`d_j >= max(h_j + T^b_j, d_prev(r(j)) + i) + W_j / B_r`, and the host's optimizer takes them one by one. Where uploads
are not ordered, devices share the root complex evenly, from one phase to the next (`shared_link`). Where directions
share a root complex, too, `d_j` is at least the time that all uploads of forward, and those of backward and gradients
down to stage j, take through what both share. Devices whose stages all fit stay resident: no uploads, and their updates
run on the device. With a norm of all gradients, each device computes that of its own in their memory, and all wait for
the last one before they clip and update.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from ..run_again import cheapest_again
from .problem import MipProblem, Unit
from .shared_link import SharedLink


def fits(p: MipProblem, cuts: Sequence[int]) -> bool:
    """Whether every stage fits its device (eq. 4)."""
    units, n = p.units, len(p.units)
    rounds = -(-(len(cuts) - 1) // n)
    stages = enumerate(itertools.pairwise(cuts))
    return all(p.need_bytes(a, b, rounds) <= units[j % n].budget_bytes for j, (a, b) in stages)


def contended_s(p: MipProblem, cuts: Sequence[int]) -> float:
    """Seconds of a step with contention; inf where a stage does not fit its device."""
    return _Step(p, cuts).seconds() if fits(p, cuts) else math.inf


def literal_s(p: MipProblem, cuts: Sequence[int]) -> float:
    """Seconds by the paper's own model; inf where a stage does not fit (eq. 4).

    Every backward rematerialises. `B` is the rate of stage j's own link; eq. 9 charges the bytes that are uploaded, not
    all the memory that is needed, and the last N stages stay for their backward. With S = W + the rest of the memory:

        f_j >= f_{j-1} + T^f_{j-1} + c     l_j >= l_{j-1} + T^f_{j-1} + c, f_j + (M-1) T^f_j            (eq. 7, 8, 10)
        f_j >= l_{j-N} + T^f_{j-N} + max(0, W_j + S_{j-N} - G) / B     f_j >= f_{j-N} + W_j / B         (eq. 5, 6, 9)

    the same in reverse for g, h; g_S >= l_S + T^f_S (eq. 11); the step takes h_1 + T^b_1 (eq. 3).
    """
    if not fits(p, cuts):
        return math.inf
    n, count, m = len(p.units), len(cuts) - 1, p.micro_batches
    forward, backward, w, s = [], [], [], []
    for j, (a, b) in enumerate(itertools.pairwise(cuts)):
        d = j % n
        forward.append(p.forward_s[d][b] - p.forward_s[d][a])
        backward.append(p.backward_s[d][b] - p.backward_s[d][a] + p.again_s[d][b] - p.again_s[d][a])
        w.append(p.weight_bytes[b] - p.weight_bytes[a])
        s.append(w[-1] + p.work_bytes[b][a])

    def sweep(times: list[float], order: Sequence[int], step: int, begin: list[tuple[float, float]]) -> float:
        """First and last start of every stage in this order; returns the end of the last one."""
        first = last = 0.0
        found: dict[int, tuple[float, float]] = {}
        for j in order:
            d, before, same = j % n, j - step, j - step * n
            fetch_s = p.units[d].fetch_s
            own = begin[j] if begin else (0.0, 0.0)
            if before in found:
                e = before % n
                a = p.message_bytes[cuts[max(j, before)]]
                c = p.message_latency_s[e][d] + a * p.message_s[e][d]
                first, last = first + times[before] + c, last + times[before] + c
            first = max(first, own[0])
            if same in found:
                late = max(0.0, w[j] + s[same] - p.units[d].budget_bytes) * fetch_s
                first = max(first, found[same][1] + times[same] + late, found[same][0] + w[j] * fetch_s)
            last = max(last, first + (m - 1) * times[j])
            found[j] = (first, last)
        starts.update(found)
        return last + times[order[-1]]

    starts: dict[int, tuple[float, float]] = {}
    sweep(forward, range(count), 1, [])
    ends = [(starts[j][1] + forward[j] if j >= count - n else 0.0, 0.0) for j in range(count)]
    return sweep(backward, range(count - 1, -1, -1), -1, ends)


def residents(p: MipProblem, cuts: Sequence[int]) -> tuple[bool, ...]:
    """Per device whether its stages stay there across steps."""
    return tuple(room == math.inf for room in _Step(p, cuts).ahead_bytes)


def num_fetched(p: MipProblem, cuts: Sequence[int]) -> int:
    """The number of stages that come from DRAM, of a partition that `contended_s` has evaluated; else 0."""
    found = (p.placed.get(_on(cuts, d, len(p.units)), (math.inf,)) for d in range(len(p.units)))
    return sum(len(range(d, len(cuts) - 1, len(p.units))) for d, (room, *_) in enumerate(found) if room < math.inf)


def _on(cuts: Sequence[int], d: int, n: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Device d and where its stages begin and end."""
    return d, tuple(cuts[d:-1:n]), tuple(cuts[d + 1 :: n])


class _Step:
    """One evaluation. Lists are per stage; `free` and `freed`: when each device's last phase and the one before
    ended."""

    def __init__(self, p: MipProblem, cuts: Sequence[int]):
        self.p, self.cuts = p, cuts
        self.n, self.count = len(p.units), len(cuts) - 1
        self.stage_numbers()
        self.ahead_bytes = [0.0] * self.n  # per device what fits beside the rest: G - S without weights; inf: resident
        self.place()

    def stage_numbers(self) -> None:
        p, n, m = self.p, self.n, self.p.micro_batches
        weights, grads, params = p.weight_bytes, p.grad_bytes, p.params
        self.tf, self.tb, self.again = [], [], []
        self.w, self.g, self.q, self.work, self.entering, self.kept = [], [], [], [], [], []
        a = 0
        for j, b in enumerate(self.cuts[1:]):
            d = j % n
            own_s = p.units[d].own_s
            self.tf.append(p.forward_s[d][b] - p.forward_s[d][a] + own_s)
            self.tb.append(p.backward_s[d][b] - p.backward_s[d][a] + own_s)
            self.again.append(p.again_s[d][b] - p.again_s[d][a])
            self.w.append(weights[b] - weights[a])
            self.g.append(grads[b] - grads[a])
            self.q.append(params[b] - params[a])
            self.work.append(p.work_bytes[b][a])
            self.entering.append(m * p.input_bytes[b][a])
            self.kept.append(p.kept_bytes[b] - p.kept_bytes[a])
            a = b

    def place(self) -> None:
        """Decide which devices are resident, and which backwards rematerialise (`insert-remat`, `insert-fetch`)."""
        n, placed = self.n, self.p.placed
        for d in range(min(n, self.count)):
            key = _on(self.cuts, d, n)  # partitions that are compared differ on few devices
            if key not in placed:
                stages = range(d, self.count, n)
                again = None if self.p.swap else self.resident(self.p.units[d], stages)
                placed[key] = self.swap_room(d, stages) if again is None else (math.inf, again)
            self.ahead_bytes[d], again = placed[key]
            for j in again:
                self.tb[j] += self.again[j]

    def resident(self, unit: Unit, stages: range) -> list[int] | None:
        """The stages to rematerialise so that all stay on the device, as `insert-remat` chooses them. None where not
        all can stay."""
        if sum(self.w[j] + self.g[j] + self.p.update.state_bytes * self.q[j] for j in stages) > unit.budget_bytes:
            return None
        missing, frees = self.moments(unit, stages)
        if self.p.always:
            return list(stages) if all(sum(row) >= least for least, row in zip(missing, frees)) else None
        again = cheapest_again([self.again[j] for j in stages], missing, frees)
        return None if again is None else [stages[i] for i in again]

    def moments(self, unit: Unit, stages: range) -> tuple[list[float], list[list[float]]]:
        """The bytes that a resident device lacks in the backward of each of its stages if none runs again, and those
        that each stage leaves free then if it does: its saved tensors, but for one micro-batch in its own backward."""
        m, missing, frees = self.p.micro_batches, [], []
        held = sum(self.w[j] + self.p.update.state_bytes * self.q[j] + self.g[j] for j in stages) - unit.budget_bytes
        for i, j in enumerate(stages):  # inputs and saved tensors of the stages up to j, gradients of those from j on
            held += self.entering[j] + m * self.kept[j]
            missing.append(held + self.work[j] - self.g[j] - self.kept[j] + 2 * self.entering[j] / m)
            before = [m * self.kept[k] for k in stages[:i]]
            frees.append([*before, (m - 1) * self.kept[j], *[0.0] * (len(stages) - i - 1)])
            held -= self.g[j]
        return missing, frees

    def swap_room(self, d: int, stages: range) -> tuple[float, list[int]]:
        """The room for weights fetched ahead beside all else, and the stages to rematerialise."""
        p, m, last = self.p, self.p.micro_batches, stages[-1]
        inputs = most = 0.0
        for j in stages:
            inputs += self.entering[j]
            if j != last:
                most = max(most, self.work[j] + inputs)
        slack = 2 * self.entering[last] / m
        again = max(most, self.work[last] + inputs) + slack
        keeping = max(most, self.work[last] + (m - 1) * self.kept[last] + inputs) + slack
        budget = p.units[d].budget_bytes
        largest = max(self.w[j] for j in stages)
        fits = keeping + largest <= budget and not p.always
        if fits and self.fetched_early(budget - keeping, stages) >= self.fetched_early(budget - again, stages):
            return budget - keeping, list(stages[:-1])
        return budget - again, list(stages)

    def fetched_early(self, room: float, stages: range) -> float:
        n, w = self.n, self.w
        return sum(max(0.0, min(w[j], room - w[j - n])) for j in stages[1:])

    def seconds(self) -> float:
        self.free = [0.0] * self.n  # end of the device's last phase
        self.freed = [0.0] * self.n  # end of the one before
        self.own_up = [0.0] * self.n
        self.own_out = [0.0] * self.n
        complexes = 1 + max(unit.complex for unit in self.p.units)
        self.up, self.out = [0.0] * complexes, [0.0] * complexes
        self.links = [SharedLink() for _ in range(complexes)]
        self.passing_s: dict[int, float] = {}
        for j in range(min(2 * self.n, self.count)):
            self.fetch(j, -self.n, 0.0)
        self.forward()
        self.backward()
        return self.update()

    def fetch(self, j: int, before: int, begin_s: float) -> None:
        """Put the weights of stage j for its forward (`before` < 0) or backward into the queue of its device, with the
        messages to it, which go before them. After its forward stage j is known as `count` + j."""
        d = j % self.n
        if self.ahead_bytes[d] < math.inf:
            unit, name = self.p.units[d], j if before < 0 else self.count + j
            messages = self.messages(j, before) if j + before >= 0 else 0.0
            self.passing_s[name] = (self.w[j] + messages) * unit.shared_fetch_s
            if not self.p.ordered:
                self.links[unit.complex].add(d, name, begin_s, self.passing_s[name])

    def there_s(self, j: int, before: int) -> float:
        """The seconds at which the weights of stage j arrive; `before` leads to the stage of the device's phase before.

        All pass their root complex, one by one or, where fetches are not ordered, sharing it evenly.
        """
        d, k = j % self.n, j + before
        room = self.ahead_bytes[d]
        if room == math.inf:
            return 0.0
        unit, w, name = self.p.units[d], self.w[j], j if before < 0 else self.count + j
        c = unit.complex
        there_s = self.up[c] = max(self.up[c], self.freed[d]) + self.passing_s[name]
        if k >= 0 and room < w + self.w[k]:
            late = min(w, w + self.w[k] - room)
            there_s = max(there_s, self.free[d] + late * unit.fetch_s + unit.latency_s)
        there_s = max(there_s, max(self.own_up[d], self.freed[d]) + w * unit.fetch_s)
        if not self.p.ordered:
            there_s = max(there_s, self.links[c].end_s(name))
        self.own_up[d] = there_s + unit.latency_s
        return self.own_up[d]

    def messages(self, j: int, before: int) -> float:
        """Bytes that stage j receives through its root complex in this direction."""
        k = j - 1 if before < 0 else j + 1
        if k < 0 or not self.p.message_shares[k % self.n][j % self.n]:
            return 0.0
        return self.p.micro_batches * self.p.message_bytes[self.cuts[max(j, k)]]

    def forward(self) -> None:
        p, n, m, tf = self.p, self.n, self.p.micro_batches, self.tf
        first = last = c = 0.0
        for j in range(self.count):
            d, e = j % n, (j - 1) % n
            if j:
                c = p.message_latency_s[e][d] + p.message_bytes[self.cuts[j]] * p.message_s[e][d]
                first, last = first + tf[j - 1] + c, max(last + tf[j - 1], first + tf[j - 1] + (m - 1) * c) + c
            first = max(first, self.free[d], self.there_s(j, -n))
            last = max(last, first + (m - 1) * tf[j])
            self.freed[d], self.free[d] = self.free[d], last + tf[j]
            if j + 2 * n < self.count:
                self.fetch(j + 2 * n, -n, self.free[d])
            elif j + n < self.count:  # the next stage stays, and backward goes on with this one
                self.fetch(j, n, self.free[d])

    def backward(self) -> None:
        p, n, m, tb = self.p, self.n, self.p.micro_batches, self.tb
        first = last = 0.0
        self.ready = [0.0] * self.count  # gradients in DRAM, or complete on a resident device
        for j in reversed(range(self.count)):
            d, e = j % n, (j + 1) % n
            swapped_again = j < self.count - n  # the weights of the last stage of each device are still there
            if j < self.count - 1:
                c = p.message_latency_s[e][d] + p.message_bytes[self.cuts[j + 1]] * p.message_s[e][d]
                first, last = first + tb[j + 1] + c, max(last + tb[j + 1], first + tb[j + 1] + (m - 1) * c) + c
            first = max(first, self.free[d], self.there_s(j, n) if swapped_again else 0.0)
            last = max(last, first + (m - 1) * tb[j])
            if swapped_again:
                self.freed[d] = self.free[d]
            self.free[d] = self.ready[j] = last + tb[j]
            if j >= 2 * n:
                self.fetch(j - 2 * n, n, self.free[d])
        self.offloads()
        self.both_ways()

    def both_ways(self) -> None:
        """All weights of forward, and then backward's weights and gradients, pass what both directions of a root
        complex share: a gradient is in DRAM when those of the stages after it, and all that these needed, are."""
        swapped = [j for j in range(self.count) if self.ahead_bytes[j % self.n] != math.inf]
        passed_s = dict.fromkeys(range(len(self.up)), 0.0)
        for j in swapped:
            unit = self.p.units[j % self.n]
            passed_s[unit.complex] += self.w[j] * unit.shared_both_s
        for j in reversed(swapped):
            unit = self.p.units[j % self.n]
            again = self.w[j] if j < self.count - self.n else 0.0
            passed_s[unit.complex] += (self.g[j] + again) * unit.shared_both_s
            self.ready[j] = max(self.ready[j], passed_s[unit.complex] + unit.latency_s)

    def offloads(self) -> None:
        """Set `ready`, when the gradients of swapped stages are in DRAM: they leave in the order of backward, after the
        messages that these stages send."""
        p, n, links = self.p, self.n, [SharedLink() for _ in self.out]
        work_s = dict[int, float]()
        swapped = [j for j in reversed(range(self.count)) if self.ahead_bytes[j % n] != math.inf]
        for j in swapped:
            unit = p.units[j % n]
            work_s[j] = (self.g[j] + (self.messages(j - 1, n) if j else 0.0)) * unit.shared_offload_s
            links[unit.complex].add(j % n, j, self.ready[j], work_s[j])
        for j in swapped:
            d, unit = j % n, p.units[j % n]
            c = unit.complex
            self.out[c] = max(self.out[c], self.ready[j]) + work_s[j]
            alone_s = max(self.ready[j], self.own_out[d]) + self.g[j] * unit.offload_s
            self.ready[j] = self.own_out[d] = max(self.out[c], alone_s, links[c].end_s(j)) + unit.latency_s

    def update(self) -> float:
        p, n, ready = self.p, self.n, self.ready
        hosts = [0.0] * len(p.update.params_s)
        for a, b, size in p.ties:
            first, last = self.stage_of(a), self.stage_of(b)
            if first != last:
                d, e = first % n, last % n
                if self.ahead_bytes[d] == math.inf:
                    same = p.message_shares[d][e] and p.units[d].complex == p.units[e].complex
                    took = 2 * p.message_latency_s[d][e] + size * p.message_s[d][e] * (1 + same)
                else:
                    took = size * p.update.bytes_s[p.units[d].host]
                ready[first] = ready[last] = max(ready[first], ready[last]) + took
        barrier = self.norm_s() if p.update.barrier else 0.0
        done = max(ready)
        for d in range(min(n, self.count)):  # on a device after its last backward, in the order of its text
            if self.ahead_bytes[d] == math.inf:
                unit, now_s = p.units[d], self.free[d]
                for j in range(d, self.count, n):
                    calls = p.tensors[self.cuts[j + 1]] - p.tensors[self.cuts[j]]
                    took = self.q[j] * unit.step_s + calls * unit.call_s + unit.own_s
                    if p.update.barrier:
                        took += 2 * self.g[j] * unit.byte_s + unit.call_s + unit.own_s
                    now_s = max(now_s, ready[j], barrier) + took
                done = max(done, now_s)
        swapped = Counter(unit.host for unit, room in zip(p.units, self.ahead_bytes[: self.count]) if room < math.inf)
        for j in sorted(range(self.count), key=ready.__getitem__):
            if self.ahead_bytes[j % n] != math.inf:
                host = p.units[j % n].host
                clip_s = self.g[j] * p.update.clip_s(host, swapped[host]) if p.update.barrier else 0.0
                hosts[host] = max(hosts[host], ready[j], barrier) + self.q[j] * p.update.params_s[host] + clip_s
                done = max(done, hosts[host])
        return done

    def norm_s(self) -> float:
        """The seconds at which all devices have the norm of their gradients; all wait for the last one."""
        p, n, last = self.p, self.n, 0.0
        hosts = [0.0] * len(p.update.params_s)
        complete = sorted((max(self.ready[d::n]), d) for d in range(min(n, self.count)))
        for ready_s, d in complete:
            unit, size = p.units[d], math.fsum(self.g[d::n])
            if self.ahead_bytes[d] == math.inf:
                last = max(last, ready_s + size * unit.byte_s + unit.call_s + unit.own_s)
            else:
                hosts[unit.host] = max(hosts[unit.host], ready_s) + size * p.update.bytes_s[unit.host]
        return max(last, *hosts)

    def stage_of(self, block: int) -> int:
        return next(j for j, b in enumerate(self.cuts[1:]) if block < b)
