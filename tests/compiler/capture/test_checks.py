"""The model's own checks of values (`torch._check*`): made while capturing where that can be, else in the programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import is_check
from penstock.ir.errors import CaptureError, WorkerError


class Checked(nn.Module):
    """Checks sizes, the batch alone, and what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        torch._check(x.shape[1] == 4)
        torch._check_is_size(x.shape[0])
        torch._check_tensor_all_with(ValueError, kept.sum() == 3, lambda: f"kept {kept.sum()}, not 3")
        h = self.layers[0](x)
        torch._check_tensor_all(h.abs() < 100)
        return (self.layers[1](h) * kept[:, None]).square().mean()


def batch_of(scale: float = 1.0, kept: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 4) * scale, "kept": torch.arange(4) < kept}


def compile_job(num_devices: int = 1) -> penstock.Job:
    torch.manual_seed(0)
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="64MB", dram="1GB")
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "strategy": "balanced"}
    return penstock.compile(Checked(), hardware, example_inputs=batch_of(), micro_batches=1, **options)


def test_checks_of_values_stay_in_the_graph_in_both_modes() -> None:
    graph = trace(Checked(), batch_of())
    assert sum(map(is_check, graph.nodes)) == 2 and graph.eval_error is None
    graph.module(**batch_of())
    with pytest.raises(RuntimeError, match=r"ValueError: kept <int64\[\]>, not 3"):
        graph.module(**batch_of(kept=4))


def test_each_check_is_in_one_stage() -> None:
    job = compile_job(num_devices=2)
    texts = [job.code(device).count("torch._assert_async(") for device in range(2)]
    assert sum(texts) == 2


@pytest.mark.parametrize(("batch", "said"), [(batch_of(kept=2), "not 3"), (batch_of(scale=1e4), "h.abs")])
def test_a_batch_that_fails_a_check_is_an_error_with_the_models_words(batch: Any, said: str) -> None:
    with compile_job() as job:
        job.step(batch_of())
        with pytest.raises(WorkerError, match=said):
            job.step(batch)


def test_a_check_of_sizes_fails_while_capturing() -> None:
    with pytest.raises(CaptureError, match=r"test_checks\.py:.*x\.shape\[1\]"):
        trace(Checked(), {"x": torch.zeros(4, 3), "kept": torch.ones(4, dtype=torch.bool)})
