"""The process of one device.

The driver starts it, as a fork (`runtime/forks.py`) of a process that has imported this file. It imports the device's
generated file, never the user's script, and serves `commands.py` over the channel. It ends when the driver closes the
channel or is gone, whatever it is doing at that moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import MutableSequence, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ...ir.errors import error_to_data
from ...ir.program import bound_interface
from ..accelerator import current
from ..bad_step import BadStep
from ..device.host import keep_freed_memory
from ..device.named_streams import STREAM_SLOTS
from ..device.peers import PeerLink, group_members
from ..device.session import DeviceSession
from ..device.setup import DeviceSetup
from ..device.streams import SWITCH_S
from ..emulate.rehearsed_device import RehearsedSession
from .commands import COMMANDS, Tensors
from .wire import LATER, later_tensors, pack, receive_message, send

PARENT_CHECK_MS = 1000
SLOT = struct.calcsize("i")


def open_board(path: str | Path, create: bool = False) -> MutableSequence[int]:
    """Open the board: the line at which each of a worker's streams is, in the order of `STREAM_SLOTS`, shared between
    processes."""
    size = SLOT * len(STREAM_SLOTS)
    if create:
        Path(path).write_bytes(bytes(size))
    with open(path, "r+b") as file:
        return cast("MutableSequence[int]", memoryview(mmap.mmap(file.fileno(), size)).cast("i"))


def build_session(
    setup: DeviceSetup,
    store: dist.Store | None,
    board: MutableSequence[int] | None = None,
    bad_step: BadStep | None = None,
) -> DeviceSession:
    """The session of the device that `setup` describes, connected to the others."""
    device, rehearsed = torch.device("cpu"), setup.paces.waits_s is not None
    if setup.spec.kind == "cuda" and not rehearsed:
        device = torch.device("cuda", setup.share.gpu)
    else:
        keep_freed_memory()
    if setup.share.num_threads is not None:
        torch.get_num_threads()  # otherwise its first use would overwrite the number that is set next
        torch.set_num_threads(setup.share.num_threads)
    with current(device):
        link = None if setup.interface.world_size == 1 else _connect(setup, store, device)
        return (RehearsedSession if rehearsed else DeviceSession)(setup, setup.open_file(), link, board, bad_step)


def _connect(setup: DeviceSetup, store: dist.Store | None, device: torch.device) -> PeerLink:
    assert store is not None
    sys.setswitchinterval(SWITCH_S)  # in the process of a torchrun's rank, too
    interface = setup.interface
    return PeerLink(
        store,
        setup.index,
        interface.world_size,
        group_members((bound_interface(interface) if interface.lanes else interface).groups),
        device,
        timeout_s=setup.timeout_s,
        hostname=setup.share.hostname,
        hosts=[device.host for device in setup.hardware.devices],
    )


def serve(channel: socket.socket, board: MutableSequence[int], reports: socket.socket) -> None:
    """Build the session that the first message describes, then answer commands until the channel closes. What its saver
    tells goes to `reports`."""

    def tell(number: int, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the driver is gone, or has given up
            send(reports, pack({**answer, "number": number}))

    session: DeviceSession | None = None
    while True:
        tensors: Tensors
        try:
            header, tensors = receive_message(channel)
        except EOFError:
            return
        if header["command"] == "close":
            return
        answer: tuple[dict[str, Any], dict[str, Any]]
        try:
            if header["command"] == "set_up":
                setup = DeviceSetup.from_json(header["setup"])
                store = dist.FileStore(header["store"], setup.interface.world_size)
                store.set_timeout(timedelta(seconds=setup.timeout_s))
                cells = BadStep.open(Path(header["bad_step"]), setup.index, setup.interface.world_size)
                session = build_session(setup, store, board, cells)
                session.saver.tell = tell
                answer = {"batch_names": session.batch_names}, {}
            else:
                assert session is not None
                if LATER in header:
                    tensors = later_tensors(channel, header[LATER])
                answer = COMMANDS[header["command"]](session, header, tensors)
        except Exception as error:
            answer = {"error": error_to_data(error), "waited": session is not None and session.waited}, {}
        del tensors
        try:
            send(channel, pack(*answer))
        except OSError:
            return


def watch_driver(channel: socket.socket, parent: int) -> None:
    """End this process as soon as the driver is gone, or this process's parent, which ends with it, even while the main
    thread waits for a peer. The driver's keeper then removes this process's files."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP | select.POLLHUP)
    while os.getppid() == parent and not poll.poll(PARENT_CHECK_MS):
        pass
    os._exit(0)


def prepare() -> None:
    """Import what PyTorch imports with the first optimizer."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])


def main(descriptors: Sequence[int], arguments: Sequence[str]) -> None:
    """The descriptors are the sockets to the driver, for commands and for reports, and what the driver's keeper waits
    for; the argument is the path of the board. Does not return."""
    channel, reports = (socket.socket(fileno=descriptor) for descriptor in descriptors[:2])
    (board_path,) = arguments
    board = open_board(board_path)
    threading.Thread(target=watch_driver, args=(channel, os.getppid()), daemon=True).start()
    sys.setswitchinterval(SWITCH_S)
    serve(channel, board, reports)
    sys.stdout.flush()
    os._exit(0)  # streams and backends may still be at work that nobody waits for
