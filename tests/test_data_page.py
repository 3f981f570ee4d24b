"""The blocks of docs/data.md run, one after the other, and do what the text beside them says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.tests.compiler.job.fed_by_rank import BATCH, Net, Samples

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
ROWS = re.findall(r"^\| `(input_ids|position_ids|labels)` \|(.*)\|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    names: dict[str, Any] = {
        "penstock": penstock, "torch": torch, "model": Net(), "hardware": penstock.Hardware.cpu(),
        "batch": {"x": torch.zeros(BATCH, 4), "y": torch.zeros(BATCH, 1)}, "dataset": Samples(),
        "directory": tmp_path / "saved",
    }  # fmt: skip
    reading, rest, resuming, stateful, evaluation, packing = BLOCKS
    exec(reading, names)
    job, sampler = names["job"], names["sampler"]
    with job:
        assert job.step_count == 6 and sampler.position == 6 * BATCH and sampler.epoch == 2  # 23 samples an epoch
        exec(rest, names)
        assert names["batches"] is names["loader"]
        exec(resuming, names)
        assert job.step_count == 9 and sampler.position == 9 * BATCH and sampler.epoch == 3
        exec(stateful, names)
        assert len(names["losses"]) == 3 and job.step_count == 12
        exec(evaluation, names)
        assert len(names["losses"]) == 3 and job.step_count == 12
    exec(packing, names)
    assert names["packed"].describe() == packing.split("# ")[1].splitlines()[0]
    table = {name: [int(cell) for cell in cells.split("|") if cell.strip()] for name, cells in ROWS}
    assert {name: row.tolist() for name, row in names["first"].items()} == table
