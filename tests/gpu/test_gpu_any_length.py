"""Batches of any length on a GPU: training equals eager PyTorch on it, with weights that stay and weights that move."""

from __future__ import annotations

from itertools import product

import pytest
from torch.export import Dim

from penstock.bench.peers import parity
from penstock.bench.peers.gpt import GptSize, batch_of
from penstock.tests.gpu.rehearsal import DEVICE, KINDS, SIZE, exact, model_of, on_gpu
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

LENGTHS = (32, 7, 20, 32, 3)


@pytest.mark.parametrize(("kind", "precision"), core_of([("swapped", "bf16")], product(KINDS, ("fp32", "bf16"))))
def test_losses_and_weights_are_eagers_at_every_length(kind: str, precision: str) -> None:
    model = model_of()
    data = [batch_of(GptSize(**{**vars(SIZE), "length": n}), 4, seed) for seed, n in enumerate(LENGTHS)]
    wanted = parity.train_eager(model, data, DEVICE, precision)
    dynamic = (Dim("rows", max=4), Dim("sequence", min=2, max=SIZE.length))
    with KINDS[kind](model, data[0], precision=precision, dynamic_shapes=dynamic) as job:
        assert bool(job.plan.decisions.fetch) == (kind == "swapped")
        found = parity.train_job(job, data)
        assert job.last is not None and not any(row["retries"] for row in job.last.allocator.values())
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart
