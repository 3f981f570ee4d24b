"""Preference training on a GPU: a rematerialised stage leaves out the reference, also in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import penstock
from penstock.bench.peers import parity
from penstock.tests.gpu.rehearsal import DEVICE, compile_job, exact, on_gpu
from penstock.tests.preference_case import adapt, pairs

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
AGAIN = (
    "drop-masks, chunk-loss, interleave-forwards, coarsen, partition-balanced{stages=3}, map-round-robin, "
    "schedule-pipeline, insert-remat{always=true}, insert-fetch, insert-optimizer"
)


@pytest.mark.parametrize(("kind", "how"), [*product(("llama", "gpt2"), ("as written", "graphs"))])
def test_losses_and_weights_are_eagers(kind: str, how: str) -> None:
    """A graph holds no more than what runs, and takes no input that backward needs nothing of."""
    model, data = penstock.DPO(adapt(kind)), [pairs(seed=seed) for seed in range(parity.STEPS)]
    wanted = parity.train_eager(model, data, DEVICE, "fp32", micro_batches=2)
    graphs = {"cuda_graphs": True} if how == "graphs" and DEVICE == "cuda" else {}
    with compile_job(model, data[0], strategy=AGAIN, micro_batches=2, precision="fp32", **graphs) as job:
        stages = job.folder.interface.stages
        assert [spec.again is not None for spec in stages.values()] == [True, True, False]
        found = parity.train_job(job, data)
        step = job.code(0).split("def step(")[1].split("def evaluate(")[0]
        assert 'rt.backward("stage1", w1, None, [' in step and " None, " in step.split('rt.backward("stage1"')[1]
    trained = replace(found, weights={name: found.weights[name] for name in wanted.weights})
    assert all("lora_" in name for name in trained.weights)
    apart = parity.compare(trained, wanted, parity.start_of(model))
    assert apart.fits("fp32"), apart
