"""Lower bounds of the steps of many partitions at once: `recurrence` without waiting for others' transfers.

In: a `MipProblem` and partitions into one number of stages. Out: the seconds of `contended_s`, but that fetches and
gradients of other devices slow none that share a root complex evenly (`shared_link`); they still follow one another
through it. That is all of it where no fetch shares a root complex, and no more elsewhere. Many partitions take little
longer than one, so a search evaluates only what this lets through.

Arrays are [stage, row] or [device, row]. `never`, 0 or -inf for a resident device, keeps what is not transferred out of
every maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from ..run_again import cheapest_of_many
from .problem import MipProblem, Table, Unit

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


class LeastTimes:
    """The numbers of a problem as arrays."""

    def __init__(self, problem: MipProblem):
        p = self.problem = problem
        self.forward, self.backward, self.again = (np.array(x) for x in (p.forward_s, p.backward_s, p.again_s))
        self.weights, self.grads, self.params = (np.array(x) for x in (p.weight_bytes, p.grad_bytes, p.params))
        self.tensors, self.kept, self.messages = (np.array(x) for x in (p.tensors, p.kept_bytes, p.message_bytes))
        self.work, self.inputs = self.table(p.work_bytes), self.table(p.input_bytes)
        self.message_s, self.latency_s = np.array(p.message_s), np.array(p.message_latency_s)
        self.shares = np.array(p.message_shares)
        self.known: dict[bytes, Flags] = {}  # which stages of a device run again, and whether that is enough
        self.complexes = np.array([unit.complex for unit in p.units])
        self.hosts = np.array([unit.host for unit in p.units])
        names = [field.name for field in fields(Unit)]
        self.units = {name: np.array([float(getattr(unit, name)) for unit in p.units]) for name in names}

    def table(self, rows: Table) -> Floats:
        full = np.zeros((self.problem.num_blocks + 1,) * 2)
        for b, row in enumerate(rows):
            full[b, : len(row)] = row
        return full

    def unit(self, name: str, devices: Indices) -> Floats:
        """A number of each stage's device, [stage, 1]."""
        return self.units[name][devices]

    def __call__(self, cuts: Indices | Sequence[Sequence[int]]) -> Floats:
        """Seconds by row; inf where a stage does not fit its device."""
        rows = np.asarray(cuts)
        fits = self.fits(rows.T)
        found = np.full(len(rows), math.inf)
        if fits.any():
            found[fits] = _Steps(self, rows[fits].T).seconds()
        return found

    def fits(self, cuts: Indices) -> Flags:
        n, count = len(self.problem.units), len(cuts) - 1
        a, b = cuts[:-1], cuts[1:]
        inputs = (self.problem.micro_batches * -(-count // n) + 2) * self.inputs[b, a]
        budgets = self.unit("budget_bytes", np.arange(count)[:, None] % n)
        fits: Flags = np.all(self.weights[b] - self.weights[a] + self.work[b, a] + inputs <= budgets, axis=0)
        return fits


class _Steps:
    """One evaluation, as `recurrence._Step` of one partition."""

    def __init__(self, of: LeastTimes, cuts: Indices):
        p = self.p = of.problem
        self.of, self.cuts, self.n = of, cuts, len(p.units)
        self.count, self.num = len(cuts) - 1, cuts.shape[1]
        self.on = np.arange(self.count) % self.n
        d, a, b = self.on[:, None], cuts[:-1], cuts[1:]
        self.zero = np.zeros(self.num)
        own_s = of.unit("own_s", d)
        self.tf = of.forward[d, b] - of.forward[d, a] + own_s
        self.tb = of.backward[d, b] - of.backward[d, a] + own_s
        self.w, self.g, self.q = (x[b] - x[a] for x in (of.weights, of.grads, of.params))
        self.work, self.entering = of.work[b, a], p.micro_batches * of.inputs[b, a]
        self.kept, self.calls = of.kept[b] - of.kept[a], of.tensors[b] - of.tensors[a]
        self.again = of.again[d, b] - of.again[d, a]
        self.room, remat = self.place()
        self.tb += np.where(remat, self.again, 0.0)
        self.swapped = self.room < math.inf  # [device, row]
        self.any_swapped = [bool(rows.any()) for rows in self.swapped]
        self.stage_swapped = self.swapped[self.on]
        self.never = np.where(self.stage_swapped, 0.0, -math.inf)

    def place(self) -> tuple[Floats, Flags]:
        """By device the room for weights fetched ahead, inf where it is resident or has no stage; by stage whether it
        rematerialises."""
        n, (rounds, more) = self.n, divmod(self.count, self.n)
        room, remat = np.full((n, self.num), math.inf), np.empty((self.count, self.num), bool)
        for devices, of_each in ((np.arange(more), rounds + 1), (np.arange(more, n), rounds)):
            if of_each and len(devices):
                stages = np.arange(of_each)[:, None] * n + devices
                room[devices], remat[stages] = self.place_on(devices, stages)
        return room, remat

    def place_on(self, devices: Indices, stages: Indices) -> tuple[Floats, Flags]:
        """The same for devices with equally many stages: [device, row] and [round, device, row]."""
        p, m = self.p, self.p.micro_batches
        names = (self.w, self.g, self.q, self.work, self.entering, self.kept)
        w, g, q, work, entering, kept = (x[stages] for x in names)
        budget = self.of.unit("budget_bytes", devices[:, None])
        slack, inputs = 2 * entering / m, np.cumsum(entering, axis=0)
        most = (work + inputs)[:-1].max(axis=0, initial=0.0)
        ends = work[-1] + inputs[-1]
        keeping = np.maximum(most, ends + (m - 1) * kept[-1]) + slack[-1]
        longer = np.maximum(most, ends) + slack[-1]

        def early(room: Floats) -> Floats:
            fetched: Floats = np.maximum(np.minimum(w[1:], room - w[:-1]), 0.0).sum(axis=0)
            return fetched

        keeps = (keeping + w.max(axis=0) <= budget) & (early(budget - keeping) >= early(budget - longer))
        keeps &= not p.always
        room = budget - np.where(keeps, keeping, longer)
        remat = np.ones(kept.shape, bool)
        remat[-1] = ~keeps
        if not p.swap:
            held = (w + p.update.state_bytes * q + g).sum(axis=0)
            missing = held - budget + inputs + m * np.cumsum(kept, axis=0) - np.cumsum(g, axis=0) + work - kept + slack
            stays, short = held <= budget, (missing > 0).any(axis=0)
            again = np.full(kept.shape, p.always)
            if p.always:
                stays &= (missing <= m * np.cumsum(kept, axis=0) - kept).all(axis=0)
            d, row = np.nonzero(stays & short & (not p.always))
            if len(d):
                lacking = (x[:, d, row].T for x in (self.again[stages], missing, kept))
                again[:, d, row], stays[d, row] = self.again_on(*lacking)
            room, remat = np.where(stays, math.inf, room), np.where(stays, again, remat)
        return room, remat

    def again_on(self, seconds: Floats, missing: Floats, kept: Floats) -> tuple[Flags, Flags]:
        """Choose the stages of resident devices that run again, [round, device], and tell whether that is enough."""
        m, count, known = self.p.micro_batches, seconds.shape[1], self.of.known
        cases = np.hstack([seconds, missing, kept])
        keys = [row.tobytes() for row in cases]  # partitions that are compared differ on few devices
        new = {key: i for i, key in enumerate(keys) if key not in known}
        if new:
            seconds, missing, kept = (x[list(new.values())] for x in (seconds, missing, kept))
            leaves = m * np.tri(count, count, -1) + (m - 1) * np.eye(count)  # those before; in its own, all but one
            again, enough = cheapest_of_many(seconds, missing, leaves * kept[:, None])
            known.update(zip(new, np.hstack([again, enough[:, None]])))
        found = np.array([known[key] for key in keys])
        return found[:, :-1].T, found[:, -1]

    def seconds(self) -> Floats:
        of, p, n, m = self.of, self.p, self.n, self.p.micro_batches
        before, after = (self.on - 1) % n, (self.on + 1) % n
        messages = of.messages[self.cuts]
        self.from_before, self.from_after = messages[:-1], messages[1:]
        fetch_s, shared_s, latency_s = (
            of.unit(x, self.on[:, None]) for x in ("fetch_s", "shared_fetch_s", "latency_s")
        )
        self.free, self.freed, self.own_up = ([self.zero] * n for _ in range(3))
        self.up = [self.zero] * (1 + max(of.complexes))
        if any(self.any_swapped):
            through = [
                m * sent * of.shares[src, self.on][:, None]
                for sent, src in ((self.from_before, before), (self.from_after, after))
            ]
            through[0][:n] = 0.0
            self.passing = [(self.w + sent) * shared_s + self.never for sent in through]
            self.alone = self.w * fetch_s + self.never
            late = self.w[n:] + self.w[:-n] - self.room[self.on[n:]]
            self.late = [
                np.where(late > 0, np.minimum(w, late) * fetch_s[n:] + latency_s[n:], -math.inf)
                for w in (self.w[n:], self.w[:-n])
            ]
        c = [
            of.latency_s[src, self.on][:, None] + sent * of.message_s[src, self.on][:, None]
            for sent, src in ((self.from_before, before), (self.from_after, after))
        ]
        self.sweep(range(self.count), self.tf, c[0], False)
        self.ready = self.sweep(range(self.count - 1, -1, -1), self.tb, c[1], True)
        self.offloads(before)
        if any(unit.shared_both_s for unit in p.units):
            self.both_ways()
        self.wait_for_ties()
        return self.update()

    def sweep(self, order: range, times: Floats, c: Floats, backward: bool) -> Floats:
        """One direction; returns the end of each stage."""
        n, rest = self.n, self.p.micro_batches - 1
        ends = np.empty_like(times)
        rest_times, rest_c = rest * times, rest * c
        first = last = self.zero
        for j in order:
            d, k = j % n, j - order.step
            if j != order[0]:
                both = first + times[k]
                first, last = both + c[j], np.maximum(last + times[k], both + rest_c[j]) + c[j]
            first = np.maximum(first, self.free[d])
            fetched = not backward or j < self.count - n
            if fetched and self.any_swapped[d]:
                first = np.maximum(first, self.there_s(j, backward))
            last = np.maximum(last, first + rest_times[j])
            if fetched:
                self.freed[d] = self.free[d]
            self.free[d] = ends[j] = last + times[j]
        return ends

    def there_s(self, j: int, backward: bool) -> Floats:
        d = j % self.n
        c, k = self.of.complexes[d], j if backward else j - self.n
        there_s = np.maximum(self.up[c], self.freed[d]) + self.passing[backward][j]
        self.up[c] = np.maximum(self.up[c], there_s)
        if k >= 0:
            there_s = np.maximum(there_s, self.free[d] + self.late[backward][k])
        there_s = np.maximum(there_s, np.maximum(self.own_up[d], self.freed[d]) + self.alone[j])
        self.own_up[d] = np.maximum(self.own_up[d], there_s + self.p.units[d].latency_s)
        arrived: Floats = self.own_up[d] + self.never[j]
        return arrived

    def offloads(self, before: Indices) -> None:
        of, ready, units = self.of, self.ready, self.p.units
        sent = self.p.micro_batches * self.from_before * of.shares[self.on, before][:, None]
        sent[0] = 0.0
        work_s = (self.g + sent) * of.unit("shared_offload_s", self.on[:, None]) + self.never
        alone = self.g * of.unit("offload_s", self.on[:, None]) + self.never
        out, own_out = [self.zero] * len(self.up), [self.zero] * self.n
        for j in range(self.count - 1, -1, -1):
            d = j % self.n
            if self.any_swapped[d]:
                c = of.complexes[d]
                passed = np.maximum(out[c], ready[j]) + work_s[j]
                out[c] = np.maximum(out[c], passed)
                there = np.maximum(passed, np.maximum(ready[j], own_out[d]) + alone[j]) + units[d].latency_s
                own_out[d], ready[j] = np.maximum(own_out[d], there), np.maximum(ready[j], there)

    def both_ways(self) -> None:
        both = np.where(self.stage_swapped, self.of.unit("shared_both_s", self.on[:, None]), 0.0)
        passed = [self.zero] * len(self.up)
        for j in range(self.count):
            c = self.of.complexes[j % self.n]
            passed[c] = passed[c] + self.w[j] * both[j]
        for j in range(self.count - 1, -1, -1):
            c = self.of.complexes[j % self.n]
            again = self.w[j] if j < self.count - self.n else 0.0
            passed[c] = passed[c] + (self.g[j] + again) * both[j]
            there = passed[c] + self.p.units[j % self.n].latency_s + self.never[j]
            self.ready[j] = np.maximum(self.ready[j], there)

    def wait_for_ties(self) -> None:
        of, ready, rows = self.of, self.ready, np.arange(self.num)
        for a, b, size in self.p.ties:
            first, last = ((self.cuts[1:] <= block).sum(axis=0) for block in (a, b))
            d, e = first % self.n, last % self.n
            same = of.shares[d, e] & (of.complexes[d] == of.complexes[e])
            took = np.where(
                self.swapped[d, rows],
                size * np.array(self.p.update.bytes_s)[of.hosts[d]],
                2 * of.latency_s[d, e] + size * of.message_s[d, e] * (1 + same),
            )
            added = np.maximum(ready[first, rows], ready[last, rows]) + np.where(first != last, took, -math.inf)
            for stage in (first, last):
                ready[stage, rows] = np.maximum(ready[stage, rows], added)

    def update(self) -> Floats:
        of, p, n = self.of, self.p, min(self.n, self.count)
        barrier = self.norm_s() if p.update.barrier else self.zero
        begin = np.maximum(self.ready, barrier)
        done: Floats = self.ready.max(axis=0)
        if not self.swapped[:n].all():
            step_s, call_s, own_s, byte_s = (
                of.unit(x, self.on[:, None]) for x in ("step_s", "call_s", "own_s", "byte_s")
            )
            took = self.q * step_s + self.calls * call_s + own_s
            if p.update.barrier:
                took = took + 2 * self.g * byte_s + call_s + own_s
            for d in range(n):
                rest = _from_here(took[d :: self.n])
                end = np.maximum(self.free[d] + rest[0], (begin[d :: self.n] + rest).max(axis=0))
                done = np.maximum(done, np.where(self.swapped[d], 0.0, end))
        if any(self.any_swapped):
            for host in range(len(p.update.params_s)):
                here = self.stage_swapped & (of.hosts[self.on] == host)[:, None]
                took = self.q * p.update.params_s[host]
                if p.update.barrier:
                    clipping = self.swapped[:n][of.hosts[:n] == host].sum(axis=0)
                    most = max(1, int(clipping.max()))
                    clip_s = np.array([0.0, *(p.update.clip_s(host, k) for k in range(1, most + 1))])
                    took = np.where(here, took + self.g * clip_s[clipping], 0.0).sum(axis=0)
                    done = np.maximum(done, np.where(here.any(axis=0), barrier + took, 0.0))
                    continue
                order = np.argsort(self.ready, axis=0, kind="stable")
                took, turn, at = (np.take_along_axis(x, order, 0) for x in (np.where(here, took, 0.0), begin, here))
                done = np.maximum(done, np.where(at, turn + _from_here(took), 0.0).max(axis=0))
        return done

    def norm_s(self) -> Floats:
        """The seconds at which all devices have the norm of their gradients."""
        of, n = self.of, min(self.n, self.count)
        ready = np.array([self.ready[d :: self.n].max(axis=0) for d in range(n)])
        size = np.array([self.g[d :: self.n].sum(axis=0) for d in range(n)])
        byte_s, call_s, own_s = (of.unit(x, np.arange(n)[:, None]) for x in ("byte_s", "call_s", "own_s"))
        swapped = self.swapped[:n]
        last: Floats = np.where(swapped, 0.0, ready + size * byte_s + call_s + own_s).max(axis=0)
        order = np.argsort(ready, axis=0, kind="stable")
        for host, dram_s in enumerate(self.p.update.bytes_s):
            here = swapped & (of.hosts[:n] == host)[:, None]
            took, turn, at = (
                np.take_along_axis(x, order, 0) for x in (np.where(here, size * dram_s, 0.0), ready, here)
            )
            last = np.maximum(last, np.where(at, turn + _from_here(took), 0.0).max(axis=0))
        return last


def _from_here(values: Floats) -> Floats:
    """Sums of each row's values from here to the end."""
    summed: Floats = np.cumsum(values[::-1], axis=0)[::-1]
    return summed
