"""`fuse-pointwise`: the same training with chains of pointwise calls as one call each, which saves no more."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.strategies import PIPELINE
from penstock.ir.errors import PassError, PlanError
from penstock.ir.regions import Region, with_regions
from penstock.passes.rewrite.fuse_pointwise import FusePointwise
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.passes.rewrite.tile_sequence import TileSequence
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.golden_text import Golden
from penstock.tests.passes.rewrite import training
from penstock.tests.passes.rewrite.training import assert_trains_and_evaluates_like_eager
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


job_of = partial(training.job_of, strategy=FUSED)


def assert_trains_like_eager(model: nn.Module, batch: Any, tolerance: float = 2e-6, **options: Any) -> None:
    with job_of(model, batch, **options) as job:
        assert job.plan.decisions.fused
        assert_trains_and_evaluates_like_eager(job, batch, tolerance)


SCHEDULES = ["schedule-pipeline", "schedule-1f1b", "schedule-zero-bubble"]
REMATS = ["insert-remat", "insert-remat{always=true}", "choose-activations"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("devices", [1, 2])
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


HARDWARE = penstock.Hardware.cpu(1, memory="64MB", dram="1GB")


@pytest.mark.slow
def test_an_edited_plan_fuses_what_it_names() -> None:
    model, batch = Stack(), batch_of()
    with job_of(model, batch) as job:
        plan = job.plan
    again = partial(penstock.compile, copy.deepcopy(model), HARDWARE, example_inputs=batch, optimizer=SGD, plan=plan)
    assert plan.decisions.fused == [f"layers.{i}/{n}" for i in range(2) for n in (1, 2, 3)]
    plan.decisions.fused = ["layers.1/3"]
    with again() as job:
        assert job.code().count("functions.fuse(") == 1
    plan.decisions.fused = ["layers.1/9"]
    with pytest.raises(PassError, match=r"'layers.1/9' is no chain of calls of this model; it has layers.0/1"):
        again()


@pytest.mark.slow
def test_kernels_are_asked_for_by_name() -> None:
    compiled = partial(penstock.compile, Stack(1), HARDWARE, example_inputs=batch_of(), optimizer=SGD)
    searched = partial(compiled, search_s=0.1)
    fused, written = searched(kernels="fused").plan, searched().plan
    assert "fuse-pointwise" in fused.passes and "fuse-pointwise" not in written.passes
    assert compiled(plan=fused, kernels="fused").plan.hash == compiled(plan=fused).plan.hash == fused.hash
    with pytest.raises(PlanError, match=f"plan={written.hash} runs calls as written; leave one of them out"):
        compiled(plan=written, kernels="fused")
    with pytest.raises(PlanError, match=r"kernels='liger'; it is \"written\", or \"fused\""):
        searched(kernels="liger")


@pytest.mark.parametrize("chosen", [{"kernels": "fused", "strategy": PIPELINE}, {"strategy": FUSED}])
def test_compiled_blocks_choose_kernels_themselves(chosen: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="compiled blocks choose their kernels themselves"):
        job_of(Stack(1), batch_of(), compile_stages=True, **chosen)


def test_a_backward_that_computes_results_again_has_no_chains() -> None:
    with pytest.raises(PassError, match="fuse-pointwise after recompute-pointwise"):
        apply(draft_of(trace(Stack(1), batch_of(2))), RecomputePointwise(), FusePointwise())
