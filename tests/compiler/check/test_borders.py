"""Packed rows are run with another first document: a mask that lets a later one see it is found."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.ir.errors import CaptureError

WIDTH, VOCABULARY = 8, 16


class Attends(nn.Module):
    """One layer of attention, whose scores of other documents are lowered by `hide`."""

    def __init__(self, hide: float) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.hide = nn.Linear(WIDTH, VOCABULARY), hide

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        document = (position_ids == 0).cumsum(-1)
        others = document[:, :, None] != document[:, None, :]
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(1, 2) - self.hide * others.float()
        h = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def documents(first: int = 3) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    positions = torch.cat([torch.arange(first), torch.arange(6 - first)])[None].expand(4, 6).contiguous()
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
        compile_job(model, documents())
    with compile_job(model, documents(), check=False) as job:
        assert "another first document" not in job.explain()


def test_a_mask_that_hides_all_is_said() -> None:
    torch.manual_seed(0)
    with compile_job(Attends(hide=1e9), documents()) as job:
        assert "another first document changes nothing in later ones" in job.explain()


def test_rows_of_one_document_are_run_once() -> None:
    with compile_job(Attends(hide=1.0), documents(first=6)) as job:
        assert "another first document" not in job.explain()
