"""Callbacks and methods of a Trainer have the effect that they have there, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import penstock
from penstock.errors import PlanError
from penstock.integrations.transformers import PenstockTrainer

TOLERANCE = 1e-6  # of weights of about 0.02; what a callback does moves them by 1e-3 at least
EMPTY = (4, 5, 6, 7)  # rows without a target: a whole batch of every order, as the order is kept


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=32
    )
    return transformers.LlamaForCausalLM(config)


def rows(empty: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    found = []
    for row in range(24):
        ids = torch.randint(32, (8,))
        found.append({"input_ids": ids, "labels": torch.full_like(ids, -100) if row in empty else ids})
    return found


def train(kind: Any, path: Path, callbacks: Any = (), data: Any = None, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, logging_steps=1,
        report_to=[], use_cpu=True, lr_scheduler_type="cosine", learning_rate=0.5, weight_decay=0.1, optim="sgd",
        disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = kind(model(), arguments, train_dataset=data or rows(), callbacks=list(callbacks), **options)
    trainer.train()
    return trainer


def compare(one: Any, other: Any) -> None:
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    for (name, value), wanted in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=TOLERANCE, msg=name)


HARDWARE = {
    "hardware": penstock.Hardware.cpu(num_devices=1), "compile_options": {"strategy": "balanced", "micro_batches": 2}
}  # fmt: skip


class Changes(TrainerCallback):
    """Sets a rate and a decay, clamps weights, and notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            kwargs["optimizer"].param_groups[0]["lr"] = 0.9

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(float(kwargs["model"].lm_head.weight.detach().norm()))
        if state.global_step == 2:
            with torch.no_grad():
                for param in kwargs["model"].parameters():
                    param.clamp_(-0.02, 0.02)
        if state.global_step == 3:
            for group in kwargs["optimizer"].param_groups:
                group["weight_decay"] = 0.5
        if state.global_step == 4:
            kwargs["lr_scheduler"].base_lrs = [0.1] * len(kwargs["lr_scheduler"].base_lrs)


def test_callbacks_see_and_set_what_they_do_in_a_trainer(tmp_path: Path) -> None:
    own, plain = Changes(), Changes()
    compare(train(PenstockTrainer, tmp_path, [own], **HARDWARE), train(Trainer, tmp_path, [plain]))
    assert own.seen == pytest.approx(plain.seen, rel=1e-5)


@pytest.mark.slow
def test_batches_without_any_target_go_on_as_in_a_trainer(tmp_path: Path) -> None:
    data = rows(EMPTY + (1, 2))
    compare(train(PenstockTrainer, tmp_path, data=data, **HARDWARE), train(Trainer, tmp_path, data=data))


class Doubles(PenstockTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return double(super()._prepare_inputs(inputs))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return super().training_step(model, inputs, num_items_in_batch)


class DoublesInTrainer(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return double(super()._prepare_inputs(inputs))


def double(inputs: Any) -> Any:
    return {name: (value * 2) % 32 for name, value in inputs.items()}


@pytest.mark.slow
def test_own_inputs_are_those_of_the_job(tmp_path: Path) -> None:
    own = train(Doubles, tmp_path, **HARDWARE)
    compare(own, train(DoublesInTrainer, tmp_path))
    assert own.count == 12


class Steps(PenstockTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


class Counts(PenstockTrainer):
    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        return 7


class Clips(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for param in model.parameters():
            param.grad.clamp_(-1, 1)


class Times(TrainerCallback):
    """Reads nothing of the model, and so may be called anywhere."""

    def __init__(self) -> None:
        self.calls = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    "kind, callbacks, told",
    [
        (Steps, [], r"Steps\.training_step makes no step of the Job; use: super\(\)\.training_step"),
        (Counts, [], r"Counts\._get_num_items_in_batch would not be called"),
        (PenstockTrainer, [Clips()], r"Clips\.on_pre_optimizer_step .* max_grad_norm or gradient hooks"),
    ],
)
def test_what_no_step_would_do_is_refused_at_construction(tmp_path: Path, kind: Any, callbacks: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        kind(model(), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), callbacks=callbacks, **HARDWARE)


@pytest.mark.slow
def test_a_callback_that_reads_nothing_is_called(tmp_path: Path) -> None:
    callback = Times()
    train(PenstockTrainer, tmp_path, [callback], **HARDWARE)
    assert callback.calls == 6
