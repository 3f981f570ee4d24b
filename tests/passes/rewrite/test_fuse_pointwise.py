"""`fuse-pointwise`: the same training with chains of pointwise calls as one call each, which saves no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import PIPELINE
from penstock.graph.regions.call_chains import call_chains
from penstock.ir.errors import PassError, PlanError
from penstock.ir.regions import Region, with_regions
from penstock.passes.rewrite.fuse_pointwise import FusePointwise
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.passes.rewrite.tile_sequence import TileSequence
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import token_batch, zoo

FUSED = "fuse-pointwise, " + PIPELINE.replace("partition-balanced", "partition-balanced{stages=2}")
ROWS, LENGTH, WIDTH, CLASSES = 8, 6, 8, 32


class Norm(nn.Module):
    """RMSNorm as models spell it out: in fp32, and back."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Gated(nn.Module):
    """A norm, rotated queries, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rows = Norm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate, self.down = (nn.Linear(a, b) for a, b in ((WIDTH, 16), (WIDTH, 16), (16, WIDTH)))
        self.register_buffer("angles", torch.outer(torch.arange(float(LENGTH)), torch.tensor([1.0, 0.1] * 4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows(self.norm(x))
        turned = torch.cat((-h[..., WIDTH // 2 :], h[..., : WIDTH // 2]), dim=-1)
        x = x + (h * self.angles.cos() + turned * self.angles.sin())
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Gated() for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def batch_of(rows: int = ROWS, length: int = LENGTH, classes: int = CLASSES) -> dict[str, Tensor]:
    ids = token_batch(rows, length)["input_ids"] % classes
    return {"input_ids": ids, "labels": ids}


def job_of(model: nn.Module, batch: Any, strategy: str = FUSED, devices: int = 1, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB")
    given = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": strategy, **options}
    return penstock.compile(copy.deepcopy(model), hardware, example_inputs=batch, **given)


def assert_trains_like_eager(model: nn.Module, batch: Any, tolerance: float = 2e-6, **options: Any) -> None:
    """Losses and weights of two steps: after SGD's first step a weight has moved by its gradient. The calls are
    eager's; sums over micro-batches are not."""
    eager = Eager(model)
    with job_of(model, batch, **options) as job:
        assert job.plan.decisions.fused
        for _ in range(2):
            torch.testing.assert_close(job.step(batch), eager.step(batch), rtol=tolerance, atol=0)
        job.sync()
        found = {name: p.detach() for name, p in job.model.named_parameters()}
        assert_close(found, {name: p.detach() for name, p in eager.params.items()}, tolerance)
        torch.testing.assert_close(job.evaluate(batch)["loss"], eager.evaluate(batch), rtol=tolerance, atol=0)


SCHEDULES = ["schedule-pipeline", "schedule-1f1b", "schedule-zero-bubble"]
REMATS = ["insert-remat", "insert-remat{always=true}", "choose-activations"]


@pytest.mark.parametrize("schedule", slow_but(["schedule-zero-bubble"], SCHEDULES))
@pytest.mark.parametrize("remat", slow_but(["insert-remat"], REMATS))
@pytest.mark.parametrize("devices", slow_but([2], [1, 2]))
def test_schedules_and_rematerialisation_train_like_eager(schedule: str, remat: str, devices: int) -> None:
    if schedule == "schedule-zero-bubble" and remat == "choose-activations":
        pytest.skip("activations are chosen for whole backwards only")
    line = FUSED.replace("schedule-pipeline", schedule).replace("insert-remat", remat)
    assert_trains_like_eager(Stack(), batch_of(), strategy=line, devices=devices)


MOVED = FUSED.replace("insert-remat", "insert-remat{swap=true}").replace("insert-fetch", "insert-fetch{swap=true}")
BESIDE = ["chunk-loss{tokens=5}, " + FUSED, FUSED.replace("coarsen", "coarsen{level=operator}"), MOVED]


@pytest.mark.parametrize("line", slow_but([MOVED], BESIDE))
def test_tiers_and_other_passes_beside_chains_train_like_eager(line: str) -> None:
    assert_trains_like_eager(Stack(), batch_of(), strategy=line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "t5", "mixtral", "gpt2"])
def test_transformers_train_like_eager(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    wide = batch_of(classes=96)
    assert_trains_like_eager(model, {key: wide.get(key, torch.ones_like(wide["input_ids"])) for key in batch}, 8e-6)


def test_tiles_keep_their_calls_and_chains_the_rest() -> None:
    """A layer without attention is one token-wise part."""
    draft = apply(draft_of(trace(Stack(), batch_of(2))), TileSequence(tokens=4), FusePointwise())
    assert [type(step).__name__ for step in with_regions(draft.graph.nodes) if isinstance(step, Region)] == [
        "TiledRegion", "TiledRegion",
    ]  # fmt: skip
    assert draft.notes["fuse-pointwise"] == "no chain of calls is fused"


def test_the_printed_chains(golden: Golden) -> None:
    with job_of(Stack(1), batch_of(), micro_batches=1) as job:
        golden(job.code().partition("class Gated")[2].partition("class Stage0")[0], "layer")


def test_an_edited_plan_fuses_what_it_names() -> None:
    model, batch = Stack(), batch_of()
    with job_of(model, batch) as job:
        plan = job.plan
    assert plan.decisions.fused == [f"layers.{i}/{n}" for i in range(2) for n in (1, 2, 3)]
    plan.decisions.fused = ["layers.1/3"]
    with penstock.compile(
        copy.deepcopy(model), penstock.Hardware.cpu(1, memory="64MB", dram="1GB"), example_inputs=batch, optimizer=SGD,
        plan=plan,
    ) as job:  # fmt: skip
        assert job.code().count("functions.fuse(") == 1
    plan.decisions.fused = ["layers.1/9"]
    with pytest.raises(PassError, match=r"'layers.1/9' is no chain of calls of this model; it has layers.0/1"):
        penstock.compile(
            copy.deepcopy(model), penstock.Hardware.cpu(1, memory="64MB", dram="1GB"), example_inputs=batch,
            optimizer=SGD, plan=plan,
        )  # fmt: skip


def test_kernels_are_asked_for_by_name() -> None:
    batch, hardware = batch_of(), penstock.Hardware.cpu(1, memory="64MB", dram="1GB")
    given: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "search_s": 0.1}
    assert "fuse-pointwise" in penstock.compile(Stack(1), hardware, kernels="fused", **given).plan.passes
    assert "fuse-pointwise" not in penstock.compile(Stack(1), hardware, **given).plan.passes
    with pytest.raises(PlanError, match=r"kernels='liger'; it is \"written\", or \"fused\""):
        penstock.compile(Stack(1), hardware, kernels="liger", **given)
    with pytest.raises(PlanError, match="Leave one of them out"):
        penstock.compile(Stack(1), hardware, kernels="fused", compile_stages=True, **given)


def test_beside_results_that_backward_computes_again_nothing_is_fused() -> None:
    graph = trace(Stack(1), batch_of(2))
    draft = apply(draft_of(graph), RecomputePointwise(), FusePointwise())
    assert draft.notes["fuse-pointwise"] == "no chain of calls is fused: backward computes them again"
    chains = {"fused": [chain.name for chain in call_chains(graph, "cpu")]}
    with pytest.raises(PassError, match="after recompute-pointwise"):
        apply(draft_of(graph), RecomputePointwise(), FusePointwise(), decisions=chains)
