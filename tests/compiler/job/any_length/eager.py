"""Training in eager PyTorch, with batches of any length, beside a job."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LR = 0.05
SGD = partial(torch.optim.SGD, lr=LR)  # a wrong gradient shows in the weights as it is, unlike with Adam
VOCABULARY = 96
# One process and eager add up rows of other micro-batches in another order: a few units in the last place of fp32.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def tokens(rows: int, length: int, seed: int = 0, ignored: int = 2) -> dict[str, Tensor]:
    """Token ids with padding at the end of the last row, and labels that ignore it and the first tokens."""
    generator = torch.Generator().manual_seed(seed * 1000 + rows * 100 + length)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, length - length // 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :ignored] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Eager:
    """A twin of a model, trained by SGD on one device."""

    def __init__(self, model: nn.Module):
        self.model: Any = copy.deepcopy(model)
        self.optimizer = SGD(self.model.parameters())

    def step(self, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> Tensor:
        """One step; of several micro-batches the loss is that of all their targets together."""
        parts = [batch] if isinstance(batch, Mapping) else list(batch)
        count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
        loss = torch.stack([self.model(**part, num_items_in_batch=count).loss for part in parts]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            found = self.model(**batch).loss
        self.model.train()
        return found


def assert_same_weights(model: nn.Module, twin: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        message = f"{name}: {{}}".format
        torch.testing.assert_close(param.detach(), other.detach(), msg=message, **CLOSE)
