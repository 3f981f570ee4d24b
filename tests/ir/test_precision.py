"""The words for a precision: names, aliases, facts, and what is said of other words."""

from __future__ import annotations

import pytest
import torch

from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import ALIASES, PRECISIONS, Precision


def test_every_name_is_known_and_aliases_become_names() -> None:
    assert all(Precision.of(name) is row and row.name == name for name, row in PRECISIONS.items())
    assert {word: Precision.of(word).name for word in ALIASES} == {
        "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-rowwise",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("bf16-ture", "bf16-true"),
        ("float32", "fp32"),
        ("fp16_mixed", "fp16-mixed"),
        ("16-mixed", "fp16-mixed"),
        ("BF16", "bf16-mixed"),
        (16, ""),
    ],
)
def test_another_word_is_refused_with_the_nearest_name(word: object, nearest: str) -> None:
    with pytest.raises(PlanError, match=f'precision={word!r}; allowed are "fp32", .*the nearest is "{nearest}'):
        Precision.of(word)


def test_autocast_is_for_mixed_precisions_alone() -> None:
    for row in PRECISIONS.values():
        with row.autocast(torch.device("cpu")):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (row.dtype if row.autocasts else torch.float32)
        assert row.input_dtype == (None if row.autocasts or row.name == "fp32" else row.dtype)


def test_a_device_has_a_rate_for_a_precision_by_its_arithmetic() -> None:
    device = Hardware.preset("mobius-topo4").devices[0]
    for row in PRECISIONS.values():
        assert device.achieved_flops(row.name) == device.achieved_flops(row.arithmetic)
