"""A GPT written by hand, which the GPU benchmarks and tests train so that they need only torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GptSize:
    """The size of a GPT. `tied`: the table of words is also the last layer's weight."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    dropout: float = 0.0
    tied: bool = True


SMALL = GptSize(layers=4, width=64, heads=4, vocabulary=256, length=32)
MEDIUM = GptSize(layers=8, width=512, heads=8, vocabulary=8192, length=256)
BASE = GptSize(layers=12, width=768, heads=12, vocabulary=50304, length=512)  # 124 M parameters
XL = GptSize(layers=48, width=1600, heads=25, vocabulary=50304, length=1024)  # 1.56 B parameters


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and with a residual."""

    def __init__(self, size: GptSize):
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.widen, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.widen(self.norm2(x)))), self.dropout, self.training)


class Gpt(nn.Module):
    """Predicts each word from those before it; `forward(words, labels)` returns the loss and the logits."""

    def __init__(self, size: GptSize):
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


def gpt(size: GptSize, device: str = "cpu", seed: int = 0) -> Gpt:
    """A GPT on the CPU with random weights that depend on the seed and the device. They are drawn on `device`, as a CPU
    takes a minute to draw 1.5 billion numbers."""
    with torch.device("meta"):
        model = Gpt(size)
    model.to_empty(device="cpu")
    if size.tied:
        model.head.weight = model.words.weight
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                param.copy_(torch.randn(param.shape, generator=generator, device=device) * 0.02)
    return model


def batch_of(size: GptSize, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random words; each word's label depends on it, so that there is something to learn."""
    words = torch.randint(0, size.vocabulary, (rows, size.length), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "labels": (words * 7 + 3) % size.vocabulary}
