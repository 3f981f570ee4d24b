"""The pages under docs/reproduce say what they must and, before a release, are as new as the code that makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.papers import freshness
from penstock.papers.everything import pages, summary, write_summary
from penstock.papers.freshness import code_of, page_hash, small_steps, sources
from penstock.papers.lab import Lab
from penstock.papers.report import PAPERS, paper_module
from penstock.papers.rule import DERIVED, DIFFERS, MEASURED, Changed, FigureRow, Tally, multiples, tally

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reproduce"
FOUND = pages(PAGES)
REMEDY = "is older than the code that makes it: make papers"


@pytest.mark.release
@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_is_as_new_as_its_experiments(paper: str) -> None:
    made = FOUND[paper]["made_from"]
    assert made["hash"] == page_hash(paper, paper_module(paper).EXPERIMENTS()), f"docs/reproduce/{paper} {REMEDY}"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_has_all_findings(paper: str) -> None:
    assert [f["key"] for f in FOUND[paper]["findings"]] == [f.__name__ for f in paper_module(paper).FINDINGS]


@pytest.mark.release
@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_is_as_new_as_passes_and_simulator(paper: str) -> None:
    """Small steps of the paper's own pipelines on its own machines take what they took when the page was made."""
    now = small_steps(paper_module(paper).EXPERIMENTS(Lab()))
    assert now == pytest.approx(FOUND[paper]["made_from"]["steps"], rel=1e-6), f"docs/reproduce/{paper} {REMEDY}"


def test_the_page_of_all_sums_up_the_others() -> None:
    assert (PAGES / "README.md").read_text("utf-8") == summary(FOUND), "penstock reproduce writes it with any page"


@pytest.mark.parametrize("paper", PAPERS)
def test_each_row_that_differs_has_its_own_reason(paper: str) -> None:
    for finding in FOUND[paper]["findings"]:
        rows = [row for row in finding["rows"] if row["verdict"] == DIFFERS and row["kind"] != DERIVED]
        assert all(row["why"] for row in rows), finding["key"]
        assert len({row["why"] for row in rows}) > 1 or len(rows) < 3, f"one reason for all of {finding['key']}"


def rows_of(paper: str) -> list[FigureRow]:
    return [
        FigureRow(**row | {"checks": tuple(Changed(**check) for check in row["checks"])})
        for finding in FOUND[paper]["findings"] for row in finding["rows"]
    ]  # fmt: skip


@pytest.mark.parametrize("paper", PAPERS)
def test_numbers_that_differ_have_reasons_that_were_checked(paper: str) -> None:
    """Each has at least one change beside it, and of four in five a change brings the number nearer."""
    differing = [row for row in rows_of(paper) if row.kind == MEASURED and row.verdict == DIFFERS]
    assert [f"{row.setting}, {row.quantity}" for row in differing if not row.checks] == []
    assert sum(row.is_checked for row in differing) >= 0.8 * len(differing)


@pytest.mark.parametrize("paper", PAPERS)
def test_no_counted_row_is_true_by_construction(paper: str) -> None:
    assert list(multiples(rows_of(paper))) == []
    assert tally(rows_of(paper)) == Tally(**FOUND[paper]["tally"])


def test_the_hash_is_of_code_and_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of('"""a"""\nx = 1  # b\n\n\ndef f():\n    """c"""\n') == code_of("x=1\ndef f(): pass")
    assert code_of("x = 'a'") != code_of("x = 'b'")
    names = {path.name for path in sources("fuyou")}
    assert {"lab.py", "equations.py"} <= names and not names & {"scale.py", "traffic.py", "freshness.py"}
    experiments = paper_module("fuyou").EXPERIMENTS()
    before = page_hash("fuyou", experiments)
    monkeypatch.setattr(type(experiments), "presets", ("fuyou-a100",))
    assert page_hash("fuyou", experiments) != before
    monkeypatch.setattr(freshness, "sources", lambda name: sources(name)[1:])
    assert page_hash("mics", paper_module("mics").EXPERIMENTS()) != FOUND["mics"]["made_from"]["hash"]


def test_a_summary_needs_all_pages(tmp_path: Path) -> None:
    def leave(paper: str, page: dict[str, Any]) -> None:
        (tmp_path / paper).mkdir()
        (tmp_path / paper / "rows.json").write_text(json.dumps(page))

    for paper in PAPERS[:-1]:
        leave(paper, FOUND[paper])
    assert write_summary(tmp_path) == []
    leave(PAPERS[-1], FOUND[PAPERS[-1]])
    assert write_summary(tmp_path) == [tmp_path / "README.md"]
    assert (tmp_path / "README.md").read_text("utf-8") == summary(FOUND)


def test_the_readme_says_how_many_numbers_agree() -> None:
    whole = sum((Tally(**page["tally"]) for page in FOUND.values()), Tally())
    said = f"| four papers' numbers, in simulation | {whole.agreeing} of {whole.measured} within 15% |"
    assert said in (PAGES.parents[1] / "README.md").read_text("utf-8")
