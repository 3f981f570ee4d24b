"""A model small enough to read its generated file whole: tied, with equal blocks, a buffer, a mask and dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Parameter(torch.randn(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.up(self.norm(x) * mask)
        h = F.dropout(torch.tanh(h), 0.25, self.training)
        return x + h @ self.down


class Tiny(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 4, vocabulary: int = 8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = (ids != 0).unsqueeze(-1)
        x = self.embed(ids)
        with torch.no_grad():
            position = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.scale
        x = x + position
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny_batch() -> dict[str, Tensor]:
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    return {"ids": ids, "labels": ids.flip(1)}
