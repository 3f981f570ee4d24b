"""A head with its cross entropy in pieces equals `F.linear` and `F.cross_entropy`: losses and every gradient.

In fp32 and fp64 sums over classes and tokens are made in another order: 4 roundings of the largest entry. In bf16 the
same products are rounded to bf16; eager's own error is of that size.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.functions import chunked_cross_entropy
from penstock.tests.passes.stage_runs import Peak
from penstock.tests.shown_elsewhere import slow_but

TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


def operands(tokens: int, classes: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator) for shape in ((tokens, 8), (classes, 8), (classes,))]
    leaves: list[Tensor | None] = [t.to(dtype).requires_grad_() for t in made]
    return leaves if bias else [*leaves[:2], None]


def labels_of(tokens: int, classes: int, ignored: float = 0.25, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (tokens,), generator=generator)
    return labels.masked_fill(torch.rand(tokens, generator=generator) < ignored, -100)


def eager(leaves: list[Any], labels: Tensor, scale: float = 1.0, cap: float | None = None, **options: Any) -> Tensor:
    logits = F.linear(*leaves)
    logits = (logits.float() if logits.dtype == torch.bfloat16 else logits) * scale
    return F.cross_entropy(logits if cap is None else cap * torch.tanh(logits), labels, **options)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("reduction", slow_but(["mean"], ["none", "sum", "mean"]))
def test_every_option_equals_eager(dtype: torch.dtype, reduction: str) -> None:
    weights = torch.rand(130, dtype=torch.promote_types(dtype, torch.float32))
    both = (False, True)
    for smoothed, weighted, bias, capped, chunk in itertools.product(both, both, both, both, (1, 5, 100)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1 if smoothed else 0.0}
        options |= {"weight": weights} if weighted else {}
        options |= {"scale": 0.5, "cap": 3.0} if capped else {}
        compare(13, 130, chunk, dtype, bias, **options)


def compare(tokens: int, classes: int, chunk: int, dtype: torch.dtype, bias: bool, **options: Any) -> None:
    """The same loss and gradients as eager. `options` have torch's names."""
    labels = options.pop("labels", labels_of(tokens, classes))
    ours, theirs = (operands(tokens, classes, dtype, bias) for _ in range(2))
    renamed = {("class_weight" if key == "weight" else key): value for key, value in options.items()}
    found = chunked_cross_entropy(*ours, labels, chunk, **renamed)  # type: ignore[arg-type]
    want = eager(theirs, labels, **options)
    grad = torch.linspace(0.5, 1.5, want.numel(), dtype=want.dtype).reshape(want.shape)
    found.backward(grad)
    want.backward(grad)
    for a, b in [(found, want), *((a.grad, b.grad) for a, b in zip(ours, theirs) if a is not None and b is not None)]:
        assert a is not None and b is not None and a.dtype == b.dtype
        size = float(b.detach().nan_to_num().abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES[dtype] * max(size, 1e-3), equal_nan=True)


@given(
    st.integers(1, 40), st.integers(2, 300), st.integers(1, 50), st.floats(0, 1), st.integers(0, 99),
    st.sampled_from(["none", "sum", "mean"]), st.sampled_from([0.0, 0.2]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_shape_and_any_ignored_labels_equal_eager(
    tokens: int, classes: int, chunk: int, ignored: float, seed: int, reduction: str, smoothing: float
) -> None:
    labels = labels_of(tokens, classes, ignored, seed)
    compare(
        tokens, classes, chunk, torch.float64, bool(seed % 2), labels=labels, reduction=reduction,
        label_smoothing=smoothing,
    )  # fmt: skip


def test_a_chunk_without_targets_and_no_targets_at_all() -> None:
    labels = labels_of(12, 90, 0.0)
    labels[4:8] = -100
    compare(12, 90, 4, torch.float64, False, labels=labels)
    compare(12, 90, 4, torch.float64, False, labels=torch.full((12,), -100), reduction="sum")
    nothing = torch.full((12,), 7)
    compare(12, 90, 4, torch.float64, False, labels=nothing, ignore_index=7)  # NaN, as in eager


def test_frozen_operands_get_no_gradient() -> None:
    for frozen in range(3):
        leaves = operands(9, 70, torch.float32, True)
        leaves[frozen] = leaves[frozen].detach()  # type: ignore[union-attr]
        chunked_cross_entropy(*leaves, labels_of(9, 70), 4).backward()  # type: ignore[arg-type]
        assert [leaf.grad is None for leaf in leaves if leaf is not None] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_product_is_low_and_the_loss_is_not(dtype: torch.dtype) -> None:
    ours, theirs = (operands(13, 130, dtype, True) for _ in range(2))
    labels = labels_of(13, 130)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(*ours, labels, 5)  # type: ignore[arg-type]
        want = F.cross_entropy(F.linear(*theirs), labels)  # type: ignore[arg-type]
    found.backward()
    want.backward()
    assert found.dtype == want.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
    for a, b in zip(ours, theirs):
        assert a is not None and b is not None and a.grad is not None and b.grad is not None
        assert a.grad.dtype == b.grad.dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-2 * float(b.grad.abs().max()))


def test_no_more_logits_than_those_of_a_chunk_are_alive() -> None:
    tokens, classes, chunk = 96, 4096, 8
    leaves, labels = operands(tokens, classes, torch.float32, False), labels_of(tokens, classes)
    with Peak() as forward:
        loss = chunked_cross_entropy(*leaves, labels, chunk)  # type: ignore[arg-type]
    with Peak() as backward:
        loss.backward()
    small = 64 * tokens * 8  # vectors of a number per token, and the hidden values
    assert forward.most <= chunk * classes * 4 + small
    assert backward.most <= (chunk * classes + classes * 8) * 4 + tokens * 64 * 4 + small


@pytest.mark.parametrize("wrong", [130, -1, 10**6])
def test_a_label_out_of_range_is_refused_as_in_eager(wrong: int) -> None:
    leaves, labels = operands(13, 130, torch.float32, False), labels_of(13, 130)
    labels[7] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        eager(leaves, labels)
    with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds; allowed are 0 to 129, or -100"):
        chunked_cross_entropy(*leaves, labels, 5)  # type: ignore[arg-type]
