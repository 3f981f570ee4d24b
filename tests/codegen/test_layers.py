"""Layers are rebuilt from plain arguments; what their attributes say is never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.codegen.layers import layer_call
from penstock.compiler.capture.calls import leaf_modules

LAYERS = [
    nn.Linear(3, 4, bias=False), nn.Conv2d(3, 4, (3, 1), padding=1), nn.LayerNorm((3,), eps=1e-6), nn.GELU("tanh"),
    nn.LSTM(3, 4, 2, batch_first=True), nn.Embedding(5, 3, padding_idx=0), nn.BatchNorm1d(3, momentum=None),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_is_built_again(layer: nn.Module) -> None:
    call = layer_call(layer)
    assert call is not None and call.text == f"nn.{layer!r}"
    built = call.build()
    assert type(built) is type(layer) and repr(built) == repr(layer)
    assert all(p.is_meta for p in built.parameters())


def test_a_text_that_is_no_call_with_literals_is_no_layer(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    layer = nn.Conv2d(3, 4, 3)
    layer.padding_mode = f"zeros, bias=open({str(canary)!r}, 'w')"
    assert "open(" in repr(layer)
    assert layer_call(layer) is None and not leaf_modules(layer)
    assert not canary.exists()
    assert layer_call(nn.Sequential(nn.ReLU())) is None
    assert layer_call(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))) is None
