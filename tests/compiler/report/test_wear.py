"""The wear of SSDs by a plan, from bytes to days."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.compiler.plan import Prediction
from penstock.compiler.report.explain import wear_text
from penstock.compiler.report.wear import wear_of
from penstock.ir.machine.hardware import Hardware


def predict(**moved: int) -> Prediction:
    links = {name.replace("_", "."): num_bytes for name, num_bytes in moved.items()}
    figures: dict[str, Any] = {"peak_bytes": {}, "budget_bytes": {}, "busy": {}, "bottleneck": "", "arena_bytes": []}
    return Prediction(step_s=100.0, moved_bytes=links, **figures)


def test_from_bytes_of_a_step_to_days() -> None:
    machine = Hardware.preset("fuyou-4090")  # 12 disks of 7.008 PB each
    (wear,) = wear_of(predict(ssd0_read=3 * 10**12, ssd0_write=2 * 10**12), machine)
    assert (wear.memory, wear.read_bytes, wear.written_bytes) == ("ssd0", 3 * 10**12, 2 * 10**12)
    assert wear.bytes_per_day == pytest.approx(2e12 * 864) and wear.endurance_bytes == 12 * 7008 * 10**12
    assert wear.days == pytest.approx(12 * 7.008e15 / (2e12 * 864))
    text = ", ".join(wear_text(wear))
    assert "reads 2.73 TiB and writes 1.82 TiB" in text and "1.73e+03 TB written in a day" in text
    assert "48.7 days to the 84,096 TB" in text


def test_the_weakest_disk_counts_as_all_are_written_alike() -> None:
    weak = {"size_bytes": "2TB", "read_bandwidth": "1GB/s", "write_bandwidth": "1GB/s", "endurance_bytes": "1PB"}
    machine = Hardware.preset("rtx4090x1", ssds=[weak, {**weak, "endurance_bytes": "9PB"}])
    (wear,) = wear_of(predict(ssd0_write=10**12), machine)
    assert wear.endurance_bytes == 2 * 10**15


def test_without_an_endurance_there_are_no_days_but_a_hint() -> None:
    machine = Hardware.cpu(1, ssd="1GB")
    (wear,) = wear_of(predict(ssd0_write=10**9), machine)
    assert wear.days is None and "endurance_bytes" in wear_text(wear)[-1]
    (reading,) = wear_of(predict(ssd0_read=10**9), Hardware.preset("rtx4090x1"))
    assert reading.days is None and len(wear_text(reading)) == 2


def test_plans_without_ssds_wear_none() -> None:
    assert wear_of(predict(gpu0_up=5), Hardware.preset("rtx4090x1")) == []
