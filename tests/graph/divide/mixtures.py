"""A small mixture of experts that sorts tokens by expert, as transformers' grouped products do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.tests.graph.divide.sequences import WORDS, Layer

WIDTH, EXPERTS, TOP, INNER = 24, 4, 2, 16  # WIDTH is that of `Layer`


class Experts(nn.Module):
    """Each token's `TOP` experts of `EXPERTS`, times its router's weights. `dtype`: of the products, if another one."""

    def __init__(self, inner: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype = dtype
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, inner) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, WIDTH) * 0.2)

    def forward(self, h: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        experts, order = chosen.reshape(-1).sort()
        ends = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows, up, down = (t if self.dtype is None else t.to(self.dtype) for t in (h[order // TOP], self.up, self.down))
        rows = torch._grouped_mm(rows, up, offs=ends)
        rows = self.result(torch._grouped_mm(self.middle(rows), down, offs=ends)) * share.reshape(-1)[order, None]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return rows[place].view(*chosen.shape, WIDTH).sum(1)

    def middle(self, rows: Tensor) -> Tensor:
        """The function between the products of an expert."""
        return F.silu(rows)

    def result(self, rows: Tensor) -> Tensor:
        """The result of an expert, of its last product."""
        return rows


class BentExperts(Experts):
    """Experts whose results are not linear in their last products."""

    def result(self, rows: Tensor) -> Tensor:
        return rows.sin()


class WideExperts(Experts):
    """Experts whose results are weighed and added up in double precision."""

    def forward(self, h: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        return super().forward(h, chosen, share.double()).to(h.dtype)


class LowExperts(Experts):
    """Experts that take rows of tokens of `dtype`. Results are weighed and added up in it, too, or, with `apart`, in
    the router's type."""

    apart = False

    def forward(self, h: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        assert self.dtype is not None
        share = share if self.apart else share.to(self.dtype)
        return super().forward(h.to(self.dtype), chosen, share).to(h.dtype)


class LowExpertsApart(LowExperts):
    apart = True


class Mixture(nn.Module):
    """Attention, a router, experts and a shared expert. `bias`: what the router adds to the scores of each expert;
    `dtype`: of the experts' products, if another one than that of the rest."""

    def __init__(
        self, bias: tuple[float, ...] = (0.0,) * EXPERTS, depth: int = 1, inner: int = INNER,
        dtype: torch.dtype | None = None, experts: type[Experts] = Experts,
    ):  # fmt: skip
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attend = nn.ModuleList(Layer() for _ in range(depth))
        self.gate, self.shared = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = experts(inner, dtype)
        self.register_buffer("bias", torch.tensor(bias))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] / 7.0
        for layer in self.attend:
            h = layer(h, angle)
        flat = h.reshape(-1, WIDTH)
        score = self.gate(flat).sigmoid()
        chosen = (score + self.bias).topk(TOP, -1).indices
        share = score.gather(1, chosen)
        h = h + self.experts(flat, chosen, share / share.sum(-1, keepdim=True)).view(h.shape) + self.shared(h)
        logits = self.head(h)
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1), reduction="sum")
        return {"loss": loss / wanted.ne(-100).sum() + 1e-3 * score.mean(), "logits": logits}
