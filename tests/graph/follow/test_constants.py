"""Rows one after the other in one sequence are apart where the values of masks and positions say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.loss import capture
from penstock.graph.follow.rows import row_facts
from penstock.graph.operators.states import Kind

ROWS, PLACES, WIDTH = 4, 3, 4
MaskOf = Callable[[nn.Module, int], Tensor]


def blocks(_: nn.Module, size: int, length: int = PLACES) -> Tensor:
    mask = torch.full((size, size), torch.finfo(torch.float32).min)
    for start in range(0, size, length):
        mask[start : start + length, start : start + length] = 0
    return mask[None, None]


def booleans(_: nn.Module, size: int) -> Tensor:
    row = torch.arange(size) // PLACES
    return row[:, None] == row[None, :]


def causal_blocks(_: nn.Module, size: int) -> Tensor:
    row = torch.arange(size) // PLACES
    return (row[:, None] == row[None, :]) & torch.ones(size, size, dtype=torch.bool).tril()


def blocks_of_two_rows(_: nn.Module, size: int) -> Tensor:
    return blocks(_, size, 2 * PLACES)


def one_key_of_another_row(_: nn.Module, size: int) -> Tensor:
    mask = blocks(_, size)
    mask[..., 0, -1] = 0
    return mask


def faint_keys(_: nn.Module, size: int) -> Tensor:
    return blocks(_, size).clamp(min=-20.0)


def causal(_: nn.Module, size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def no_keys(_: nn.Module, size: int) -> Tensor:
    """A softmax of what is all hidden is a mean over all keys."""
    return torch.full((size, size), torch.finfo(torch.float32).min)


def other_places_in_the_first_row(_: nn.Module, size: int) -> Tensor:
    mask = booleans(_, size)
    mask[0, 1] = False
    return mask


def buffer_mask(model: nn.Module, size: int) -> Tensor:
    """A checkpoint may write it."""
    return model.mask[:size, :size]  # type: ignore[index, return-value]


def parameter_mask(model: nn.Module, size: int) -> Tensor:
    return model.trained[:size, :size]  # type: ignore[index, return-value]


class Packed(nn.Module):
    """Attention over the places of all rows, one after the other."""

    def __init__(self, mask_of: MaskOf):
        super().__init__()
        self.inner, self.out, self.mask_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), mask_of
        self.register_buffer("mask", blocks(self, ROWS * PLACES)[0, 0])
        self.trained = nn.Parameter(blocks(self, ROWS * PLACES)[0, 0])

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x).flatten(0, 1)[None, None]
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask_of(self, h.shape[2]))
        return (self.out(h)[0, 0, :, 0].view(y.shape) - y).square().mean(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.losses(x, y).mean()


def kinds_of(model: nn.Module, count: int) -> set[Kind]:
    batch = {"x": torch.randn(ROWS, PLACES, WIDTH), "y": torch.randn(ROWS, PLACES)}
    facts = row_facts(lambda m: capture(model, micro_batch_spec(batch, m)), count, ROWS)
    assert facts.power == 0 or facts.couplings
    return {coupling.kind for coupling in facts.couplings}


def leak(model: Packed) -> float:
    """The gradient of the first row's loss by the other rows."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, PLACES, WIDTH, requires_grad=True)
    model.losses(x, torch.randn(ROWS, PLACES))[0].backward()
    assert x.grad is not None
    return float(x.grad[1:].abs().max())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mask_of", [blocks, booleans, causal_blocks])
def test_masks_that_part_rows(mask_of: MaskOf, count: int) -> None:
    model = Packed(mask_of)
    assert leak(model) == 0
    assert kinds_of(model, count) == set()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("mask_of", [blocks_of_two_rows, one_key_of_another_row, faint_keys, no_keys])
def test_masks_by_which_rows_meet(mask_of: MaskOf, count: int) -> None:
    model = Packed(mask_of)
    assert leak(model) > 0
    assert Kind.PAIRS in kinds_of(model, count)


@pytest.mark.parametrize("mask_of", [causal, other_places_in_the_first_row, buffer_mask, parameter_mask])
def test_masks_that_do_not_part_all_rows_alike_or_may_change(mask_of: MaskOf) -> None:
    assert Kind.PAIRS in kinds_of(Packed(mask_of), 2)


class Placed(nn.Module):
    """Adds numbers by places to rows one after the other."""

    def __init__(self, numbers_of: Callable[[nn.Module, int], Tensor]):
        super().__init__()
        self.inner, self.out, self.numbers_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), numbers_of
        self.register_buffer("frequencies", torch.zeros(WIDTH))
        self.table = nn.Parameter(torch.zeros(ROWS * PLACES, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x).flatten(0, 1)
        h = (h + self.numbers_of(self, len(h))).tanh()
        return (self.out(h).view(y.shape) - y).square().mean()


def numbers_of_each_row(model: nn.Module, size: int) -> Tensor:
    places = torch.cat([torch.arange(PLACES) for _ in range(size // PLACES)])
    return (places[:, None] * model.frequencies).cos()  # type: ignore[operator]


def numbers_over_all_rows(model: nn.Module, size: int) -> Tensor:
    """With frequencies of zero all are equal; others may come."""
    return (torch.arange(size)[:, None] * model.frequencies).cos()  # type: ignore[operator]


def numbers_of_a_table(model: nn.Module, size: int) -> Tensor:
    return model.table[:size]  # type: ignore[index, return-value]


def test_numbers_that_are_the_same_numbers_of_each_row() -> None:
    assert kinds_of(Placed(numbers_of_each_row), 2) == set()


@pytest.mark.parametrize("numbers_of", [numbers_over_all_rows, numbers_of_a_table])
def test_numbers_that_depend_on_the_row(numbers_of: Callable[[nn.Module, int], Tensor]) -> None:
    assert kinds_of(Placed(numbers_of), 2) == {Kind.ROW_NUMBER}
