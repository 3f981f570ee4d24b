"""Some stages stay whole on a GPU that fetches the others: training equals eager PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from penstock.bench.peers import parity
from penstock.ir import ops
from penstock.runtime.accelerator import allocator_figures
from penstock.tests.gpu.rehearsal import DEVICE, batches, exact, model_of, on_gpu, swapping_job
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
HEAD = "drop-masks, chunk-loss, coarsen, partition-balanced{stages=6}, map-round-robin, schedule-pipeline, "
LINES = {
    "exact": f"{HEAD}keep-stages{{share=1.0}}, insert-remat, insert-fetch, insert-optimizer",
    "overlapped": f"{HEAD}keep-stages{{share=1.0}}, choose-activations{{tier=none}}, insert-fetch, overlap-optimizer",
}


CORE = {("bf16", "overlapped", True)}


@pytest.mark.parametrize(
    ("precision", "line", "clipped"), core_of(CORE, product(("fp32", "bf16"), LINES, (True, False)))
)
def test_losses_and_weights_are_eagers(line: str, precision: str, clipped: bool) -> None:
    model, data = model_of(), batches()
    options = {"optimizer": parity.SGD, "precision": precision, "max_grad_norm": 0.5 if clipped else None}
    wanted = parity.train_eager(model, data, DEVICE, **options)
    before = allocator_figures(torch.device(DEVICE))["retries"]  # of other tests in this process
    with swapping_job(model, data[0], resident_too=True, strategy=LINES[line], **options) as job:
        resident, fetched = set(job.plan.decisions.resident), set(job.plan.decisions.fetch)
        assert resident and fetched and not resident & fetched
        offloaded = [n for n in job.programs[0].ops() if n.target is ops.offload and n.meta["type"].kind == "grads"]
        assert {node.meta["type"].stage for node in offloaded} == fetched
        found = parity.train_job(job, data)
        assert job.last is not None and all(row["retries"] == before for row in job.last.allocator.values())
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart
