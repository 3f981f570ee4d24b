"""Mixtures of experts that are much larger than a device are planned in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.search_time import MIXTURE_LIMIT_GB, MIXTURES
from penstock.ir.machine.hardware import Hardware
from penstock.tests.compiler.search.search_process import searched


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_is_planned_within_its_limits(case: str, tmp_path: Path) -> None:
    row, peak_gb = searched(case, tmp_path)
    assert peak_gb < MIXTURE_LIMIT_GB
    assert 0 < row["bound_s"] <= row["step_s"]
    room_bytes = Hardware.preset(MIXTURES[case]["hardware"][0]).devices[0].budget_bytes
    assert all(size <= 2e12 for memory, size in row["peak_bytes"].items() if memory.startswith("dram"))
    assert all(size <= room_bytes for memory, size in row["peak_bytes"].items() if memory.startswith("gpu"))
