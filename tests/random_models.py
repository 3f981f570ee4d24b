"""Random tiny models: `model, batches, traits = random_model(seed)`. Each seed has its own model, always the same.

They draw from what makes partitioning hard: values read far down, branches, layers and weights used twice, in-place
operations, dropout, normalisation with running statistics, buffers that are written, frozen layers, several inputs,
outputs beside the loss. Layers are elements of one module list, so each is a block of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS, TOKENS, CLASSES = 4, 3, 7, 3
MICRO_BATCHES = 4
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Traits:
    """The traits of a model that a test needs to know."""

    is_chain: bool  # each value has one reader and each weight one use: gradients are added up in one order only
    is_random: bool  # dropout


class Layer(nn.Module):
    """One of several kinds of a small layer on `h`; `other` is a second value for kinds that read two.

    `DRAWING` are kinds for models that draw much: a turned layer drops out what it is given, and gives a value that is
    not contiguous.
    """

    DRAWING = ("dropout", "turned", "turned", "batch_norm", "gate", "in_place")
    KINDS = ("linear", "layer_norm", "batch_norm", "in_place", "dropout", "halves", "gate", "masked", "counted")

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind in ("layer_norm", "batch_norm"):
            self.norm = nn.LayerNorm(WIDTH) if kind == "layer_norm" else nn.BatchNorm1d(WIDTH)
        if kind == "counted":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor, other: Tensor, keep: Tensor) -> Tensor:
        if self.kind == "turned":
            return torch.tanh(self.linear(F.dropout(h, 0.25, self.training))).t().contiguous().t()
        h = self.linear(h)
        if self.kind in ("layer_norm", "batch_norm"):
            return self.norm(torch.tanh(h))
        if self.kind == "in_place":
            h = torch.tanh(h).mul(0.5).add_(0.25)
            h *= 2.0
            return h
        if self.kind == "dropout":
            return F.dropout(torch.tanh(h), 0.25, self.training)
        if self.kind == "halves":
            first, second = torch.sin(h).chunk(2, dim=-1)
            return torch.cat([second, first * second], dim=-1)
        if self.kind == "gate":
            return torch.sigmoid(h) * other
        if self.kind == "masked":
            return torch.tanh(h) * keep
        if self.kind == "counted":
            self.seen.add_(1.0)
            return torch.tanh(h) / self.seen.clone()
        return torch.tanh(h)


class RandomModel(nn.Module):
    """`steps`: the layer, the numbers of the two values that it reads, and whether it adds to the first of them."""

    def __init__(self, draw: random.Random, is_chain: bool, kinds: Sequence[str] = Layer.KINDS):
        super().__init__()
        self.is_chain = is_chain
        self.embed = nn.Embedding(TOKENS, WIDTH) if draw.random() < 0.4 else None
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(draw.choice(kinds)) for _ in range(draw.randint(2, 7)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.steps: list[tuple[int, int, int, bool]] = []
        calls = list(range(len(self.layers)))
        if not is_chain:
            self._share(draw)
            calls += draw.choices(calls, k=draw.choice((0, 0, 1, 2)))  # called again, perhaps at once
        for value, layer in enumerate(calls):
            first = other = value
            if not is_chain:
                first, other = (value if draw.random() < 0.6 else draw.randint(0, value) for _ in range(2))
            self.steps.append((layer, first, other, draw.random() < 0.4))
        self.gathered = [] if is_chain else draw.sample(range(len(calls)), k=draw.randint(0, 2))
        self.reports = draw.random() < 0.4
        self._freeze(draw)

    def _share(self, draw: random.Random) -> None:
        """Some layers have the weight of an earlier one."""
        for i in range(1, len(self.layers)):
            if draw.random() < 0.2:
                self.layers[i].linear.weight = self.layers[draw.randrange(i)].linear.weight

    def _freeze(self, draw: random.Random) -> None:
        for module in (self.inlet, *self.layers):
            if draw.random() < 0.12:
                module.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        keep = (mask > 0).to(x.dtype)
        values = [self.inlet(x) if self.embed is None else self.inlet(x) + self.embed(ids)]
        for layer, first, other, adds in self.steps:
            made = self.layers[layer](values[first], values[other], keep)
            values.append(values[first] + made if adds else made)
        h = values[-1]
        for i in self.gathered:
            h = h + values[i]
        logits = self.head(h)
        loss = F.cross_entropy(logits, target)
        return {"loss": loss, "logits": logits, "mean": h.detach().mean()} if self.reports else {"loss": loss}


def random_model(seed: int, kinds: Sequence[str] = Layer.KINDS) -> tuple[nn.Module, list[Batch], Traits]:
    """A model, a few micro-batches and its traits. Chains compute in fp32, the others in fp64."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    is_chain = draw.random() < 0.3
    model = RandomModel(draw, is_chain, kinds)
    batches = [random_batch() for _ in range(MICRO_BATCHES)]
    if not is_chain:
        model = model.double()
        batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in batches]
    return model, batches, Traits(is_chain, any(layer.kind in ("dropout", "turned") for layer in model.layers))


def random_batch() -> Batch:
    return {
        "x": torch.randn(ROWS, WIDTH),
        "ids": torch.randint(TOKENS, (ROWS,)),
        "mask": torch.randint(2, (ROWS, 1)),
        "target": torch.randint(CLASSES, (ROWS,)),
    }
