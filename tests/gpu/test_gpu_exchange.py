"""Gathers and reduce-scatters between four GPUs over NCCL, on two hosts as the link is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.runtime.device.peers import _alias

EMULATED = "FAKECUDA_TORCH" in os.environ  # there a process has as many GPUs as it asks for
BUSY_CYCLES = 200_000_000  # of a GPU's clock: a tenth of a second
pytestmark = pytest.mark.gpu
MEMBER = """
import sys
import torch, torch.distributed as dist
from penstock.runtime.device.peers import LOOPBACK, PeerLink

index, path = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", index)
torch.cuda.set_device(device)
store = dist.FileStore(path, 4)
link = PeerLink(store, index, 4, {"all": [0, 1, 2, 3]}, device, timeout_s=60.0, hostname=LOOPBACK, hosts=[0, 0, 1, 1])
link.connect({}, {"all": "device"})
assert link.on_device("all")
wanted = torch.arange(4.0)[:, None] * 10 + torch.arange(5.0)
for hierarchical in (False, True):
    rows = torch.full((4, 5), -1.0, device=device)
    rows[index] = wanted[index].to(device)
    link.gather_rows(rows, "all", hierarchical)
    assert torch.equal(rows.cpu(), wanted), (hierarchical, rows)
    given = (wanted + index).to(device)
    total = link.sum_rows(given, torch.empty(5, device=device), None, "all", hierarchical)
    assert torch.equal(total.cpu(), 4 * wanted[index] + 6), (hierarchical, total)
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
@pytest.mark.skipif(not EMULATED and torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_rows_over_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMBER]
    environment = {**os.environ, "FAKECUDA_DEVICES": "4"}
    members = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path / "store")], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for index in range(4)
    ]  # fmt: skip
    try:
        outputs = [member.communicate(timeout=120) for member in members]
    finally:
        for member in members:
            member.kill()
    assert [said for said, _ in outputs] == 4 * ["equal\n"], outputs
