"""A plan's loss and gradients are those of one eager forward and backward over the whole batch."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.errors import BatchError, CaptureError, NonFiniteLoss, PlanError
from penstock.tests.compiler.loss.rules import (
    RULES,
    Loss,
    Tokens,
    class_weights,
    criterion,
    labels_written_in_place,
    likelihood,
    masked_mean,
    masked_mean_at_least_one,
    plain,
    plain_mean,
    ratio_of_means,
    rows,
    two_counts,
    weighted_rows,
)  # fmt: skip
from penstock.tests.compiler.loss.whole_batch import ROWS, Step, compile_job, eager_step, job_step, token_rows
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

TOLERANCE = 1e-5  # fp32: the same terms are added up in another order
EMPTY = (32, 4, 1, 0, 1, 1, 6, 10)  # the second of four micro-batches has no target once labels are shifted


@pytest.fixture(autouse=True)
def look_briefly_for_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)


def assert_whole(found: Step, wanted: Step) -> None:
    assert found.distance(wanted) <= TOLERANCE


SEEN = (class_weights, likelihood, criterion, masked_mean, ratio_of_means, labels_written_in_place)


@pytest.mark.parametrize("rule", slow_but(SEEN, RULES), ids=lambda rule: rule.__name__)
def test_every_rule_counts_over_the_whole_batch(rule: Any) -> None:
    model, batch = Loss(rule), rows()
    assert_whole(job_step(compile_job(model, batch, 1, "balanced", 4), batch), eager_step(model, batch))


@pytest.mark.parametrize("rule", slow_but((weighted_rows, masked_mean), RULES), ids=lambda rule: rule.__name__)
def test_every_rule_counts_over_micro_batches_of_one_row(rule: Any) -> None:
    model, batch = Loss(rule), rows()
    assert_whole(job_step(compile_job(model, batch, 1, "balanced", ROWS), batch), eager_step(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("devices,strategy", [(1, "balanced"), (2, "gpipe"), (2, "data-parallel"), (2, "mics")])
def test_every_rule_on_every_kind_of_plan(rule: Any, micro_batches: int, devices: int, strategy: str) -> None:
    if strategy in ("data-parallel", "mics") and micro_batches == 1:
        return  # every lane needs a micro-batch
    model, batch = Loss(rule), rows()
    found = job_step(compile_job(model, batch, devices, strategy, micro_batches), batch)
    assert_whole(found, eager_step(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_labels_of_uneven_rows(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)[0], token_rows()
    wanted = eager_step(model, batch)
    for devices, strategy, micro_batches in [(1, "balanced", 4), (1, "balanced", 8), (2, "data-parallel", 4)]:
        assert_whole(job_step(compile_job(model, batch, devices, strategy, micro_batches), batch), wanted)


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [(1, "balanced"), *(pytest.param(2, name, marks=pytest.mark.slow) for name in ("gpipe", "data-parallel"))],
)
def test_a_micro_batch_without_targets_adds_zero(devices: int, strategy: str) -> None:
    model, batch = Loss(two_counts), rows((6, 1, 0, 0, 5, 4, 2, 6))
    assert_whole(job_step(compile_job(model, batch, devices, strategy, 4), batch), eager_step(model, batch))


def test_a_batch_without_targets_is_nan_and_trains_nothing_as_in_eager() -> None:
    model, batch = Loss(plain), rows((0,) * ROWS)
    with compile_job(model, batch, 1, "balanced", 2) as job:
        assert math.isnan(job.step(batch))
        again = rows((6, 1, 0, 0, 5, 4, 2, 6))
        assert float(job.step(again)) == pytest.approx(float(eager_step(model, again).loss), rel=1e-5)
    assert math.isnan(eager_step(model, batch).loss)


def test_a_batch_without_targets_that_spoils_the_weights_is_told() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.linear(x).squeeze(-1) * mask).sum() / mask.sum()

    batch = {"x": torch.randn(4, 4), "mask": torch.zeros(4)}
    with compile_job(Masked(), batch, 1, "balanced", 2) as job, pytest.raises(NonFiniteLoss):
        job.step(batch)


class TakesCount(nn.Module):
    """Divides by what it is given, as transformers' causal models do; `power` makes it more than a divisor."""

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.tokens, self.power = Tokens(), power

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
        total = F.cross_entropy(self.tokens(x).flatten(0, 1), labels.flatten(), reduction="sum")
        count = num_items_in_batch if self.power == 1.0 else num_items_in_batch.float().pow(self.power) + 1.0
        return total / count


@pytest.mark.parametrize("power", slow_but([0.5], [1.0, 0.5]))
def test_a_model_that_takes_the_count_gets_that_of_the_whole_batch(power: float) -> None:
    model, batch = TakesCount(power), rows()
    count = (batch["labels"] != -100).sum()
    wanted = eager_step(model, batch, lambda m, b: m(**b, num_items_in_batch=count))
    for micro_batches in (1, 4):
        assert_whole(job_step(compile_job(model, batch, 1, "balanced", micro_batches), batch), wanted)


def test_a_count_in_the_batch_is_refused() -> None:
    batch = {**rows(), "num_items_in_batch": torch.ones(ROWS)}
    with pytest.raises(PlanError, match="leave it out"):
        compile_job(TakesCount(), batch, 1, "balanced", 2)


def test_a_count_of_nothing_known_is_refused() -> None:
    class Regression(TakesCount):
        def forward(self, x: Tensor, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:  # type: ignore[override]
            return self.tokens(x).square().sum() / num_items_in_batch

    batch = {name: value for name, value in rows().items() if name != "labels"}
    with pytest.raises(CaptureError, match="loss_weight"):
        compile_job(Regression(), batch, 1, "balanced", 2)


class Images(nn.Module):
    """Takes images, of which a batch has another number than of rows, and targets that are shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.eyes = Tokens(), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor, images: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = self.tokens(x) + self.eyes(images).sum()
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if num_items_in_batch is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("images", [ROWS + 1, 3])
def test_shifted_targets_of_a_batch_that_is_never_cut(images: int) -> None:
    batch = {**rows(), "images": torch.randn(images, 6)}
    del batch["mask"]
    torch.manual_seed(0)
    model = Images()
    wanted = eager_step(model, batch, lambda m, b: m(**b))
    assert_whole(job_step(compile_job(model, batch, 2, "balanced", 1, check=False), batch), wanted)


def test_targets_that_cannot_be_counted_are_refused() -> None:
    class Chosen(TakesCount):
        def forward(self, x: Tensor, labels: Tensor, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
            logits = self.tokens(x)
            targets = torch.where(logits.amax(-1) > 0, labels, -100)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_items_in_batch

    with pytest.raises(CaptureError, match="cannot be counted"):
        compile_job(Chosen(), rows(), 1, "balanced", 2)


def rows_that_count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["mask"].sum(1) > 2).sum()


def of_long_rows(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    long = (mask.sum(1) > 2).float()
    return (logits.square().mean((1, 2)) * long).sum() / long.sum()


@pytest.mark.parametrize(
    ("devices", "strategy"), [(1, "balanced"), pytest.param(2, "data-parallel", marks=pytest.mark.slow)]
)
def test_a_users_own_weights(devices: int, strategy: str) -> None:
    """Each micro-batch counts by the rows that are long; one without any is NaN by itself and adds exactly zero."""
    model, batch = Loss(of_long_rows), rows((6, 1, 1, 2, 5, 4, 2, 6))
    parts = [{name: value[2 * m : 2 * m + 2] for name, value in batch.items()} for m in range(4)]
    weights = [float(rows_that_count(part)) for part in parts]
    assert 0.0 in weights and math.isnan(eager_step(model, parts[weights.index(0.0)]).loss)
    steps = [(weight / sum(weights), eager_step(model, part)) for weight, part in zip(weights, parts) if weight]
    names = steps[0][1].gradients
    wanted = Step(
        sum(share * step.loss for share, step in steps),
        {name: torch.stack([share * step.gradients[name] for share, step in steps]).sum(0) for name in names},
    )
    job = compile_job(model, batch, devices, strategy, 4, loss_weight=rows_that_count)
    assert "loss_weight" in reasons_of(job)
    assert_whole(job_step(job, batch), wanted)


def test_a_users_weight_must_be_a_count() -> None:
    wrong = {r"loss_weight gave -1\.0": lambda batch: -1, "loss_weight failed: KeyError": lambda batch: batch["length"]}
    for said, weight in wrong.items():
        job = compile_job(Loss(plain), rows(), 1, "balanced", 2, loss_weight=weight)
        with job, pytest.raises(BatchError, match=said):
            job.step(rows())


@pytest.mark.slow
def test_a_folder_counts_as_the_job_that_wrote_it(tmp_path: Path) -> None:
    for rule in (class_weights, masked_mean_at_least_one):
        model, batch = Loss(rule), rows((6, 1, 0, 0, 5, 4, 2, 6))
        job = compile_job(model, batch, 2, "gpipe", 4)
        explained = reasons_of(job)
        job.write(tmp_path)
        loaded = penstock.load(tmp_path, model)
        assert explained.split("\n\n")[1] == reasons_of(loaded).split("\n\n")[1]
        assert_whole(job_step(loaded, batch), eager_step(Loss(rule), batch))
    compile_job(Loss(plain_mean), rows(), 2, "gpipe", 4).write(tmp_path)
    assert not (tmp_path / "counts.py").exists()


def test_a_folder_with_a_users_weights_asks_for_them(tmp_path: Path) -> None:
    compile_job(Loss(plain), rows(), 1, "balanced", 4, loss_weight=rows_that_count).write(tmp_path)
    with pytest.raises(PlanError, match=r"pass the same to penstock\.load"):
        penstock.load(tmp_path, Loss(plain))
    penstock.load(tmp_path, Loss(plain), loss_weight=rows_that_count)


def test_explain_says_which_rule_holds() -> None:
    said = reasons_of(compile_job(Loss(two_counts), rows(), 1, "balanced", 2))
    assert "divided by the number of targets other than -100" in said
    assert "each micro-batch counts alike" in said


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_asynchronous_mini_batches_have_means_of_their_own(accumulate: int) -> None:
    """Of one micro-batch, or of two, one of which counts more than the other, or nothing."""
    model, batch, size = Loss(plain), rows((6, 1, 0, 0, 5, 4, 2, 6)), 2 * accumulate
    parts = [{name: value[m : m + size] for name, value in batch.items()} for m in range(0, 8, size)]
    eager = [eager_step(model, part).loss for part in parts]
    standing = partial(torch.optim.SGD, lr=1e-12)  # all mini-batches see the same weights
    strategy = STRATEGIES["async"] + f"{{accumulate={accumulate}}}"
    with compile_job(model, batch, 2, strategy, 4, optimizer=standing) as job:
        loss = float(job.step(batch))
        evaluated = float(job.evaluate(batch)["loss"])
    assert loss == pytest.approx(sum(value for value in eager if not math.isnan(value)) / len(eager), rel=TOLERANCE)
    assert evaluated == pytest.approx(eager_step(model, batch).loss, rel=TOLERANCE)


@pytest.mark.parametrize("precision", slow_but(["fp16"], ["bf16", "fp16"]))
def test_low_precision_sums_do_not_overflow(precision: str) -> None:
    """The logits' own dtype is half: a sum of 48 losses near 2000 is beyond fp16, its mean is not."""

    def in_half(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy((logits * 3000).flatten(0, 1).half().log_softmax(-1), labels.flatten()).float()

    def in_full(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy((logits * 3000).flatten(0, 1), labels.flatten())

    batch = rows()
    with compile_job(Loss(in_half), batch, 1, "balanced", 2, precision=precision) as job:
        loss = float(job.step(batch))
    assert loss == pytest.approx(eager_step(Loss(in_full), batch).loss, rel=3e-2)
