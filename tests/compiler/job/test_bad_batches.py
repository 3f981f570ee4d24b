"""A batch that eager would refuse, or that makes the loss NaN: the step raises, and it is as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.job.step_inputs import StepInputs
from penstock.ir.errors import BatchError, NonFiniteLoss, WorkerError
from penstock.ir.program import aligned, persistent_bytes
from penstock.runtime.processes.driver import DifferentCalls
from penstock.tests.compiler.job.agents import agents

SLOW = pytest.mark.slow
RANKS = Path(__file__).with_name("bad_batches_of_ranks.py")
ROWS, WORDS, WIDTH = 8, 50, 16
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """Buffers that forward changes, dropout, a table, a loss of classes and a check of the model's own. With `hidden`
    the numbers depend on floats, so that they are not known before the step. Lanes refuse `buffers`. With `attends` its
    tokens may be divided, so that it has attention and no dropout."""

    def __init__(self, hidden: bool = False, buffers: bool = True, attends: bool = False):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.drop, self.hidden, self.buffers_change = nn.Dropout(0.1 * (not attends)), hidden, buffers
        self.attends = attends
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        if self.buffers_change:
            self.calls += 1
        if self.hidden:
            zero = (x[:, :1] * 0).nan_to_num().long()
            ids, labels = ids + zero, labels + zero
        y = self.table(ids) + x[:, None]
        if self.attends:
            h = y.unflatten(-1, (2, -1)).transpose(1, 2)
            y = y + F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)
        for layer in self.layers:
            y = y + self.drop(layer(y).relu())
        torch._assert_async(x[0, 0] < 1e6)
        return F.cross_entropy(self.head(self.norm(y.flatten(0, 1))), labels.flatten())


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (ROWS, 8), generator=generator) for _ in range(2))
    return {"ids": ids, "x": torch.randn(ROWS, WIDTH, generator=generator), "labels": labels}


def bad_batch(kind: str, seed: int = 0) -> dict[str, Tensor]:
    batch, row = batch_of(1000 + seed), random.Random(seed).randrange(ROWS)
    if kind == "id":
        batch["ids"][row, 2] = WORDS + 27
    elif kind == "negative id":
        batch["ids"][row, 0] = -1
    elif kind == "label":
        batch["labels"][row, 1] = WORDS
    elif kind == "check":
        batch["x"][0, 0] = 1e7
    elif kind == "dtype":
        batch["x"] = batch["x"].double()
    else:
        batch["x"][row, 3] = float(kind)
    return batch


KINDS = ("id", "negative id", "label", "nan", "inf", "check", "dtype")


def job_of(
    num_devices: int = 1,
    hidden: bool = False,
    memory: str = "64MB",
    buffers: bool = True,
    hosts: int = 1,
    attends: bool = False,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    options = {"optimizer": ADAMW, "strategy": "balanced", "micro_batches": 2, **options}
    hardware = penstock.Hardware.cpu(num_devices, memory=memory, hosts=hosts)
    return penstock.compile(Net(hidden, buffers, attends).train(), hardware, example_inputs=batch_of(0), **options)


def results(
    job: Any, kinds: Sequence[str], steps: int, said: list[str] | None = None
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of good steps, each after its share of the bad `kinds`, the loss of an evaluation, and all that was
    trained. `said` gets the errors."""
    said = [] if said is None else said
    losses, each = [], len(kinds) // steps
    with job:
        for step in range(steps):
            for i, kind in enumerate(kinds[step * each : (step + 1) * each]):
                with pytest.raises((BatchError, NonFiniteLoss)) as error:
                    job.step(bad_batch(kind, step * each + i))
                said.append(str(error.value))
            assert job.step_count == step
            losses.append(float(job.step(batch_of(step))))
        return losses, float(job.evaluate(batch_of(99))["loss"]), job.state_dict()


def require_equal(first: Any, second: Any) -> None:
    assert first[:2] == second[:2]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.parametrize(
    ("num_devices", "hidden"),
    [(1, False), (1, True), pytest.param(2, True, marks=[pytest.mark.multi, pytest.mark.slow])],
)
def test_bad_batches_leave_no_trace(num_devices: int, hidden: bool) -> None:
    """The first step is among them, and a batch's numbers are known before the step, or not."""
    without = results(job_of(num_devices, hidden), [], 3)
    require_equal(results(job_of(num_devices, hidden), [*KINDS, *KINDS, *KINDS], 3), without)


EARLY = "coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline, insert-remat, "
EARLY += "insert-fetch{swap=true}, overlap-optimizer{clip=speculative}"
ONE_STAGE = "coarsen, mesh, partition-balanced{stages=1}, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, "
ONE_STAGE += "insert-optimizer"
APART: dict[str, Any] = {"num_devices": 2, "buffers": False, "attends": True}
WAYS: dict[str, dict[str, Any]] = {
    "swapped": {"memory": "100kB", "strategy": "mobius", "micro_batches": 4},
    "clipped": {"max_grad_norm": 0.01},
    "lanes": {"num_devices": 2, "strategy": "data-parallel", "buffers": False},
    "shards": {"num_devices": 2, "strategy": "zero3-offload", "buffers": False},
    "zero bubble": {"num_devices": 2, "strategy": "zero-bubble"},
    "early": {"max_grad_norm": 0.1, "strategy": EARLY, "memory": "90kB", "micro_batches": 4},
    "width": {**APART, "strategy": f"drop-masks, split-width{{team=2}}, {ONE_STAGE}"},
    "heads": {**APART, "strategy": f"drop-masks, chunk-loss, split-context{{by=heads, team=2}}, {ONE_STAGE}"},
    "ring": {**APART, "strategy": f"drop-masks, chunk-loss, split-context{{by=ring, team=2}}, {ONE_STAGE}"},
    "low bits": {"precision": "bf16-true", "buffers": False},
}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("way", WAYS)
def test_bad_batches_leave_no_trace_in_any_way_to_run(way: str) -> None:
    without = results(job_of(hidden=True, **WAYS[way]), [], 3)
    require_equal(results(job_of(hidden=True, **WAYS[way]), [*KINDS, *KINDS, *KINDS], 3), without)


@pytest.mark.slow
@pytest.mark.multi
def test_an_asynchronous_job_finds_numbers_before_and_says_what_it_cannot_undo() -> None:
    options: dict[str, Any] = {"strategy": "async", "buffers": False}
    with job_of(2, **options) as job:
        for kind in ("id", "label", "dtype"):
            with pytest.raises(BatchError):
                job.step(bad_batch(kind))
            job.step(batch_of(0))
        with pytest.raises(NonFiniteLoss, match="the weights have taken that step"):
            job.step(bad_batch("nan"))
    with job_of(2, hidden=True, **options) as job:
        with pytest.raises(WorkerError, match="index out of range"):
            job.step(bad_batch("id"))
        with pytest.raises(WorkerError, match=r"may hold half a step[\s\S]*job\.resume\(directory\)"):
            job.step(batch_of(0))


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("way", "hosts"), [("gpipe", 1), pytest.param("gpipe", 2, marks=SLOW), pytest.param("data-parallel", 1, marks=SLOW)]
)
def test_all_ranks_of_torchrun_leave_a_bad_batch_out_together(way: str, hosts: int, tmp_path: Path) -> None:
    """Ranks of several hosts tell each other through the store."""
    words = [str(tmp_path), way, str(hosts)]
    with agents(tmp_path, *words, nodes=hosts, per_node=2 // hosts, script=RANKS) as running:
        assert set(running.wait(200)) == {0}, running.output()
        said = running.results()
    assert said[0] == said[1] and len(said[0]["errors"]) == 2 * len(KINDS)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("num_devices", [1, 2])
def test_two_hundred_bad_batches_each_before_a_good_one(num_devices: int) -> None:
    kinds = [KINDS[i % len(KINDS)] for i in range(200)]
    without = results(job_of(num_devices, hidden=True), [], 200)
    require_equal(results(job_of(num_devices, hidden=True), kinds, 200), without)


def test_an_error_names_input_row_value_and_bounds() -> None:
    batch = batch_of(1)
    batch["ids"][6, 3] = 77
    with job_of() as job:
        for call in (job.step, job.evaluate):
            with pytest.raises(BatchError, match=r"batch\['ids'\] has 77 in row 6: the 50 rows of table .*are 0 to 49"):
                call(batch)
        batch = batch_of(1)
        batch["labels"][5, 0] = -3
        with pytest.raises(BatchError, match=r"batch\['labels'\] has -3 in row 5: .*0 to 49, and -100 is left out"):
            job.step(batch)
        batch["labels"][5, 0] = -100
        job.step(batch)
        batch["x"][4, 2] = float("nan")
        place = r"nan in step 2 \(batch\['x'\] holds nan in row 4\).*stop_on_nan=False"
        with pytest.raises(NonFiniteLoss, match=place):
            job.step(batch)
    with job_of(hidden=True) as job:
        batch["ids"][1, 3] = 77
        for call in (job.step, job.evaluate):
            with pytest.raises(BatchError, match=r"micro-batch 0.*index out of range[\s\S]*self\.table.*\n.*left out"):
                call(batch)


def test_a_batch_that_is_left_out_counts_in_the_sampler() -> None:
    with job_of() as job:
        sampler = job.sampler(range(10 * ROWS))
        job.step(batch_of(0))
        for kind in ("id", "nan"):  # found before the step, and after it
            with pytest.raises((BatchError, NonFiniteLoss)):
                job.step(bad_batch(kind))
        assert sampler.position == 3 * ROWS


def test_calls_that_differ_leave_no_batch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_call(self: StepInputs, function: str, batch: Any, call: str = "") -> None:
        raise DifferentCalls("`step` on rank 0, `save` on rank 1")

    monkeypatch.setattr(StepInputs, "for_call", for_call)
    with job_of() as job:
        sampler = job.sampler(range(10 * ROWS))
        with pytest.raises(DifferentCalls):
            job.step(batch_of(0))
        assert sampler.position == 0


class Averages(nn.Module):
    """An average that all rows influence, and a count that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(700))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.calls += 1
        return (y - self.average).square().mean() + 0 * self.calls.sum()


def test_the_plan_counts_the_copies_of_buffers_that_a_step_holds() -> None:
    batch, hardware = {"x": torch.randn(ROWS, WIDTH)}, penstock.Hardware.cpu(1, memory="64MB")
    options: dict[str, Any] = {"optimizer": ADAMW, "strategy": "balanced", "micro_batches": 2}
    with penstock.compile(Averages(), hardware, example_inputs=batch, **options) as job:
        for _ in range(3):
            job.step(batch)
        state = job.driver.session.state
        (store,) = state.stores.values()
        _, copies = store.runner._noted
        held_bytes = sum(aligned(copy.nbytes) for copy in copies.values())
        assert held_bytes == sum(aligned(buffer.nbytes) for buffer in store.runner.buffers().values()) > 4 * 700
        assert persistent_bytes(job.programs[0]).device["undo"] == held_bytes
        assert state.memory.accounts["device"].live["all steps' undo"] == held_bytes
