"""The process of one device: `python -m penstock.runtime.processes.worker --channel FD --board FILE`.

The launcher starts it. It imports the device's generated file, never the user's script, and serves `commands.py` over
the channel. It ends when the driver closes the channel or is gone, whatever it is doing then.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import shutil
import socket
import struct
import sys
import threading
import traceback
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ...ir import ops
from ...ir.errors import WorkerError
from ...ir.machine.hardware import Hardware
from ...ir.program import Interface, bound_interface, place_of
from ..device.file import open_device_file
from ..device.malloc import keep_freed_memory
from ..device.pacing import LinkClient, TurnClient
from ..device.peers import PeerLink
from ..device.session import STREAM_SLOTS, DeviceSession, device_groups
from ..device.streams import SWITCH_S
from ..emulate.rehearsed_device import RehearsedSession
from ..optimizer.stage_optimizer import OptimizerSpec
from .commands import COMMANDS
from .wire import receive_message, send_message

PARENT_CHECK_MS = 1000
SLOT = struct.calcsize("i")


def open_board(path: str | Path, create: bool = False) -> MutableSequence[int]:
    """The lines at which a worker's streams are, one place per name of `STREAM_SLOTS`, shared between processes."""
    size = SLOT * len(STREAM_SLOTS)
    if create:
        Path(path).write_bytes(bytes(size))
    with open(path, "r+b") as file:
        return cast("MutableSequence[int]", memoryview(mmap.mmap(file.fileno(), size)).cast("i"))


def build_session(
    setup: dict[str, Any], store: dist.Store | None, board: MutableSequence[int] | None = None
) -> DeviceSession:
    """The session of the device that `setup` (plain data, see `launcher.Job`) describes, connected to the others."""
    interface = Interface.from_json(setup["interface"])
    hardware = Hardware.from_any(setup["hardware"])
    index, spec = setup["index"], hardware.devices[setup["index"]]
    device, rehearsed = torch.device("cpu"), "waits_s" in setup
    if spec.kind == "cuda" and not rehearsed:
        device = torch.device("cuda", setup["gpu"])
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if setup["num_threads"] is not None:
        torch.get_num_threads()  # the first use would else overwrite the number set next
        torch.set_num_threads(setup["num_threads"])
    link = None
    if interface.world_size > 1:
        assert store is not None
        sys.setswitchinterval(SWITCH_S)  # in the process of a torchrun's rank, too
        link = PeerLink(
            store,
            index,
            interface.world_size,
            device_groups(bound_interface(interface) if interface.lanes else interface),
            device,
            timeout_s=setup["timeout_s"],
            hostname=setup["hostname"],
            hosts=[device.host for device in hardware.devices],
        )
    address = setup.get("link_server")
    options: dict[str, Any] = {
        "precision": setup["precision"],
        "seed": setup["seed"],
        "link": link,
        "num_threads": setup["num_threads"],
        "board": board,
        "dram_budget_bytes": setup["dram_budget_bytes"],
        "link_server": None if address is None else LinkClient(address, index),
    }
    file = open_device_file(setup["file"], interface, place_of(interface, index)[1])
    if rehearsed:
        return RehearsedSession(index, file, hardware, waits_s=setup["waits_s"], **options)
    optimizer = None if setup["optimizer"] is None else OptimizerSpec.from_json(setup["optimizer"])
    options |= {"ssd_dirs": setup["ssd_dirs"], "ssd_verify": setup["ssd_verify"]}
    own, turns = hardware.devices[index], setup.get("turns")
    if turns is not None and hardware.hosts[own.host].ordered_fetches:
        options["turns"] = TurnClient(turns, own.root_complex)
    for what in ("shared", "collective_s"):
        options[what] = {name: dict(rows) for name, rows in setup.get(what, {}).items()}
    return DeviceSession(index, file, hardware, optimizer=optimizer, **options)


def describe_error(error: BaseException, session: DeviceSession | None) -> dict[str, Any]:
    """An error as plain data: its type by name, what it knows beside its message, and for a failed op where it was and
    whether it waited for another device (then that one is the likelier culprit)."""
    fault = None if session is None else session.broken
    label = None if fault is None else fault.label
    return {
        "type": type(error).__name__,
        "message": str(error),
        "details": {key: value for key, value in vars(error).items() if isinstance(value, (str, int))},
        "line": error.line if isinstance(error, WorkerError) else None if label is None else label.text,
        "waited": label is not None and bool(ops.ALL[label.op].meets),
        "traceback": "".join(traceback.format_exception(error)),
    }


def serve(channel: socket.socket, board: MutableSequence[int]) -> None:
    """Set up as the first message says, then answer one command after the other until the channel closes."""
    session: DeviceSession | None = None
    while True:
        try:
            header, tensors = receive_message(channel)
        except EOFError:
            return
        if header["command"] == "close":
            return
        answer: tuple[dict[str, Any], dict[str, Any]]
        try:
            if header["command"] == "set_up":
                store = None if header["store"] is None else dist.FileStore(header["store"], header["num_devices"])
                session = build_session(header, store, board)
                answer = {"batch_names": session.batch_names, "stages": list(session.stores)}, {}
            else:
                assert session is not None
                answer = COMMANDS[header["command"]](session, header, tensors)
        except Exception as error:
            answer = {"error": describe_error(error, session)}, {}
        del tensors
        try:
            send_message(channel, *answer)
        except OSError:
            return


def watch_driver(channel: socket.socket, parent: int, scratch: str) -> None:
    """End this process as soon as the driver is gone, without asking the main thread, which may wait for a peer."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP | select.POLLHUP)
    while os.getppid() == parent and not poll.poll(PARENT_CHECK_MS):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="The process of one device; the launcher starts it.")
    parser.add_argument("--channel", type=int, required=True, help="file descriptor of the socket to the driver")
    parser.add_argument("--board", required=True, help="file in which to note the line at which each stream is")
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    args = parser.parse_args()
    channel = socket.socket(fileno=args.channel)
    board = open_board(args.board)
    scratch = os.path.dirname(os.path.abspath(args.board))
    threading.Thread(target=watch_driver, args=(channel, args.parent, scratch), daemon=True).start()
    sys.setswitchinterval(SWITCH_S)
    serve(channel, board)
    sys.stdout.flush()
    os._exit(0)  # streams and backends may be in the middle of something that nobody waits for any more


if __name__ == "__main__":
    main()
