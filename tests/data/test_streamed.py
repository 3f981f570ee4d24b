"""Rows that are read while training are those that are read at once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.data.codec import Codec
from penstock.data.read import read_rows
from penstock.data.spec import DataSpec
from penstock.data.streamed import StreamedRows
from penstock.ir.errors import PlanError

BYTES = Codec.read(None)


def spec_of(folder: Path, rows: list[dict[str, Any]], **wishes: Any) -> DataSpec:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return DataSpec.model_validate({"paths": [path], "sequence": 8, **wishes})


TEXTS = [{"text": f"number {i} of some texts"} for i in range(5)]
ANSWERS = [{"prompt": f"{i}?", "completion": "x" * (1 + i % 3)} for i in range(6)]


@pytest.mark.parametrize("rows", [TEXTS, ANSWERS], ids=["text", "completion"])
def test_same_rows(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rows)
    whole = read_rows(spec, BYTES, "causal-lm").rows
    count = len(whole) // 2
    parts = list(itertools.islice(StreamedRows(spec, BYTES, "causal-lm").batches(2), count))
    for name, column in whole.columns.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), column[: 2 * count], rtol=0, atol=0)


def test_begins_again_and_goes_on_anywhere(tmp_path: Path) -> None:
    stream = StreamedRows(spec_of(tmp_path, ANSWERS), BYTES, "causal-lm")
    first = list(itertools.islice(stream.batches(4), 4))
    later = next(stream.batches(4, start=8))
    torch.testing.assert_close(later["input_ids"], first[2]["input_ids"], rtol=0, atol=0)
    torch.testing.assert_close(first[3]["input_ids"], first[0]["input_ids"], rtol=0, atol=0)  # 12 rows are two epochs


def test_long_rows_of_the_first_pass_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * 20}, {"prompt": "a", "completion": "b"}]
    stream = StreamedRows(spec_of(tmp_path, rows), BYTES, "causal-lm")
    next(stream.batches(2))  # as an example of a batch
    list(itertools.islice(stream.batches(2), 3))
    (said,) = stream.lengths.describe()
    assert said.startswith("1 of 2 rows have more than 8 tokens and were cut, by 14 tokens")


@pytest.mark.parametrize(
    ("head", "wishes", "said"),
    [
        ("causal-lm", {"pack": True}, "--streaming --pack"),
        ("classification", {}, "which classes"),
        ("seq2seq", {}, "give --targets"),
        ("causal-lm", {"sequence": 999, "kind": "text"}, "no whole row of 999 tokens"),
        ("causal-lm", {"sequence": 8, "long_rows": "error", "kind": "completion"}, "give --sequence"),
        ("causal-lm", {"long_rows": "drop", "kind": "completion"}, "no row is left to train on; 1 of 1 rows have more"),
    ],
)
def test_mistakes(head: str, wishes: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1, "source": "a", "target": "b", "prompt": "a" * 9, "completion": "b"}]
    with pytest.raises(PlanError, match=said):
        next(StreamedRows(spec_of(tmp_path, rows, **wishes), BYTES, head).batches(1))
