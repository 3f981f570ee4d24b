"""Documents packed into rows: where each token is, what it counts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import penstock
from penstock.compiler.packing.documents import IGNORED, first_fit, pack_documents
from penstock.ir.errors import PlanError


def test_documents_are_packed_whole_and_long_ones_are_cut() -> None:
    packed = penstock.pack_documents([[1, 2, 3], [4, 5], [], [6, 7, 8, 9, 10, 11, 12], [13]], 5, pad_id=99)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 99, 99]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 1, 0, 0, 1]]
    no = IGNORED
    assert packed.labels.tolist() == [[no, 2, 3, no, 5], [no, 7, 8, 9, 10], [no, 12, no, no, no]]
    assert packed.describe() == "4 documents (5 pieces) in 3 rows, 2 of 15 tokens are padding (13.3%)"


def test_labels_and_positions_of_ones_own() -> None:
    prompt = {"input_ids": np.array([1, 2, 3, 4]), "labels": torch.tensor([-100, -100, 3, 4])}
    packed = pack_documents([prompt, torch.tensor([5, 6])], 6, first_position=2)
    assert packed.labels.tolist() == [[IGNORED, IGNORED, 3, 4, IGNORED, 6]]
    assert packed.position_ids.tolist() == [[2, 3, 4, 5, 2, 3]]


def test_the_rows_are_a_data_set() -> None:
    packed = pack_documents([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4)
    batch = next(iter(DataLoader(packed, batch_size=len(packed))))  # type: ignore[arg-type]
    assert batch.keys() == {"input_ids", "position_ids", "labels"}
    assert torch.equal(batch["input_ids"], packed.input_ids)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_item_goes_into_the_first_row_with_room(sizes: list[int]) -> None:
    used: list[int] = []
    for size, (row, place) in zip(sizes, first_fit(sizes, 20), strict=True):
        expected = next((i for i, full in enumerate(used) if full + size <= 20), len(used))
        used += [0] * (expected == len(used))
        assert (row, place) == (expected, used[row])
        used[row] += size


@pytest.mark.parametrize(
    ("documents", "sequence", "message"),
    [
        ([[1, 2]], 1, r"sequence=1; a row has 2 tokens or more"),
        ([], 8, r"none of the 0 documents has a target"),
        ([[1], [2]], 8, r"none of the 2 documents has a target"),
        (["text"], 8, r"documents\[0\] is 'text'; it is a list or tensor of token ids"),
        ([[1, 2], 3], 8, r"documents\[1\] is '3'; it is a list or tensor of token ids"),
        ([torch.zeros(2, 3)], 8, r"documents\[0\] is torch.float32\[2, 3\]; it is one document"),
        ([{"ids": [1]}], 8, r'documents\[0\] has ids; it needs "input_ids"'),
        ([{"input_ids": [1, 2], "labels": [1]}], 8, r"2 input_ids and 1 labels"),
    ],
)
def test_what_is_no_document_is_refused(documents: list, sequence: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pack_documents(documents, sequence)
