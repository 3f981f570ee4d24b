"""Bad batches on GPUs: numbers out of their bounds reach no kernel, a loss that is not finite undoes the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.tests.compiler.job.agents import agents
from penstock.tests.compiler.job.test_bad_batches import ADAMW, Net, batch_of, require_equal, results
from penstock.tests.gpu.rehearsal import compile_job, exact, on_gpu, only_on_gpu, swapping_job
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

RANKS = Path(__file__).with_name("bad_batches_of_gpus.py")
KINDS = ("id", "negative id", "label", "nan", "inf", "dtype")
WAYS: dict[str, Callable[..., Any]] = {
    "resident": partial(compile_job, stages=1),
    "clipped": partial(compile_job, stages=2, max_grad_norm=0.01),
    "swapped": swapping_job,
    "graphs": partial(compile_job, stages=2, cuda_graphs=True),
}
# On two GPUs.
PAIRS: dict[str, dict[str, Any]] = {
    "1f1b": {"max_grad_norm": 0.01},
    "interleaved": {},
    "zero-bubble": {},
    "data-parallel": {},
    "zero3-offload": {},
    "mobius": {"memory": "150kB", "micro_batches": 4},
    "graphs": {"strategy": "1f1b", "cuda_graphs": True},
}
UNCHANGED = ("graphs", "data-parallel", "zero3-offload")  # lanes refuse buffers that forward changes
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def net_for(way: str) -> Net:
    torch.manual_seed(0)
    net = Net(buffers=False).train()  # emulated GPUs evaluate no batch norm
    net.buffers_change = way not in UNCHANGED
    net.drop.p *= way != "graphs"
    return net


def job_by(way: str) -> Any:
    return WAYS[way](net_for(way), batch_of(0), optimizer=ADAMW, micro_batches=2)


def pair_by(way: str) -> Any:
    """A job on two GPUs; of two hosts if only one GPU is visible."""
    options = {"strategy": way, "micro_batches": 2, "optimizer": ADAMW, "memory": "1GB", **PAIRS[way]}
    hardware = penstock.Hardware.detect().with_(dram="8GB", ssds=0, memory=options.pop("memory"))
    if len(hardware.devices) == 1:
        (host,), (gpu,) = hardware.hosts, hardware.devices
        gpus = [gpu, gpu.model_copy(update={"name": "gpu1", "host": 1})]
        hardware = penstock.Hardware(hosts=[host, host], devices=gpus, network={"bandwidth": 1e9, "latency_s": 1e-5})
    return penstock.compile(net_for(way), hardware, example_inputs=batch_of(0), **options)


def require_no_trace(start: Callable[[], Any], kinds: Sequence[str] = KINDS) -> list[str]:
    """Bad batches leave no trace in a job. Returns their errors."""
    said: list[str] = []
    require_equal(results(start(), [*kinds, *kinds, *kinds], 3, said), results(start(), [], 3))
    assert sum("the loss is nan" in text and "are as before it" in text for text in said) == 6
    return said


@pytest.mark.parametrize("way", core_of({"swapped"}, WAYS))
def test_bad_batches_leave_no_trace(way: str) -> None:
    require_no_trace(partial(job_by, way))


@only_on_gpu
@two_gpus
@pytest.mark.multi
@pytest.mark.parametrize("way", ["1f1b", "mobius"])
def test_bad_batches_leave_no_trace_on_two_gpus(way: str) -> None:
    """The hosts issue updates long before the losses are known."""
    require_no_trace(partial(pair_by, way))


@only_on_gpu
@two_gpus
@pytest.mark.multi
@pytest.mark.parametrize(("hosts", "ways"), [(1, PAIRS), (2, ["1f1b"])])
def test_ranks_of_torchrun_leave_a_bad_batch_out_together(hosts: int, ways: Sequence[str], tmp_path: Path) -> None:
    """All ways one after the other in the same two ranks; those of two hosts tell each other through the store."""
    with agents(tmp_path, str(tmp_path), *ways, nodes=hosts, per_node=2 // hosts, script=RANKS) as running:
        assert set(running.wait(280)) == {0}, running.output()
        said = running.results()
    assert said[0] == said[1] and set(said[0]) == set(ways)
