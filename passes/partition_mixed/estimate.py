"""The throughput of a partition into stages: the analysis by which Mixed-pipe's attempts compete (FTPipe 4).

In: stages as lists of blocks, and the device of each. Out: seconds of one synchronous step in which every device runs
each of its stages on all micro-batches, forward in order and backward in reverse; messages take the time of their link
and overlap with everything but what waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...graph.costs.stage_time import MessageTimes
from ...ir.machine.hardware import Hardware
from .block_sets import Integers
from .graph import NANO, BlockGraph


@dataclass(frozen=True)
class Wires:
    """Nanoseconds per byte and per message between every two devices."""

    ns_per_byte: list[list[float]]
    latency_ns: list[list[int]]

    @classmethod
    def from_hardware(cls, hardware: Hardware) -> Wires:
        messages, devices = MessageTimes(hardware), range(hardware.num_devices)
        ways = [[messages.way(src, dst) for dst in devices] for src in devices]
        rates = [[NANO / bandwidth for _, bandwidth in row] for row in ways]
        return cls(rates, [[round(NANO * latency_s) for latency_s, _ in row] for row in ways])

    @property
    def slowest_ns_per_byte(self) -> float:
        return max(rate for row in self.ns_per_byte for rate in row)


class PipelineEstimate:
    """Stages 0 to S - 1 in topological order, and what flows between them. All but the `spared` ones rematerialise; an
    `asynchronous` pipeline spares the last one, and a device's time for one micro-batch counts.

    Devices of stages are arrays [row, stage]: a hundred rows take little longer than one row."""

    def __init__(
        self,
        graph: BlockGraph,
        members: Sequence[Sequence[int]],
        wires: Wires,
        micro_batches: int,
        spared: Sequence[bool] = (),
        asynchronous: bool = False,
    ):
        self.micro_batches, self.asynchronous = micro_batches, asynchronous
        self.ns_per_byte, self.latency_ns = np.array(wires.ns_per_byte), np.array(wires.latency_ns)
        self.num_devices = len(self.ns_per_byte)
        home = np.empty(graph.num_blocks, np.int64)
        for s, own in enumerate(members):
            home[own] = s
        self._join(graph, home, len(members))
        if asynchronous:
            makers = {maker for maker, _, _ in self.values}
            spared = [s not in makers for s in range(len(members))]
        order, begins = np.concatenate(list(map(list, members))), np.cumsum([0, *map(len, members[:-1])])
        forward, load = (np.add.reduceat(times[:, order], begins, axis=1) for times in graph.times_ns)
        backward = load - forward
        load = np.where(np.array([*spared] or [False]), backward, load)
        self.load_ns = load.tolist()
        self.loads, turns = load, np.arange(micro_batches + 1)
        self.passed = [times.T[:, :, None] * turns for times in (forward, load - forward)]  # [stage, device, turn]
        self.waits = [self._lags(rows) for rows in (self.pred, self.succ)]

    def _join(self, graph: BlockGraph, home: Integers, count: int) -> None:
        """Find what flows between the stages."""
        edges: dict[tuple[int, int], int] = {}
        back: dict[tuple[int, int], int] = {}
        self.values: list[tuple[int, tuple[int, ...], int]] = []  # maker, reading stages, bytes there and back
        makers, readers = home[graph.ends.makers], home[graph.ends.readers.items]
        of_reader = graph.ends.readers.owners
        for k in np.unique(of_reader[makers[of_reader] != readers]).tolist():
            value, maker = graph.values[k], int(makers[k])
            others = sorted(set(home[list(value.readers)].tolist()) - {maker})
            for reader in others:
                edges[maker, reader] = edges.get((maker, reader), 0) + value.bytes
                if value.has_gradient:
                    back[maker, reader] = back.get((maker, reader), 0) + value.bytes
            self.values.append((maker, tuple(others), value.bytes * (1 + value.has_gradient)))
        self.pred: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self.succ: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for (a, b), size in edges.items():
            self.pred[b].append((a, size))
        for (a, b), size in back.items():
            self.succ[a].append((b, size))

    def _lags(self, rows: list[list[tuple[int, int]]]) -> list[list[tuple[int, Integers]]]:
        """Per stage the stages that it waits for, with the nanoseconds of the message, [from device, to device]."""
        sizes = np.array([size for row in rows for _, size in row], np.int64)[:, None, None]
        lags = iter(self.latency_ns + (sizes * self.ns_per_byte).astype(np.int64))
        return [[(source, next(lags)) for source, _ in row] for row in rows]

    def step_ns(self, device_of: Sequence[int]) -> int:
        """Nanoseconds of one step without the optimizer; for an asynchronous pipeline, of one micro-batch in it."""
        return int(self.steps_ns(np.array([device_of]))[0])

    def steps_ns(self, rows: Integers) -> Integers:
        """The same of each row of devices."""
        if self.asynchronous:
            longest: Integers = self._periods_ns(rows).max(axis=1)
            return longest
        count = rows.shape[1]
        free = np.zeros((len(rows), self.num_devices), np.int64)
        done: dict[int, Integers] = {}
        for s in range(count):
            done[s] = self.forward(s, rows, free, done)
        after: dict[int, Integers] = {}
        for s in reversed(range(count)):
            after[s] = self._run(s, rows, free, True, after)
        ends: Integers = free.max(axis=1)
        return ends

    def _periods_ns(self, rows: Integers) -> Integers:
        """Per device its computation, and by how much sending activations, and gradients, takes longer (eq. 1)."""
        every = np.arange(len(rows))
        loads, there, back = np.zeros((3, len(rows), self.num_devices), np.int64)
        for s in range(rows.shape[1]):
            loads[every, rows[:, s]] += self.loads[rows[:, s], s]
        for sources, sent in ((self.pred, there), (self.succ, back)):
            for stage, row in enumerate(sources):
                for source, size in row:
                    took_ns = size * self.ns_per_byte[rows[:, source], rows[:, stage]]
                    sent[every, rows[:, source]] += took_ns.astype(np.int64)
        periods: Integers = loads + np.maximum(0, there - loads) + np.maximum(0, back - loads)
        return periods

    def forward(self, stage: int, rows: Integers, free: Integers, done: Mapping[int, Integers]) -> Integers:
        """Ends of a stage's forwards, after those of the stages `done`, [row, micro-batch]. Updates `free`, when each
        device is free."""
        return self._run(stage, rows, free, False, done)

    def _run(
        self, stage: int, rows: Integers, free: Integers, backward: bool, done: Mapping[int, Integers]
    ) -> Integers:
        """Ends of all micro-batches of one stage, in order: micro-batch m ends at max(end of m - 1, what it waits for)
        + T, so less (m + 1) T it ends at the largest of the device's first free moment and of all waits up to m."""
        every, device = np.arange(len(rows)), rows[:, stage]
        passed = self.passed[backward][stage][device]
        least = free[every, device][:, None]
        for source, lags in self.waits[backward][stage]:
            least = np.maximum(least, done[source] + lags[rows[:, source], device][:, None] - passed[:, :-1])
        ends: Integers = np.maximum.accumulate(least, axis=1) + passed[:, 1:]
        free[every, device] = ends[:, -1]
        return ends

    def device_load_ns(self, device_of: Sequence[int], num_devices: int) -> list[int]:
        """Computation of one micro-batch on each device."""
        loads = [0] * num_devices
        for s, device in enumerate(device_of):
            loads[device] += self.load_ns[device][s]
        return loads

    def cut_bytes(self, device_of: Sequence[int]) -> int:
        """Bytes of one micro-batch between devices, gradients included; a value goes once to each device."""
        return sum(
            size * len({device_of[r] for r in readers} - {device_of[maker]}) for maker, readers, size in self.values
        )

    def distances(self) -> list[int]:
        """Per stage the number of stages after it on the longest way to an end."""
        found = [0] * len(self.pred)
        for s in reversed(range(len(found))):
            for a, _ in self.pred[s]:
                found[a] = max(found[a], found[s] + 1)
        return found

    def depth(self) -> int:
        """The number of stages on the longest path."""
        level = [1] * len(self.pred)
        for s, row in enumerate(self.pred):
            level[s] = 1 + max((level[a] for a, _ in row), default=0)
        return max(level)
