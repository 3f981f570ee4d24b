"""Losses that count, each by a rule of its own, of a small model whose rows have labels of uneven number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.tests.compiler.loss.whole_batch import ROWS


class Tokens(nn.Module):
    """Logits of four classes for each of a row's places."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=made) / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def rows(counts: tuple[int, ...] = (6, 1, 3, 2, 5, 4, 2, 6)) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, 3, generator=made)
    labels = torch.randint(0, 4, (ROWS, 6), generator=made)
    mask = torch.arange(6) < torch.tensor(counts)[:, None]
    return {"x": x, "labels": labels.masked_fill(~mask, -100), "mask": mask.float()}


class Loss(nn.Module):
    """A model that computes its loss by `rule(self, logits, batch)`."""

    def __init__(self, rule: Any):
        super().__init__()
        self.tokens, self.rule = Tokens(), rule
        self.register_buffer("class_weights", torch.tensor([0.5, 1.0, 2.0, 0.1]))
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 0.1]), label_smoothing=0.1)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.rule(self, self.tokens(x), labels, mask)


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view(labels.shape)


def plain(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def other_index(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), ignore_index=0)


def class_weights(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=model.class_weights)


def likelihood(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten(), weight=model.class_weights)


def criterion(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return model.criterion(logits.flatten(0, 1), labels.flatten())


def masked_mean(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, labels) * mask).sum() / mask.sum()


def masked_mean_at_least_one(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, labels) * mask).sum() / (mask.sum().clamp(min=1.0) + 1e-8)


def ratio_of_means(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, labels) * mask).mean() / mask.mean()


def two_counts(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    first = F.cross_entropy(logits[:, 0], labels[:, 0].masked_fill(labels[:, 1] == -100, -100))
    return entropy + 0.5 * first + 0.01 * logits.square().mean()


def mean_of_list(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([plain(model, logits, labels, mask), masked_mean(model, logits, labels, mask)]).mean()


def labels_written_in_place(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    targets = labels.clone()
    targets[labels == 2] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_mean(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return logits.square().mean()


def weighted_rows(model: Loss, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    weights = 1 + mask.sum(1)
    return (logits.square().mean((1, 2)) * weights).sum() / weights.sum()


RULES = (
    plain, other_index, class_weights, likelihood, criterion, masked_mean, masked_mean_at_least_one, ratio_of_means,
    two_counts, mean_of_list, labels_written_in_place, plain_mean, weighted_rows,
)  # fmt: skip
