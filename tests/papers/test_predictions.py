"""`penstock predict`: simulations beside published runs, kept between commands, and the page that they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.ir.errors import PlanError
from penstock.papers import published
from penstock.papers.predictions import Compared, Simulation, compare, page, summary
from penstock.papers.published import COLUMNS
from penstock.tests.papers.test_published import ROW, TABLE, express

ROOT = TABLE.parents[1]
TOY = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=256,n_positions=64"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of a toy: one fits a GPU, the other has run out of the memory of a tiny one."""
    monkeypatch.setitem(published.GPUS, "tiny", ("rtx4090", {"memory": "1MB"}))
    rows = [ROW | {"model": TOY, "note": "peak 0.001 GiB"}, ROW | {"model": TOY, "gpu": "tiny", "value": "OOM"}]
    path = tmp_path / "table.tsv"
    path.write_text("\n".join("\t".join(row[name] for name in COLUMNS) for row in [dict(zip(COLUMNS, COLUMNS)), *rows]))
    return path


@pytest.mark.slow
def test_fits_are_predicted_and_kept_for_the_next_command(table: Path, tmp_path: Path) -> None:
    kept, told = tmp_path / "kept.jsonl", list[str]()
    first, second = compare(table, kept, best=False, say=told.append)
    assert first.theirs is not None and first.theirs.step_s and first.theirs.peak_bytes
    assert second.theirs is not None and second.theirs.step_s is None and second.theirs.why
    assert (first.fits_alike, second.fits_alike) == (True, True)
    assert first.excess is not None and first.excess < 0  # a toy's step takes less than 2 s
    assert len(told) == len(kept.read_text().splitlines()) == 2
    again = compare(table, kept, best=False, say=told.append)
    assert again == [first, second] and len(told) == 2


@pytest.mark.slow
def test_auto_is_at_least_as_fast_as_what_a_system_does(table: Path) -> None:
    (found,) = compare(table, only="0.001")
    assert found.auto is not None and found.auto.step_s and found.theirs is not None
    assert found.auto.step_s <= found.theirs.step_s


def test_nothing_is_begun_when_the_time_is_over(table: Path) -> None:
    assert [each.theirs for each in compare(table, until_s=0.0)] == [None, None]


def test_a_kept_file_of_something_else_is_refused_with_the_line(table: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"bench": "published"}\n')
    with pytest.raises(PlanError, match=r"kept.jsonl:1: not a line that this command has written"):
        compare(table, kept)


def test_an_unknown_model_is_refused_with_the_nearest(table: Path) -> None:
    table.write_text(table.read_text().replace(TOY, "gpt-two"))
    with pytest.raises(PlanError, match="no model 'gpt-two'; did you mean gpt2"):
        compare(table, best=False)


def test_the_summary_counts_each_way_to_be_wrong() -> None:
    run = express(note="peak 1 GiB")  # 2 s
    peak = 2**30
    found = [
        Compared(ROW, run, "", Simulation(2.2, peak), Simulation(1.9)),
        Compared(ROW, run, "", Simulation(1.0, 2 * peak), Simulation(2.1)),
        Compared(ROW, run, "", Simulation(None, why="gpu0")),
        Compared(ROW, None, "fp8"),
    ]
    assert summary(found) == [
        ("runs in the table, simulated, not simulated", "4, 3, 1"),
        ("step as they do it, of 2 runs: median, worst", "30%, 50% off"),
        ("peak as they do it, of 2 runs: median, worst", "50%, 100% off"),
        ("fits and misfits that are right", "2 of 3"),
        ("of these wrong: theirs fits, ours not", "1"),
        ("`auto` at least as fast as the published run", "1 of 2 that were searched"),
    ]


@pytest.mark.slow
def test_the_command_writes_a_page(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, kept = tmp_path / "page.md", tmp_path / "kept.jsonl"
    main_of = ["predict", "--check", str(table), "--kept", str(kept), "--out", str(out), "--no-auto"]
    with pytest.raises(SystemExit) as ended:
        main(main_of)
    assert ended.value.code in (0, None)
    assert "2 of 2" in capsys.readouterr().out
    assert "| torch, no offload | " in out.read_text() and "| OOM | does not fit |" in out.read_text()
    assert {json.loads(line)["how"] for line in kept.read_text().splitlines()} == {"as they do it"}


def test_a_table_that_lacks_a_column_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.tsv"
    path.write_text("gpu\tvalue\nrtx4090\t3\n")
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--check", str(path)])
    assert ended.value.code == 2
    assert "lacks the column source, system" in capsys.readouterr().err


def test_our_page_is_made_from_what_is_kept() -> None:
    command = "penstock predict --check bench/published.tsv --kept bench/results/predictions.jsonl "
    found = compare(TABLE, ROOT / "bench" / "results" / "predictions.jsonl", until_s=0.0)
    assert (ROOT / "docs" / "predictions.md").read_text() == page(found, f"{command}--out docs/predictions.md")


@pytest.mark.slow
def test_a_published_step_is_predicted() -> None:
    (found,) = compare(TABLE, only="+packed", best=False)
    assert found.excess == pytest.approx(0.0, abs=0.15)
    assert found.peak_excess == pytest.approx(0.0, abs=0.1)
