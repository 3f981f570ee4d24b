"""Global batches: their tensors by name, what is cut into micro-batches, what a later batch may not change."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.batches.shape import (
    BatchShape,
    flatten,
    micro_batch_spec,
    number_of_rows,
    program_inputs,
    rows_of_leaves,
)
from penstock.ir.errors import BatchError, PlanError


class Model(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.mean()


MODEL = Model()
Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("batch", "names", "flags"),
    [
        ({"x": torch.zeros(4)}, ["x"], {}),
        ({"x": torch.zeros(4), "mask": None, "n": 3}, ["x"], {"mask": "None", "n": "3"}),
        ((torch.zeros(4), torch.zeros(4)), ["x", "mask"], {}),
        ((torch.zeros(4), torch.zeros(4), torch.zeros(4)), ["x", "mask", "batch_2"], {}),
        (torch.zeros(4), ["x"], {}),
        ({"x": {"a": torch.zeros(4), "b": [torch.zeros(4), True]}}, ["x_a", "x_b_0"], {"x_b_1": "True"}),
        ({"x": Pair(torch.zeros(4), torch.zeros(4))}, ["x_0", "x_1"], {}),
        (
            {"input": torch.zeros(4), "class": torch.zeros(4), "2d": torch.zeros(4)},
            ["input_", "class_", "input_2d"],
            {},
        ),
        ({"x": {"shape": [4], "dtype": "int64"}}, ["x"], {}),
    ],
)
def test_leaves_by_name(batch: Any, names: list[str], flags: dict[str, str]) -> None:
    tensors, found = flatten(MODEL, batch)
    assert list(tensors) == names and found == flags


def test_micro_batches_keep_the_nest() -> None:
    batch = {"x": torch.zeros(8, 3), "nested": [Pair(torch.zeros(8, dtype=torch.long), 5), None], "mask": None}
    spec = micro_batch_spec(batch, 4)
    assert spec["x"] == {"shape": [2, 3], "dtype": "float32"}
    assert spec["nested"][0] == Pair({"shape": [2], "dtype": "int64"}, 5) and spec["nested"][1] is spec["mask"] is None
    assert micro_batch_spec({"shape": [8, 2], "dtype": torch.int64}, 2) == {"shape": [4, 2], "dtype": "int64"}


def test_shapes() -> None:
    shape = BatchShape.from_inputs(MODEL, {"x": torch.zeros(6, 2), "mask": {"shape": (6,), "dtype": "bool"}})
    assert shape.size == 6 and shape.leaves["mask"] == ((6,), torch.bool)
    for count in (1, 2, 3, 6):
        shape.check_divisible(count)
    for count, near in ((4, "2, 3"), (5, "3, 6"), (12, "3, 6"), (0, "1, 2"), (-1, "1, 2")):
        with pytest.raises(PlanError, match=f"micro_batches={count} .* nearest that do: {near}$"):
            shape.check_divisible(count)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.zeros(4), "mask": torch.zeros(5)}, "'mask'.*first dimension 5, 'x' has 4"),
        ({"x": torch.zeros(4), "mask": torch.zeros(())}, "'mask'.*first dimension none.*micro_batches=1 takes"),
        ({"x": torch.zeros(4), "mask": torch.zeros(0)}, "'mask'.*first dimension 0.*same at every step$"),
        ({"x": torch.zeros(0)}, "no rows: 'x' has first dimension 0"),
        ({}, "no tensor"),
        ((), "no tensor"),
        ({"x": 3}, "no tensor"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        BatchShape.from_inputs(MODEL, batch)


def test_a_batch_that_cannot_be_cut_is_taken_whole_by_one_micro_batch() -> None:
    edges = {"nodes": torch.zeros(4, 3), "edges": torch.zeros(2, 9, dtype=torch.long), "weights": torch.zeros(9)}
    boxes = {"images": torch.zeros(4, 3), "labels": [{"boxes": torch.zeros(4, 2)} for _ in range(4)]}
    masks = {"images": torch.zeros(4, 3), "masks": [torch.zeros(2, 8) for _ in range(4)]}
    timestep = {"x": torch.zeros(4, 3), "timestep": torch.tensor(7)}
    for batch, said in (
        (edges, "'weights'.*micro_batches=1"),
        (timestep, "'timestep'.*first dimension none.*micro_batches=1"),
        (masks, "'masks_0'.*first dimension 2, 'images' has 4.*micro_batches=1"),
        (boxes, "'labels'.*list.*each row.*micro_batches=1"),
    ):
        with pytest.raises(PlanError, match=said):
            BatchShape.from_inputs(MODEL, batch)
        shape = BatchShape.from_inputs(MODEL, batch, one=True)
        assert shape.is_whole and shape.size == 1 and not shape.wide
        assert shape.check(MODEL, batch).keys() == shape.leaves.keys()
        with pytest.raises(PlanError, match="micro_batches=2"):
            shape.check_divisible(2)
    for batch in (edges, timestep):
        assert rows_of_leaves(BatchShape.from_inputs(MODEL, batch, one=True).leaves) == 1
    assert not BatchShape.from_inputs(MODEL, {"x": torch.zeros(4)}, one=True).is_whole


def test_a_tensor_without_dimensions_is_an_entry_of_the_program_and_keeps_its_shape_in_batches() -> None:
    batch = {"x": torch.zeros(4, 3), "timestep": torch.tensor(7)}
    shape = BatchShape.from_inputs(MODEL, batch, one=True)
    assert shape.leaves["timestep"] == ((), torch.int64) and shape.entries("timestep", shape.size) == 1
    assert micro_batch_spec(batch, 1)["timestep"] == {"shape": [], "dtype": "int64"}
    assert program_inputs(shape.check(MODEL, batch))["timestep"].shape == (1,)
    with pytest.raises(BatchError, match=r"'timestep'\] is torch.int64\[1\], compiled for torch.int64\[\]"):
        shape.check(MODEL, {**batch, "timestep": torch.tensor([7])})


def test_an_input_with_several_entries_for_each_row_is_cut_by_its_own_count() -> None:
    batch = {"patches": torch.zeros(32, 3), "ids": torch.zeros(8, 2), "labels": torch.zeros(8)}
    shape = BatchShape.from_inputs(MODEL, batch)
    assert shape.size == 8 and shape.wide == {"patches": 4} and shape.entries("patches", 2) == 8
    assert micro_batch_spec(batch, 4)["patches"] == {"shape": [8, 3], "dtype": "float32"}
    assert shape.check(MODEL, batch).keys() == batch.keys()
    part = {name: value[: len(value) // 2] for name, value in batch.items()}
    assert shape.check(MODEL, part, part_size=4).keys() == batch.keys()
    for wrong, said in (
        ({**part, "patches": batch["patches"]}, "'ids'.*allowed are 8 rows, or the 4 of this rank's lane"),
        ({**batch, "patches": torch.zeros(28, 3)}, "'patches'.*allowed are 32 rows, or the 16 of"),
    ):
        with pytest.raises(BatchError, match=said):
            shape.check(MODEL, wrong, part_size=4)


@pytest.mark.parametrize(
    ("sizes", "rows"), [([4, 4, 64], 4), ([64, 64, 4], 4), ([4, 1], 4), ([1, 1], 1), ([4, 6, 4], 4), ([0, 4], 4)]
)
def test_the_number_of_rows(sizes: list[int], rows: int) -> None:
    assert number_of_rows(sizes) == rows


def test_arrays_of_other_libraries() -> None:
    with pytest.raises(BatchError, match=r"'x'\] is a ndarray; pass a torch\.Tensor"):
        BatchShape.from_inputs(MODEL, {"x": np.zeros((4, 2))})


def test_a_later_batch() -> None:
    shape = BatchShape.from_inputs(MODEL, {"x": torch.zeros(4, 2), "mask": None})
    good = {"mask": None, "x": torch.ones(4, 2)}
    assert torch.equal(shape.check(MODEL, good)["x"], good["x"])
    for wrong, said in (
        ({"x": torch.ones(4, 3), "mask": None}, r"'x'\] is torch.float32\[4, 3\], compiled for torch.float32\[4, 2\]"),
        (
            {"x": torch.ones(4, 2, dtype=torch.float64), "mask": None},
            "has dtype torch.float64, compiled for torch.float32",
        ),
        (
            {"x": torch.ones(3, 2, dtype=torch.float64), "mask": None},
            "has dtype torch.float64, compiled for torch.float32",
        ),
        ({"x": torch.ones(4, 2), "mask": torch.ones(4)}, "mask, which was not compiled; expected x"),
        ({"x": torch.ones(4, 2)}, "'mask'.*absent, compiled as None"),
        ({"mask": None}, "lacks x; it has no tensor"),
    ):
        with pytest.raises(BatchError, match=said):
            shape.check(MODEL, wrong)


def test_a_key_that_ends_in_a_number_is_no_entry_of_a_list() -> None:
    shape = BatchShape.from_inputs(MODEL, {"x": torch.zeros(4, 2), "mode": "a", "mode_2": "b"})
    with pytest.raises(BatchError, match=r"^batch\['mode_2'\] is absent, compiled as "):
        shape.check(MODEL, {"x": torch.zeros(4, 2), "mode": "a"})


def test_a_value_in_a_list_is_named_as_the_script_writes_it() -> None:
    def batch(texts: list[str], sizes: list[int]) -> dict[str, object]:
        return {"x": torch.zeros(4, 2), "texts": texts, "image": {"sizes": sizes, "kind": 7}}

    shape = BatchShape.from_inputs(MODEL, batch(["a"] * 4, [1, 2]))
    for texts, sizes, said in (
        (["a"] * 3, [1, 2], r"^batch\['texts'\] has 3 entries, compiled with 4; "),
        (["a"] * 11, [1, 2], r"^batch\['texts'\] has 11 entries, compiled with 4; "),
        ([], [1, 2], r"^batch\['texts'\] has 0 entries, compiled with 4; "),
        (["a"] * 4, [1, 2, 3], r"^batch\['image'\]\['sizes'\] has 3 entries, compiled with 2; "),
        (["a", "b", "a", "a"], [1, 2], r"^batch\['texts'\]\[1\] is 'b', compiled as 'a'; "),
        (["a"] * 4, [1, 5], r"^batch\['image'\]\['sizes'\]\[1\] is 5, compiled as 2; "),
    ):
        with pytest.raises(BatchError, match=said):
            shape.check(MODEL, batch(texts, sizes))
