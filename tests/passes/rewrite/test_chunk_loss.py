"""`chunk-loss`: the same training without whole logits, in the memory that is planned, where the planner wants it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.loss import capture
from penstock.compiler.plan import Plan
from penstock.compiler.strategies import PIPELINE
from penstock.ir.errors import BatchError, PassError
from penstock.ir.precision import Precision
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.tests.compiler.eager_baseline import SGD, assert_close, zoo_case
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.passes.rewrite import training
from penstock.tests.passes.rewrite.training import assert_trains_and_evaluates_like_eager
from penstock.tests.passes.running import all_passes, apply, draft_of
from penstock.tests.passes.stage_runs import Peak, stages_of
from penstock.tests.shown_elsewhere import slow_but, slow_rows_but

CHUNKED = "chunk-loss{tokens=5}, " + PIPELINE


class Reader(nn.Module):
    """A small language model with a large vocabulary: an embedding, one layer and a head."""

    def __init__(self, classes: int = 32768, width: int = 16, bias: bool = False):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(classes, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=bias)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.layer(self.embedding(ids))))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def tokens_of(classes: int = 32768, rows: int = 4, length: int = 64) -> dict[str, Tensor]:
    """Each row ignores as many labels, so that plain micro-batches have the loss of the batch."""
    ids = torch.randint(0, classes, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.masked_fill(torch.arange(length) % 7 == 3, -100)}


job_of = partial(training.job_of, strategy=CHUNKED)


def assert_trains_like_eager(model: nn.Module, batch: Any, tolerance: float = 2e-6, **options: Any) -> None:
    with job_of(model, batch, **options) as job:
        assert job.plan.decisions.chunks
        assert_trains_and_evaluates_like_eager(job, batch, tolerance)
        assert job.evaluate(batch)["logits"].shape[-1] > 1
        assert set(job.evaluate(batch, outputs=False)) == {"loss"}


@pytest.mark.parametrize("name", slow_but(("gpt2",), ("gpt2", "opt", "qwen3", "t5")))
def test_transformers_train_and_evaluate_like_eager(name: str) -> None:
    model, batch = zoo_case(name)
    assert_trains_like_eager(model, batch, 4e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("schedule-zero-bubble", "insert-remat"),  # with choose-activations it is refused by name
        ("schedule-zero-bubble", "insert-remat{always=true}"),
        ("schedule-1f1b", "insert-remat"),
        ("schedule-1f1b", "insert-remat{always=true}"),
        ("schedule-1f1b", "choose-activations"),
    ],
)
def test_schedules_and_rematerialisation_train_like_eager(schedule: str, remat: str) -> None:
    model, batch = zoo_case("gpt2")
    line = CHUNKED.replace("schedule-pipeline", schedule).replace("insert-remat", remat)
    line = line.replace("partition-balanced", "partition-balanced{stages=2}")
    assert_trains_like_eager(model, batch, 4e-6, strategy=line, devices=2)


@pytest.mark.slow
def test_split_backward_and_dropped_tensors_of_a_chunked_stage_train_like_eager() -> None:
    batch = tokens_of(90, 4, 12)
    line = CHUNKED.replace("schedule-pipeline", "schedule-zero-bubble")
    line = line.replace("partition-balanced", "partition-balanced{stages=2}")
    assert_trains_like_eager(Reader(90, bias=True), batch, strategy=line, devices=2)
    assert_trains_like_eager(Reader(90), batch, strategy=CHUNKED.replace("insert-remat", "insert-remat{always=true}"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_is_that_of_whole_logits(precision: str) -> None:
    """Both round the same products to bf16; sums over tokens and classes are made in fp32 in both."""
    model, batch, found = Reader(90), tokens_of(90, 4, 12), []
    for strategy in (PIPELINE, CHUNKED):
        with job_of(model, batch, strategy=strategy, precision=precision) as job:
            losses = [job.step(batch) for _ in range(2)]
            job.sync()
            found.append((losses, {n: p.detach().float() for n, p in job.model.named_parameters()}))
    (whole, weights), (chunked, mine) = found
    torch.testing.assert_close(chunked, whole, rtol=2e-3, atol=0)
    assert_close(mine, weights, 4e-3)


def test_the_printed_stage(golden: Any) -> None:
    with job_of(Reader(90, bias=True), tokens_of(90, 4, 6), micro_batches=1) as job:
        text = job.code(0)
        golden(text[text.index("class Stage0") : text.index("STAGES =")], "reader")
        assert "chunk-loss: the 90 logits of 20 tokens are made in 4 chunks of 1.76 KiB" in reasons_of(job)


@pytest.mark.parametrize(
    ("classes", "tokens", "low"), slow_rows_but([(4096, 64, False)], [(4096, 8, True), (4096, 64, False)])
)
def test_memory_is_as_planned(classes: int, tokens: int, low: bool) -> None:
    batch = tokens_of(classes, 4, 65)
    precision = "bf16-mixed" if low else "fp32"
    graph = capture(Reader(classes), batch, precision=Precision.of(precision))
    draft = apply(draft_of(graph, penstock.Hardware.cpu(num_devices=1)), ChunkLoss(tokens), *all_passes(1)[:4])
    whole = apply(draft_of(graph, penstock.Hardware.cpu(num_devices=1)), *all_passes(1)[:4])
    ((spec, runner, inputs),) = stages_of(draft, {**batch, "items": torch.ones(1)}, precision)
    _, grads = runner.backward(runner.forward(inputs, 0)[1], inputs, [1.0], None, 0)
    assert runner.kept_bytes == spec.kept_bytes
    with Peak() as forward:
        outputs, kept = runner.forward(inputs, 0)
    with Peak() as both:  # gradients add up, as from a step's second micro-batch on
        runner.backward(runner.forward(inputs, 0)[1], inputs, [1.0], grads, 0)
    want = spec.kept_bytes + sum(o.nbytes for o in outputs) + spec.forward_workspace_bytes
    assert kept is not None and 0.95 * forward.most <= want <= 1.05 * forward.most, (forward.most, want)
    want = max(want, spec.kept_bytes + spec.backward_workspace_bytes)
    assert 0.95 * both.most <= want <= 1.05 * both.most, (both.most, want)
    old = whole.stages[0].spec
    assert spec.backward_workspace_bytes < old.backward_workspace_bytes and spec.kept_bytes < old.kept_bytes / 2


@pytest.mark.slow
def test_a_small_device_gets_chunks_of_large_logits() -> None:
    batch = tokens_of()
    with job_of(Reader(), batch, strategy="auto", micro_batches=1) as job:
        (chunk,) = job.plan.decisions.chunks.values()
        assert 1 < chunk.tokens < 64 and not chunk.logits
        assert "evaluation gives no logits" in reasons_of(job)
        assert set(job.evaluate(batch)) == {"loss"}


@pytest.mark.slow
def test_a_large_device_keeps_logits_whole_as_that_is_faster() -> None:
    with job_of(Reader(), tokens_of(), strategy="auto", memory="4GB", micro_batches=1) as job:
        assert not job.plan.decisions.chunks
        lost = [rival for rival in job.plan.rivals if "chunk-loss{" in rival.name]
        assert lost, "chunks were not tried"


def test_small_logits_are_left_alone() -> None:
    draft = draft_of(capture(Reader(90), tokens_of(90)), penstock.Hardware.cpu(num_devices=1, memory="1MB"))
    assert ChunkLoss().plan(draft) == {}
    graph = draft.graph
    ChunkLoss().rewrite(draft, {})
    assert draft.graph is graph


@pytest.mark.slow
def test_a_decision_can_be_edited(tmp_path: Path) -> None:
    model, batch = Reader(90), tokens_of(90, 4, 12)
    with job_of(model, batch) as job:
        plan, code = job.plan, job.code(0)
    plan.save(tmp_path / "plan.json")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    again = partial(penstock.compile, model, hardware, example_inputs=batch, optimizer=SGD)
    assert again(plan=tmp_path / "plan.json").code(0) == code
    edited = Plan.load(tmp_path / "plan.json")
    (name,) = edited.decisions.chunks
    edited.decisions.chunks[name].tokens = 3
    assert "tokens=3" in again(plan=edited).code(0)
    edited.decisions.chunks["another"] = edited.decisions.chunks.pop(name)
    with pytest.raises(PassError, match=f"'another' is no cross entropy of this model; it has {name}"):
        again(plan=edited)


def test_logits_that_must_stand_whole_are_refused_by_their_reason() -> None:
    class Penalised(Reader):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.head(self.embedding(ids))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean()

    draft = draft_of(capture(Penalised(90), tokens_of(90)))
    with pytest.raises(PassError, match="also read by square"):
        ChunkLoss(4).plan(draft)
    assert ChunkLoss().plan(draft) == {}


def test_a_label_out_of_range_is_found_before_the_step() -> None:
    model, batch = Reader(90), tokens_of(90, 4, 12)
    batch["labels"][2, 3] = 90
    with pytest.raises(IndexError, match="Target 90 is out of bounds"):
        model(**batch)
    with (
        job_of(model, batch) as job,
        pytest.raises(BatchError, match=r"batch\['labels'\] has 90 in row 2: a loss over 90 classes"),
    ):
        job.step(batch)
