"""Mixtures of experts that are much larger than a device are planned in less than two minutes of CPU."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.search_time import MIXTURE_LIMIT_GB, MIXTURE_LIMIT_S, MIXTURES

IMPORTS_S = 15.0  # of libraries, and of what makes the model


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_is_planned_within_its_limits(case: str, tmp_path: Path) -> None:
    code = (
        f"import pathlib, sys; sys.argv = ['search_time', {case!r}]; from penstock.bench.peers import rows; "
        f"rows.RESULTS = pathlib.Path({str(tmp_path)!r}); from penstock.bench.search_time import main; main()"
    )
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", code], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime - before_s < MIXTURE_LIMIT_S + IMPORTS_S
    assert used.ru_maxrss < MIXTURE_LIMIT_GB * 1e6
    row = json.loads((tmp_path / "search_time.jsonl").read_text())
    assert row["met"] and 0 < row["bound_s"] <= row["step_s"]
    assert all(size <= 2e12 for memory, size in row["peak_bytes"].items() if memory.startswith("dram"))
    assert all(size <= 24 * 2**30 for memory, size in row["peak_bytes"].items() if memory.startswith("gpu"))
