"""Layers that take a fixed time, and several times that in one process: a worker that is slow whatever else runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SLOW_PID_FILE = "PENSTOCK_TEST_SLOW_PID"  # in the environment: a file with the id of the slow process
LAYER_S, TIMES, LAYERS, WIDTH = 0.003, 4.0, 6, 32


class Slept(torch.autograd.Function):
    """The identity, after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        wait()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        wait()
        return grad.clone()


def wait() -> None:
    path = Path(os.environ.get(SLOW_PID_FILE, ""))
    is_slow = path.is_file() and path.read_text() == str(os.getpid())
    time.sleep(LAYER_S * (TIMES if is_slow else 1.0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(Slept.apply(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def batch_of(step: int, rows: int = 32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {name: torch.randn(rows, WIDTH, generator=made) for name in ("x", "y")}


def model() -> Net:
    torch.manual_seed(0)
    return Net()
