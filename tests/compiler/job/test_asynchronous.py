"""Asynchronous jobs: two real processes, schedules of learning rates, what is said of staleness, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.pipeline import parse_pipeline, require_complete
from penstock.compiler.report.explain import explain
from penstock.compiler.search.candidate import Candidate
from penstock.compiler.search.candidates import schedules
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import PassError, PlanError
from penstock.passes.draft import Draft
from penstock.tests.passes.running import SEED, Batch, join_batches
from penstock.tests.passes.schedule.test_schedule_async import LargeLoss
from penstock.tests.passes.sequential import Sequential
from penstock.tests.zoo import zoo

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
DECAYING = partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=8)
PREDICTING = STRATEGIES["async"].replace("schedule-async", "schedule-async{weights=predict}")


def compile_job(model: torch.nn.Module, batch: Batch, **options: Any) -> penstock.Job:
    machine = penstock.Hardware.cpu(num_devices=2)
    return penstock.compile(model, hardware=machine, example_inputs=batch, seed=SEED, **options)


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum().float().reshape(1)


def add_counts(draft: Draft, batches: Sequence[Batch], counts: Sequence[torch.Tensor]) -> list[Batch]:
    """The batches with what the programs' loss divides by, which a job counts itself."""
    names = draft.graph.inputs.keys() - batches[0].keys()
    return [{**batch, **dict.fromkeys(names, count)} for batch, count in zip(batches, counts)]


def assert_trained(loop: Sequential, trained: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit."""
    for stage in loop.stages:
        for name, value in stage.names.items():
            assert torch.equal(trained[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (2, 0.5)])
def test_two_processes_train_as_the_sequential_loop_does(accumulate: int, max_norm: float | None) -> None:
    """T5 with dropout, weights that are predicted, and a learning rate that falls with every update; without and with
    mini-batches of two micro-batches that are clipped."""
    model, _ = zoo()["t5"](dropout=0.1)
    batches = [zoo()["t5"](seed=seed)[1] for seed in range(4)]
    drafts: list[Draft] = []
    strategy = PREDICTING.replace("predict}", f"predict, accumulate={accumulate}}}")
    options = {"optimizer": ADAMW, "lr_scheduler": DECAYING, "micro_batches": 4, "strategy": strategy}
    options["max_grad_norm"] = max_norm
    with compile_job(model, join_batches(batches), dump=lambda name, draft: drafts.append(draft), **options) as job:
        loop = Sequential(drafts[-1], "predict", ADAMW, DECAYING)
        counts = [count_targets(batch["labels"]) for batch in batches]
        counts = [sum(counts[m - m % accumulate :][:accumulate]) / accumulate for m in range(4)]
        counted = add_counts(drafts[-1], batches, counts)
        for _ in range(2):
            loss = torch.stack(loop.step(counted)).mean()
            assert torch.equal(job.step(join_batches(batches)), loss)
        trained = job.state_dict()
        text, said = job.code(0), explain(job.plan, drafts[-1].programs, drafts[-1].lane_hardware)
    assert loop.stages[0].optimizer is not None
    assert loop.stages[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 0.9 / accumulate))
    assert_trained(loop, trained)
    assert job.plan.decisions.staleness == {"stage0": 1, "stage1": 1 if max_norm else 0, "tie.shared.weight": 1}
    assert "asynchronous, staleness stage0 " in " ".join(text.split())
    assert ("each micro-batch has updates of its own" in said) == (accumulate == 1)


@pytest.mark.slow
def test_mixed_pipe_predicts_weights() -> None:
    """GPT-2 with tied weights, by the strategy's name, on two processes: losses and weights of the sequential loop."""
    model, _ = zoo()["gpt2"](dropout=0.1)
    batches = [zoo()["gpt2"](seed=seed)[1] for seed in range(4)]
    drafts: list[Draft] = []
    options = {"optimizer": ADAMW, "micro_batches": 4, "strategy": "ftpipe-async"}
    with compile_job(model, join_batches(batches), dump=lambda name, draft: drafts.append(draft), **options) as job:
        assert "rt.predict(" in job.code(0)
        loop = Sequential(drafts[-1], "predict", ADAMW)
        counts = [count_targets(batch["labels"][:, 1:]) for batch in batches]
        counted = add_counts(drafts[-1], batches, counts)
        for _ in range(2):
            assert torch.equal(job.step(join_batches(batches)), torch.stack(loop.step(counted)).mean())
        trained = job.state_dict()
    assert_trained(loop, trained)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["dram", "states", "all"])
def test_two_processes_train_with_stages_off_their_devices(tier: str, tmp_path: Path) -> None:
    """GPT-2 with tied weights, four stages on two devices, mini-batches of two micro-batches that are clipped."""
    model, _ = zoo()["gpt2"](dropout=0.1)
    batches = [zoo()["gpt2"](seed=seed)[1] for seed in range(4)]
    drafts: list[Draft] = []
    schedule = f"schedule-async{{accumulate=2, tier={tier}}}"
    job = penstock.compile(
        model,
        hardware=penstock.Hardware.cpu(num_devices=2, ssd="1GB", ssd_dir=tmp_path),
        example_inputs=join_batches(batches),
        seed=SEED,
        optimizer=ADAMW,
        micro_batches=4,
        max_grad_norm=0.5,
        strategy=f"coarsen, partition-balanced{{stages=4, asynchronous=true}}, map-round-robin, {schedule}",
        dump=lambda name, draft: drafts.append(draft),
    )
    with job:
        loop = Sequential(drafts[-1], "current", ADAMW, whole=True)
        counts = [count_targets(batch["labels"][:, 1:]) for batch in batches]
        counts = [sum(counts[m - m % 2 :][:2]) / 2 for m in range(4)]
        counted = add_counts(drafts[-1], batches, counts)
        for _ in range(2):
            assert torch.equal(job.step(join_batches(batches)), torch.stack(loop.step(counted)).mean())
        trained = job.state_dict()
    assert_trained(loop, trained)
    assert set(job.plan.decisions.optimizer.values()) == {"dram" if tier == "dram" else "ssd"}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_four_processes_train_in_two_lanes(shards: int) -> None:
    """Each mini-batch has a micro-batch of each lane; the sum over two processes is the same in either order."""
    model, _ = zoo()["gpt2"](dropout=0.1)
    batches = [zoo()["gpt2"](seed=seed)[1] for seed in range(8)]
    drafts: list[Draft] = []
    lanes = f"coarsen, mesh{{depth=2, shards={shards}}}, partition-balanced{{stages=2, asynchronous=true}}"
    job = penstock.compile(
        model,
        hardware=penstock.Hardware.cpu(num_devices=4),
        example_inputs=join_batches(batches),
        seed=SEED,
        optimizer=ADAMW,
        micro_batches=8,
        strategy=f"{lanes}, map-round-robin, schedule-async{{accumulate=2}}",
        dump=lambda name, draft: drafts.append(draft),
    )
    with job:
        loop = Sequential(drafts[-1], "current", ADAMW, whole=shards > 1)
        counts = [count_targets(batch["labels"][:, 1:]) for batch in batches]
        counts = [(counts[m % 4] + counts[m % 4 + 4]) / 2 for m in range(8)]
        counted = add_counts(drafts[-1], batches, counts)
        for _ in range(2):
            torch.testing.assert_close(job.step(join_batches(batches)), torch.stack(loop.step(counted)).mean())
        trained = job.state_dict()
    for stage in loop.stages:
        for name, value in stage.names.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.slow
def test_two_processes_skip_what_overflows() -> None:
    """In fp16 mini-batches whose gradients overflow on any device are skipped on both."""
    model, batches = LargeLoss(), [LargeLoss.batch(seed) for seed in range(8)]
    drafts: list[Draft] = []
    options = {"optimizer": ADAMW, "micro_batches": 8, "strategy": STRATEGIES["async"], "precision": "fp16"}
    with compile_job(model, join_batches(batches), dump=lambda name, draft: drafts.append(draft), **options) as job:
        loop = Sequential(drafts[-1], "current", ADAMW)
        for _ in range(3):
            assert torch.equal(job.step(join_batches(batches)), torch.stack(loop.step(batches)).mean())
        trained, last = job.state_dict(), job.last
    for stage in loop.stages:
        for name, value in stage.masters.items():
            assert torch.equal(trained[name], value), name
    assert last is not None and 1 < loop.overflows < 20
    assert last.loss_scale == loop.scales[-1] == loop.scales[0] / 2**loop.overflows


def test_it_comes_only_to_who_names_it() -> None:
    assert {name for name in STRATEGIES if not Candidate.parse(name, 2).is_synchronous} == {"async", "ftpipe-async"}
    assert "schedule-async" not in [schedule.name for schedule in schedules()]
    assert not Candidate.parse(PREDICTING, 2).is_synchronous


@pytest.mark.slow
def test_what_jobs_refuse() -> None:
    model, batch = zoo()["mlp"]()
    with pytest.raises(PlanError, match="their number is yours to choose"):
        compile_job(model, batch, strategy="async")
    with pytest.raises(PlanError, match=r"torch.optim:Adagrad has no rule .*torch.optim.AdamW"):
        compile_job(model, batch, strategy=PREDICTING, micro_batches=2, optimizer=torch.optim.Adagrad)
    with pytest.raises(PlanError, match=r"without momentum.* end with schedule-async{weights=current}"):
        compile_job(model, batch, strategy="ftpipe-async", micro_batches=2, optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(PassError, match=r"accumulate=3, but 2 micro-batches .*the nearest that works is accumulate=2"):
        compile_job(model, batch, strategy=STRATEGIES["async"] + "{accumulate=3}", micro_batches=2)


@pytest.mark.parametrize("after", ["insert-fetch{swap=true}", "insert-remat", "insert-optimizer"])
def test_no_pass_decides_behind_it(after: str) -> None:
    with pytest.raises(PassError, match=r'updates come between its turns.* such as "ftpipe" or "mobius"'):
        parse_pipeline(f"{STRATEGIES['async']}, {after}", 2)
    require_complete(parse_pipeline("ftpipe-async", 2))
