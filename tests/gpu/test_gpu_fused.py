"""Chains of pointwise calls on a GPU: with kernels and as written, training equals eager, in the planned memory.

torch's own backend writes kernels that only a GPU runs. Under emulation another goes through all the rest: the trial,
kernels on the instruction's own stream, weights that move.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.bench.peers import gpu_sections, parity
from penstock.bench.peers.gpt import GptSize
from penstock.runtime.functions.chains import KERNELS
from penstock.tests.gpu.rehearsal import (
    DEVICE,
    KINDS,
    REHEARSED,
    SETUP,
    SIZE,
    batches,
    compile_job,
    exact,
    on_gpu,
    only_on_gpu,
)
from penstock.tests.passes.rewrite.test_fuse_pointwise import Norm
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

JOBS = {**KINDS, "graphs": partial(compile_job, cuda_graphs=not REHEARSED)}
AS_WRITTEN = "inductor"  # of which Python has no Triton under emulation
BACKENDS = [AS_WRITTEN, "aot_eager"]
CORE = {("resident", "bf16", "aot_eager")}


class Layer(nn.Module):
    """A layer as Llama has it, call by call."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (nn.Linear(a, b) for a, b in 2 * [(width, 2 * width)] + [(2 * width, width)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (part * cos + torch.cat(part.chunk(2, -1)[::-1], -1) * sin for part in rows[:2].unbind(0))
        mixed = F.scaled_dot_product_attention(query, key, rows[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Spelled(nn.Module):
    """A model of such layers, on the words of `batch_of`."""

    def __init__(self, size: GptSize = SIZE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(size.vocabulary, size.width), nn.Linear(size.width, size.vocabulary)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        angles = torch.outer(torch.arange(float(size.length)), torch.logspace(0, -3, size.width // size.heads))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return {"loss": F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    KERNELS.clear()
    yield
    KERNELS.clear()


@pytest.mark.parametrize(("kind", "precision", "backend"), core_of(CORE, product(JOBS, ("fp32", "bf16"), BACKENDS)))
def test_losses_and_weights_are_eagers(
    kind: str, precision: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.stage.runner.BACKEND", backend)
    model, data = Spelled(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision)
    with JOBS[kind](model, data[0], precision=precision, kernels="fused") as job:
        assert job.plan.decisions.fused
        found = parity.train_job(job, data)
        if backend != AS_WRITTEN and not REHEARSED:
            assert job.last.eager_blocks == {} and KERNELS
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart


@only_on_gpu
@pytest.mark.parametrize("fused", core_of({True}, [False, True]))
def test_the_planned_memory_is_what_a_step_takes(fused: bool) -> None:
    """As written, a chain's inner values live in forward alone, and those of one chain in backward."""
    model, data = Spelled(), batches()
    SETUP.tidy()
    before_bytes = torch.cuda.memory_allocated()
    kernels = "fused" if fused else "written"
    with compile_job(copy.deepcopy(model), data[0], kernels=kernels) as job:
        for batch in data:
            job.step(batch)
        job.sync()
        peak, _ = gpu_sections.allocator_peak(SETUP, job, data[0], before_bytes)
        planned = job.plan.predicted.peak_bytes[job.hardware.devices[0].name]
    assert (0 if fused else 0.75 * planned) < peak <= planned  # kernels take less than the calls that they replace
