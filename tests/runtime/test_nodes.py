"""NUMA nodes from the kernel's own description, the calls that are made for them, and large pages."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.device import host
from penstock.runtime.nodes import HUGE_PAGE_BYTES, NODES, Nodes, gpu_address, map_pages
from penstock.runtime.stage import arena

GPUS = {"0000:17:00.0": 0, "0000:3b:00.0": 0, "0001:b1:00.0": 1, "0001:d8:00.0": 1, "0002:01:00.0": -1}


def describe_kernel(folder: Path, memory: str = "0-1\n") -> Path:
    """The files of a kernel with two sockets of 8 cores each, and GPUs under both."""
    node = folder / "devices/system/node"
    for index, cores in enumerate(("0-3,8-11\n", "4-7,12-15\n")):
        (node / f"node{index}").mkdir(parents=True)
        (node / f"node{index}/cpulist").write_text(cores)
    (node / "has_memory").write_text(memory)
    for address, number in GPUS.items():
        (folder / "bus/pci/devices" / address).mkdir(parents=True)
        (folder / "bus/pci/devices" / address / "numa_node").write_text(f"{number}\n")
    return folder


def test_the_node_of_a_gpu_is_that_of_its_root_complex(tmp_path: Path) -> None:
    nodes = Nodes(describe_kernel(tmp_path))
    assert nodes.with_memory == [0, 1]
    assert [nodes.node_of_gpu(address) for address in GPUS] == [0, 0, 1, 1, None]
    assert nodes.node_of_gpu("0000:99:00.0") is None
    assert nodes.cores(1, range(16)) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert nodes.cores(1, [3, 4, 12]) == [4, 12] and nodes.cores(None, [3, 4]) == [3, 4]
    assert nodes.cores(1, [0, 1]) == [0, 1]  # a process that may use none of them uses what it may
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xB1, pci_device_id=0)
    assert gpu_address(properties) == "0001:b1:00.0"


def test_nothing_is_done_where_there_is_one_node(tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    one = Nodes(describe_kernel(tmp_path, "0\n"), lambda *call: not calls.append(call))
    assert one.node_of_gpu("0000:17:00.0") is None and Nodes(tmp_path / "none").with_memory == []
    assert not one.place(4096, 1 << 30, one.node_of_gpu("0000:17:00.0")) and not calls
    assert host.node_of(torch.device("cpu"), Nodes(tmp_path)) is None


def test_gpus_of_a_node_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(describe_kernel(tmp_path))
    monkeypatch.setattr(host, "available_cores", lambda: list(range(16)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(
        pci_domain_id=1, pci_bus_id=0xB1 if device.index == 2 else 0xD8, pci_device_id=0
    ))  # fmt: skip
    shares = []
    for place in (2, 3):
        node = host.node_of(torch.device("cuda", place), nodes)
        assert node == 1
        shares.append(host.optimizer_cores(*host.near_cores(node, place, 4, nodes)))
    assert shares == [[6, 7], [14, 15]]  # of [4, 5, 6, 7] and [12, 13, 14, 15], less two for issuing


def test_buffers_ask_for_their_node_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(arena, "NODES", Nodes(bind=lambda *call: not calls.append(call)))
    num_bytes = 3 * HUGE_PAGE_BYTES
    cpu = torch.device("cpu")
    made = [arena.pages(num_bytes, node=1), arena.allocate(num_bytes, cpu, node=1)]
    dram = arena.Arena(cpu, on_pages=True, node=1)
    dram.ensure(num_bytes)
    assert calls == [(flat.data_ptr(), num_bytes, 1) for flat in (*made, dram.flat)]
    arena.pages(num_bytes)
    assert len(calls) == 3  # without a node nothing is asked


@pytest.mark.skipif(not NODES.with_memory, reason="a kernel without NUMA")
def test_the_kernel_takes_the_wish_and_large_pages() -> None:
    num_bytes = 4 * HUGE_PAGE_BYTES
    flat = torch.frombuffer(map_pages(num_bytes), dtype=torch.uint8)
    node = NODES.with_memory[0]
    if not NODES.place(flat.data_ptr(), num_bytes, node):
        pytest.skip("this container may not call mbind")
    flat.fill_(1)
    places = Path("/proc/self/numa_maps").read_text()
    assert re.search(rf"^{flat.data_ptr():08x} prefer[^ ]*:{node} ", places, re.MULTILINE)
    own = Path("/proc/self/smaps").read_text().split(f"{flat.data_ptr():08x}-", 1)[1]
    flags = re.search(r"VmFlags: (.*)", own)
    assert flags and "hg" in flags[1].split()  # the kernel was asked for large pages


@pytest.mark.skipif(not NODES.with_memory, reason="a kernel without NUMA")
def test_a_node_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    flat = torch.frombuffer(map_pages(HUGE_PAGE_BYTES), dtype=torch.uint8)
    assert not NODES.place(flat.data_ptr(), HUGE_PAGE_BYTES, 900)
    assert int(flat.sum()) == 0


def test_small_buffers_and_large_ones_hold_what_is_written() -> None:
    for num_bytes in (0, 5, HUGE_PAGE_BYTES + 12345):
        flat = arena.allocate(num_bytes, torch.device("cpu"))
        assert flat.numel() == num_bytes
        assert int(flat.fill_(1).sum()) == num_bytes
