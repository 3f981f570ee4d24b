"""Evaluations while training go through the job, and are those of `Trainer`."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, EarlyStoppingCallback, Seq2SeqTrainer, Trainer

from penstock.integrations.transformers import PenstockSeq2SeqTrainer, PenstockTrainer
from penstock.integrations.transformers.batches import BatchForm, longest_rows
from penstock.integrations.transformers.evaluation import shifts_labels
from penstock.tests.integrations.transformers.runs import (
    TOLERANCE,
    both,
    causal,
    classifier,
    llama,
    padding,
    require_equal,
    seq2seq,
    tell_of,
    train_steps,
    vision,
)

EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()), "rows": len(found.label_ids)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [causal, llama, seq2seq])
@pytest.mark.parametrize(
    "rows", [2, 8], ids=["smaller batches", "larger batches"]
)
def test_same_losses(make, rows, tmp_path):
    """7 rows, in batches with fewer or more rows than a step has, of which the last is short."""
    changes = {**EVALUATING, "per_device_eval_batch_size": rows, "max_steps": 4}
    changes |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    ours, plain = both(make, tmp_path, {"data_collator": padding}, **changes)
    assert len(tell_of(plain, "eval_loss")) == 2
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_same_metrics_and_best_model(tmp_path):
    alike = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6}
    keeping = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "learning_rate": 3e-2}
    given = {"compute_metrics": accuracy, "callbacks": [EarlyStoppingCallback(3)]}
    ours, plain = both(classifier, tmp_path, given, **alike, **keeping, **EVALUATING)
    for name in ("eval_accuracy", "eval_rows", "eval_loss"):
        torch.testing.assert_close(tell_of(ours, name), tell_of(plain, name), rtol=1e-3, atol=TOLERANCE)
    assert ours.state.best_global_step == plain.state.best_global_step
    require_equal(ours, plain, tolerance=1e-4)  # at this learning rate a step of AdamW moves weights by 3e-2


@pytest.mark.slow
def test_same_run_of_labels_that_are_one_number_per_class(tmp_path):
    """Rows of 8 to 14 tokens, with 3 labels each, in lists."""

    def many_classes():
        model, _ = classifier()
        model.config.problem_type = "multi_label_classification"
        ids = [each["input_ids"].tolist() for each in llama()[1]]
        return model, [{"input_ids": i, "attention_mask": [1] * len(i), "labels": [0.0, 1.0, 0.5]} for i in ids[:28]]

    def collate(rows):
        plain = [{name: torch.tensor(row[name]) for name in ("input_ids", "attention_mask")} for row in rows]
        return {**padding(plain), "labels": torch.tensor([row["labels"] for row in rows])}

    alike = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    ours, plain = both(many_classes, tmp_path, {"data_collator": collate}, **alike, **EVALUATING)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_predictions_after_training(tmp_path):
    ours, plain = both(classifier, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    found, expected = ours.predict(ours.eval_dataset), plain.predict(plain.eval_dataset)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.slow
def test_labels_that_always_count_are_evaluated_by_the_model(tmp_path, caplog):
    def regression():
        model, rows = classifier()
        model.config.num_labels, model.config.problem_type = 1, "regression"
        torch.manual_seed(0)
        rows = [{**each, "labels": torch.tensor(i / 32)} for i, each in enumerate(rows)]
        return BertForSequenceClassification(model.config), rows

    changes = {**EVALUATING, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    with caplog.at_level(logging.WARNING):
        ours = train_steps(PenstockTrainer, regression, tmp_path / "a", **changes)
    plain = train_steps(Trainer, regression, tmp_path / "b", **changes)
    assert "evaluated by the model" in caplog.text
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


def generate_stages(found):
    return {"tokens": float(found.predictions.sum()), "rows": len(found.predictions)}


@pytest.mark.slow
@pytest.mark.parametrize("generates", [True, False])
def test_same_generated_texts(generates, tmp_path):
    """With beams, also between two steps; without `predict_with_generate` evaluations go through the job."""
    changes = {**EVALUATING, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
    changes |= {"predict_with_generate": generates, "generation_max_length": 8, "generation_num_beams": 2}
    given = {"data_collator": padding, "compute_metrics": generate_stages if generates else None}
    runs = []
    for kind in (PenstockSeq2SeqTrainer, Seq2SeqTrainer):
        runs.append(train_steps(kind, seq2seq, tmp_path / kind.__name__, trainer=given, **changes))
    ours, plain = runs
    require_equal(ours, plain, tolerance=1e-4)
    for name in ("eval_loss", *(("eval_tokens", "eval_rows") if generates else ())):
        assert len(tell_of(plain, name)) == 3
        torch.testing.assert_close(tell_of(ours, name), tell_of(plain, name), rtol=TOLERANCE, atol=TOLERANCE)
    found, expected = (run.predict(run.eval_dataset, max_length=6).predictions for run in runs)
    if generates:
        np.testing.assert_array_equal(found, expected)


def test_longest_rows_of_tables_are_found_without_their_rows(monkeypatch):
    from datasets import Dataset, LargeList, Value

    rows = [{"input_ids": [1] * (i + 1), "labels": [1] * (9 - i), "label": i, "scores": [0.5] * 12} for i in range(9)]
    table = Dataset.from_list(rows).select(range(7))
    expected = {"input_ids": 7, "labels": 9}
    assert longest_rows([rows[:7]]) == longest_rows([table.with_transform(lambda some: some)]) == expected
    large = table.cast_column("labels", LargeList(Value("int64")))
    monkeypatch.setattr(Dataset, "__getitem__", None)
    assert longest_rows([large]) == expected
    assert longest_rows([table, None, [{"input_ids": [1] * 8}]]) == {**expected, "input_ids": 8}


def test_no_label_of_a_row_that_fills_up_counts():
    batch = {"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(6)}
    filled = BatchForm(4, {}).fill(batch)
    assert filled["labels"].tolist() == [0, 1, 2, 3, 4, 5, -100, -100]
    assert filled["input_ids"][-1].tolist() == [0, 1]


def test_only_models_of_transformers_shift_labels_by_themselves():
    assert shifts_labels(llama()[0]) and not shifts_labels(classifier()[0]) and not shifts_labels(vision()[0])
