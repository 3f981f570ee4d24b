"""Rows of one length: which of them are held out, and in which batches they are evaluated."""

from __future__ import annotations

import torch

from penstock.data.rows import Rows, evaluation_batches


def number(count: int) -> Rows:
    ids = torch.arange(count).view(count, 1)
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def test_evaluation_counts_every_row_once() -> None:
    batches = list(evaluation_batches(number(7), 3))
    assert [list(counted) for _, counted in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(len(rows) == 3 for rows, _ in batches)
    labels = torch.cat([rows.labels for rows, _ in batches])[:, 0]
    assert labels.tolist() == [*range(7), -100, -100]


def test_held_out_rows_are_a_fixed_random_part() -> None:
    rest, held = number(20).split(0.25, seed=0)
    first = held.columns["input_ids"][:, 0].tolist()
    assert len(held) == 5
    assert sorted([*rest.columns["input_ids"][:, 0].tolist(), *first]) == list(range(20))
    assert first == number(20).split(0.25, seed=0)[1].columns["input_ids"][:, 0].tolist()
    assert first != number(20).split(0.25, seed=1)[1].columns["input_ids"][:, 0].tolist()


def test_describes_its_inputs() -> None:
    ids, labels = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    assert Rows({"input_ids": ids, "labels": ids}).describe() == "8 tokens each"
    assert Rows({"input_ids": ids, "labels": labels}).describe() == "8 tokens of input_ids, 3 tokens of labels"
