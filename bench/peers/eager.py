"""Eager PyTorch on one device, as a user would write it: gradients accumulated over micro-batches, fused AdamW."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Eager:
    """Trains `model` in place."""

    def __init__(self, model: nn.Module, micro_batches: int, lr: float):
        self.model, self.micro_batches = model.train(), micro_batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One step on a global batch. Returns the mean loss."""
        loss = self.gradients(batch)
        self.optimizer.step()
        return loss

    def gradients(self, batch: Mapping[str, Tensor]) -> float:
        """Compute the gradients of a global batch into the parameters. Returns the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        pieces = {name: value.chunk(self.micro_batches) for name, value in batch.items()}
        losses = []
        for m in range(self.micro_batches):
            loss = self.model(**{name: parts[m] for name, parts in pieces.items()}).loss
            (loss / self.micro_batches).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())
