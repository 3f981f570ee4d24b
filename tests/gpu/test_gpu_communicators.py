"""The communicators of a program on emulated GPUs are those of its plan, and faults that NCCL does not forgive show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import gpu_connections
from penstock.tests.ir.program.handmade import pipeline

EMULATED = "FAKECUDA_TORCH" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi,
    pytest.mark.skipif(not EMULATED, reason="only an emulated library says what it makes and waits for"),
]
MEMBER = """
import ctypes, os, sys, time
import torch, torch.distributed as dist
from penstock.ir import ops
from penstock.ir.calls import op_of
from penstock.ir.program import work_of
from penstock.runtime.device import peers
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.ir.program.test_communicators import one_for_all

index, count, path, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
device = torch.device("cuda", index)
torch.cuda.set_device(device)
program = pipeline(count, count, 2, clip=True, fetched=False)[index]
if fault == "one communicator":
    peers.message_communicators = one_for_all
if fault == "not used before":
    peers.PeerLink._use_once = lambda *_: None
link = peers.PeerLink(
    dist.FileStore(path, count), index, count, {"world": list(range(count))}, device, timeout_s=60.0,
    hostname=peers.LOOPBACK,
)
own = [program]
link.connect(peers.message_orders(own), peers.group_memories(own), peers.group_uses(own))
streams = {ops.SEND: torch.cuda.Stream(), ops.RECV: torch.cuda.Stream(), ops.COMM: torch.cuda.Stream()}
values = [torch.full((4, 32), float(index), device=device)]
torch.cuda.synchronize()
messages = [n for n in program.ops() if op_of(n).meets == ops.PEER]
for node in sorted(messages, key=lambda n: n.target is ops.send):  # receives as early as they can be
    work = work_of(program, node)
    with torch.cuda.stream(streams[work.stream]):
        if node.target is ops.send:
            link.send(values[0], work.peer, work.tag)
        else:
            values.append(torch.empty(4, 32, device=device))
            link.recv(values[-1], work.peer, work.tag)
total = torch.ones(1, device=device)
with torch.cuda.stream(streams[ops.COMM]):
    link.sum(total, "world")
ends = [stream.record_event() for stream in streams.values()]
until_s = time.monotonic() + 20
while not all(end.query() for end in ends):
    if time.monotonic() > until_s:
        print("waits for ever", flush=True)
        os._exit(0)
    time.sleep(0.01)
assert total.item() == count and all(abs(v[0, 0].item() - index) == 1 for v in values[1:])
ctypes.CDLL("libcudart.so.13").fakecuda_summary()
print("done", flush=True)
os._exit(0)
"""


def run(count: int, folder: Path, fault: str = "", **settings: str) -> list[tuple[str, str]]:
    """The output of each device, and its complaints."""
    environment = {**os.environ, "FAKECUDA_DEVICES": str(count), "FAKECUDA_VERBOSE": "1", "FAKECUDA_STATS": ""}
    arguments = [str(count), str(folder / "store"), fault]
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(index), *arguments], env=environment | settings, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        return [member.communicate(timeout=240) for member in members]
    finally:
        for member in members:
            member.kill()


def counter(name: str, said: str) -> int:
    return int(re.findall(rf" {name}=(\d+);", said)[-1])


def test_a_program_makes_what_its_plan_says_and_nothing_beside_a_message(tmp_path: Path) -> None:
    hardware = Hardware.from_any("rtx4090x4").with_(p2p=True)
    planned = gpu_connections(pipeline(4, 4, 2, clip=True, fetched=False), hardware)
    found = run(4, tmp_path, FAKECUDA_LAZY="2", FAKECUDA_SMS="7")  # of three kernels of two blocks, and of all else
    for index, (printed, said) in enumerate(found):
        assert printed == "done\n", said
        plan = planned[index]
        assert counter("nccl communicators", said) == plan.messages + plan.groups == 3, said
        assert counter("nccl connections", said) <= plan.connections, said  # of ring and tree, the small sum takes one
        assert counter("nccl connection MiB", said) << 20 <= plan.buffer_bytes, said


@pytest.mark.parametrize(
    ("fault", "settings", "sign"),
    [
        ("one communicator", {}, "waits for ever"),
        ("not used before", {"FAKECUDA_LAZY": "2"}, "connects beside"),
        ("few SMs", {"FAKECUDA_SMS": "4"}, "hold 4 of 4 SMs"),
    ],
)
def test_what_nccl_does_not_forgive_is_noticed(fault: str, settings: dict[str, str], sign: str, tmp_path: Path) -> None:
    found = run(2, tmp_path, fault, **settings)
    assert any(sign in printed + said for printed, said in found), found
