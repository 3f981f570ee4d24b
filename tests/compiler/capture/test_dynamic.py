"""A model that does one thing for some sizes and another for others is refused with its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.dynamic import DynamicDims, SizeBranch
from penstock.compiler.capture.trace import trace
from penstock.ir.program import SizeRange

DIMS = {"x": (("rows", 1), ("length", 1), None)}


class Model(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.run = nn.Linear(4, 4), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner(x)).sum()


def trace_case(run: Callable[[Tensor], Tensor], least: int = 2, most: int = 64) -> None:
    ranges = {"rows": SizeRange(2, 8), "length": SizeRange(least, most)}
    trace(Model(run), {"x": torch.zeros(4, 32, 4)}, dynamic=DynamicDims(ranges, DIMS))


def long_only(h: Tensor) -> Tensor:
    if h.shape[1] > 16:  # the branch
        h = h * 2
    return h


def test_a_branch_on_the_length_names_its_line_and_the_ranges_on_its_sides() -> None:
    with pytest.raises(SizeBranch) as caught:
        trace_case(long_only)
    text = str(caught.value)
    assert "test_dynamic.py" in text and "if h.shape[1] > 16:  # the branch" in text
    assert "length may be 2 to 64. One program holds for 17 to 64" in text
    assert 'torch.export.Dim("length", min=..., max=...)' in text
    assert caught.value.size == "length"


def test_on_one_side_of_a_branch_one_program_holds() -> None:
    trace_case(long_only, least=17)
    with pytest.raises(SizeBranch):
        trace_case(long_only, least=16)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda h: h.view(h.shape[0], 8, 4, 4), "length was fixed to 32"),
        (lambda h: h + 1 if h.shape[0] == h.shape[1] else h, "one thing where"),
        (lambda h: h.view(h.shape[0], h.shape[1] // 8, 8, 4) if h.shape[1] % 8 == 0 else h, "holds for 8, 16, 24"),
    ],
)  # fmt: skip
def test_what_fixes_a_size_is_named(run: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(SizeBranch, match=words):
        trace_case(run)


class Positions(Model):
    def __init__(self) -> None:
        super().__init__(lambda h: h)
        self.table = nn.Parameter(torch.zeros(48, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.table[: x.shape[1]]).sum()  # the table


def test_a_table_of_positions_says_how_long_a_sequence_may_be() -> None:
    """Torch's own kernels compare the length with the table's; the line is the model's all the same."""
    dims = DynamicDims({"rows": SizeRange(2, 8), "length": SizeRange(2, 64)}, DIMS)
    with pytest.raises(SizeBranch, match=r"(?s)test_dynamic.py.*# the table.*One program holds for 2 to 48"):
        trace(Positions(), {"x": torch.zeros(4, 32, 4)}, dynamic=dims)


def test_a_branch_on_multiples_is_found_in_a_range_that_is_too_wide_to_look_at_whole() -> None:
    """Sizes at even distances could all be multiples of what the model asks for."""
    with pytest.raises(SizeBranch, match="one thing where"):
        trace_case(lambda h: h + 1 if h.shape[1] % 8 == 0 else h, least=16, most=16 + 8 * (1 << 16))
