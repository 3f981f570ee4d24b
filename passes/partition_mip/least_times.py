"""Lower bounds of the steps of many partitions at once: `recurrence` without waiting for others' transfers.

In: a `MipProblem` and partitions into one number of stages. Out: the seconds of `contended_s`, but that fetches and
gradients of other devices slow none that share a root complex evenly (`shared_link`); they still follow one another
through it. That is all of it where no fetch shares a root complex, and no more elsewhere. Many partitions take little
longer than one, so a search evaluates only what this lets through.

Arrays are [stage, row] or [device, row]. `never`, 0 or -inf for a resident device, keeps what is not transferred out of
every maximum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

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
        self.took = np.array([p.forward_s, p.backward_s, p.again_s])  # [which, device, block]
        self.held = np.array([p.weight_bytes, p.grad_bytes, p.params, p.tensors, p.kept_bytes])  # [which, block]
        self.messages = np.array(p.message_bytes)
        self.work, self.inputs = self.table(p.work_bytes), self.table(p.input_bytes)
        self.message_s, self.latency_s = np.array(p.message_s), np.array(p.message_latency_s)
        self.shares = np.array(p.message_shares)
        self.known: dict[bytes, bytes] = {}  # which stages of a device run again, and whether that is enough
        self.complexes = np.array([unit.complex for unit in p.units])
        self.hosts = np.array([unit.host for unit in p.units])
        names = [field.name for field in fields(Unit)]
        self.units = {name: np.array([float(getattr(unit, name)) for unit in p.units]) for name in names}
        self.layouts: dict[int, _Layout] = {}  # by number of stages

    def table(self, rows: Table) -> Floats:
        full = np.zeros((self.problem.num_blocks + 1,) * 2)
        for b, row in enumerate(rows):
            full[b, : len(row)] = row
        return full

    def layout(self, count: int) -> _Layout:
        if count not in self.layouts:
            self.layouts[count] = _Layout(self, count)
        return self.layouts[count]

    def __call__(self, cuts: Indices | Sequence[Sequence[int]]) -> Floats:
        """Seconds by row; inf where a stage does not fit its device."""
        rows = np.asarray(cuts).T
        layout, a, b = self.layout(len(rows) - 1), rows[:-1], rows[1:]
        held, work, inputs = self.held[:, rows], self.work[b, a], self.inputs[b, a]
        held = held[:, 1:] - held[:, :-1]
        fits = (held[0] + work + layout.num_inputs * inputs <= layout.unit["budget_bytes"]).all(axis=0)
        if fits.all():
            return _Steps(self, layout, rows, held, work, inputs).seconds()
        found = np.full(rows.shape[1], math.inf)
        if fits.any():
            some = (x[..., fits] for x in (rows, held, work, inputs))
            found[fits] = _Steps(self, layout, *some).seconds()
        return found


class _Layout:
    """The facts of partitions into one number of stages that do not depend on their cuts. `unit`: the numbers of each
    stage's device, [stage, 1]; those of the ways of messages from the stages before and after."""

    def __init__(self, of: LeastTimes, count: int):
        n = len(of.problem.units)
        self.count, self.on = count, np.arange(count) % n
        self.before, self.after = (self.on - 1) % n, (self.on + 1) % n
        self.unit = {name: row[self.on[:, None]] for name, row in of.units.items()}
        self.num_inputs = of.problem.micro_batches * -(-count // n) + 2
        self.hosts = of.hosts[self.on][:, None]
        ways = (self.before, self.after)
        self.latency_s, self.message_s, self.shares = (
            [row[src, self.on][:, None] for src in ways] for row in (of.latency_s, of.message_s, of.shares)
        )
        self.sent_shares = of.shares[self.on, self.before][:, None]


class _Steps:
    """One evaluation, as `recurrence._Step` of one partition."""

    def __init__(self, of: LeastTimes, layout: _Layout, cuts: Indices, held: Floats, work: Floats, inputs: Floats):
        p = self.p = of.problem
        self.of, self.layout, self.cuts, self.n = of, layout, cuts, len(p.units)
        self.count, self.num, self.on = layout.count, cuts.shape[1], layout.on
        self.zero = np.zeros(self.num)
        took = of.took[:, self.on[:, None], cuts[1:]] - of.took[:, self.on[:, None], cuts[:-1]]
        took[:2] += layout.unit["own_s"]
        self.tf, self.tb, self.again = took
        self.w, self.g, self.q, self.calls, self.kept = held
        self.work, self.entering = work, p.micro_batches * inputs
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
        budget = self.of.units["budget_bytes"][devices[:, None]]
        slack, inputs = 2 * entering / m, entering.cumsum(axis=0)
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
            missing = held - budget + inputs + m * kept.cumsum(axis=0) - g.cumsum(axis=0) + work - kept + slack
            stays, short = held <= budget, (missing > 0).any(axis=0)
            again = np.full(kept.shape, p.always)
            if p.always:
                stays &= (missing <= m * kept.cumsum(axis=0) - kept).all(axis=0)
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
        keys = bytes_of_rows(cases)
        new = {key: i for i, key in enumerate(keys) if key not in known}  # compared partitions differ on few devices
        if new:
            seconds, missing, kept = (x[list(new.values())] for x in (seconds, missing, kept))
            again, enough = cheapest_of_many(seconds, missing, _leaves(m, count) * kept[:, None])
            known.update((key, row.tobytes()) for key, row in zip(new, np.hstack([again, enough[:, None]])))
        found = np.frombuffer(b"".join([known[key] for key in keys]), np.bool_).reshape(len(keys), -1)
        return found[:, :-1].T, found[:, -1]

    def seconds(self) -> Floats:
        of, layout, n, m = self.of, self.layout, self.n, self.p.micro_batches
        messages = of.messages[self.cuts]
        self.from_before, self.from_after = messages[:-1], messages[1:]
        fetch_s, shared_s, latency_s = (layout.unit[x] for x in ("fetch_s", "shared_fetch_s", "latency_s"))
        self.free, self.freed, self.own_up = ([self.zero] * n for _ in range(3))
        self.up = [self.zero] * (1 + max(of.complexes))
        if any(self.any_swapped):
            through = [m * sent * row for sent, row in zip((self.from_before, self.from_after), layout.shares)]
            through[0][:n] = 0.0
            self.passing = [(self.w + sent) * shared_s + self.never for sent in through]
            self.alone = self.w * fetch_s + self.never
            late = self.w[n:] + self.w[:-n] - self.room[self.on[n:]]
            self.late = [
                np.where(late > 0, np.minimum(w, late) * fetch_s[n:] + latency_s[n:], -math.inf)
                for w in (self.w[n:], self.w[:-n])
            ]
        ways = zip((self.from_before, self.from_after), layout.latency_s, layout.message_s)
        c = [latency_s + sent * message_s for sent, latency_s, message_s in ways]
        self.sweep(range(self.count), self.tf, c[0], False)
        self.ready = self.sweep(range(self.count - 1, -1, -1), self.tb, c[1], True)
        self.offloads()
        if any(unit.shared_both_s for unit in self.p.units):
            self.both_ways()
        self.wait_for_ties()
        return self.update()

    def sweep(self, order: range, times: Floats, c: Floats, backward: bool) -> Floats:
        """One direction; returns the end of each stage."""
        n, rest, maximum = self.n, self.p.micro_batches - 1, np.maximum
        ends = np.empty_like(times)
        took, sent, rest_took, rest_sent = (list(x) for x in (times, c, rest * times, rest * c))
        first = last = self.zero
        for j in order:
            d, k = j % n, j - order.step
            if j != order[0]:
                both = first + took[k]
                first, last = both + sent[j], maximum(last + took[k], both + rest_sent[j]) + sent[j]
            first = maximum(first, self.free[d])
            fetched = not backward or j < self.count - n
            if fetched and self.any_swapped[d]:
                first = maximum(first, self.there_s(j, backward))
            last = maximum(last, first + rest_took[j])
            if fetched:
                self.freed[d] = self.free[d]
            self.free[d] = ends[j] = last + took[j]
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

    def offloads(self) -> None:
        of, ready, units, layout = self.of, self.ready, self.p.units, self.layout
        sent = self.p.micro_batches * self.from_before * layout.sent_shares
        sent[0] = 0.0
        work_s = (self.g + sent) * layout.unit["shared_offload_s"] + self.never
        alone = self.g * layout.unit["offload_s"] + self.never
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
        both = np.where(self.stage_swapped, self.layout.unit["shared_both_s"], 0.0)
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
            step_s, call_s, own_s, byte_s = (self.layout.unit[x] for x in ("step_s", "call_s", "own_s", "byte_s"))
            took = self.q * step_s + self.calls * call_s + own_s
            if p.update.barrier:
                took = took + 2 * self.g * byte_s + call_s + own_s
            rest = _from_here(self.rounds_of_devices(took, 0.0))
            ends = np.maximum(
                np.array(self.free[:n]) + rest[0], (self.rounds_of_devices(begin, -math.inf) + rest).max(axis=0)
            )
            done = np.maximum(done, np.where(self.swapped[:n], 0.0, ends).max(axis=0))
        if any(self.any_swapped):
            for host in range(len(p.update.params_s)):
                here = self.stage_swapped & (self.layout.hosts == host)
                took = self.q * p.update.params_s[host]
                if p.update.barrier:
                    clipping = self.swapped[:n][of.hosts[:n] == host].sum(axis=0)
                    most = max(1, int(clipping.max()))
                    clip_s = np.array([0.0, *(p.update.clip_s(host, k) for k in range(1, most + 1))])
                    took = np.where(here, took + self.g * clip_s[clipping], 0.0).sum(axis=0)
                    done = np.maximum(done, np.where(here.any(axis=0), barrier + took, 0.0))
                    continue
                order = self.ready.argsort(axis=0, kind="stable"), np.arange(self.num)
                took, turn, at = (x[order] for x in (np.where(here, took, 0.0), begin, here))
                done = np.maximum(done, np.where(at, turn + _from_here(took), 0.0).max(axis=0))
        return done

    def rounds_of_devices(self, values: Floats, missing: float) -> Floats:
        """The stages' values as [round, device, row]; `missing`: for a last round that not all devices have."""
        n = min(self.n, self.count)
        rounds = -(-self.count // n)
        if rounds * n > self.count:
            more = np.full((rounds * n - self.count, self.num), missing)
            values = np.concatenate([values, more])
        return values.reshape(rounds, n, self.num)

    def norm_s(self) -> Floats:
        """The seconds at which all devices have the norm of their gradients."""
        of, n = self.of, min(self.n, self.count)
        ready = self.rounds_of_devices(self.ready, -math.inf).max(axis=0)
        size = self.rounds_of_devices(self.g, 0.0).sum(axis=0)
        byte_s, call_s, own_s = (self.layout.unit[x][:n] for x in ("byte_s", "call_s", "own_s"))
        swapped = self.swapped[:n]
        last: Floats = np.where(swapped, 0.0, ready + size * byte_s + call_s + own_s).max(axis=0)
        order = ready.argsort(axis=0, kind="stable"), np.arange(self.num)
        for host, dram_s in enumerate(self.p.update.bytes_s):
            here = swapped & (of.hosts[:n] == host)[:, None]
            took, turn, at = (x[order] for x in (np.where(here, size * dram_s, 0.0), ready, here))
            last = np.maximum(last, np.where(at, turn + _from_here(took), 0.0).max(axis=0))
        return last


def bytes_of_rows(rows: NDArray[Any]) -> list[bytes]:
    """The bytes of each row, by which equal rows are found."""
    packed: Any = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    found: list[bytes] = packed.ravel().tolist()
    return found


@functools.cache
def _leaves(micro_batches: int, count: int) -> Floats:
    """The micro-batches whose saved tensors a stage that runs again leaves free, [moment, stage]: of those before, all;
    in its own backward, all but one."""
    leaves: Floats = micro_batches * np.tri(count, count, -1) + (micro_batches - 1) * np.eye(count)
    return leaves


def _from_here(values: Floats) -> Floats:
    """Sums of each row's values from here to the end."""
    summed: Floats = values[::-1].cumsum(axis=0)[::-1]
    return summed
