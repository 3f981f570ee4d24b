"""Messages of any size come whole, and a wait for one that does not move can be ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.runtime.processes.wire import pack, receive_message, send

BIG = {"big": torch.arange(1 << 20), "empty": torch.zeros(0, 3), "across": torch.arange(12.0).reshape(3, 4).t()}


class Enough(Exception):
    pass


def give_up(left_bytes: int) -> None:
    raise Enough(left_bytes)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("idle", [None, give_up])
def test_a_message_larger_than_the_channel_comes_whole(pair: tuple[socket.socket, socket.socket], idle: object) -> None:
    ours, theirs = pair
    sender = threading.Thread(target=send, args=(ours, pack({"command": "x"}, BIG), idle))
    sender.start()
    header, tensors = receive_message(theirs, give_up)
    sender.join()
    assert header == {"command": "x"} and set(tensors) == set(BIG)
    assert all(torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in BIG.items())


def test_a_side_that_does_not_read_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    message = pack({}, BIG)
    with pytest.raises(Enough) as caught:
        send(ours, message, give_up)
    assert 0 < caught.value.args[0] < sum(chunk.nbytes for chunk in message.chunks)


def test_a_side_that_stops_in_the_middle_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(b"\x02" + b"\0" * 15 + b"{")  # the lengths of a header and of no tensors, and half of the header
    with pytest.raises(Enough) as caught:
        receive_message(theirs, give_up)
    assert caught.value.args == (1,)
    ours.close()
    with pytest.raises(EOFError):
        receive_message(theirs, give_up)
