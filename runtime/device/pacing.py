"""How long a device's transfers last on throttled links, and when a chunk of weights may be copied: the device's side
of two servers in `emulate/`, which know about all devices."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ...ir import ops
from ...ir.errors import WorkerError
from ...ir.machine.hardware import Device, Hardware
from .prepare import Issue, Issues

CHUNK_BYTES = 32 << 20  # 2 to 3 ms of a PCIe link: an urgent copy may have to wait this long
REQUEST = struct.Struct("<ii")  # root complex and turn, or device and index of the op
GRANTED, DONE, OVER = b".", b"!", b"."


@dataclass(frozen=True)
class Paces:
    """What makes a device's `Pacing`, as plain data.

    `link_server`: the address of the server that times the transfers on shared, throttled links; `shared`: per program,
    the numbers of its ops there; `collective_s`: the least seconds of each collective. `turns`: the address of the
    server that says when the next chunk of weights may come, if fetches are ordered. `waits_s`: in a rehearsal, the
    seconds of each op of the step, None for an op whose end the link server tells.
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
    """The pace of the transfers of device `index`. `turns`: None if fetches are not ordered."""

    def __init__(self, hardware: Hardware, index: int, paces: Paces):
        self.hardware, self.spec, self.paces = hardware, hardware.devices[index], paces
        self.throttled = hardware.throttled and self.spec.kind == "cpu"
        self.links = None if paces.link_server is None else LinkClient(paces.link_server, index)
        self.turns = None if paces.turns is None else TurnClient(paces.turns, self.spec.root_complex)

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
        end_s = time.perf_counter() + issue.least_s

        def rest() -> None:
            rest_s = end_s - time.perf_counter()
            if rest_s > 0:
                time.sleep(rest_s)

        return rest

    def _transfer_s(self, issue: Issue) -> float:
        """The seconds of a transfer on the described hardware; 0 for a receive, which its send slows down."""
        if not ops.ALL[issue.op].transfers:
            return 0.0
        route = route_of(issue, self.hardware, self.spec)
        return issue.moved_bytes / self.hardware.bandwidth(*route, issue.moved_bytes) + self.hardware.latency_s(*route)


def _go_on() -> None:
    """The end of a transfer that nothing slows down."""


def route_of(issue: Issue, hardware: Hardware, own: Device) -> tuple[str, str]:
    """The machine's names of the memories between which the device `own` moves an op's bytes."""
    names = {ops.DEVICE: own.name, ops.DRAM: f"dram{own.host}", ops.SSD: f"ssd{own.host}"}
    names |= {f"device{i}": device.name for i, device in enumerate(hardware.devices)}
    source, target = issue.route
    return names[source], names[target]


class TurnClient:
    """One device's side, under root complex `complex_` of its host: any of the device's threads may ask."""

    def __init__(self, address: str, complex_: int):
        self.address, self.complex_ = address, complex_
        self._own = threading.local()

    @contextmanager
    def hold(self, turn: int) -> Iterator[None]:
        """Hold the root complex alone. Raises `WorkerError` if the server is gone."""
        channel = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel.connect(self.address)
        try:
            channel.sendall(REQUEST.pack(self.complex_, turn))
            granted = channel.recv(len(GRANTED))
        except OSError:
            granted = b""
        if not granted:
            raise WorkerError("the process that hands out the turns of copies is gone")
        try:
            yield
        finally:
            channel.sendall(DONE)


class LinkClient:
    """One device's side: any of its threads may ask."""

    def __init__(self, address: str, device: int):
        self.address, self.device = address, device
        self._own = threading.local()

    def begin(self, index: int) -> Callable[[], None]:
        """Tell the server that op `index` begins now; the returned function waits for its end. One op at a time per
        thread.

        Raises `WorkerError` if the server is gone.
        """
        channel = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel.connect(self.address)
        channel.sendall(REQUEST.pack(self.device, index))

        def wait() -> None:
            try:
                answer = channel.recv(1)
            except ConnectionResetError:
                answer = b""
            if not answer:
                raise WorkerError(f"device {self.device}: the process that shares out the links is gone")

        return wait
