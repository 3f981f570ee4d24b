"""The throughput of a partition into stages: the analysis by which Mixed-pipe's attempts compete (FTPipe 4).

In: stages as lists of blocks, and the device of each. Out: seconds of one synchronous step in which every device runs
each of its stages on all micro-batches, forward in order and backward in reverse; messages take the time of their link
and overlap with everything but what waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.costs.stage_time import MessageTimes
from ...ir.machine.hardware import Hardware
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
    `asynchronous` pipeline spares the last one, and a device's time for one micro-batch counts."""

    def __init__(
        self,
        graph: BlockGraph,
        members: Sequence[Sequence[int]],
        wires: Wires,
        micro_batches: int,
        spared: Sequence[bool] = (),
        asynchronous: bool = False,
    ):
        self.wires, self.micro_batches, self.asynchronous = wires, micro_batches, asynchronous
        home = {block: s for s, own in enumerate(members) for block in own}
        self.forward_ns = [[sum(row[i] for i in own) for own in members] for row in graph.forward_ns]
        self.load_ns = [[sum(row[i] for i in own) for own in members] for row in graph.load_ns]
        edges: dict[tuple[int, int], int] = {}
        back: dict[tuple[int, int], int] = {}
        self.values: list[tuple[int, tuple[int, ...], int]] = []  # maker, reading stages, bytes there and back
        for value in graph.values:
            maker = home[value.maker]
            readers = sorted({home[r] for r in value.readers} - {maker})
            for reader in readers:
                edges[maker, reader] = edges.get((maker, reader), 0) + value.bytes
                if value.has_gradient:
                    back[maker, reader] = back.get((maker, reader), 0) + value.bytes
            if readers:
                self.values.append((maker, tuple(readers), value.bytes * (1 + value.has_gradient)))
        self.pred = [[(a, size) for (a, b), size in edges.items() if b == s] for s in range(len(members))]
        self.succ = [[(b, size) for (a, b), size in back.items() if a == s] for s in range(len(members))]
        self.edges = list(edges)
        if asynchronous:
            spared = [not any(maker == s for maker, _ in edges) for s in range(len(members))]
        for s in (s for s, is_spared in enumerate(spared) if is_spared):
            for loads, forwards in zip(self.load_ns, self.forward_ns):
                loads[s] -= forwards[s]

    def step_ns(self, device_of: Sequence[int]) -> int:
        """Nanoseconds of one step without the optimizer; for an asynchronous pipeline, of one micro-batch in it."""
        if self.asynchronous:
            return max(self.periods_ns(device_of))
        count = len(device_of)
        free = [0] * (max(device_of) + 1)
        done: list[list[int]] = []
        for s in range(count):
            done.append(self.forward(s, device_of, free, done))
        backward: list[list[int]] = [[]] * count
        for s in reversed(range(count)):
            device = device_of[s]
            took_ns = self.load_ns[device][s] - self.forward_ns[device][s]
            backward[s] = self._run(s, device_of, free, took_ns, self.succ[s], backward)
        return max(free)

    def periods_ns(self, device_of: Sequence[int]) -> list[int]:
        """Per device its computation, and by how much sending activations, and gradients, takes longer (eq. 1)."""
        loads = self.device_load_ns(device_of, max(device_of) + 1)
        there, back = [0] * len(loads), [0] * len(loads)
        for sources, sent in ((self.pred, there), (self.succ, back)):
            for stage, row in enumerate(sources):
                for source, size in row:
                    rate = self.wires.ns_per_byte[device_of[source]][device_of[stage]]
                    sent[device_of[source]] += int(size * rate)
        return [load + max(0, x - load) + max(0, y - load) for load, x, y in zip(loads, there, back)]

    def forward(
        self, stage: int, device_of: Sequence[int], free: list[int], done: Sequence[Sequence[int]]
    ) -> list[int]:
        """Ends of a stage's forwards, after those of the stages `done`. Updates `free`, when each device is free."""
        took_ns = self.forward_ns[device_of[stage]][stage]
        return self._run(stage, device_of, free, took_ns, self.pred[stage], done)

    def _run(
        self,
        stage: int,
        device_of: Sequence[int],
        free: list[int],
        took_ns: int,
        sources: Sequence[tuple[int, int]],
        done: Sequence[Sequence[int]],
    ) -> list[int]:
        """Ends of all micro-batches of one stage, in order."""
        device = device_of[stage]
        wires = self.wires
        waits = []
        for source, size in sources:
            other = device_of[source]
            lag = wires.latency_ns[other][device] + int(size * wires.ns_per_byte[other][device])
            waits.append((done[source], lag))
        ends = []
        now = free[device]
        for m in range(self.micro_batches):
            for row, lag in waits:
                if row[m] + lag > now:
                    now = row[m] + lag
            now += took_ns
            ends.append(now)
        free[device] = now
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
