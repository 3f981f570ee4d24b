"""A run by `PenstockTrainer` is that of `Trainer`: losses and weights, also when resumed. fp32 on one device and one
thread sums micro-batches in another order, hence 1e-5."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from penstock.errors import PlanError
from penstock.integrations.transformers import PenstockTrainer
from penstock.ir.machine.hardware import Hardware

TOLERANCE = 1e-5


def causal():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), [row(i) for i in range(32)]


def row(number):
    """Twelve tokens, of which the first have no label: how many differs from row to row."""
    tokens = torch.randint(1, 61, (12,), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[: 1 + number % 7] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def classifier():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config), [{**row(i), "labels": torch.tensor(i % 3)} for i in range(32)]


def arguments(folder, **changes):
    known = dict(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5,
        learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return TrainingArguments(**{**known, **changes})


def trained(kind, made, folder, resume=None, **changes):
    model, rows = made()
    more = {} if kind is Trainer else {"hardware": Hardware.from_any("auto")}
    trainer = kind(model=model, args=arguments(folder, **changes), train_dataset=rows, eval_dataset=rows[:8], **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told(trainer, name):
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])


def require_equal(ours, plain):
    for name in ("loss", "learning_rate", "grad_norm"):
        assert len(told(plain, name)) == 5
        torch.testing.assert_close(told(ours, name), told(plain, name), rtol=2e-4, atol=TOLERANCE)
    for (name, a), b in zip(ours.model.named_parameters(), plain.model.parameters()):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_same_run_of_a_causal_model(tmp_path):
    require_equal(trained(PenstockTrainer, causal, tmp_path / "a"), trained(Trainer, causal, tmp_path / "b"))


@pytest.mark.slow
def test_same_run_of_a_classifier(tmp_path):
    """Without accumulation: with it, Trainer adds up the means of a classifier's micro-batches, a Job averages them."""
    alike = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    ours = trained(PenstockTrainer, classifier, tmp_path / "a", **alike)
    require_equal(ours, trained(Trainer, classifier, tmp_path / "b", **alike))


@pytest.mark.slow
def test_resumes_in_the_middle(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    trained(PenstockTrainer, causal, tmp_path / "a", **saving)
    again = trained(PenstockTrainer, causal, tmp_path / "a", str(tmp_path / "a" / "checkpoint-3"), **saving)
    require_equal(again, trained(Trainer, causal, tmp_path / "b"))


def test_evaluates_the_trained_weights(tmp_path):
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    ours = trained(PenstockTrainer, causal, tmp_path / "a", **evaluating)
    plain = trained(Trainer, causal, tmp_path / "b", **evaluating)
    assert len(told(plain, "eval_loss")) == 3
    torch.testing.assert_close(told(ours, "eval_loss"), told(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "option",
    [
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"torch_empty_cache_steps": 2},
        {"gradient_checkpointing": True},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
        {"train_sampling_strategy": "group_by_length"},
    ],
)
def test_refuses_by_name(option, tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match=next(iter(option))):
        PenstockTrainer(model=model, args=arguments(tmp_path, **option), train_dataset=rows, eval_dataset=rows)


def test_refuses_a_loss_of_ones_own(tmp_path):
    model, rows = causal()
    with pytest.raises(PlanError, match="compute_loss_func"):
        PenstockTrainer(model=model, args=arguments(tmp_path), train_dataset=rows, compute_loss_func=lambda *a, **k: 0)


def test_refuses_a_last_batch_that_is_short(tmp_path):
    model, rows = causal()
    trainer = PenstockTrainer(model=model, args=arguments(tmp_path, max_steps=9), train_dataset=rows[:30])
    with pytest.raises(PlanError, match="give it 28"):
        trainer.train()
