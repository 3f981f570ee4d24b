"""The order of weight fetches: on a host with `ordered_fetches` the stage that runs first has a root complex to itself.

CUDA's stream priorities do not order copies between host and device, so the runtime does (Mobius 3.3): weights move in
chunks, each under a token of the root complex, which goes to the lowest turn that waits. The tokens are held by a
thread of the process that starts the devices; each asking thread of a device has its own connection.
"""

from __future__ import annotations

import heapq
import itertools
import socket
import socketserver
import threading

from ..device.pacing import DONE, GRANTED, REQUEST


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
        while True:
            try:
                request = self.request.recv(REQUEST.size, socket.MSG_WAITALL)
                if len(request) < REQUEST.size:
                    return
                complex_, turn = REQUEST.unpack(request)
                self.server.tokens.take(complex_, turn)
                try:
                    self.request.sendall(GRANTED)
                    self.request.recv(len(DONE))
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
