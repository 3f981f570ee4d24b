"""Small losses over rows, by name: `losses()["mean"](model, h, y)`; `h` are eight features a row, `y` a class a row.

Each list says what is true of them: `MEANS` are means over rows, `SUMS` sums, and in `COUPLED` rows meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 8
Loss = Callable[["WithHead", Tensor, Tensor], Tensor]


class WithHead(nn.Module):
    """One layer, a norm that a loss may use, and a loss of its output and a class a row."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.layer, self.norm, self.loss = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.layer(x)), y)


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator)
    return {"x": x, "y": torch.randint(0, FEATURES, (rows,), generator=generator)}


def _picked(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return -h.log_softmax(-1)[torch.arange(len(h)), y].mean()


def _double(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    first, second = torch.cat([h, h.sin()]).exp().chunk(2)
    return F.mse_loss(first, second)


def _pairs(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """Two rows for each row, taken by the numbers of all, and compared within a pair."""
    both = torch.cat([h, h.sin()])
    taken = both[torch.arange(len(both))[:, None], torch.arange(FEATURES)].square().sum(-1)
    chosen, rejected = taken.chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def _row_first(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    scores = torch.einsum("rf,gf->gr", h, model.layer.weight).t().reshape(-1, 2, 4).flatten(0, 1)
    return scores.softmax(-1).square().mean()


def _focal(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(h, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": torch.neg,
    "bounded": lambda g: g.clamp(-1e-3, 1e-3),
    "each by its norm": lambda g: g / g.norm(dim=1, keepdim=True),
    "by the norm of all": lambda g: g / g.norm(),
    "of other rows": lambda g: g.flip(0),
    "times rows": lambda g: g * len(g),
    "by the root of rows": lambda g: g / len(g) ** 0.5,
}


class Changed(torch.autograd.Function):
    """A copy whose gradient is changed in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: str) -> Tensor:
        ctx.change = CHANGES[change]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


class FusedLoss(torch.autograd.Function):
    """A cross entropy that makes the gradient of its logits in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((x.softmax(-1) - F.one_hot(y, x.shape[1])) / len(x))
        return F.cross_entropy(x, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def _gradient(change: str) -> Loss:
    return lambda model, h, y: F.cross_entropy(Changed.apply(h, change), y)


def _gradient_of_weight(change: str) -> Loss:
    return lambda model, h, y: F.cross_entropy(h @ Changed.apply(model.layer.weight, change), y)


def _looked_up(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h + F.embedding(y % 3, model.layer.weight, scale_grad_by_freq=True), y)


def _bags(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h + F.embedding_bag(y[:, None] % 3, model.layer.weight, scale_grad_by_freq=True), y)


def _dice_of_rows(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    p, t = h.sigmoid(), (h.detach() > 0).float()
    return (1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1) + 1)).mean()


def _fill(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    wide = h.new_zeros(len(h), 2, FEATURES)
    wide[:, 1] = h
    return (wide.flatten(1) @ model.layer.weight.repeat(2, 1)).square().mean()


def _rows_one_by_one(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """Images of their own attention: pieces of a row, computed alone, and put back."""
    pieces = h.view(-1, 4).split([2] * len(h))
    seen = torch.cat([(piece @ piece.t()).softmax(-1) @ piece for piece in pieces])
    return (seen.view(len(h), FEATURES) @ model.layer.weight).square().mean()


def _select_rows(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return torch.stack([-row.log_softmax(-1).gather(0, target[None]).sum() for row, target in zip(h, y)]).mean()


def _features_into_places(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """Half of the elements of each row are those of others of the row, in their order."""
    mask = torch.arange(FEATURES).expand(len(h), FEATURES) % 2 + 0 * y[:, None] == 0
    filled = h.masked_scatter(mask, (2 * h[:, :4]).exp().flatten())
    return F.cross_entropy(filled, y)


def _grid(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """A table of weights, read between its entries at places of all rows."""
    places = h.view(1, -1, 1, 2)
    return F.grid_sample(model.layer.weight.view(1, 4, 4, 4), places, align_corners=False).square().mean()


def _sorted_back(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """Rows grouped by class, as experts see them, and back in their order."""
    order = torch.argsort(y)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return ((h[order] * 2).exp()[back] * h).mean()


def _masked_columns(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """A mask that is made in place, the same for each row, and taken by numbers."""
    mask = torch.ones(len(h), FEATURES)
    mask[:, :2] = 0
    mask = mask[torch.arange(len(h))[:, None], torch.arange(FEATURES)]
    return (h.square() * mask).sum() / mask.sum()


def _joined_angles(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """Angles of three axes, alike for all rows, of which one's are written into another's."""
    angles = torch.arange(FEATURES * 1.0).expand(3, len(h), FEATURES) * 0.1
    first = angles[0]
    for axis in (1, 2):
        first[..., axis::3] = angles[axis, ..., axis::3]
    return (h * first.cos()).square().mean()


def _written_by_mask(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    hidden = h.clone()
    hidden[h > 0.5] = 0.0
    hidden[y == 2] = 0.0
    return F.cross_entropy(hidden, y)


MEANS: dict[str, Loss] = {
    "mean of a total per row": lambda model, h, y: h.new_zeros(len(h)).index_add(0, y % 2, h.sum(-1)).mean(),
    "mean": lambda model, h, y: F.cross_entropy(h, y),
    "smoothed": lambda model, h, y: F.cross_entropy(h, y, label_smoothing=0.1),
    "squares": lambda model, h, y: F.mse_loss(h, h.detach().roll(1, 1)),
    "with decay": lambda model, h, y: F.cross_entropy(h, y) + 0.1 * model.layer.weight.square().sum(),
    "sum over rows by number": lambda model, h, y: F.cross_entropy(h, y, reduction="sum") / len(h),
    "sum of shares": lambda model, h, y: (F.cross_entropy(h, y, reduction="none") / len(y)).sum(),
    "shares of rows that are not left out": lambda model, h, y: torch.where(
        y > 3, torch.zeros(()) * 2.0, F.cross_entropy(h, y, reduction="none") / len(y)
    ).sum(),
    "batchmean": lambda model, h, y: F.kl_div(h.log_softmax(-1), h.detach().softmax(0 + 1), reduction="batchmean"),
    "picked": _picked,
    "gradient of each row by its norm": _gradient("each by its norm"),
    "gradient of each row bounded": _gradient("bounded"),
    "gradient of a product": lambda model, h, y: F.cross_entropy(Changed.apply(2.0 * h, "negative"), y),
    "gradient that forward makes": lambda model, h, y: FusedLoss.apply(h, y),
    "gradient of a weight": lambda model, h, y: F.cross_entropy(OwnLinear.apply(h, model.layer.weight), y),
    "negative gradient of a weight": _gradient_of_weight("negative"),
    "written by a mask": _written_by_mask,
    "stacked terms": lambda model, h, y: torch.stack([h.square().mean(), (2.5 * h).mean()]).mean(),
    "gathered": lambda model, h, y: -h.log_softmax(-1).gather(1, y[:, None]).mean(),
    "of both views": _double,
    "pairs": _pairs,
    "row first": _row_first,
    "margins of y": lambda model, h, y: F.multilabel_margin_loss(h, F.pad(y[:, None], (0, FEATURES - 1), value=-1)),
    "triplets in a row": lambda model, h, y: F.triplet_margin_loss(h, h.sin(), h.cos()),
    "focal": _focal,
    "dice of rows": _dice_of_rows,
    "instance norm": lambda model, h, y: F.instance_norm(h.view(-1, 2, 4)).exp().mean(),
    "filled": _fill,
    "sorted and back": _sorted_back,
    "by a count of ones": lambda model, h, y: h.square().sum() / torch.ones(len(h)).sum().clamp(min=1),
    "by a number as a tensor": lambda model, h, y: h.square().sum() / torch.tensor(float(len(h))),
    "part of a constant": _masked_columns,
    "parts of three constants": _joined_angles,
    "rows one by one": _rows_one_by_one,
    "rows selected": _select_rows,
    "features into places": _features_into_places,
    "read by places of all rows": _grid,
}
SUMS: dict[str, Loss] = {
    "sum": lambda model, h, y: F.cross_entropy(h, y, reduction="sum"),
    "sum by a constant": lambda model, h, y: F.cross_entropy(h, y, reduction="none").sum() / 4,
    "sum of squares": lambda model, h, y: 0.5 * h.square().sum(),
    "product with itself": lambda model, h, y: torch.trace(h.t() @ h),
}


def _simclr(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([h, h.sin()])
    similar = F.cosine_similarity(both[:, None], both[None], dim=-1)
    return -F.log_softmax(similar, dim=-1).diagonal().mean()


def _in_batch(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    unit = F.normalize(h, dim=-1)
    return F.cross_entropy(unit @ unit.t() / 0.1, torch.arange(len(unit)))


def _dino(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return -(F.softmax(h - h.mean(0), -1) * F.log_softmax(h, -1)).sum(-1).mean()


def _barlow(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    z = (h - h.mean(0)) / h.std(0)
    return (z.t() @ z / len(z) - torch.eye(FEATURES)).square().sum()


def _halves(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    chosen, rejected = h.chunk(2)
    return F.softplus(rejected - chosen).mean()


def _dice(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    p, t = h.sigmoid(), (h.detach() > 0).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def _balanced(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    """The auxiliary loss of a mixture of experts: the share of rows times the mean probability of each."""
    chosen = F.one_hot(h.argmax(-1), FEATURES).float()
    return F.cross_entropy(h, y) + 0.01 * (chosen.mean(0) * h.softmax(-1).mean(0)).sum()


def _centred_if_even(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return ((h - h.mean(0)) if len(h) % 2 == 0 else h).square().mean()


def _each_and_their_number(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return (torch.stack([row.tanh() for row in h]) + torch.ones(len(h)).sum() / 10).square().mean()


def _rows_in_a_list(model: WithHead, h: Tensor, y: Tensor) -> Tensor:
    return (h * h.new_tensor([len(h) / 3, *range(1, FEATURES)])).tanh().mean()


COUPLED: dict[str, Loss] = {
    "gradient by the norm of all": _gradient("by the norm of all"),
    "gradients of other rows": _gradient("of other rows"),
    "gradient times rows": _gradient("times rows"),
    "gradient by the root of rows": _gradient("by the root of rows"),
    "gradient of a weight bounded": _gradient_of_weight("bounded"),
    "gradient by how often a row of a table is read": _looked_up,
    "gradient by how often bags read it": _bags,
    "shares in a loss": lambda model, h, y: F.mse_loss(h / len(h), h.detach().sin()),
    "losses of classes times rows": lambda model, h, y: F.nll_loss(h.log_softmax(-1) * len(h), y),
    "a layer of what is times rows": lambda model, h, y: (model.layer(h * len(h)) / len(h)).square().mean(),
    "some of it times rows": lambda model, h, y: (torch.where(h > 0, h * len(h), h) / len(h)).square().mean(),
    "a part of it times rows": lambda model, h, y: (torch.cat([h * len(h), h], 1) / len(h)).square().mean(),
    "weights times rows": lambda model, h, y: h.mean() * F.mse_loss(model.layer.weight * len(h), model.layer.weight),
    "bound of a loss by rows": lambda model, h, y: F.huber_loss(h, h.detach().cos(), delta=len(h) / 8),
    "rows in a list": _rows_in_a_list,
    "up to the number of rows": lambda model, h, y: (h * torch.linspace(0, len(h), FEATURES)).tanh().mean(),
    "each row and their number": _each_and_their_number,
    "centred if their number is even": _centred_if_even,
    "shares squared": lambda model, h, y: (h / len(h)).square().mean(),
    "scores times rows": lambda model, h, y: F.cross_entropy(h * len(h), y),
    "a share and the whole": lambda model, h, y: (h / len(h) + h).mean(),
    "rows added": lambda model, h, y: (h + len(h)).square().mean(),
    "power of rows": lambda model, h, y: (h.abs() + 0.1).pow(len(h)).mean(),
    "bound by rows": lambda model, h, y: h.clamp(max=len(h) / 16).mean(),
    "temperature by rows": lambda model, h, y: F.scaled_dot_product_attention(
        *[h.view(-1, 4, 2)] * 3, scale=1 / len(h)
    ).mean(),
    "rows as a tensor": lambda model, h, y: (h * torch.tensor(float(len(h)))).tanh().mean(),
    "first row": lambda model, h, y: F.cross_entropy(h[0], y[0]),
    "first row for all": lambda model, h, y: F.cross_entropy(h + h[:1], y),
    "rows turned": lambda model, h, y: F.cross_entropy(torch.cat([*reversed(h.split(1))]), y),
    "all but one": lambda model, h, y: F.cross_entropy(torch.stack([*h.unbind()][1:]), y[1:]),
    "in-batch negatives": _in_batch,
    "simclr": _simclr,
    "triplets of rows": lambda model, h, y: F.triplet_margin_loss(h, h.sin(), h.roll(1, 0)),
    "dino": _dino,
    "barlow twins": _barlow,
    "halves": _halves,
    "dice": _dice,
    "balanced experts": _balanced,
    "variance": lambda model, h, y: F.relu(1 - h.var(0)).mean(),
    "root of a mean": lambda model, h, y: F.mse_loss(h, h.cos()).sqrt(),
    "norm of all": lambda model, h, y: h.norm(),
    "hardest rows": lambda model, h, y: F.cross_entropy(h, y, reduction="none").topk(2).values.mean(),
    "mixup": lambda model, h, y: (0.5 * h + 0.5 * h.flip(0)).square().mean(),
    "distances": lambda model, h, y: torch.cdist(h, h).mean(),
    "number of a row": lambda model, h, y: (F.cross_entropy(h, y, reduction="none") * torch.arange(len(h))).mean(),
    "sum and decay": lambda model, h, y: F.cross_entropy(h, y, reduction="sum") + model.layer.weight.square().sum(),
    "batch norm": lambda model, h, y: F.cross_entropy(model.norm(h), y),
}


def model_of(loss: Loss, seed: int = 0) -> WithHead:
    torch.manual_seed(seed)
    return WithHead(loss)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    found = model(**batch)
    return found if isinstance(found, Tensor) else found["loss"]
