"""Heads followed by a cross entropy are found, with all that computes them, or with the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import zoo

from penstock.compiler.loss import capture
from penstock.graph.loss.head_loss import HeadLoss, WholeLogits, head_losses
from penstock.ir.precision import Precision

CLASSES, WIDTH = 12, 8


class Reader(nn.Module):
    """An embedding, a layer and a head, with a loss that `loss(model, hidden, labels)` computes."""

    def __init__(self, loss: Callable[[Any, Tensor, Tensor], Any], bias: bool = False):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.register_buffer("class_weight", torch.rand(CLASSES))
        self.rule = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.loss(self, self.layer(self.embedding(ids)), labels)


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(6).reshape(2, 3), "labels": torch.arange(6).reshape(2, 3) + 1}


def find(loss: Callable[[Any, Tensor, Tensor], Any], **options: Any) -> HeadLoss | WholeLogits:
    (row,) = head_losses(capture(Reader(loss, **options), batch()))
    return row


MORE = [pytest.param(name, "bf16-mixed", marks=pytest.mark.slow) for name in ("llama", "qwen3", "mixtral", "t5")]
MORE.append(pytest.param("t5", "fp32", marks=pytest.mark.slow))


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "bf16-mixed"), ("opt", "fp32"), *MORE])
def test_heads_of_transformers_are_found(name: str, precision: str) -> None:
    model, examples = zoo()[name](0.0)
    graph = capture(model, examples, precision=Precision.of(precision))
    (head,) = head_losses(graph)
    assert isinstance(head, HeadLoss), head
    assert (head.weight, head.bias, head.outputs) == ("lm_head.weight", None, ("logits",))
    assert (head.num_classes, head.ignore_index, head.reduction) == (96, -100, "sum")
    assert head.num_tokens == examples["labels"].numel()
    assert head.logits_dtype == Precision.of(precision).dtype and head.loss_dtype == torch.float32
    assert (head.scale, head.cap, head.class_weight, head.label_smoothing) == (1.0, None, None, 0.0)
    assert head.hidden.meta["val"].shape[:-1] == examples["labels"].shape


def test_a_masked_language_model_has_a_head_with_a_bias() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertForMaskedLM(config)
    ids = torch.arange(16).reshape(2, 8)
    (head,) = head_losses(capture(model, {"input_ids": ids, "labels": ids}))
    assert isinstance(head, HeadLoss)
    assert (head.weight, head.bias) == ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")


def test_a_capped_head_is_found_with_its_scale() -> None:
    def capped(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = torch.tanh(model.head(hidden) / 30.0) * 30.0
        return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    head = find(capped)
    assert isinstance(head, HeadLoss)
    assert (head.scale, head.cap) == (1 / 30.0, 30.0)


def test_a_function_with_a_tied_weight_is_found() -> None:
    def tie(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, model.embedding.weight) * 0.5
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    head = find(tie)
    assert isinstance(head, HeadLoss) and not isinstance(head.weight, str)
    assert (head.weight.target, head.scale) == ("embedding.weight", 0.5)


@pytest.mark.parametrize("turned", [lambda w: w.t(), lambda w: w.T, lambda w: w.transpose(0, 1)])
def test_a_product_with_a_transposed_weight_is_found(turned: Callable[[Tensor], Tensor]) -> None:
    head = find(lambda m, h, y: F.cross_entropy((h @ turned(m.head.weight)).view(-1, CLASSES), y.view(-1)))
    assert isinstance(head, HeadLoss) and not isinstance(head.weight, str)
    assert head.weight.target == "head.weight"


@pytest.mark.parametrize("turned", [lambda x: x.transpose(1, 2), lambda x: x.permute(0, 2, 1), lambda x: x.mT])
def test_classes_in_the_second_dimension_are_found(turned: Callable[[Tensor], Tensor]) -> None:
    head = find(lambda m, h, y: F.cross_entropy(turned(m.head(h)), y), bias=True)
    assert isinstance(head, HeadLoss)
    assert (head.bias, head.moves, head.num_tokens) == ("head.bias", (), 6)


def test_shifted_logits_and_a_module_with_class_weights_are_found() -> None:
    def shift(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(hidden)[:, :-1, :].contiguous()
        loss: Tensor = model.rule(logits.view(-1, CLASSES).float(), labels[:, 1:].reshape(-1))
        return loss

    head = find(shift)
    assert isinstance(head, HeadLoss)
    assert (head.num_tokens, head.label_smoothing) == (4, 0.1)
    assert [move.name.rstrip("_0123456789") for move in head.moves] == ["getitem", "view"]


def test_class_weights_are_found() -> None:
    head = find(lambda m, h, y: F.cross_entropy(m.head(h).view(-1, CLASSES), y.view(-1), weight=m.class_weight))
    assert isinstance(head, HeadLoss) and not isinstance(head.class_weight, str)
    assert head.class_weight is not None and head.class_weight.target == "class_weight"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda m, h, y: F.nll_loss(m.head(h).log_softmax(-1).view(-1, CLASSES), y.view(-1)), "negative log-likel"),
        (lambda m, h, y: F.cross_entropy(m.head(h)[..., 1:].reshape(-1, CLASSES - 1), y.view(-1)), "getitem"),
        (lambda m, h, y: F.cross_entropy(F.relu(m.head(h)).view(-1, CLASSES), y.view(-1)), "relu is between"),
        (lambda m, h, y: F.cross_entropy((m.head(h) + 1).view(-1, CLASSES), y.view(-1)), "add "),
        (lambda m, h, y: F.cross_entropy((m.head(h) * h.sum()).view(-1, CLASSES), y.view(-1)), "mul "),
        (lambda m, h, y: F.cross_entropy(m.head(h).narrow(1, 0, 2).mT, y[:, :2]), "narrow"),
        (lambda m, h, y: F.cross_entropy(m.head(h).view(-1, CLASSES), m.head(h).view(-1, CLASSES)), "not numbers"),
        (lambda m, h, y: F.cross_entropy(m.head(h), y[:, :1].expand(2, CLASSES)), "not the last dimension"),
    ],
)
def test_other_losses_say_why_their_logits_stand_whole(loss: Callable[..., Any], reason: str) -> None:
    row = find(loss)
    assert isinstance(row, WholeLogits) and reason in row.reason, row


def test_logits_that_another_term_reads_stand_whole() -> None:
    def with_z(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(hidden)
        return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)) + logits.logsumexp(-1).square().mean()

    row = find(with_z)
    assert isinstance(row, WholeLogits) and "also read by logsumexp" in row.reason and "test_head_loss" in row.reason


def test_outputs_that_are_logits_are_named() -> None:
    def with_output(model: Any, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = model.head(hidden).contiguous()
        return {"loss": F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "scores": logits}

    head = find(with_output)
    assert isinstance(head, HeadLoss) and head.outputs == ("scores",)
