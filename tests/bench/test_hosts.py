"""Two hosts in network namespaces: one link between them, with a rate, counted, that can be cut; nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from penstock.bench.hosts import two_hosts, why_not

pytestmark = [
    pytest.mark.multi,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "two hosts can be made here"),
]
NUM_BYTES = 8_000_000
TAKES = """
import socket
listener = socket.create_server(("{address}", 5000))
channel, _ = listener.accept()
print("ready", flush=True)
count = 0
while data := channel.recv(1 << 20):
    count += len(data)
print(count)
"""
GIVES = """
import socket
channel = socket.create_connection(("{address}", 5000))
channel.sendall(bytes({num_bytes}))
"""


def test_what_goes_over_the_link_is_held_down_and_counted() -> None:
    with two_hosts(rate_bytes_s=10e6) as hosts:
        address = hosts.addresses[0]
        taker = hosts.popen(0, [sys.executable, "-c", TAKES.format(address=address)], stdout=subprocess.PIPE, text=True)
        time.sleep(1.0)
        before, began_s = hosts.sent_bytes(), time.monotonic()
        hosts.run(1, [sys.executable, "-c", GIVES.format(address=address, num_bytes=NUM_BYTES)])
        said, _ = taker.communicate(timeout=60)
        took_s = time.monotonic() - began_s
        sent = hosts.sent_bytes()
    assert said.split() == ["ready", str(NUM_BYTES)]
    assert took_s > 0.9 * NUM_BYTES / 10e6
    assert NUM_BYTES < sent[1] - before[1] < 1.05 * NUM_BYTES and sent[0] - before[0] < 0.1 * NUM_BYTES


def test_a_cut_link_carries_nothing_until_it_is_joined_again() -> None:
    with two_hosts() as hosts:
        reach = [sys.executable, "-c", f"import socket; socket.create_connection(('{hosts.addresses[0]}', 5000), 2)"]
        keeps = f"import socket, time; s = socket.create_server(('{hosts.addresses[0]}', 5000)); time.sleep(60)"
        hosts.popen(0, [sys.executable, "-c", keeps])
        time.sleep(1.0)
        hosts.run(1, reach)
        hosts.cut()
        with pytest.raises(subprocess.CalledProcessError):
            hosts.run(1, reach)
        hosts.join()
        hosts.run(1, reach)


def test_nothing_is_left_behind_an_error() -> None:
    with pytest.raises(ValueError, match="on purpose"), two_hosts() as hosts:
        process = hosts.popen(1, ["sleep", "100"])
        names = hosts.names
        raise ValueError("on purpose")
    assert process.wait(5) == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)
