"""A wide residual network (Zagoruyko and Komodakis 2016) with bottleneck blocks, for the papers that train one.

Its normalisations are frozen: a scale and a shift per channel, as in a batch normalisation with fixed statistics,
because devices that train on different micro-batches could not share statistics that change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

EXPANSION = 4  # of a block's output over its base width


class FrozenNorm(nn.Module):
    """Scale and shift of each channel of [b, c, h, w]."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; `factor` widens the inner ones."""

    def __init__(self, channels: int, base: int, factor: int, stride: int):
        super().__init__()
        inner, out = base * factor, base * EXPANSION
        self.reduce, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), FrozenNorm(inner)
        self.middle, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), FrozenNorm(inner)
        self.expand, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), FrozenNorm(out)
        changes = stride > 1 or channels != out
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.reduce(x)))
        y = torch.relu(self.norm2(self.middle(y)))
        return torch.relu(self.norm3(self.expand(y)) + self.skip(x))


class WideResNet(nn.Module):
    """Computes the mean loss of images [b, 3, h, w] and labels [b]."""

    def __init__(self, depths: Sequence[int], factor: int, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), FrozenNorm(64), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = list[nn.Module](), 64
        for group, depth in enumerate(depths):
            base = 64 * 2**group
            for number in range(depth):
                blocks.append(Bottleneck(channels, base, factor, 2 if group and not number else 1))
                channels = base * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(self.stem(pixel_values)))
        return nn.functional.cross_entropy(self.classifier(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class NamedWideResNet:
    """The counterpart of `compiler.models.named.NamedModel`, which is for models of `transformers`."""

    depths: Sequence[int]
    factor: int
    image: int = 224

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return WideResNet(self.depths, self.factor)

    def batch_spec(self, batch: int, sequence: int, targets: int | None = None) -> dict[str, dict[str, Any]]:
        """Shapes of one batch; images have no `sequence` and no `targets`."""
        return {
            "pixel_values": {"shape": [batch, 3, self.image, self.image], "dtype": "float32"},
            "labels": {"shape": [batch], "dtype": "int64"},
        }
