"""A cross entropy whose head is in parts: each part makes the logits of its own classes, in chunks of tokens, and
leaves three numbers a token, from which the loss follows.

The numbers are the logarithm of the sum of a part's exponentials, the logit of the token's label (0 in parts that lack
it), and with label smoothing the sum of the part's logits. Backward makes a part's logits once more, from the
gradients of these numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunked_loss import LogitGradients, LogitRoom, LossRule, OperandGradients, check_labels, factors


def part_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    begin: int | Tensor,
    tokens: int,
    class_weight: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """The statistics that the loss needs of the classes from `begin` on, whose rows `weight`, `bias` and `class_weight`
    hold: three numbers for each token, in fp32 at least. `begin` may be [1], a number that the device alone knows.
    `more`: other fields of `LossRule`."""
    kind = hidden.device.type
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    rule = LossRule(tokens, **more)
    with torch.autocast(kind, enabled=False):
        found: Tensor = _PartStatistics.apply(hidden, weight, bias, labels, class_weight, begin, rule)
        return found


def joined_statistics(one: Tensor, other: Tensor) -> Tensor:
    """The statistics of the classes of two parts together."""
    return torch.cat((torch.logaddexp(one[:1], other[:1]), one[1:] + other[1:]))


def cross_entropy_of_parts(
    statistics: Tensor,
    labels: Tensor,
    classes: int,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of logits of which these are the statistics. Raises IndexError for a label that is no class and
    not `ignore_index`; on a GPU that is an assertion on the device."""
    check_labels(labels, classes, ignore_index)
    shape, labels = labels.shape, labels.reshape(-1)
    log_sum, own, of_all = statistics
    counted = factors(labels, class_weight, ignore_index)
    losses: Tensor = (log_sum - own) * counted
    if label_smoothing:
        whole = classes if class_weight is None else class_weight.sum()
        losses = losses * (1 - label_smoothing) + (log_sum * whole - of_all) * (label_smoothing / classes)
    losses = losses.masked_fill(labels == ignore_index, 0.0)
    if reduction == "none":
        return losses.view(shape)
    total: Tensor = losses.sum()
    return total if reduction == "sum" else total / counted.sum()


class _PartStatistics(torch.autograd.Function):
    """Three rows: logarithms of sums, own logits, sums of logits (zeros without label smoothing)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
        begin: int | Tensor, rule: LossRule,
    ) -> Tensor:  # fmt: skip
        ctx.rule, ctx.begin = rule, begin
        room = LogitRoom(hidden, rule)
        found = hidden.new_zeros((3, len(labels)), dtype=room.wide)
        columns, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        place, here = _own_place(labels, begin, len(weight), rule)
        for rows in rule.pieces(len(labels), rule.tokens):
            logits, _ = room.logits(hidden[rows], columns, offset)
            own = logits.gather(1, place[rows, None]).squeeze(1)
            found[1, rows] = own.masked_fill(~here[rows], 0.0)
            if rule.label_smoothing:
                weights = None if class_weight is None else class_weight.to(logits.dtype)
                found[2, rows] = logits.sum(-1) if weights is None else logits @ weights
            top = logits.amax(-1)
            found[0, rows] = logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top)
        ctx.save_for_backward(hidden, weight, bias, labels, class_weight, found[0].clone())
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, labels, class_weight, log_sums = ctx.saved_tensors
        rule, (grad,) = ctx.rule, grads
        with torch.autocast(hidden.device.type, enabled=False):
            sums = OperandGradients(ctx, hidden, weight, bias)
            place, here = _own_place(labels, ctx.begin, len(weight), rule)
            each = -grad[2] if rule.label_smoothing else None
            logits_of = LogitGradients(place.masked_fill(~here, -1), log_sums, grad[0], -grad[1], each, class_weight)
            sums.add_all(logits_of, weight, bias)
        return sums.hidden_gradient(), sums.weight, sums.bias, None, None, None, None


def _own_place(labels: Tensor, begin: int | Tensor, classes: int, rule: LossRule) -> tuple[Tensor, Tensor]:
    """Each label's column in a part, 0 for those of other parts and ignored ones, and which labels are of this part."""
    place = labels - begin
    here = (place >= 0) & (place < classes) & (labels != rule.ignore_index)
    return place.where(here, 0), here
