"""The meaning of a precision, stated again in plain PyTorch, without any code of the package.

Parameters have the low dtype and floating inputs of forward are cast to it; buffers stay. Each micro-batch has its own
backward, and the gradients are added up in fp32. The optimizer updates fp32 masters; the parameters follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, ROWS, CLASSES = 16, 8, 5


class Upcasts(nn.Module):
    """A model that computes some things in fp32 by its own wish, whatever its parameters are."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(UpcastingLayer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.enter(features)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden).float()
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class UpcastingLayer(nn.Module):
    """A root-mean-square norm and a softmax in fp32, around products in the dtype of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("turn", torch.linspace(0.9, 1.1, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        full = hidden.to(torch.float32)
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6) * self.turn
        normed = self.scale * full.to(hidden.dtype)
        gate = F.softmax(self.up(normed), dim=-1, dtype=torch.float32).to(hidden.dtype)
        return hidden + self.down(gate * 8)


class Promotes(nn.Module):
    """A model whose activations are fp32 between its layers, because an fp32 buffer scales them; `keeps`: because it
    says so. After the layers in `cuts` they are rounded to the low type, as between stages."""

    def __init__(self, keeps: bool = False, cuts: tuple[int, ...] = (), layers: int = 4) -> None:
        super().__init__()
        self.keeps, self.cuts = keeps, cuts
        self.layers = nn.ModuleList(PromotingLayer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = F.pad(features, (0, WIDTH - features.shape[1]))
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if self.keeps:
                hidden = hidden.float()
            if i in self.cuts:
                hidden = hidden.to(torch.bfloat16).to(torch.float32)
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


class PromotingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden)) * self.scale


def upcasting(seed: int = 0, layers: int = 3) -> tuple[Upcasts, dict[str, Tensor]]:
    """The model and a global batch."""
    torch.manual_seed(seed)
    labels = torch.randint(0, CLASSES, (ROWS,))
    return Upcasts(layers), {"features": torch.randn(ROWS, 6), "labels": labels}


class Plain:
    """Trains a copy of `model`. `dtype`: of its parameters; `autocast`: whether calls choose, else inputs are cast.
    `sums`: in which micro-batches' gradients are added up."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        micro_batches: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        autocast: bool = False,
        sums: torch.dtype = torch.float32,
        max_norm: float | None = None,
    ):
        self.model, self.micro_batches, self.dtype, self.autocast = copy.deepcopy(model), micro_batches, dtype, autocast
        self.sums, self.max_norm = sums, max_norm
        self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.model.named_parameters()}
        for param in self.model.parameters():
            param.data = param.data.to(dtype)
        self.optimizer = optimizer(self.masters.values())
        self.gradients: dict[str, Tensor] = {}

    def step(self, batch: Mapping[str, Tensor]) -> float:
        losses, totals = [], dict[str, Tensor]()
        for part in zip(*(value.chunk(self.micro_batches) for value in batch.values())):
            given: dict[str, Any] = dict(zip(batch, part))
            if not self.autocast:
                given = {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in given.items()}
            with torch.autocast("cpu", self.dtype) if self.autocast else nullcontext():
                loss = self.model(**given)["loss"]
            (loss / self.micro_batches).backward()
            losses.append(loss.detach().float())
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    added = param.grad.to(self.sums)
                    totals[name] = totals[name].add_(added) if name in totals else added.clone()
                    param.grad = None
        for name, total in totals.items():
            self.masters[name].grad = total.float()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        self.gradients = {n: p.grad.clone() for n, p in self.masters.items() if p.grad is not None}
        self.optimizer.step()
        for name, param in self.model.named_parameters():
            param.data.copy_(self.masters[name].data)
        return float(torch.stack(losses).mean())


class PlainPure(Plain):
    """`Plain` without masters: each step computes in fp32 from the bf16 weights, and the result goes to one of the two
    neighbours in bf16, as `noise(name, step, count)` says: whole numbers below 2^16, one for each element."""

    noise: Callable[[str, int, int], Tensor]
    step_count = 0

    def step(self, batch: Mapping[str, Tensor]) -> float:
        for name, param in self.model.named_parameters():
            self.masters[name].data.copy_(param.data)
        loss = super().step(batch)
        for name, param in self.model.named_parameters():
            bits = self.masters[name].data.view(torch.int32).view(-1).long()
            up = self.noise(name, self.step_count, param.numel()) + (bits & 0xFFFF) > 0xFFFF
            near = ((bits >> 16) + up).to(torch.int16).view(torch.bfloat16)
            param.data.copy_(near.view_as(param))
        self.step_count += 1
        return loss
