"""Detecting and measuring: this machine for real, machines with GPUs through a pretended driver and /sys."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from penstock import Hardware
from penstock.ir.errors import HardwareError
from penstock.ir.machine.gpu_parts import PARTS
from penstock.ir.machine.host import CommunicatorMemory
from penstock.ir.machine.presets import MESSAGES_BYTES
from penstock.runtime.measure import cpu as measure
from penstock.runtime.measure import detect


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_machine_without_gpus_becomes_cpu_devices_that_fit_into_its_memory(no_gpu: None) -> None:
    hardware = Hardware.detect()
    cores = detect.usable_cores()
    assert hardware.num_devices == min(cores, 4)
    assert all(device.kind == "cpu" and device.threads == cores // hardware.num_devices for device in hardware.devices)
    claimed = sum(device.memory_bytes for device in hardware.devices) + hardware.hosts[0].dram_bytes
    assert 0.7 * detect.ram_bytes() < claimed <= 0.8 * detect.ram_bytes()
    assert "not measured" in hardware.source
    assert Hardware.from_any("auto").num_devices == hardware.num_devices


@pytest.mark.slow
@pytest.mark.multi
def test_measuring_times_every_figure_on_this_machine(no_gpu: None, tmp_path: Path) -> None:
    hardware = Hardware.detect(measure=True)
    guess = Hardware.detect()
    host, device = hardware.hosts[0], hardware.devices[0]
    assert hardware.source.endswith("all rates measured")
    for rate in ("memory_bandwidth", "h2d_bandwidth", "link_latency_s", "op_overhead_s"):
        measured, guessed = getattr(device, rate), getattr(guess.devices[0], rate)
        assert measured != guessed and guessed / 100 < measured < guessed * 100
    assert 1e9 < device.achieved_flops("fp32") < 1e13
    assert 1e7 < host.optimizer_params_per_s < 1e11
    assert device.memory_bandwidth != device.h2d_bandwidth  # of computation on caches, of copies between memories
    if hardware.num_devices > 1:
        assert 1e7 < hardware.bandwidth("cpu0", "cpu1") < 1e12
        assert 1e-6 < hardware.latency_s("cpu0", "cpu1") < 0.1
    hardware.save(tmp_path / "here.yaml")
    assert Hardware.load(tmp_path / "here.yaml") == hardware
    for measured, guessed in zip(host.ssds, guess.hosts[0].ssds, strict=True):
        assert measured.directory == guessed.directory and measured.directory is not None
        assert measured.read_bandwidth != guessed.read_bandwidth and 1e6 < measured.write_bandwidth < 1e11
        assert not list(Path(measured.directory).glob("penstock-*-measure"))


@pytest.mark.slow
def test_a_failing_measurement_shows_the_childs_error() -> None:
    with pytest.raises(HardwareError, match=r"(?s)measuring failed in cpu \(exit 1\).*not enough values"):
        detect.run_children("cpu", [["0"]], threads=1)


@pytest.mark.slow
@pytest.mark.multi
def test_a_hanging_measurement_is_stopped_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(detect, "MEASURE_TIMEOUT_S", 3.0)
    before = {child.pid for child in psutil.Process().children()}
    start = time.monotonic()
    with pytest.raises(HardwareError, match="measuring took more than 3 s"):
        detect.run_children("cpu", [["0", "2", "1", "1", str(tmp_path / "alone")]], threads=1)
    assert time.monotonic() - start < 10
    assert {child.pid for child in psutil.Process().children()} <= before


def test_median_is_of_the_work_given() -> None:
    assert 0.009 < measure.steady_s(lambda: time.sleep(0.01), slice_s=0.05) < 0.05


# -- reading files -----------------------------------------------------------------------------------------------------


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    limit, groups = tmp_path / "sys/fs/cgroup/memory.max", tmp_path / "proc/self/cgroup"
    for file in (limit, groups):
        file.parent.mkdir(parents=True)
    groups.write_text("0::/\n")
    limit.write_text("123456789\n")
    assert detect.ram_bytes(tmp_path) == 123456789
    limit.write_text("max\n")
    assert detect.ram_bytes(tmp_path) == psutil.virtual_memory().total == detect.ram_bytes(tmp_path / "none")


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/user/job/step\n", {"user": "max", "user/job": "300000", "user/job/step": "400000"}),
        ("0::/user/job/step\n", {"user": "300000", "user/job/step": "max"}),
        ("5:cpu:/x\n4:hugetlb,memory:/slurm/job\n", {"memory/slurm": "300000", "memory/slurm/job": str(2**63 - 4096)}),
        ("4:memory:/docker/unseen\n0::/\n", {"memory": "300000"}),
    ],
)
def test_the_least_limit_of_all_groups_counts(tmp_path: Path, groups: str, limits: dict[str, str]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if path.startswith("memory") else "memory.max")).write_text(limit + "\n")
    assert detect.ram_bytes(tmp_path) == 300000


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    taken = psutil.Process().memory_info()
    most = {"RLIMIT_AS": taken.vms, "RLIMIT_DATA": taken.data}[kind] + (50 << 20)
    found = {getattr(resource, kind): (most, most)}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: found.get(limit, 2 * (resource.RLIM_INFINITY,)))
    assert 0 < detect.ram_bytes() <= 60 << 20


@pytest.mark.parametrize(
    ("flags", "fp32", "bf16"), [("sse2", 32e9, 8e9), ("avx2 fma", 64e9, 16e9), ("avx512f avx512_bf16", 128e9, 256e9)]
)
def test_instruction_sets_set_the_guess(flags: str, fp32: float, bf16: float, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\ncpu MHz\t\t: 2000.0\nflags\t\t: fpu {flags}\n")
    peak = detect.cpu_peak_flops(1, cpuinfo)
    assert (peak["fp32"], peak["bf16"]) == (fp32, bf16)
    assert detect.cpu_peak_flops(3, cpuinfo)["fp32"] == 3 * fp32


def pci_tree(root: Path, chain: str, speed: str = "16.0 GT/s PCIe", width: int = 16, port_width: int = 16) -> Path:
    """A /sys of one device behind its ports: `chain` lists their addresses, the device's last."""
    folder = root / "devices" / "pci0000:3a" / Path(*chain.split())
    folder.mkdir(parents=True, exist_ok=True)
    for node, lanes in ((folder, width), (folder.parent, port_width)):
        (node / "max_link_speed").write_text(f"{speed}\n")
        (node / "max_link_width").write_text(f"{lanes}\n")
    (folder / "numa_node").write_text("1\n")
    bus = root / "bus"
    bus.mkdir(exist_ok=True)
    (bus / folder.name).symlink_to(folder)
    return bus


def test_slots_are_as_wide_as_their_narrowest_part(tmp_path: Path) -> None:
    bus = pci_tree(tmp_path, "0000:3a:00.0 0000:3b:00.0")
    assert detect.slot_bandwidth("0000:3b:00.0", bus) == pytest.approx(26e9, rel=0.02)
    bus = pci_tree(tmp_path / "narrow", "0000:3a:00.0 0000:3b:00.0", port_width=8)
    assert detect.slot_bandwidth("0000:3b:00.0", bus) == pytest.approx(13e9, rel=0.02)
    assert detect.slot_bandwidth("0000:ff:00.0", bus) == detect.slot_bandwidth(None, bus) == 13.1e9


def test_gpus_behind_one_switch_share_a_root_port(tmp_path: Path) -> None:
    pci_tree(tmp_path, "0000:3a:00.0 0000:3b:00.0 0000:3c:08.0 0000:3d:00.0")
    bus = pci_tree(tmp_path, "0000:3a:00.0 0000:3b:00.0 0000:3c:10.0 0000:3e:00.0")
    assert detect.root_port("0000:3d:00.0", bus) == detect.root_port("0000:3e:00.0", bus) == "0000:3a:00.0"
    alone = pci_tree(tmp_path / "other", "0000:3e:00.0")
    assert detect.root_port("0000:3e:00.0", alone) == "node 1"
    assert detect.root_port(None, bus) == "unknown"


@pytest.mark.parametrize(
    ("driver", "part"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx4060-laptop"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI250X/MI250", "mi250"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "rtx4000sffada"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000-maxq"),
        ("Tesla T4", "t4"),
        ("NVIDIA GB10", "gb10"),
        ("AMD Radeon 8060S Graphics", "radeon8060s"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce GTX 1060", None),
    ],
)
def test_driver_names(driver: str, part: str | None) -> None:
    assert detect.known_part(driver) == part
    assert part is None or part in PARTS


@pytest.mark.parametrize(
    ("driver", "gib", "part"),
    [
        ("NVIDIA GeForce RTX 5060 Ti", 15.5, "rtx5060ti-16gb"),
        ("NVIDIA GeForce RTX 5060 Ti", 7.6, "rtx5060ti-8gb"),
        ("Orin", 61.4, "orin-64gb"),
        ("Orin", 30.0, None),
        ("NVIDIA L4", 22.0, "l4"),
    ],
)
def test_drivers_name_several_parts_alike_which_differ_in_memory(driver: str, gib: float, part: str | None) -> None:
    assert detect.known_part(driver, int(gib * 2**30)) == part


# -- a machine with GPUs, pretended ------------------------------------------------------------------------------------


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two 3090s behind one switch and an unknown card on its own port."""
    pci_tree(tmp_path, "0000:3a:00.0 0000:3b:00.0 0000:3c:08.0 0000:3d:00.0")
    pci_tree(tmp_path, "0000:3a:00.0 0000:3b:00.0 0000:3c:10.0 0000:3e:00.0")
    bus = pci_tree(tmp_path, "0000:40:00.0 0000:41:00.0", speed="8.0 GT/s PCIe")

    def properties(index: int) -> SimpleNamespace:
        known = index < 2
        return SimpleNamespace(
            name="NVIDIA GeForce RTX 3090" if known else "NVIDIA Unheard Of", total_memory=24 * 2**30, major=8,
            multi_processor_count=80, clock_rate=1_500_000, memory_clock_rate=7_000_000, memory_bus_width=256,
            pci_domain_id=0, pci_bus_id=(0x3D, 0x3E, 0x41)[index], pci_device_id=0,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    monkeypatch.setattr(detect, "PCI", bus)


def test_gpus_are_described_with_their_slots_and_datasheets(three_gpus: None) -> None:
    hardware = Hardware.detect()
    assert [device.name for device in hardware.devices] == ["gpu0", "gpu1", "gpu2"]
    assert [device.root_complex for device in hardware.devices] == [0, 0, 1]
    assert hardware.devices[0].peak_flops["fp16"] == 71e12
    assert hardware.devices[2].peak_flops["fp32"] == pytest.approx(2 * 80 * 128 * 1.5e9)
    assert hardware.devices[2].memory_bandwidth == pytest.approx(448e9)
    assert hardware.bandwidth("dram0", "gpu2") == pytest.approx(13.1e9, rel=0.02)
    assert (hardware.hosts[0].p2p, hardware.hosts[0].nvlink_bandwidth) == (False, None)
    assert "guessed for NVIDIA Unheard Of" in hardware.source


@pytest.mark.parametrize(("gib", "shares"), [(119, True), (192, False)])
def test_an_integrated_gpu_shares_the_ram(gib: int, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it has more memory than there is RAM: then that was set apart."""
    found = SimpleNamespace(name="NVIDIA GB10", total_memory=gib * 2**30, major=12, multi_processor_count=48)
    found.is_integrated = 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(detect, "ram_bytes", lambda: 120 * 2**30)
    monkeypatch.setattr(detect.psutil, "virtual_memory", lambda: SimpleNamespace(total=120 * 2**30))
    hardware = Hardware.detect()
    (device,), (host,) = hardware.devices, hardware.hosts
    assert host.shared_memory == shares
    if shares:
        assert device.budget_bytes + hardware.dram_budget_bytes() == host.usable_bytes == int(0.85 * 120 * 2**30)
        assert device.budget_bytes == int(0.8 * 119 * 2**30) and device.h2d_bandwidth == device.memory_bandwidth / 2


def test_measured_cpu_devices_add_up_to_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own rates, the host their sums; the first one reports the link."""
    products = {"fp32": {"512": 1e11}, "bf16": {"512": 2e11}, "fp16": {"512": 1e10}}
    table = {"products": products, "attention": [], "pointwise": {"2000000": 10e9}}
    rates = {"rates": table, "copy_latency_s": 1e-6, "op_overhead_s": 2e-6, "disks": [], "disk_shares": None}
    first = rates | {"copy": 4e9, "adamw": 1e8, "link": 1e9, "link_latency_s": 3e-5}
    first["link_shares"] = {"65536": 0.5, "8388608": 1.0}
    second = rates | {"copy": 5e9, "adamw": 2e8, "link": 2e9, "link_latency_s": 4e-5, "link_shares": None}
    second["rates"] = table | {"pointwise": {"2000000": 11e9}}
    document = {"devices": [{"threads": 1}, {"threads": 1}], "hosts": [{"ssds": [], "cpu_cores": 1}]}
    monkeypatch.setattr(detect, "run_children", lambda module, arguments, threads: [first, second])
    detect._measure_cpus(document, [])
    assert [device["memory_bandwidth"] for device in document["devices"]] == [10e9, 11e9]
    (host,) = document["hosts"]
    assert (host["dram_bandwidth"], host["optimizer_params_per_s"]) == (18e9, pytest.approx(3e8))
    assert host["root_complexes"] == [{"bandwidth_up": 9e9, "bandwidth_down": 9e9}]
    assert (host["nvlink_bandwidth"], host["nvlink_latency_s"]) == (1e9, 3e-5)
    assert host["nvlink_message_shares"] == {"65536": 0.5, "8388608": 1.0}


def test_measured_gpus_replace_every_guess(three_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    products = {dtype: {"4096": rate} for dtype, rate in (("fp32", 30e12), ("fp16", 60e12), ("bf16", 61e12))}
    table = {"products": products, "attention": [], "pointwise": {"100000000": 700e9}}
    figures = {"rates": table, "memory": 800e9, "h2d": 24e9, "d2h": 25e9}
    report = {
        "devices": [figures | {"copy_latency_s": 7e-6, "op_overhead_s": 4e-6}] * 3,
        "reserves": [{"context_bytes": 9**9, "libraries_bytes": 8**8}] * 3,
        "down": [24.5e9, 12e9], "up": [25.5e9, 12.5e9], "both": [41e9, 20e9],
        "host": {"adamw": 3e9, "adamw_threads": 6, "copy": 15e9},
        "disks": [{"disk_read": 3e9, "disk_write": 2e9, "disk_latency_s": 70e-6}], "disk_shares": {"1": 1.0, "4": 0.8},
    }  # fmt: skip

    taken = [{"first": 90, "rest": 20 + rank, "gather": 33, "sums": rank} for rank in range(3)]
    taken[0]["message"], taken[1]["message"] = 4, 40

    def answer(module: str, arguments: list[list[str]], threads: int) -> list[dict[str, Any]]:
        asked.append((module, *arguments[0][:2]))
        return taken if module == "communicators" else [report]

    monkeypatch.setattr(detect, "run_children", answer)
    monkeypatch.setattr(detect, "disk_directories", lambda: [str(tmp_path)])
    hardware = Hardware.detect(measure=True)
    assert asked == [("cuda", "[[0, 1], [2]]", str(tmp_path)), ("communicators", "0", "3")]
    assert hardware.source.endswith("; all rates measured")
    device, host = hardware.devices[1], hardware.hosts[0]
    assert device.achieved_flops("bf16") == 61e12
    assert device.reserve is not None and device.reserve.gaps_bytes == device.memory_bytes // 32  # stated
    assert device.reserve.num_bytes == 9**9 + 8**8 + MESSAGES_BYTES + device.reserve.gaps_bytes
    assert host.communicators == CommunicatorMemory(
        library_bytes=90 - 22, rest_bytes=22, sender_bytes=4, receiver_bytes=40, group_bytes=9
    )
    assert device.rates is not None and device.rates.products["fp16"] == ((4096.0, 60e12),)
    assert (device.h2d_bandwidth, device.d2h_bandwidth, device.link_latency_s) == (24e9, 25e9, 7e-6)
    assert (host.root_complexes[0].bandwidth_down, host.root_complexes[1].bandwidth_up) == (24.5e9, 12.5e9)
    assert [each.bandwidth_both for each in host.root_complexes] == [41e9, 20e9]
    assert (host.optimizer_params_per_s, host.optimizer_threads, host.dram_bandwidth) == (3e9, 6, 30e9)
    assert "a communicator takes 22.0 B at rest, a connection of it 4.00 B and 40.0 B" in hardware.describe()
    assert "AdamW 3.00 G parameters/s with 6 threads" in hardware.describe()
    (disk,) = host.ssds
    assert (disk.read_bandwidth, disk.write_bandwidth, disk.latency_s) == (3e9, 2e9, 70e-6)
    assert disk.directory == str(tmp_path) and disk.size_bytes > 0
    assert host.ssd_shares == ((1.0, 1.0), (4.0, 0.8))


@pytest.mark.real_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_measuring_a_real_gpu() -> None:
    hardware = Hardware.detect(measure=True)
    assert all(device.kind == "cuda" for device in hardware.devices)
    assert hardware.bandwidth("dram0", "gpu0") > 1e9
    assert hardware.devices[0].achieved_flops("fp32") > 1e12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_the_optimizer_is_that_of_the_code_that_steps_stages(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[torch.dtype, bool]] = []
    whole = measure.StageOptimizer.step

    def step(self: measure.StageOptimizer, grads: dict[str, torch.Tensor], **options: Any) -> None:
        given.append((grads["weight"].dtype, options["weights"] is not None))
        whole(self, grads, **options)

    monkeypatch.setattr(measure.StageOptimizer, "step", step)
    monkeypatch.setattr(measure, "steady_s", lambda work: work() or 1.0)
    assert measure.adamw_params_per_s(1 << 10, dtype) == 1 << 10
    assert set(given) == {(dtype, dtype == torch.bfloat16)}


def test_the_optimizer_gets_the_number_of_threads_that_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, own = {1: 1e9, 2: 3e9, 4: 2e9, 6: 2.5e9}, torch.get_num_threads()
    monkeypatch.setattr(measure, "adamw_params_per_s", lambda *given: rates[torch.get_num_threads()])
    torch.set_num_threads(6)
    try:
        assert measure.fastest_adamw(1 << 10, torch.bfloat16) == (2, 3e9)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(own)
