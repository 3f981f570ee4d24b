"""Options that a Job cannot honour are refused by name, before a step is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import default_data_collator

from penstock.errors import BatchError, PlanError
from penstock.integrations.transformers import PenstockTrainer
from penstock.integrations.transformers.features import INSTEAD, refuse_trainer, require_known_optimizer
from penstock.tests.integrations.transformers.runs import (
    TOLERANCE,
    VOCABULARY,
    arguments,
    both,
    causal,
    classifier,
    llama,
    make_case,
    padding,
    require_equal,
    row,
    tell_of,
)

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
        make_case(PenstockTrainer, model, rows, tmp_path, {"compute_loss_func": lambda *a, **k: 0})


def test_refuses_an_optimizer_of_ones_own(tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match="optimizers"):
        make_case(PenstockTrainer, model, rows, tmp_path, {"optimizers": (torch.optim.SGD(model.parameters()), None)})


def test_refuses_an_optimizer_that_wants_more_than_gradients():
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    with pytest.raises(PlanError, match=r"'galore_adamw_layerwise'.*adafactor"):
        require_known_optimizer(LayerWiseDummyOptimizer, "galore_adamw_layerwise")


@pytest.mark.parametrize("name", ["create_optimizer", "create_scheduler"])
def test_refuses_an_override(name, tmp_path):
    kind = type("Mine", (PenstockTrainer,), {name: lambda self, *given: None})
    with pytest.raises(PlanError, match=f"{name}.*optimizer_cls_and_kwargs"):
        make_case(kind, *causal(), tmp_path)


def test_refuses_a_maker_of_models(tmp_path):
    with pytest.raises(PlanError, match=r"model_init.*model=model_init\(\)"):
        make_case(PenstockTrainer, None, causal()[1], tmp_path, {"model_init": lambda: causal()[0]})


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_refuses_what_accelerate_launch_adds(name, tmp_path):
    trainer = make_case(PenstockTrainer, *causal(), tmp_path)
    setattr(trainer, f"is_{name}_enabled", True)
    with pytest.raises(PlanError, match=f"--use_{name}"):
        refuse_trainer(trainer)


def test_refuses_a_precision_of_accelerate_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(PlanError, match=r"--mixed_precision fp8.*bf16"):
        make_case(PenstockTrainer, *causal(), tmp_path)


def test_refuses_a_short_batch_that_cannot_be_filled(tmp_path):
    model, rows = classifier()
    rows = [{**each, "labels": torch.rand(3)} for each in rows]
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(PlanError, match=r"labels are no classes.*give it 28"):
        make_case(PenstockTrainer, model, rows[:30], tmp_path, max_steps=9).train()


class CountsAllRows(nn.Module):
    """A model with 2 classes whose loss takes any number as a class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1)

    def forward(self, input_ids, labels):
        logits = self.head(self.tokens(input_ids).mean(1)).squeeze(-1)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels.float()), "logits": logits}


def counted_rows():
    return CountsAllRows(), [{"input_ids": row(i)["input_ids"], "labels": torch.tensor(i % 2)} for i in range(32)]


def test_refuses_to_fill_up_for_a_loss_that_counts_all_rows(tmp_path):
    model, rows = counted_rows()
    with pytest.raises(PlanError, match="a mean over rows, whatever their labels; give it 28"):
        make_case(PenstockTrainer, model, rows[:30], tmp_path, max_steps=9).train()


def test_a_loss_that_counts_all_rows_is_evaluated_as_by_trainer(tmp_path):
    """7 rows, fewer than two steps have."""
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "eval_strategy": "steps"}
    ours, plain = both(counted_rows, tmp_path, **changes, eval_steps=2)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


def test_refuses_to_fill_up_a_stream_of_numbers(tmp_path):
    from datasets import Dataset

    model, rows = classifier()
    model.config.problem_type = "multi_label_classification"
    rows = [{"input_ids": each["input_ids"].tolist(), "labels": [0.0, 1.0, 0.0]} for each in rows[:30]]
    given = {"train_dataset": Dataset.from_list(rows).to_iterable_dataset(), "data_collator": default_data_collator}
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    with pytest.raises(BatchError, match=r"lacks 2 of the 4 rows.*labels are no classes"):
        make_case(PenstockTrainer, model, rows, tmp_path, given, max_steps=9, **whole).train()


def test_refuses_rows_longer_than_it_was_told(tmp_path):
    model, rows = llama()
    with pytest.raises(BatchError, match="max_length=14"):
        make_case(PenstockTrainer, model, rows[:4][::-1] + [rows[6]] * 28, tmp_path,
             {"data_collator": padding, "max_length": 11}).train()  # fmt: skip
