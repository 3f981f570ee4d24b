"""Expressions of sizes: their values, and what is none."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.documents import Unreadable
from penstock.ir.program import Interface, SizeRange, StageSpec, TensorSpec, found_sizes, sizes_spec, value_of
from penstock.ir.stages.sizes import SIZES, wrong_expression


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_an_expression_has_the_value_that_python_gives_it(rows: int, sequence: int) -> None:
    sums = ("sequence", "rows*sequence - 1", "(sequence - 1)//2 + 1", "-sequence % 8")
    for text in (*sums, "max(rows, sequence) + 3", "rows**2"):
        wanted = eval(text, {"rows": rows, "sequence": sequence, "max": max})
        assert value_of(text, {"rows": rows, "sequence": sequence}) == wanted
        assert not wrong_expression(text, ["rows", "sequence"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9**9**9", "is no expression"),
        ("other", "names 'other', which is no size"),
        ("sequence.real", "is no expression"),
        ("__import__('os')", "is no expression"),
        ("sequence +", "is no expression"),
        ("1.5", "is no expression"),
        ("[sequence]", "is no expression"),
        ("sequence if sequence else 1", "is no expression"),
    ],
)
def test_text_of_strangers_is_no_expression(text: str, words: str) -> None:
    assert words in wrong_expression(text, ["sequence"])


def test_sizes_are_found_in_inputs() -> None:
    assert found_sizes([(("", "s", ""), (2, 5, 3)), (("b", "s + 1"), (7, 6)), ((), (4,))]) == {"s": 5, "b": 7}


X = TensorSpec("x", (4, 9), "float32", dims=("rows", "2*length + 1"))
SIZED = Interface(
    {"stage0": StageSpec("stage0", (X,), (), ())},
    {"x": X, SIZES: sizes_spec({"rows": 0, "length": 0})},  # type: ignore[dict-item]
    sizes={"rows": SizeRange(1, 4), "length": SizeRange(2, 4)},
)


def test_an_interface_with_sizes_is_read_back() -> None:
    assert Interface.from_json(SIZED.to_json()) == SIZED
    assert X.shape_at({"rows": 2, "length": 3}) == (2, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dims": ("rows", "other")}, "names 'other'"),
        ({"dims": ("rows",)}, "not in its shape"),
        ({"shape": (4, 10)}, r"\[4, 10\] at most, but its dimensions make \[4, 9\]"),
    ],
)
def test_dimensions_that_contradict_are_refused(change: dict[str, tuple[str, ...]], words: str) -> None:
    wrong = dataclasses.replace(X, **change)
    with pytest.raises(Unreadable, match=words):
        Interface.from_json(dataclasses.replace(SIZED, batch={**SIZED.batch, "x": wrong}).to_json())


def test_sizes_without_their_input_are_refused() -> None:
    with pytest.raises(Unreadable, match="has no micro_batch_sizes of 2 sizes"):
        Interface.from_json(dataclasses.replace(SIZED, batch={"x": X}).to_json())
    with pytest.raises(Unreadable, match="its size 'length' is 5 to 4"):
        Interface.from_json(dataclasses.replace(SIZED, sizes={**SIZED.sizes, "length": SizeRange(5, 4)}).to_json())
