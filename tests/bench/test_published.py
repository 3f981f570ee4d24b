"""No published run is faster than the bound of any step."""

from __future__ import annotations

import json

import pytest

from penstock.bench.peers.rows import RESULTS
from penstock.bench.published import TABLE, bounds_of, timed_run
from penstock.papers.published import read


def test_no_published_run_is_faster_than_its_bound() -> None:
    """By the rows that the bench saved, one for each run that can be expressed."""
    saved = [json.loads(line) for line in (RESULTS / "published.jsonl").read_text().splitlines()]
    runs = [run for run in map(timed_run, read(TABLE)) if run is not None]
    assert [row["published_s"] for row in saved] == pytest.approx([run.seconds for run in runs], rel=1e-3)
    assert len(runs) > 80
    assert all(0.1 < row["bound_share"] < 1 and row["bound_s"] <= row["fused_s"] <= row["eager_s"] for row in saved)


@pytest.mark.slow
def test_a_published_run_that_undercuts_eager_calls() -> None:
    """LoRA of an 8B on one H100, whose products and attention reach 42 % of the peak."""
    run = next(r for row in read(TABLE) if "NeMo" in row["system"] and (r := timed_run(row)) is not None)
    bound, fused_s, eager_s = bounds_of(run)
    assert bound.seconds < fused_s < run.seconds < eager_s
    assert bound.seconds == pytest.approx(0.419 * run.seconds, rel=0.02)
