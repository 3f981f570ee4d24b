"""Packed rows are run with other documents: a mask that lets one see another is found."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.ir.errors import CaptureError
from penstock.tests.compiler.reasons import reasons_of

WIDTH, VOCABULARY = 8, 16


class Attends(nn.Module):
    """One layer of attention, whose scores of other documents are lowered by `hide`. Of `alike` documents one after
    the other each counts as the same."""

    def __init__(self, hide: float, alike: int = 1) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.hide, self.alike = nn.Linear(WIDTH, VOCABULARY), hide, alike

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        document = (position_ids == 0).cumsum(-1) // self.alike
        others = document[:, :, None] != document[:, None, :]
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(1, 2) - self.hide * others.float()
        h = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def documents(*lengths: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(4, 6).contiguous()
    ids, labels = (torch.randint(0, VOCABULARY, (4, 6), generator=made) for _ in range(2))
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def compile_job(model: nn.Module, batch: dict[str, Tensor], **options: bool) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=optimizer, strategy="balanced", micro_batches=2, **options
    )


def test_a_mask_that_hides_too_little_is_refused_by_module_and_line() -> None:
    torch.manual_seed(0)
    model = Attends(hide=1.0)
    with pytest.raises(
        CaptureError, match=r"see across borders first in the model \(Attends\), at test_borders.py:\d+: h ="
    ):
        compile_job(model, documents(3, 3))
    with compile_job(model, documents(3, 3), check=False) as job:
        assert "what another computes" not in reasons_of(job)


def test_later_documents_that_see_each_other_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="what a document computes changes with another one"):
        compile_job(Attends(hide=1e9, alike=2), documents(2, 2, 2))


def test_a_mask_that_hides_all_is_said() -> None:
    torch.manual_seed(0)
    with compile_job(Attends(hide=1e9), documents(3, 3)) as job:
        assert "no document changes what another computes" in reasons_of(job)


def test_rows_of_one_document_are_run_once() -> None:
    with compile_job(Attends(hide=1.0), documents(6)) as job:
        assert "what another computes" not in reasons_of(job)
