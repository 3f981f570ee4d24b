"""Turns on links: of the weights that devices of one host fetch through one root complex, the lowest turn comes first.

CUDA's stream priorities do not order copies between host and device, so the runtime does (Mobius 3.3): weights whose
fetches have a `link_turn` move in chunks, each under a token of the root complex, which goes to the lowest turn that
waits. The tokens of a host are held by a thread of one of its processes: that which starts the workers, or the first
rank of a torchrun on this host. Each asking thread of a device has its own connection; if it breaks, its token goes to
the next.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..ir.errors import WorkerError
from .scratch import reachable

REQUEST = struct.Struct("<ii")  # root complex and turn
GRANTED, DONE = b".", b"!"


class Tokens:
    """One token per root complex. The request with the lowest turn gets it next, of equal turns the earliest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        self._taken: set[int] = set()
        self._count = itertools.count()

    def take(self, complex_: int, turn: int) -> None:
        """Wait for the token of a root complex."""
        with self._changed:
            mine, waiting = (turn, next(self._count)), self._waiting.setdefault(complex_, [])
            heapq.heappush(waiting, mine)
            self._changed.wait_for(lambda: complex_ not in self._taken and waiting[0] == mine)
            heapq.heappop(waiting)
            self._taken.add(complex_)

    def give(self, complex_: int) -> None:
        with self._changed:
            self._taken.discard(complex_)
            self._changed.notify_all()


class _Handler(socketserver.BaseRequestHandler):
    """One connection: asks for a token, is granted it, gives it back, and so on. If it breaks, the token goes back."""

    server: _Server

    def handle(self) -> None:
        self.server.clients.add(self.request)
        with contextlib.suppress(OSError):  # the device has gone, or the server is closed
            while self._serve_one():
                pass
        self.server.clients.discard(self.request)

    def _serve_one(self) -> bool:
        request = self.request.recv(REQUEST.size, socket.MSG_WAITALL)
        if len(request) < REQUEST.size:
            return False
        complex_, turn = REQUEST.unpack(request)
        self.server.tokens.take(complex_, turn)
        try:
            self.request.sendall(GRANTED)
            return bool(self.request.recv(len(DONE)))
        finally:
            self.server.tokens.give(complex_)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN

    def __init__(self, address: str):
        self.tokens = Tokens()
        self.clients: set[socket.socket] = set()
        with reachable(address) as path:
            super().__init__(path, _Handler)


class TurnServer:
    """Hands out tokens at `address`, a path of its own, until `close`, after which whoever waits gets an error."""

    def __init__(self, address: str):
        self.address = address
        self._server = _Server(address)
        self._thread = threading.Thread(target=self._server.serve_forever, name="penstock-turns", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        for client in list(self._server.clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


class TurnsLost(WorkerError):
    """The process that hands out the turns of copies is gone: it is to blame, and not the device that waits."""


class Asking:
    """The device's side of a server on its host: each of its threads has a connection of its own."""

    def __init__(self, address: str):
        self.address = address
        self._own = threading.local()

    def _connect(self) -> socket.socket:
        channel: socket.socket | None = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with reachable(self.address) as path:
                channel.connect(path)
        return channel


class TurnClient(Asking):
    """One device's side, under the root complex of this number, of those of all hosts: any of its threads may ask."""

    def __init__(self, address: str, complex_: int):
        super().__init__(address)
        self.complex_ = complex_

    @contextmanager
    def hold(self, turn: int) -> Iterator[None]:
        """Hold the root complex alone. Raises `TurnsLost` if the server is gone."""
        try:
            channel = self._connect()
            channel.sendall(REQUEST.pack(self.complex_, turn))
            granted = channel.recv(len(GRANTED))
        except OSError:
            granted = b""
        if not granted:
            raise TurnsLost("the process that hands out the turns of copies is gone")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the next request says so
                channel.sendall(DONE)
