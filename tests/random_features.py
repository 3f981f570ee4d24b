"""Random tiny models with what a user's script may do beside computing: `featured_model(seed)`.

They are random models (`random_models.py`) with gradient hooks, layers in evaluation mode, parameters that forward
changes in place, embeddings with `max_norm`, nested outputs and Python state. Some of it no program can do: then the
plan must be refused. Layers with dropout are in evaluation mode: what dropout draws is compared elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.tests.random_models import MICRO_BATCHES, Batch, RandomModel, random_batch


def halves(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def in_place(g: Tensor) -> None:
    g.mul_(2.0).clamp_(-0.01, 0.01)


def logs(g: Tensor) -> None:
    LOG.append(g)


LOG: list[Tensor] = []
HOOKS: dict[str, Callable[..., Any]] = {
    "scaled": lambda g: g * -0.5,
    "clamped": lambda g: g.clamp(-0.01, 0.02),
    "where": lambda g: torch.where(g > 0, g, 0.1 * g),
    "sign": lambda g: g.sign() * 0.01,
    "in place": in_place,
}
REFUSED_HOOKS: dict[str, Callable[..., Any]] = {"by norm": lambda g: g / (1 + g.norm()), "logs": logs}


class Featured(RandomModel):
    def __init__(self, draw: random.Random):
        super().__init__(draw, is_chain=draw.random() < 0.3)
        self.features: list[str] = []
        self.calls = 0
        self.clamped = self._drawn(draw, "clamp", 0.2) and draw.randrange(len(self.layers))
        self.is_clamped = "clamp" in self.features
        self.decays, self.counts = self._drawn(draw, "decay", 0.05), self._drawn(draw, "count", 0.05)
        self.nests = self._drawn(draw, "nested", 0.4)
        if self.embed is not None and draw.random() < 0.4:
            self.features.append("max_norm")
            self.embed.max_norm = 0.5
        self.double()

    def _drawn(self, draw: random.Random, feature: str, share: float) -> bool:
        if draw.random() < share:
            self.features.append(feature)
        return feature in self.features

    def set_modes(self, draw: random.Random) -> None:
        for layer in self.layers:
            if layer.kind == "dropout" or draw.random() < 0.25:
                layer.eval()
                self.features.append(f"eval {layer.kind}")

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, target: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            if self.is_clamped:
                self.layers[self.clamped].linear.weight.data.clamp_(-0.3, 0.3)  # unseen by backward: see `compare`
            if self.decays:
                self.head.weight.mul_(0.99)
        if self.counts:
            self.calls += 1
        found: dict[str, Any] = super().forward(x, ids, mask, target)
        if self.nests:
            found["more"] = {"inputs": (x * 2, [x.mean()]), "loss again": found["loss"] * 1.0}
        return found


def register_hooks(model: nn.Module, draw: random.Random) -> list[str]:
    """Draw gradient hooks for the model's parameters; returns their names."""
    made = []
    bad = draw.random() < 0.1
    for name, param in model.named_parameters():
        if param.requires_grad and draw.random() < 0.3:
            kind = draw.choice([*HOOKS, "after"])
            made.append(f"{name}: {kind}")
            if kind == "after":
                param.register_post_accumulate_grad_hook(halves)
            else:
                param.register_hook(HOOKS[kind])
            if bad:
                kind, bad = draw.choice([*REFUSED_HOOKS]), False
                made.append(f"{name}: {kind}")
                param.register_hook(REFUSED_HOOKS[kind])
    return made


def featured_model(seed: int) -> tuple[Featured, list[Batch], list[str]]:
    """A model in fp64, a few micro-batches, and what the model does."""
    draw = random.Random(f"features {seed}")
    torch.manual_seed(seed)
    model = Featured(draw)
    model.set_modes(draw)
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in random_batch().items()}
               for _ in range(MICRO_BATCHES)]  # fmt: skip
    return model, batches, [*model.features, *register_hooks(model, draw)]
