"""Rows of a mix by the shapes of operands, whatever form of an operator is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.operators.table import kernel_rows
from penstock.ir.machine.call_mix import Product

aten = torch.ops.aten
A, B, SUM = torch.zeros(3, 5), torch.zeros(5, 7), torch.zeros(3, 7)


def rows_of(func: Any, *operands: Tensor, **options: Any) -> Any:
    return kernel_rows(func, operands, options, func(*operands, **options))


@pytest.mark.parametrize(
    ("func", "operands", "options"),
    [
        (aten.mm.default, (A, B), {}),
        (aten.mm.out, (A, B), {"out": SUM}),
        (aten.addmm.default, (SUM, A, B), {}),
        (aten.addmm.out, (SUM, A, B), {"out": SUM.clone()}),
        (aten.addmm_.default, (SUM, A, B), {}),
    ],
)
def test_all_forms_of_a_product_have_one_row(func: Any, operands: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    assert rows_of(func, *operands, **options) == (Product("fp32", 3, 7, 5),)


def test_products_in_batches_have_one_row() -> None:
    a, b = A.expand(2, 3, 5), B.expand(2, 5, 7)
    assert rows_of(aten.bmm.default, a, b) == (Product("fp32", 3, 7, 5, batch=2),)
    assert rows_of(aten.baddbmm.default, SUM.expand(2, 3, 7), a, b) == (Product("fp32", 3, 7, 5, batch=2),)


def test_what_only_takes_memory_has_no_row_and_of_others_none_is_known() -> None:
    assert rows_of(aten.empty_like.default, A) == ()
    assert rows_of(aten.relu.default, A) is None
