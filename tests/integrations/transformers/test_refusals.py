"""What a Job cannot honour is refused by its name, before a step is made."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import BatchError, PlanError
from penstock.integrations.transformers import PenstockTrainer
from penstock.integrations.transformers.refusals import INSTEAD
from penstock.tests.integrations.transformers.runs import arguments, causal, classifier, llama, made, padding

VALUES = {
    "torch_empty_cache_steps": 2,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "train_sampling_strategy": "group_by_length",
}
NEED_MORE = ("fsdp", "deepspeed", "parallelism_config", "optim_target_modules")  # objects, or a start of their own


@pytest.mark.parametrize("name", [*(name for name in INSTEAD if name not in NEED_MORE), *list(VALUES)[-2:]])
def test_refuses_by_name(name, tmp_path):
    model, rows = causal()
    given = arguments(tmp_path, eval_strategy="steps")
    setattr(given, name, VALUES.get(name, True))
    with pytest.raises(PlanError, match=name):
        PenstockTrainer(model=model, args=given, train_dataset=rows, eval_dataset=rows)


def test_refuses_a_loss_of_ones_own(tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match="compute_loss_func"):
        made(PenstockTrainer, model, rows, tmp_path, {"compute_loss_func": lambda *a, **k: 0})


def test_refuses_an_optimizer_of_ones_own(tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match="optimizers"):
        made(PenstockTrainer, model, rows, tmp_path, {"optimizers": (torch.optim.SGD(model.parameters()), None)})


def test_refuses_an_optimizer_of_another_library(tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match="adafactor"):
        made(PenstockTrainer, model, rows, tmp_path, optim="adafactor").train()


def test_refuses_a_short_batch_that_cannot_be_filled(tmp_path):
    model, rows = classifier()
    rows = [{**each, "labels": torch.rand(3)} for each in rows]
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(PlanError, match=r"labels are no classes.*give it 28"):
        made(PenstockTrainer, model, rows[:30], tmp_path, max_steps=9).train()


def test_refuses_rows_longer_than_it_was_told(tmp_path):
    model, rows = llama()
    with pytest.raises(BatchError, match="max_length=14"):
        made(PenstockTrainer, model, rows[:4][::-1] + [rows[6]] * 28, tmp_path,
             {"data_collator": padding, "max_length": 11}).train()  # fmt: skip
