"""Parts of parameters: cut one way, stored, and read another way."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.program import ParamSpec, RowPart, whole_params, wrong_parts
from penstock.runtime.state.part_params import PartIndex, PartJoiner, joined_rows

ROWS = 12
cuts = st.sets(st.integers(1, ROWS - 1), max_size=5).map(lambda inner: [0, *sorted(inner), ROWS])


def parts_of(rows: list[int], name: str = "table") -> dict[str, RowPart]:
    return {f"{name}[{a}:{b}]": RowPart(name, a, b, ROWS) for a, b in pairwise(rows)}


def specs_of(parts: dict[str, RowPart]) -> list[ParamSpec]:
    return [ParamSpec(name, (part.end - part.begin, 3), "float32", part=part) for name, part in parts.items()]


@given(cuts, cuts)
def test_rows_cut_one_way_are_read_another_way(before: list[int], after: list[int]) -> None:
    table = torch.arange(ROWS * 3.0).view(ROWS, 3)
    stored = {name: table[part.rows] for name, part in parts_of(before).items()}
    index = PartIndex(parts_of(before))
    for part in (None, *parts_of(after).values()):
        found = joined_rows([(stored[name], rows) for name, rows in index.pieces("table", part)])
        assert torch.equal(found, table if part is None else table[part.rows])


@given(cuts)
def test_whole_tensors_are_cut_and_joined(rows: list[int]) -> None:
    table = torch.arange(ROWS * 3.0).view(ROWS, 3)
    specs = specs_of(parts_of(rows))
    cut = {s.name: joined_rows([(table, r) for _, r in PartIndex({}).pieces("table", s.part)]) for s in specs}
    joiner, found = PartJoiner(), {}
    for spec in specs:
        assert "table" not in found
        found.update(joiner.add([spec], {spec.name: cut[spec.name], "other": table}))
    assert torch.equal(found["table"], table) and set(found) == {"table", "other"}
    assert whole_params(specs) == [ParamSpec("table", (ROWS, 3), "float32")]
    assert not list(wrong_parts(specs))


def test_parts_that_are_no_whole_parameter_are_named() -> None:
    def wrong(*rows: tuple[int, int], shape: tuple[int, ...] | None = None) -> str:
        parts = {f"table[{a}:{b}]": RowPart("table", a, b, ROWS) for a, b in rows}
        specs = specs_of(parts)
        if shape is not None:
            specs[0] = ParamSpec(specs[0].name, shape, "float32", part=specs[0].part)
        return "; ".join(wrong_parts(specs))

    assert not wrong((0, 5), (5, 12))
    assert "rows 0 to 6, 5 to 12 of 12" in wrong((0, 6), (5, 12))
    assert "rows 0 to 4, 5 to 12 of 12" in wrong((0, 4), (5, 12))
    assert "rows 0 to 5, 5 to 11 of 12" in wrong((0, 5), (5, 11))
    assert "has the shape [4, 3], but rows 0 to 5" in wrong((0, 5), (5, 12), shape=(4, 3))
