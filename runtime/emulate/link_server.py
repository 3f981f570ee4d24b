"""Links that several processes share, in real time: a process that moves something over them asks a server, and is told
when the transfer is over.

The server shares links out as the simulator does (`simulate/sharing.py`), except that a clock decides when things
happen. It is a thread of the process that starts the devices; each asking thread of a device has its own connection.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from ...ir.machine.links import Link
from ..device.pacing import OVER, REQUEST
from ..scratch import reachable
from ..simulate.sharing import Cost, TasksUnderWay

Costs = Sequence[Sequence[Cost]]  # per device, per op of its program in text order


class LinkServer:
    """Answers `LinkClient`s at `address` (a path of its own) until `close`.

    `time_scale` seconds pass for each second of the costs.
    """

    def __init__(self, address: str, links: Mapping[str, Link], costs: Costs, time_scale: float = 1.0):
        self.address, self.costs, self.time_scale = address, costs, time_scale
        self.progress = TasksUnderWay(links)
        self._asked: dict[int, socket.socket] = {}  # per task under way, the connection that waits for it
        self._count = 0
        self._begin_s = time.perf_counter()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with reachable(address) as path:
            self._listener.bind(path)
        self._listener.listen(socket.SOMAXCONN)
        self._stop, stopped = socket.socketpair()
        self._selector = selectors.SelectSelector()  # the only kind that waits to the microsecond
        for each in (self._listener, stopped):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, args=(stopped,), name="penstock-links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Clients that still wait see their connections close."""
        if self._thread.is_alive():
            self._stop.send(OVER)
            self._thread.join()
        self._stop.close()

    def _now_s(self) -> float:
        return (time.perf_counter() - self._begin_s) / self.time_scale

    def _run(self, stopped: socket.socket) -> None:
        running = True
        while running:
            next_s = self.progress.next_s
            wait_s = None if next_s == math.inf else max(0.0, (next_s - self._now_s()) * self.time_scale)
            ready = self._selector.select(wait_s)
            now_s = self._now_s()
            while self.progress.next_s <= now_s:
                _, over = self.progress.pop()
                if over is not None:
                    self._answer(self._asked.pop(over))
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is stopped:
                    running = False
                elif key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                else:
                    self._hear(key.fileobj, now_s)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _hear(self, client: socket.socket, now_s: float) -> None:
        try:
            request = client.recv(REQUEST.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            request = b""
        if len(request) < REQUEST.size:  # the client has gone; its transfer goes on, and the answer is lost
            self._selector.unregister(client)
            client.close()
            return
        device, index = REQUEST.unpack(request)
        self._count += 1
        self._asked[self._count] = client
        self.progress.begin(self._count, self.costs[device][index], now_s)

    def _answer(self, client: socket.socket) -> None:
        try:
            client.send(OVER)
        except OSError:
            return  # the client has gone meanwhile
