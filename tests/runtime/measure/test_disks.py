"""Directories that count as disks; measuring a disk uses the runtime's own I/O and leaves no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import Hardware
from penstock.ir.errors import HardwareError
from penstock.runtime.measure import disks


def test_one_directory_for_each_disk_and_none_in_memory(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    assert disks.disk_directories([*places, tmp_path / "missing"]) == [str(places[0])]
    assert disks.disk_directories(["/dev/shm", "/proc"]) == []
    assert not list(tmp_path.rglob("penstock-*"))


def test_a_directory_that_cannot_be_written_or_is_full_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "free_space", lambda _: disks.LEAST_FREE_BYTES - 1)
    assert disks.disk_directories([tmp_path]) == []
    monkeypatch.undo()
    monkeypatch.setattr(disks.os, "access", lambda *_: False)
    assert disks.disk_directories([tmp_path]) == []


def test_a_directory_without_direct_access_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise HardwareError("no O_DIRECT")

    monkeypatch.setattr(disks, "SsdFolder", refuse)
    assert disks.disk_directories([tmp_path]) == []


def test_partitions_of_one_disk_are_one(tmp_path: Path) -> None:
    for part in ("nvme0/nvme0n1/nvme0n1p1", "nvme0/nvme0n1/nvme0n1p2", "nvme1/nvme1n1"):
        (tmp_path / "devices" / part).mkdir(parents=True)
        if "n1p" in part:
            (tmp_path / "devices" / part / "partition").write_text("1\n")
    dev = tmp_path / "dev"
    dev.mkdir()
    for number, part in {
        "8:1": "nvme0/nvme0n1/nvme0n1p1",
        "8:2": "nvme0/nvme0n1/nvme0n1p2",
        "8:3": "nvme1/nvme1n1",
    }.items():
        (dev / number).symlink_to(tmp_path / "devices" / part)
    first, second, third, unknown = (disks.disk_of(os.makedev(8, minor), dev) for minor in (1, 2, 3, 4))
    assert first == second != third and unknown == os.makedev(8, 4)


def test_rates_are_measured_and_leave_no_file(tmp_path: Path) -> None:
    rates = disks.disk_rates(tmp_path, slice_s=0.05, block_bytes=1 << 20)
    assert set(rates) == {"disk_read", "disk_write", "disk_latency_s"}
    assert 1e6 < rates["disk_read"] < 1e11 and 1e6 < rates["disk_write"] < 1e11 and 1e-7 < rates["disk_latency_s"] < 1
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="does not exist"):
        disks.disk_rates(tmp_path / "missing")


def test_detected_disks_have_a_directory_and_say_so() -> None:
    hardware = Hardware.detect()
    assert hardware.ssd_directories() == disks.disk_directories()
    assert all(directory in hardware.describe() for directory in hardware.ssd_directories())
    assert hardware.ssd_budget_bytes() == sum(ssd.budget_bytes for ssd in hardware.hosts[0].ssds)
