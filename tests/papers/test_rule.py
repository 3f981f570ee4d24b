"""The strict rule: what a row is, how it is judged, and what counts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.papers.rule import (
    AGREES,
    DERIVED,
    DIFFERS,
    FITTED,
    MEASURED,
    ORDER,
    Changed,
    FigureRow,
    Tally,
    marked,
    multiples,
    tally,
    without_finding,
)
from penstock.papers.table import AT_LEAST_ONE, ELSEWHERE, FigureTable


def row(value: float | None, **how: Any) -> FigureRow:
    table = FigureTable()
    table.add("here", "number", value, **how)
    return table[0]


@pytest.mark.parametrize(
    ("value", "claim", "kind", "verdict"),
    [
        (1.14, 1.0, MEASURED, AGREES), (1.16, 1.0, MEASURED, DIFFERS), (0.84, 1.0, MEASURED, DIFFERS),
        (0.99, AT_LEAST_ONE, ORDER, DIFFERS), (5.0, AT_LEAST_ONE, ORDER, AGREES), (11.0, (0, 10), ORDER, DIFFERS),
        (2.0, None, "", ""), (None, 2.0, "", ""),
    ],
)  # fmt: skip
def test_kind_and_verdict(value: float | None, claim: Any, kind: str, verdict: str) -> None:
    found = row(value, claim=claim)
    assert (found.kind, found.verdict) == (kind, verdict)


def test_no_row_has_a_range() -> None:
    with pytest.raises(ValueError, match=r"two bounds, 0\.95 and 1\.3: judge its ends"):
        row(1.0, claim=(0.95, 1.3))
    assert row(1.0, claim=(0.95, 1.3), unit="x", apart=ELSEWHERE).paper == "(0.95 to 1.3x)"


def test_a_range_is_judged_by_its_ends() -> None:
    table = FigureTable()
    table.ends("all", "gain", [11.0, 12.0, 25.0], (11.3, 18.1), "%", 1, "why")
    assert [(r.quantity, r.paper, r.ours, r.kind, r.verdict) for r in table] == [
        ("gain, lowest", "11.3%", "11.0%", MEASURED, AGREES),
        ("gain, highest", "18.1%", "25.0%", MEASURED, DIFFERS),
    ]


def test_words_and_what_is_beside_do_not_count() -> None:
    table = FigureTable()
    table.words("a", "fits", "yes", "no", "since")
    table.words("a", "fits", "", "no")
    table.add("a", "b", 2.0, claim=1.0, apart=ELSEWHERE, why="no matter")
    assert [(r.kind, r.verdict, r.why) for r in table] == [(ORDER, DIFFERS, "since"), ("", "", ""), ("", "", "")]
    assert tally(table) == Tally(ordered=1)


def test_what_follows_or_is_fitted_does_not_count() -> None:
    rows = [row(1.0, claim=1.0, apart="an identity"), row(1.0, claim=1.01), row(3.0, claim=AT_LEAST_ONE)]
    assert [found.kind for found in rows] == [DERIVED, MEASURED, ORDER]
    assert tally(rows) == Tally(measured=1, agreeing=1, ordered=1, in_order=1, derived=1)
    fitted = marked("fig1", rows, {"fig1": "its disks"})
    assert [(found.kind, found.follows) for found in fitted] == [
        (DERIVED, "an identity"), (FITTED, "its disks"), (ORDER, "")
    ]  # fmt: skip
    assert tally(fitted) == Tally(ordered=1, in_order=1, fitted=1, derived=1)
    assert marked("fig1", rows, {"fig1: elsewhere": "its disks"}) == rows
    assert without_finding({"fig1: here": "", "fig2": ""}, ["fig1"]) == ["fig2"]


def test_what_a_reason_names_is_changed_where_the_row_differs() -> None:
    made: list[str] = []

    def later(name: str, value: float | None) -> Any:
        return lambda: (made.append(name), value)[1]

    checks = {"faster": later("faster", 1.5), "slower": later("slower", 3.0), "tight": later("tight", None)}
    assert not row(2.0, claim=1.0, checks={"hardly": later("", 1.95)}).is_checked
    made.clear()
    found = row(2.0, unit="x", claim=1.0, why="a link", checks=checks)
    assert found.checks == (
        Changed("faster", "1.50x", True), Changed("slower", "3.00x", False), Changed("tight", "does not fit", False)
    )  # fmt: skip
    assert found.is_checked and tally([found]).checked == 1
    assert made == ["faster", "slower", "tight"]
    assert row(1.1, claim=1.0, checks=checks).checks == () and len(made) == 3
    assert not row(2.0, claim=1.0, checks={"slower": later("", 3.0)}).is_checked


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([(0.4375, 0.4375)], ["here, number is the paper's own number"]),
        ([(1.26, 1.42), (1.26 * 0.57 / 1.42, 0.57)], ["here, number is here, number times a constant"]),
        ([(1.26, 1.42), (0.51, 0.57)], []),
    ],
)
def test_identities_and_multiples_are_found(numbers: list[tuple[float, float]], said: list[str]) -> None:
    assert list(multiples(row(value, claim=claim) for value, claim in numbers)) == said


def test_tallies_add_up() -> None:
    whole = Tally(3, 2, 1, 4, 3, 1, 0) + Tally(1, 0, 0, 1, 1, 0, 2)
    assert whole == Tally(4, 2, 1, 5, 4, 1, 2)
    assert whole.said == "2 of 4 numbers that the papers print agree (50%)" and Tally().share == ""
