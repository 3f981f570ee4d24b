"""Messages between the driver and its workers: a JSON header, then the bytes of the tensors. Nothing is pickled."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<QQ")  # the bytes of the header and of all tensors
_ALIGNMENT = 64  # of each tensor, so that it can be used in the buffer that received it
_TENSORS = "tensors"  # the header's key for names, dtypes and shapes


def send_message(
    channel: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Send a header of JSON values (the key "tensors" is reserved) and tensors by name. Blocks until all is sent."""
    rows: list[list[Any]] = []
    chunks: list[Any] = []
    total = 0
    for name, tensor in (tensors or {}).items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else None
        rows.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), total])
        if data is not None:
            padding = -data.nbytes % _ALIGNMENT
            chunks += [memoryview(data), bytes(padding)]
            total += data.nbytes + padding
    head = json.dumps({**header, _TENSORS: rows}).encode()
    channel.sendall(_LENGTH.pack(len(head), total) + head)
    for chunk in chunks:
        channel.sendall(chunk)


def receive_message(channel: socket.socket) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Receive the next message. Raises `EOFError` if the other side is gone."""
    head_bytes, total = _LENGTH.unpack(_read(channel, bytearray(_LENGTH.size)))
    header = json.loads(_read(channel, bytearray(head_bytes)))
    flat = torch.empty(total, dtype=torch.uint8)
    if total:
        _read(channel, flat.numpy())
    tensors = {}
    for name, dtype_name, shape, start in header.pop(_TENSORS):
        dtype = getattr(torch, dtype_name)
        numel = torch.Size(shape).numel()
        tensors[name] = flat[start : start + numel * dtype.itemsize].view(dtype).reshape(shape)
    return header, tensors


def _read(channel: socket.socket, into: Any) -> Any:
    view = memoryview(into)
    while view:
        try:
            count = channel.recv_into(view)
        except ConnectionResetError:
            count = 0
        if count == 0:
            raise EOFError("the other side has closed the channel")
        view = view[count:]
    return into
