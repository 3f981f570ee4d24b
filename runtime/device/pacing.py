"""The duration of a device's transfers on throttled links, and the time when a chunk of weights may be copied: the
device's side of two servers, `emulate/link_server.py` and `turns.py`, which know about all devices."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...ir import ops
from ...ir.errors import WorkerError
from ...ir.machine.hardware import Device, Hardware
from ...ir.program import PAGE, aligned
from ..turns import Asking, TurnClient
from .prepare import Issue, Issues

# A chunk is what the device's link moves in CHUNK_S: a fetch with a lower turn waits so long at most. The copy of its
# last HAND_OVER_S is still under way while the turn is handed on, which takes about as long: so the link is never idle.
CHUNK_S, HAND_OVER_S = 2.5e-3, 2e-4
REQUEST = struct.Struct("<ii")  # device and index of the op
OVER = b"."


@dataclass(frozen=True)
class Paces:
    """The plain data from which a device's `Pacing` is made.

    `link_server`: the address of the server that times the transfers on shared, throttled links; `shared`: per program,
    the numbers of its ops there; `collective_s`: the least seconds of each collective. `turns`: the address of the
    server that says when the next chunk of weights may come; None where fetches have no turns, or the link server keeps
    them. `waits_s`: in a rehearsal, the seconds of each op of the step, None for an op whose end the link server tells.
    """

    link_server: str | None = None
    turns: str | None = None
    shared: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    collective_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    waits_s: Sequence[float | None] | None = None

    def to_json(self) -> dict[str, Any]:
        numbered = {"shared": self.shared, "collective_s": self.collective_s}
        return asdict(self) | {
            key: {name: list(rows.items()) for name, rows in found.items()} for key, found in numbered.items()
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Paces:
        numbered = {key: {name: dict(rows) for name, rows in raw[key].items()} for key in ("shared", "collective_s")}
        return Paces(**{**raw, **numbered})


class Pacing:
    """The pace of the transfers of device `index`. `turns`: None if nothing waits for its turn. `chunk_bytes`: what a
    fetch moves in one turn, of which the last `hand_over_bytes` do not hold up the next."""

    def __init__(self, hardware: Hardware, index: int, paces: Paces):
        self.hardware, self.spec, self.paces = hardware, hardware.devices[index], paces
        self.throttled = hardware.throttled and self.spec.kind == "cpu"
        self.links = None if paces.link_server is None else LinkClient(paces.link_server, index)
        before = sum(len(host.root_complexes) for host in hardware.hosts[: self.spec.host])
        self.turns = None if paces.turns is None else TurnClient(paces.turns, before + self.spec.root_complex)
        self.link_rate = hardware.bandwidth(f"dram{self.spec.host}", self.spec.name)  # bytes/s
        self.chunk_bytes = aligned(int(self.link_rate * CHUNK_S), PAGE)
        self.hand_over_bytes = aligned(int(self.link_rate * HAND_OVER_S), PAGE)

    def mark(self, function: str, plan: Issues) -> None:
        """Set the least seconds of each op of a program, and its number at the link server if it has one."""
        if self.throttled:
            shared, collective_s = self.paces.shared.get(function, {}), self.paces.collective_s.get(function, {})
            for issue in plan.ops:
                issue.least_s = collective_s.get(issue.index, self._transfer_s(issue))
                issue.shared = shared.get(issue.index)

    def begin(self, issue: Issue) -> Callable[[], None]:
        """Begin a transfer. The returned function waits until the described links would have moved it as well."""
        if issue.shared is not None:
            assert self.links is not None
            return self.links.begin(issue.shared)
        if not issue.least_s:
            return _go_on
        return _not_before(time.perf_counter() + issue.least_s)

    def begin_chunk(self, num_bytes: int) -> Callable[[], None]:
        """Begin a part of a fetch, in its turn on the link. The returned function waits until the described link would
        have moved it as well, where no server times it."""
        if not self.throttled:
            return _go_on
        return _not_before(time.perf_counter() + num_bytes / self.link_rate)

    def _transfer_s(self, issue: Issue) -> float:
        """The seconds of a transfer on the described hardware; 0 for a receive, which its send slows down."""
        if not ops.ALL[issue.op].transfers:
            return 0.0
        route = route_of(issue, self.hardware, self.spec)
        return issue.moved_bytes / self.hardware.bandwidth(*route, issue.moved_bytes) + self.hardware.latency_s(*route)


def _go_on() -> None:
    """The end of a transfer that nothing slows down."""


def _not_before(end_s: float) -> Callable[[], None]:
    def rest() -> None:
        rest_s = end_s - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)

    return rest


def route_of(issue: Issue, hardware: Hardware, own: Device) -> tuple[str, str]:
    """The machine's names of the memories between which the device `own` moves an op's bytes."""
    names = memory_names(hardware, own)
    source, target = issue.route
    return names[source], names[target]


def memory_names(hardware: Hardware, own: Device) -> dict[str, str]:
    """The machine's names of the memories that the programs of the device `own` name."""
    devices = {f"device{i}": device.name for i, device in enumerate(hardware.devices)}
    return {ops.DEVICE: own.name, ops.DRAM: f"dram{own.host}", ops.SSD: f"ssd{own.host}", **devices}


def moved_bytes(plan: Issues, hardware: Hardware, own: Device) -> dict[str, int]:
    """The bytes of a run per route between two memories by name. A message counts at its sender."""
    moved: dict[str, int] = {}
    for issue in plan.ops:
        op = ops.ALL[issue.op]
        if issue.moved_bytes and (op.transfers or not op.meets):
            route = " -> ".join(route_of(issue, hardware, own))
            moved[route] = moved.get(route, 0) + issue.moved_bytes
    return moved


class LinkClient(Asking):
    """One device's side: any of its threads may ask."""

    def __init__(self, address: str, device: int):
        super().__init__(address)
        self.device = device

    def begin(self, index: int) -> Callable[[], None]:
        """Tell the server that op `index` begins now; the returned function waits for its end. One op at a time per
        thread.

        Raises `WorkerError` if the server is gone.
        """
        try:
            channel = self._connect()
            channel.sendall(REQUEST.pack(self.device, index))
        except OSError:
            raise self._lost_server() from None

        def wait() -> None:
            try:
                answer = channel.recv(1)
            except OSError:
                answer = b""
            if not answer:
                raise self._lost_server()

        return wait

    def _lost_server(self) -> WorkerError:
        return WorkerError(f"device {self.device}: the process that shares out the links is gone")
