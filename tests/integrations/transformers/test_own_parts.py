"""Losses, optimizers and schedules of the script's own train as by `Trainer`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers import Trainer, get_linear_schedule_with_warmup

from penstock.integrations.transformers import PenstockTrainer
from penstock.tests.integrations.transformers.runs import (
    TOLERANCE,
    both,
    causal,
    classifier,
    llama,
    make_case,
    padding,
    require_equal,
    tell_of,
)
from penstock.tests.shown_elsewhere import slow_but

WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}


def weigh(outputs, labels, num_items_in_batch=None):
    """A loss of the script: a cross entropy that counts one token thrice."""
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    found = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return (found * (1 + 2 * (labels == 7))).sum() / num_items_in_batch


def test_a_loss_function(tmp_path):
    """Over 2 x 2 rows, of several numbers of labels; also its evaluation."""
    ours, plain = both(causal, tmp_path, {"compute_loss_func": weigh}, eval_strategy="steps", eval_steps=2)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)


def all_labels():
    model, rows = causal()
    return model, [{**each, "labels": each["input_ids"].clone()} for each in rows]


@pytest.mark.slow
def test_the_count_of_labels_is_that_of_trainer(tmp_path):
    """`Trainer` counts the first label of each row of GPT-2, too."""
    ours, plain = both(all_labels, tmp_path, eval_strategy="steps", eval_steps=2)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)


def focal(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
    loss = loss + 0.01 * outputs.logits.square().mean()
    return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_compute_loss_of_a_subclass(tmp_path):
    kinds = [type(kind.__name__, (kind,), {"compute_loss": focal}) for kind in (PenstockTrainer, Trainer)]
    ours, plain = (make_case(kind, *classifier(), tmp_path / kind.__name__, **WHOLE) for kind in kinds)
    for trainer in (ours, plain):
        trainer.train()
    require_equal(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("make", [causal, classifier])
def test_label_smoothing(make, tmp_path):
    changes = WHOLE if make is classifier else {}
    require_equal(*both(make, tmp_path, label_smoothing_factor=0.2, **changes))


def own_optimizer(model, kind=torch.optim.AdamW, **options):
    """Two groups with rates of their own, and parameters that are in none."""
    weights = [p for n, p in model.named_parameters() if p.dim() > 1 and "wte" not in n]
    biases = [p for n, p in model.named_parameters() if p.dim() == 1]
    return kind([{"params": weights, "lr": 3e-3}, {"params": biases, "weight_decay": 0.0}], lr=1e-3, **options)


def pair(model, has_schedule=True):
    optimizer = own_optimizer(model, betas=(0.8, 0.95))
    return optimizer, get_linear_schedule_with_warmup(optimizer, 2, 6) if has_schedule else None


def run_pair(kind, folder, has_schedule):
    model, rows = causal()
    trainer = make_case(kind, model, rows, folder, {"optimizers": pair(model, has_schedule)})
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("has_schedule", [True, False])
def test_optimizers_that_are_given(has_schedule, tmp_path):
    require_equal(*(run_pair(kind, tmp_path / kind.__name__, has_schedule) for kind in (PenstockTrainer, Trainer)))


def create_optimizer(self, model=None):
    self.optimizer = own_optimizer(self.model, torch.optim.SGD, momentum=0.9)
    return self.optimizer


def create_scheduler(self, num_training_steps, optimizer=None):
    self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, [3e-3, 1e-2], num_training_steps)
    return self.lr_scheduler


@pytest.mark.slow
def test_an_optimizer_and_a_schedule_that_a_subclass_creates(tmp_path):
    """OneCycleLR sets rates and momentum."""
    own = {"create_optimizer": create_optimizer, "create_scheduler": create_scheduler}
    kinds = [type(kind.__name__, (kind,), own) for kind in (PenstockTrainer, Trainer)]
    ours, plain = (make_case(kind, *causal(), tmp_path / kind.__name__) for kind in kinds)
    for trainer in (ours, plain):
        trainer.train()
    require_equal(ours, plain)


@pytest.mark.slow
def test_a_schedule_that_follows_evaluations(tmp_path):
    changes = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5}}
    both_ran = both(causal, tmp_path, eval_strategy="steps", eval_steps=1, **changes)
    require_equal(*both_ran)
    assert tell_of(both_ran[0], "learning_rate").unique().numel() > 1


def many_labels():
    model, rows = classifier()
    model.config.problem_type = "multi_label_classification"
    draw = torch.Generator().manual_seed(0)
    return model, [{**each, "labels": torch.rand(3, generator=draw).round()} for each in rows[:30]]


class Norms(nn.Module):
    """A regression through BatchNorm, which mixes the rows of a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x, labels):
        found = self.head(self.norm(self.inner(x)).relu()).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def norm_rows():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 7, generator=draw)
    return Norms(), [{"x": row[:6], "labels": row[6]} for row in rows]


@pytest.mark.parametrize("make", slow_but([norm_rows], [many_labels, norm_rows]))
def test_a_short_last_batch_of_any_label(make, tmp_path):
    """30 rows: seven steps of 4, and one of 2; an evaluation of 7 rows."""
    options = {"compile_options": {"strategy": "mobius", "micro_batches": 1 if make is norm_rows else 2}}
    changes = {**WHOLE, "max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"}
    ours, plain = make_case(PenstockTrainer, *make(), tmp_path / "a", options, **changes), None
    plain = make_case(Trainer, *make(), tmp_path / "b", **changes)
    for trainer in (ours, plain):
        trainer.train()
    assert len(tell_of(ours, "loss")) == 16
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)


@pytest.mark.slow
def test_rows_grouped_by_length_and_an_evaluation_before(tmp_path):
    changes = {"train_sampling_strategy": "group_by_length", "eval_strategy": "steps", "eval_steps": 3}
    ours, plain = both(partial(llama), tmp_path, {"data_collator": padding}, eval_on_start=True, **changes)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)
