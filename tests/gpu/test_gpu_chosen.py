"""Loops over the experts that got tokens, of which a GPU computes all and backward asks which counted."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from penstock.ir.errors import PlanError
from penstock.tests.compiler.capture.values.test_chosen import Net, batch_of, hit_list, skip_empty
from penstock.tests.gpu.rehearsal import compile_job, exact, on_gpu

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("style", [hit_list, skip_empty])
def test_steps_are_those_of_eager(style: Any) -> None:
    torch.manual_seed(1)
    model = Net(style)
    eager = copy.deepcopy(model)
    optimizer, batches = ADAMW(eager.parameters()), [batch_of() for _ in range(3)]
    with compile_job(model, batches[0], optimizer=ADAMW) as job:
        for batch in batches:
            loss = eager(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(job.step(batch).cpu(), loss.detach(), rtol=1e-5, atol=1e-6)
        state = job.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=1e-5, atol=1e-6)


def test_a_stage_whose_backward_asks_the_device_runs_from_no_graph() -> None:
    batch = batch_of()
    with (
        compile_job(Net(skip_empty), batch, optimizer=ADAMW, cuda_graphs=True) as job,
        pytest.raises(PlanError, match="no stage of this plan can run from CUDA graphs: stage0: it waits for the dev"),
    ):
        job.step(batch)
