"""A cross entropy of parts of the classes equals torch's on the whole logits, and so do all gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.functions import cross_entropy_of_parts, joined_statistics, part_statistics

TOKENS, WIDTH, CLASSES = 13, 6, 21


def in_parts(operands: list[Tensor | None], labels: Tensor, ends: list[int], chunk: int, **options: Any) -> Tensor:
    """The loss with the rows of the weight between `ends` as parts."""
    hidden, weight, bias = operands
    assert hidden is not None and weight is not None
    of_logits = {"scale": options.pop("scale", 1.0), "cap": options.pop("cap", None)}
    reduction, class_weight = options.pop("reduction", "mean"), options.pop("weight", None)
    found = None
    for begin, end in pairwise(ends):
        part = slice(begin, end)
        rows = [None if given is None else given[part] for given in (bias, class_weight)]
        own = part_statistics(hidden, weight[part], rows[0], labels, begin, chunk, rows[1], **of_logits, **options)
        found = own if found is None else joined_statistics(found, own)
    assert found is not None
    return cross_entropy_of_parts(found, labels, CLASSES, class_weight, reduction=reduction, **options)


def whole(operands: list[Tensor | None], labels: Tensor, scale: float, cap: float | None, **options: Any) -> Tensor:
    logits = scale * F.linear(*operands)
    return F.cross_entropy(logits if cap is None else cap * torch.tanh(logits), labels, **options)


def operands_of(dtype: torch.dtype, has_bias: bool = False) -> list[Tensor | None]:
    torch.manual_seed(0)
    shapes = [(TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,)]
    made: list[Tensor | None] = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return made if has_bias else [*made[:2], None]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("has_bias", "scale", "cap"), [(True, 1.0, None), (False, 0.25, 3.0)])
@pytest.mark.parametrize("ends", [[0, 7, 8, 21], [0, 21]])
def test_equals_torch(
    reduction: str, smoothing: float, weighted: bool, has_bias: bool, scale: float, cap: float | None, ends: list[int]
) -> None:
    """In float64, so that only another order of the same sums remains: 1e-12 of the largest entry."""
    labels = torch.randint(0, CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    labels[3], labels[4] = -100, 7
    weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5 if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "scale": scale, "cap": cap}
    given = operands_of(torch.float64, has_bias)
    trained = [tensor for tensor in given if tensor is not None]
    expected = whole(given, labels, **options)
    wanted = torch.autograd.grad(3.0 * expected, trained)
    for chunk in (4, TOKENS):
        found = in_parts(given, labels, ends, chunk, **options)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        for one, other in zip(torch.autograd.grad(3.0 * found, trained), wanted, strict=True):
            assert (one - other).abs().max() <= 1e-12 * other.abs().max().clamp(min=1)


def test_large_logits_and_low_precision() -> None:
    """Sums of exponentials of logits around 1000 stay finite; bf16 operands get their gradients in bf16, as from
    torch's own product, within two roundings of 2^-8."""
    given, labels = operands_of(torch.bfloat16), torch.arange(TOKENS)
    assert torch.isfinite(in_parts(given, labels, [0, 5, 21], 4, scale=300.0))
    found = in_parts(given, labels, [0, 5, 21], 4)
    expected = F.cross_entropy(F.linear(*given).float(), labels)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    trained = [tensor for tensor in given if tensor is not None]
    for one, other in zip(torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).abs().max() <= 2 * 2**-8 * other.abs().max()


def test_labels_of_no_class_are_refused() -> None:
    hidden, weight, _ = operands_of(torch.float32)
    assert hidden is not None and weight is not None
    for wrong in (CLASSES, -1):
        labels = torch.zeros(TOKENS, dtype=torch.int64)
        labels[2] = wrong
        found = part_statistics(hidden, weight, None, labels, 0, 4)
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            cross_entropy_of_parts(found, labels, CLASSES)
