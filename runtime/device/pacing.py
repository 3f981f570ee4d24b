"""The device's side of two servers in `emulate/`: one says when a chunk of weights may be copied, the other when a
transfer over links that several devices share is over."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...ir.errors import WorkerError

CHUNK_BYTES = 32 << 20  # 2 to 3 ms of a PCIe link: as long may what is urgent have to wait
REQUEST = struct.Struct("<ii")  # root complex and turn, or device and index of the op
GRANTED, DONE, OVER = b".", b"!", b"."


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
    """The side of one device: any of its threads may ask."""

    def __init__(self, address: str, device: int):
        self.address, self.device = address, device
        self._own = threading.local()

    def begin(self, index: int) -> Callable[[], None]:
        """Tell that op `index` begins now; what this returns waits until it is over. One op at a time per thread.

        Raises `WorkerError` where the server is gone.
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
