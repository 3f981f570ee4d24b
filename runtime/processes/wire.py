"""Messages between the driver and its workers: a JSON header, then the bytes of the tensors. Nothing is pickled.

Tensors that are read when they are asked for (`Reads`) are not part of the message: the worker asks for each by name.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import error_from_data
from ..device.host import Trimmer
from ..state.tensor_file import Reads

LOOK_S = 0.25  # between two looks at whether to go on waiting
_LENGTH = struct.Struct("<QQ")  # the bytes of the header and of all tensors
_ALIGNMENT = 64  # of each tensor, so that it can be used in the buffer that received it
_TENSORS = "tensors"  # the header's key for names, dtypes and shapes
LATER, WANTED = "later", "wanted"  # for the names of tensors to ask for, and of the one that a worker asks for


Idle = Callable[[int], None]  # called with the bytes that are left, about every LOOK_S in which none has moved


@dataclass(frozen=True)
class Packed:
    """A message as the chunks of memory that are sent one after another."""

    chunks: Sequence[memoryview]


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Packed:
    """A message of JSON values (the key "tensors" is reserved) and tensors by name, which are not copied if they are
    contiguous in host memory."""
    if isinstance(tensors, Reads):
        return pack({**header, LATER: list(tensors)})
    rows: list[list[Any]] = []
    chunks: list[memoryview] = []
    total = 0
    for name, tensor in (tensors or {}).items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        rows.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), total])
        if flat.numel():
            data = flat.view(torch.uint8).numpy().data
            padding = -data.nbytes % _ALIGNMENT
            chunks += [data, memoryview(bytes(padding))]
            total += data.nbytes + padding
    head = json.dumps({**header, _TENSORS: rows}).encode()
    return Packed([memoryview(_LENGTH.pack(len(head), total) + head), *chunks])


def send(channel: socket.socket, message: Packed, idle: Idle | None = None) -> None:
    """Return when all is sent. `idle` may raise to end the wait; without it the wait has no end."""
    if idle is None:
        for chunk in message.chunks:
            channel.sendall(chunk)
        return
    left = sum(chunk.nbytes for chunk in message.chunks)
    for chunk in message.chunks:
        while chunk:
            try:
                count = channel.send(chunk, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not _ready(channel, select.POLLOUT):
                    idle(left)
                continue
            chunk, left = chunk[count:], left - count


def receive_message(channel: socket.socket, idle: Idle | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Receive the next message. `idle` as in `send`. Raises `EOFError` if the other side is gone."""
    head_bytes, total = _LENGTH.unpack(_read(channel, bytearray(_LENGTH.size), idle))
    header = json.loads(_read(channel, bytearray(head_bytes), idle))
    flat = torch.empty(total, dtype=torch.uint8)
    if total:
        _read(channel, flat.numpy(), idle)
    tensors = {}
    for name, dtype_name, shape, start in header.pop(_TENSORS):
        dtype = getattr(torch, dtype_name)
        numel = torch.Size(shape).numel()
        tensors[name] = flat[start : start + numel * dtype.itemsize].view(dtype).reshape(shape)
    return header, tensors


def later_tensors(channel: socket.socket, names: Sequence[str]) -> Reads[Tensor]:
    """The tensors that a message has only named, each received when it is read."""
    trimmer = Trimmer()

    def ask(name: str) -> Tensor:
        trimmer.trim()
        send(channel, pack({WANTED: name}))
        header, tensors = receive_message(channel)
        if "error" in header:
            raise error_from_data(header["error"], "the driver", None)
        return tensors[name]

    return Reads(names, ask)


def _read(channel: socket.socket, into: Any, idle: Idle | None) -> Any:
    view = memoryview(into)
    while view:
        try:
            count = channel.recv_into(view, 0, 0 if idle is None else socket.MSG_DONTWAIT)
        except BlockingIOError:
            assert idle is not None
            if not _ready(channel, select.POLLIN):
                idle(len(view))
            continue
        except ConnectionResetError:
            count = 0
        if count == 0:
            raise EOFError("the other side has closed the channel")
        view = view[count:]
    return into


def _ready(channel: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(channel, event)
    return bool(poll.poll(LOOK_S * 1000))
