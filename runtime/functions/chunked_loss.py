"""A head and the cross entropy of its logits, in pieces: the logits never exist whole.

Forward goes over chunks of tokens, each with all classes, and keeps one number per token, the logarithm of the sum of
its exponentials. Backward makes the logits again in slices of the classes, one for each chunk, each for all tokens: so
a row of the weight gets its gradient at once, with the sum over tokens inside one product, and what adds up over slices
is the gradient of the hidden values, in fp32 where they have fewer bits. Both hold equally many logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_names import assert_async

COLUMNS = 64  # the size of a slice of classes is a multiple of it, for kernels that work in tiles


PieceBounds = Callable[[int, int], Iterable[slice]]  # by the number of all, and that of a piece


def slices(total: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))


class LossRule(NamedTuple):
    """The loss of a head in pieces, with the logits of `tokens` tokens at once.

    The logits are multiplied by `scale`; with a `cap` they are `cap * tanh(scale * product)`. `pieces`: what chunks of
    tokens and slices of classes there are.
    """

    tokens: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    pieces: PieceBounds = slices


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tokens: int,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    **more: Any,
) -> Tensor:
    """The cross entropy of `F.linear(hidden, weight, bias)` and `labels`, with the logits of `tokens` tokens at once.

    more: other fields of `LossRule`. The product is made in the dtype of autocast or of `hidden`, the loss in fp32 at
    least. Raises IndexError for a label that is no class and not `ignore_index`; on a GPU that is an assertion on the
    device.
    """
    rule = LossRule(tokens, **more)
    check_labels(labels, weight.shape[0], rule.ignore_index)
    kind, shape = hidden.device.type, labels.shape
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        losses: Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, class_weight, rule)
        if reduction == "none":
            return losses.reshape(shape)
        total = losses.sum()
        return total if reduction == "sum" else total / factors(labels, class_weight, rule.ignore_index).sum()


def evaluation_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
    """`F.linear` of these, or while training a tensor like it without rows: only evaluation gives the logits."""
    if training:
        return hidden.new_empty((0, *hidden.shape[1:-1], weight.shape[0]))
    return F.linear(hidden, weight, bias)


class _ChunkedLoss(torch.autograd.Function):
    """The loss of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
        rule: LossRule,
    ) -> Tensor:  # fmt: skip
        ctx.rule = rule
        num_tokens, room = len(labels), LogitRoom(hidden, rule)
        losses, log_sums = (hidden.new_empty(num_tokens, dtype=room.wide) for _ in range(2))
        columns, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for rows in rule.pieces(num_tokens, rule.tokens):
            logits, _ = room.logits(hidden[rows], columns, offset)
            losses[rows], log_sums[rows] = _losses(logits, labels[rows], class_weight, rule)
        ctx.save_for_backward(hidden, weight, bias, labels, class_weight, log_sums)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, labels, class_weight, log_sums = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            sums = OperandGradients(ctx, hidden, weight, bias)
            logits_of = LogitGradients.from_losses(grads[0], labels, class_weight, log_sums, ctx.rule, weight.shape[0])
            sums.add_all(logits_of, weight, bias)
        return sums.hidden_gradient(), sums.weight, sums.bias, None, None, None


class LogitRoom:
    """Memory of the logits of one piece, which the next piece takes over: in the dtype of the product, and in that of
    the loss where it is another."""

    def __init__(self, hidden: Tensor, rule: LossRule):
        self.like, self.rule = hidden, rule
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.buffers: dict[str, Tensor] = {}

    def _take(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(size, dtype=dtype)
        return self.buffers[name][:size].view(shape)

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wants_slope: bool = False
    ) -> tuple[Tensor, Tensor | float]:
        """The logits of these rows and classes in the dtype of the loss, and their derivative by the product."""
        shape, rule = (len(hidden), len(weight)), self.rule
        made = self._take("product", shape, hidden.dtype)
        if bias is None:
            torch.mm(hidden, weight.t(), out=made)
        else:
            torch.addmm(bias, hidden, weight.t(), out=made)
        logits = made if made.dtype == self.wide else self._take("wide", shape, self.wide).copy_(made)
        if rule.scale != 1.0:
            logits.mul_(rule.scale)
        if rule.cap is None:
            return logits, rule.scale
        logits.tanh_()
        slope: Tensor | float = rule.scale
        if wants_slope:
            slope = self._take("slope", shape, self.wide).copy_(logits).square_().neg_().add_(1.0)
            slope = slope.mul_(rule.scale * rule.cap)
        return logits.mul_(rule.cap), slope

    def cast_to_product(self, values: Tensor) -> Tensor:
        """The values in the dtype of the product."""
        if values.dtype == self.like.dtype:
            return values
        return self._take("product", (values.shape[0], values.shape[1]), self.like.dtype).copy_(values)


def _losses(logits: Tensor, labels: Tensor, class_weight: Tensor | None, rule: LossRule) -> tuple[Tensor, Tensor]:
    """Each row's loss, and the logarithm of the sum of its exponentials. Uses the logits up."""
    counts = labels != rule.ignore_index
    top = logits.amax(-1)
    logits.sub_(top[:, None])
    own = logits.gather(1, labels.where(counts, 0)[:, None]).squeeze(1)
    smoothing, num_classes = rule.label_smoothing, logits.shape[1]
    all_classes = own
    if smoothing:
        all_classes = logits.sum(-1) if class_weight is None else logits @ class_weight.to(logits.dtype)
    log_sum = logits.exp_().sum(-1).log()
    losses = (log_sum - own) * factors(labels, class_weight, rule.ignore_index)
    if smoothing:
        whole = num_classes if class_weight is None else class_weight.sum()
        losses = losses * (1 - smoothing) + (log_sum * whole - all_classes) * (smoothing / num_classes)
    return losses.masked_fill_(~counts, 0.0), log_sum + top


class LogitGradients:
    """Writes the gradients of the products in place of logits, one slice of the classes after the other.

    A logit's gradient is `all` times its share of the exponentials, whose sums are e to `log_sums`, less `own` where it
    is the label's, and less `each` times its class's weight."""

    def __init__(
        self, labels: Tensor, log_sums: Tensor, all: Tensor, own: Tensor, each: Tensor | None, weight: Tensor | None
    ):
        self.labels, self.log_sums, self.all, self.own = labels, log_sums, all, own
        self.each, self.class_weight = each, weight

    @staticmethod
    def from_losses(
        grad: Tensor, labels: Tensor, class_weight: Tensor | None, log_sums: Tensor, rule: LossRule, classes: int
    ) -> LogitGradients:
        """Make the gradients of logits from these gradients of the tokens' losses."""
        counts = labels != rule.ignore_index
        grad = grad.to(log_sums.dtype).masked_fill(~counts, 0.0)
        smoothing = rule.label_smoothing
        own = all = grad * factors(labels, class_weight, rule.ignore_index) * (1 - smoothing)
        each = grad * (smoothing / classes) if smoothing else None
        if each is not None:
            all = own + each * (classes if class_weight is None else class_weight.sum())
        return LogitGradients(labels.where(counts, 0), log_sums, all, own, each, class_weight)

    def write(self, logits: Tensor, slope: Tensor | float, columns: slice) -> None:
        logits.sub_(self.log_sums[:, None]).exp_().mul_(self.all[:, None])
        if self.each is not None and self.class_weight is None:
            logits.sub_(self.each[:, None])
        elif self.each is not None and self.class_weight is not None:
            logits.addcmul_(self.each[:, None], self.class_weight[columns].to(logits.dtype)[None], value=-1.0)
        place = self.labels - columns.start
        here = (place >= 0) & (place < logits.shape[1])
        place = place.clamp_(0, logits.shape[1] - 1)
        logits.scatter_add_(1, place[:, None], self.own.where(here, 0.0).neg_()[:, None])
        if isinstance(slope, Tensor) or slope != 1.0:
            logits.mul_(slope)


class OperandGradients:
    """The gradients of the operands, as far as they are wanted."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None):
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        self.operand, self.room = hidden, LogitRoom(hidden, ctx.rule)
        self.weight = torch.empty_like(weight) if wants_weight else None
        self.bias = torch.empty_like(bias) if bias is not None and wants_bias else None
        self.hidden = torch.zeros_like(hidden, dtype=self.room.wide) if wants_hidden else None
        self.part = torch.empty_like(hidden) if wants_hidden and hidden.dtype != self.room.wide else None

    def add_all(self, logits_of: LogitGradients, weight: Tensor, bias: Tensor | None) -> None:
        """Add what all classes give, one slice of them after the other."""
        rule, hidden = self.room.rule, self.operand
        for columns in rule.pieces(len(weight), slice_width(len(weight), len(hidden), rule.tokens)):
            part = weight[columns].to(hidden.dtype)
            offset = None if bias is None else bias[columns].to(hidden.dtype)
            logits, slope = self.room.logits(hidden, part, offset, wants_slope=True)
            logits_of.write(logits, slope, columns)
            self._add(self.room.cast_to_product(logits), part, columns)

    def _add(self, gradient: Tensor, weight: Tensor, columns: slice) -> None:
        """Add what a slice of the classes gives; `gradient`: of its products."""
        if self.weight is not None and self.weight.dtype == gradient.dtype:
            torch.mm(gradient.t(), self.operand, out=self.weight[columns])
        elif self.weight is not None:
            self.weight[columns] = gradient.t() @ self.operand
        if self.bias is not None:
            self.bias[columns] = gradient.sum(0)
        if self.hidden is not None and self.part is not None:
            self.hidden += torch.mm(gradient, weight, out=self.part)
        elif self.hidden is not None:
            self.hidden.addmm_(gradient, weight)

    def hidden_gradient(self) -> Tensor | None:
        return None if self.hidden is None else self.hidden.to(self.operand.dtype)


def factors(labels: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """The weight of each label: its class's weight, or 1; 0 where it is ignored."""
    counts = labels != ignore_index
    if class_weight is None:
        return counts
    return class_weight[labels.where(counts, 0)].masked_fill(~counts, 0.0)


def slice_width(num_classes: int, num_tokens: int, tokens: int) -> int:
    """The number of classes of a slice with about the number of logits of `tokens` tokens."""
    pieces = max(1, -(-num_tokens // tokens))
    return -(-num_classes // pieces // COLUMNS) * COLUMNS if pieces > 1 else num_classes


def check_labels(labels: Tensor, num_classes: int, ignore_index: int) -> None:
    if type(labels) is not Tensor or labels.is_meta:  # a tensor without values
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= num_classes))
    allowed = f"0 to {num_classes - 1}, or {ignore_index}, which is ignored"
    if labels.is_cuda:
        assert_async(~wrong.any(), f"a label is out of bounds; allowed are {allowed}")
    elif wrong.any():
        raise IndexError(f"Target {labels[wrong][0].item()} is out of bounds; allowed are {allowed}")
