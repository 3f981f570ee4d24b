"""The benchmark's own models: their published size, and that they learn."""

from __future__ import annotations

import pytest
import torch

from penstock.bench.models import WideResNet


def test_wide_resnet_has_the_published_size() -> None:
    with torch.device("meta"):
        model = WideResNet()
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(3.0, rel=0.05)
    convolutions = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "shortcut" not in name]
    assert len(convolutions) + 1 == 200  # and the classifier


def test_wide_resnet_gives_a_loss_with_gradients() -> None:
    model = WideResNet(depths=(1, 2), width=2, base=4, num_labels=5)
    model(torch.randn(2, 3, 32, 32), torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
