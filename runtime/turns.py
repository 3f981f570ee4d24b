"""Whose weights come first: on a host with `ordered_fetches` the stage that runs first has a root complex to itself.

CUDA's stream priorities do not order copies between host and device, so the runtime does (Mobius 3.3): weights move in
chunks, each under a token of the root complex, which goes to the lowest turn among those who wait. The tokens are held
by a thread of the process that starts the devices; each thread of a device that asks has a connection of its own.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from . import ops
from .errors import WorkerError

CHUNK_BYTES = 32 << 20  # 2 to 3 ms of a PCIe link: as long may what is urgent have to wait
LAST_TURN = 1 << 20  # more than any number of stages
_REQUEST = struct.Struct("<ii")  # root complex, turn
_GRANTED, _DONE = b".", b"!"


def is_weights_fetch(node: fx.Node) -> bool:
    return node.target is ops.fetch and node.meta["type"].kind in ("weights", "part", "shard")


def turn_of(fetch: fx.Node) -> int:
    """When the step needs these weights: stage j's turn is j in forward and -j, behind all of those, in backward."""
    user: fx.Node | None = fetch
    while user is not None and user.target in (ops.fetch, operator.getitem, ops.all_gather):
        user = next((u for u in user.users if u.target is not ops.free), None)
    stage = int(fetch.meta["type"].stage.removeprefix("stage"))
    return 2 * LAST_TURN - stage if user is not None and user.target in (ops.backward, ops.backward_input) else stage


class Tokens:
    """One token a root complex. Who asks with the lowest turn gets it next, of equal turns who asked first."""

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
    """One connection: asks for a token, is granted it, gives it back; and so on. A broken one gives its token back."""

    server: _Server

    def handle(self) -> None:
        while True:
            try:
                request = self.request.recv(_REQUEST.size, socket.MSG_WAITALL)
                if len(request) < _REQUEST.size:
                    return
                complex_, turn = _REQUEST.unpack(request)
                self.server.tokens.take(complex_, turn)
                try:
                    self.request.sendall(_GRANTED)
                    self.request.recv(len(_DONE))
                finally:
                    self.server.tokens.give(complex_)
            except OSError:  # the device has gone
                return


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str):
        self.tokens = Tokens()
        super().__init__(address, _Handler)


class TurnServer:
    """Hands out tokens at `address`, a path of its own, until `close`."""

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


class TurnClient:
    """The side of one device, under root complex `complex_` of its host: any of its threads may ask."""

    def __init__(self, address: str, complex_: int):
        self.address, self.complex_ = address, complex_
        self._own = threading.local()

    @contextmanager
    def hold(self, turn: int) -> Iterator[None]:
        """Have the root complex to oneself. Raises `WorkerError` where the server is gone."""
        channel = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel.connect(self.address)
        try:
            channel.sendall(_REQUEST.pack(self.complex_, turn))
            granted = channel.recv(len(_GRANTED))
        except OSError:
            granted = b""
        if not granted:
            raise WorkerError("the process that hands out the turns of copies is gone")
        try:
            yield
        finally:
            channel.sendall(_DONE)
