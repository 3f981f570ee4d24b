"""`compile` without a batch plans with the model's own dummy inputs, or shows both forms that work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import penstock
from penstock.compiler.batches.dummy import dummy_batch
from penstock.errors import PlanError

CPU = penstock.Hardware.cpu(num_devices=1, memory="1GB")
FAST = {"strategy": "balanced", "micro_batches": 3}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def causal() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **SMALL))


def test_a_model_alone_is_planned_with_its_dummy_inputs() -> None:
    with pytest.warns(UserWarning, match=r"dummy_inputs \(input_ids \[3, 5\], labels \[3, 5\]\).*hardware, batch"):
        job = penstock.compile(causal(), CPU, **FAST)
    with job:
        assert job.step(dummy_batch(causal(), needs_labels=True)).isfinite()


def test_a_batch_may_be_the_third_argument() -> None:
    model = torch.nn.Linear(4, 1)
    with penstock.compile(model, CPU, torch.ones(3, 4), loss_fn=lambda out, batch: out.mean(), **FAST) as job:
        assert job.step(torch.ones(3, 4)).isfinite()


@pytest.mark.filterwarnings("ignore:no example_inputs")
@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("BertForSequenceClassification", "Bert", {"labels": (3,)}),
        ("BertForTokenClassification", "Bert", {"labels": (3, 5)}),
        ("BertForQuestionAnswering", "Bert", {"start_positions": (3,), "end_positions": (3,)}),
        ("BertForMaskedLM", "Bert", {"labels": (3, 5)}),
    ],
)
def test_labels_are_those_of_the_head(name: str, kind: str, labels: dict[str, tuple[int, ...]]) -> None:
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(vocab_size=32, **SMALL))
    found = dummy_batch(model, needs_labels=True)
    assert {n: tuple(value.shape) for n, value in found.items() if n != "input_ids"} == labels
    assert model(**found).loss.isfinite()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(4, 1),
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, **SMALL)),
    ],
)
def test_without_dummy_inputs_both_forms_are_shown(make: Any) -> None:
    with pytest.raises(PlanError, match=r"compile\(model, hardware, batch\).*\"shape\": \[8, 128\]"):
        penstock.compile(make(), CPU)
