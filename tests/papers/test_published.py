"""Tables of published runs: the forms of their cells, and the mistakes that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.ir.errors import PlanError
from penstock.papers.published import COLUMNS, PublishedRun, peak_of, read, run_of, way_of

TABLE = Path(__file__).resolve().parents[2] / "bench" / "published.tsv"
ROW = {
    "source": "a page", "system": "torch, no offload", "gpu": "rtx4090", "n_gpus": "1", "dram": "?", "ssd": "-",
    "model": "gpt2", "params": "0.1B", "batch": "4", "seq": "64", "precision": "bf16-true", "adapters": "none",
    "value": "2", "unit": "s/step", "note": "", "line": "table.tsv:2",
}  # fmt: skip


def express(**cells: str) -> PublishedRun:
    run = run_of(ROW | cells)
    assert isinstance(run, PublishedRun)
    return run


@pytest.mark.parametrize(
    ("batch", "gpus", "rows", "micro_batches"),
    [("recipe default (2)", 1, 2, 1), ("16 (2/GPU)", 8, 2, 8), ("1 x 4", 1, 1, 4), ("96 (3 x 4/GPU)", 8, 3, 32),
     ("micro-batch 4", 1, 4, 1), ("32", 8, 4, 8)],
)  # fmt: skip
def test_the_rows_of_a_micro_batch(batch: str, gpus: int, rows: int, micro_batches: int) -> None:
    run = express(batch=batch, n_gpus=str(gpus), gpu="a100_80gb")
    assert (run.rows, run.batch // run.rows) == (rows, micro_batches)


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [({}, 2.0), ({"value": "128", "unit": "tokens/s"}, 2.0), ({"value": "OOM", "unit": "fits"}, None),
     ({"value": "16", "unit": "tokens/s/GPU", "n_gpus": "8", "gpu": "h100"}, 2.0),
     ({"value": "0.1", "unit": "s/micro-batch", "seq": "Alpaca, at most 64"}, None),
     ({"value": "6", "unit": "TFLOPS", "params": "1B"}, 0.256)],
)  # fmt: skip
def test_the_seconds_of_a_step(cells: dict[str, str], seconds: float | None) -> None:
    assert express(**cells).seconds == pytest.approx(seconds)


def test_peaks_in_notes() -> None:
    assert peak_of("eager, peak active 2 GiB") == 2 * 2**30
    assert peak_of("peak 9.5 GB, checkpointing") == 9_500_000_000
    assert peak_of("out of 40 GB") is None


def test_more_gpus_than_a_server_has_are_hosts() -> None:
    assert express(n_gpus="64", gpu="h100_80gb", batch="64").hardware == "h100x8:8"


@pytest.mark.parametrize(
    ("cells", "message"),
    [({"gpu": "rtx4091"}, "table.tsv:2: no GPU 'rtx4091'; did you mean 'rtx4090'"),
     ({"value": "fast"}, "table.tsv:2: value 'fast'; allowed is a number above 0, or OOM"),
     ({"value": "-1"}, "value '-1'"), ({"value": "nan"}, "value 'nan'"), ({"n_gpus": "two"}, "n_gpus 'two'"),
     ({"unit": "token/s"}, "no unit 'token/s'; did you mean 'tokens/s'"),
     ({"batch": "some"}, "batch 'some' has no number"), ({"seq": "long"}, "seq 'long' has no number")],
)  # fmt: skip
def test_a_mistake_in_a_row_is_named_with_its_line(cells: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError) as error:
        run_of(ROW | cells)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [({"precision": "float8"}, "fp8"), ({"seq": "variable (alpaca-like)"}, "lengths of its rows")],
)
def test_a_run_that_cannot_be_expressed_has_a_reason(cells: dict[str, str], reason: str) -> None:
    run: Any = run_of(ROW | cells)
    assert reason in run


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty; its first line names the columns"), ("\t".join(COLUMNS) + "\n", "has no row below its columns"),
     ("source\tgpu\nx\ty\n", "lacks the column system, n_gpus")],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.tsv"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        read(path)
    assert message in str(error.value)
    if "lacks" in message:
        assert "it has source, gpu" in str(error.value)


def test_every_run_of_ours_has_a_way_or_a_reason() -> None:
    for row in read(TABLE):
        assert isinstance(run_of(row), str) or way_of(row) is not None, row["system"]


def test_a_way_computes_again_by_the_note_only_where_none_is_stated() -> None:
    by_note = way_of(ROW | {"system": "FSDP1 FULL_SHARD"})
    assert by_note is not None
    assert "insert-remat{always=true}" in by_note.pipeline("MFU 40%, checkpointing True")
    assert "insert-remat{never=true}" in by_note.pipeline("MFU 40%, checkpointing False")
    stated = way_of(ROW | {"system": "litgpt finetune_lora"})
    assert stated is not None
    assert "never=true" in stated.pipeline("activation checkpointing")
