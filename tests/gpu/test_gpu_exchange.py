"""Gathers and reduce-scatters between six GPUs over NCCL, on three hosts as the link is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.device.peers import _alias
from penstock.runtime.simulate.collectives import rounds_of
from penstock.tests.gpu.test_gpu_communicators import counter

EMULATED = "FAKECUDA_TORCH" in os.environ  # there a process has as many GPUs as it asks for
BUSY_CYCLES = 200_000_000  # of a GPU's clock: a tenth of a second
pytestmark = pytest.mark.gpu
MEMBER = """
import ctypes, sys
import torch, torch.distributed as dist
from penstock.runtime.device.peers import GATHER, LOOPBACK, PeerLink, Use

index, path, order = int(sys.argv[1]), sys.argv[2], [int(device) for device in sys.argv[3].split(",")]
count, length = len(order), 5
device = torch.device("cuda", index)
torch.cuda.set_device(device)
store, hosts = dist.FileStore(path, count), [device // 2 for device in range(count)]
link = PeerLink(store, index, count, {"all": order}, device, timeout_s=60.0, hostname=LOOPBACK, hosts=hosts)
link.connect({}, {"all": "device"}, {"all": [Use(GATHER, 4 * count * length, True)]})
assert link.on_device("all")
seat = order.index(index)
wanted = torch.arange(float(count))[:, None] * 10 + torch.arange(float(length))
for hierarchical in (False, True):
    rows = torch.full((count, length), -1.0, device=device)
    rows[seat] = wanted[seat].to(device)
    link.gather_rows(rows, "all", hierarchical)
    assert torch.equal(rows.cpu(), wanted), (hierarchical, rows)
if len(sys.argv) > 4:
    ctypes.CDLL("libcudart.so.13").fakecuda_summary()
given = (wanted + seat).to(device)
total = link.sum_rows(given, torch.empty(length, device=device), None, "all", True)
assert torch.equal(total.cpu(), count * wanted[seat] + sum(range(count))), total
print("equal", flush=True)
sys.exit(0)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("aliased", [True, False])
def test_the_allocator_does_not_wait_for_the_stream_of_an_alias(aliased: bool) -> None:
    """NCCL's backend records what it is given as used on its own stream. Memory of which it has an alias is handed out
    again at once, other memory only once that stream is past it."""
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    value = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    address = value.data_ptr()
    shared = _alias(value) if aliased else value
    assert shared.data_ptr() == address and shared.shape == value.shape and shared.dtype == value.dtype
    busy.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(busy):
        torch.cuda._sleep(BUSY_CYCLES)
    shared.record_stream(busy)
    del value, shared
    again = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert not busy.query()
    assert (again.data_ptr() == address) == aliased
    torch.cuda.synchronize()


@pytest.mark.multi
@pytest.mark.skipif(not EMULATED and torch.cuda.device_count() < 6, reason="needs six GPUs")
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 2, 4, 1, 3, 5)])
def test_rows_over_nccl(order: tuple[int, ...], tmp_path: Path) -> None:
    """Two GPUs on each of three hosts. A hierarchical gather moves what the simulator says: messages between hosts, and
    NCCL's gathers inside them, where the rows of a host are next to each other."""
    command = [sys.executable, "-c", MEMBER]
    environment = {**os.environ, "FAKECUDA_DEVICES": "6", "FAKECUDA_VERBOSE": "1", "FAKECUDA_STATS": ""}
    arguments = [str(tmp_path / "store"), ",".join(map(str, order)), *["counted"] * EMULATED]
    members = [
        subprocess.Popen(
            [*command, str(index), *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(6)
    ]  # fmt: skip
    try:
        outputs = [member.communicate(timeout=240) for member in members]
    finally:
        for member in members:
            member.kill()
    assert [printed for printed, _ in outputs] == 6 * ["equal\n"], outputs
    whole_bytes = 6 * 5 * 4
    rounds = rounds_of(order, Hardware.cpu(6, hosts=3), whole_bytes, 1, hierarchical=True)
    in_messages = 1 if order == tuple(range(6)) else 2
    for index, (_, said) in enumerate(outputs if EMULATED else []):
        sent_bytes = [2 * sum(n for (a, _), n in each.hops.items() if a == index) for each in rounds]  # of two gathers
        plain_bytes = 4 + whole_bytes // 6  # of this member's rows in two plain gathers
        assert counter("nccl send bytes", said) == sum(sent_bytes[:in_messages])
        assert counter("nccl all_gather bytes", said) == plain_bytes + sum(sent_bytes[in_messages:])
