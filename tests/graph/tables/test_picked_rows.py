"""The numbers by which a step picks rows of tables and classes, cut out of the op graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.loss import capture
from penstock.graph.tables.picked_rows import PickRules, picked_rows


class Shifted(nn.Module):
    """As transformers' models take labels: the first of a row is read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(6, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        scores = self.head(self.words(ids) + self.places(places))
        return F.cross_entropy(scores.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1))


class Unknown(nn.Module):
    """Numbers that are the same in each batch, and targets that are no classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.register_buffer("places", torch.arange(5))

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(self.places)), self.head(self.words(ids)[0]).softmax(-1))


def rules_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, PickRules]:
    return picked_rows(capture(model.train(), batch))


def test_the_numbers_are_those_that_are_read() -> None:
    ids = torch.arange(10).view(2, 5)
    batch = {"ids": ids, "mask": torch.ones_like(ids), "labels": ids}
    graph, rules = rules_of(Shifted(), batch)
    assert rules.inputs == ("ids", "mask", "labels")
    assert [(b.inputs, b.size, b.ignored) for b in rules.bounds] == [
        (("ids",), 20, None), (("mask",), 6, None), (("labels",), 20, -100)
    ]  # fmt: skip
    found_ids, places, labels = graph(ids, batch["mask"], ids)
    assert torch.equal(found_ids, ids) and torch.equal(places, torch.arange(5).expand(2, 5))
    assert labels.tolist() == [1, 2, 3, 4, -100, 6, 7, 8, 9, -100]


def test_numbers_that_the_batch_does_not_say_are_left_out() -> None:
    _, rules = rules_of(Unknown(), {"ids": torch.arange(10).view(2, 5)})
    assert [(b.inputs, b.size) for b in rules.bounds] == [(("ids",), 20)]
