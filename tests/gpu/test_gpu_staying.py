"""Trained parameters of a frozen base stay on a GPU beside stages that come from DRAM: training equals eager
PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from penstock.bench.peers import parity
from penstock.ir import ops
from penstock.runtime.accelerator import allocator_figures
from penstock.tests.gpu.rehearsal import DEVICE, batches, exact, model_of, on_gpu, swapping_job
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LINES = {
    "exact": "insert-remat, insert-fetch{swap=true}, insert-optimizer",
    "overlapped": "choose-activations{swap=true, tier=none}, insert-fetch{swap=true}, overlap-optimizer",
}
HEAD = "drop-masks, chunk-loss, coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline"


def frozen_but_norms() -> nn.Module:
    model = model_of()
    for name, param in model.named_parameters():
        param.requires_grad_("ln" in name or "norm" in name)
    assert any(p.requires_grad for p in model.parameters()) and not all(p.requires_grad for p in model.parameters())
    return model


@pytest.mark.parametrize(("precision", "line"), core_of([("bf16", "overlapped")], product(("fp32", "bf16"), LINES)))
def test_losses_and_weights_are_eagers(line: str, precision: str) -> None:
    model, data = frozen_but_norms(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision, optimizer=ADAMW, max_grad_norm=0.5)
    options = {"optimizer": ADAMW, "precision": precision, "strategy": f"{HEAD}, {LINES[line]}", "max_grad_norm": 0.5}
    before = allocator_figures(torch.device(DEVICE))["retries"]  # of other tests in this process
    with swapping_job(model, data[0], **options) as job:
        nodes = list(job.programs[0].ops())
        assert any(spec.staying for spec in job.folder.interface.stages.values())
        assert not [n for n in nodes if n.target is ops.offload and n.meta["type"].kind == "grads"]
        found = parity.train_job(job, data)
        assert job.last is not None and all(row["retries"] == before for row in job.last.allocator.values())
    trained = replace(found, weights={name: found.weights[name] for name in wanted.weights})
    assert trained.weights.keys() < found.weights.keys()
    apart = parity.compare(trained, wanted, parity.start_of(model))
    assert apart.fits(precision), apart
