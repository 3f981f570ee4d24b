"""Models of the papers for which `transformers` has no configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WideBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around `inner` channels, and a shortcut."""

    def __init__(self, channels: int, inner: int, out: int, stride: int):
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU())
        self.conv = nn.Sequential(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = (
            nn.Identity()
            if channels == out and stride == 1
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.expand(self.conv(self.reduce(x))) + self.shortcut(x))


class WideResNet(nn.Module):
    """Residual network whose 3x3 convolutions are `width` times as wide; returns the loss.

    The defaults are MiCS's 3 B parameters (section 5.1.4): 200 convolutions in [6, 8, 46, 6] blocks, width factor 8.
    `pixel_values` f32[b, 3, 224, 224], `labels` i64[b].
    """

    def __init__(self, depths: tuple[int, ...] = (6, 8, 46, 6), width: int = 8, base: int = 64, num_labels: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, base, 7, 2, 3, bias=False), nn.BatchNorm2d(base), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        channels, blocks = base, []
        for stage, depth in enumerate(depths):
            planes = base << stage
            for i in range(depth):
                stride = 2 if stage and not i else 1
                blocks.append(WideBottleneck(channels, width * planes, 4 * planes, stride))
                channels = 4 * planes
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.stem(pixel_values))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)
