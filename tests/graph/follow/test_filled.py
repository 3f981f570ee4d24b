"""Rows whose features fill the places of a mask: the numbers agree in each micro-batch, or a check says so."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CaptureError

SGD = partial(torch.optim.SGD, lr=0.1)
PICTURE, ROWS, TOKENS = 7, 4, 5


class Seeing(nn.Module):
    """Features of pictures in place of the tokens that stand for them, two a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower, self.head = nn.Embedding(8, 6), nn.Linear(3, 6), nn.Linear(6, 8)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        mask = (ids == PICTURE)[..., None]
        hidden = self.embed(ids).masked_scatter(source=self.tower(pixels), mask=mask)
        return self.head(torch.tanh(hidden)).square().mean()


def batch_of(places: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    for row, taken in enumerate(places):
        ids[row, taken] = PICTURE
    return {"ids": ids, "pixels": torch.randn(2 * ROWS, 3, generator=torch.Generator().manual_seed(0))}


GOOD, OTHER = [[0, 1], [2, 4], [0, 3], [1, 2]], [[0, 1, 3], [2], [0, 3], [1, 2]]


def compile_job(model: nn.Module, micro_batches: int | str) -> penstock.Job:
    hardware = penstock.Hardware.cpu(2, memory="64MB")
    return penstock.compile(
        model, hardware, example_inputs=batch_of(GOOD), optimizer=SGD, strategy="gpipe", micro_batches=micro_batches
    )


@pytest.mark.slow
def test_several_micro_batches_train_as_the_whole_batch(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = Seeing()
    twin = copy.deepcopy(model)
    optimizer = SGD(twin.parameters())
    with compile_job(model, 4) as job:
        assert not [each for each in recwarn if "coupled" in str(each.message)]
        for places in (GOOD, [[3, 4], [0, 1], [0, 1], [2, 3]]):
            loss = twin(**batch_of(places))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(job.step(batch_of(places))) == pytest.approx(float(loss.detach()), rel=1e-5)
        job.sync()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.mark.slow
def test_a_micro_batch_with_the_places_of_another_is_refused() -> None:
    with compile_job(Seeing(), 2) as job:
        job.step(batch_of(OTHER))  # three and one in a micro-batch that has four
    with compile_job(Seeing(), 4) as job, pytest.raises(Exception, match="another number of elements than of places"):
        job.step(batch_of(OTHER))


def test_places_are_checked_once_in_the_first_print_and_in_each_later_one() -> None:
    """Otherwise a change in Python without effect would be taken for one that gives another plan."""
    job = compile_job(Seeing(), 2)
    assert sum(text.count("of elements than of places") for text in job.folder.files.values()) == 1
    assert job._inputs.taken.replanner.print_anew().is_in(job.folder)


@pytest.mark.slow
def test_more_elements_than_places_are_refused_at_compile_in_their_own_words() -> None:
    """Eager leaves the last ones over; micro-batches would take others than the whole batch."""
    few = batch_of([[0], [2], [0], [1]])
    hardware, options = penstock.Hardware.cpu(1, memory="64MB"), {"example_inputs": few, "optimizer": SGD}
    with penstock.compile(Seeing(), hardware, micro_batches=1, **options) as job:
        assert float(job.step(few)) == pytest.approx(float(Seeing.forward(job.model, **few).detach()), rel=1e-5)
    with pytest.raises(CaptureError, match=r"test_filled\.py:\d+: .*than of places.*micro_batches=1") as refused:
        penstock.compile(Seeing(), hardware, micro_batches=2, **options)
    assert "whether it is traced" not in str(refused.value)
