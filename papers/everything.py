"""`penstock reproduce all`: the pages of all papers, each made by its own process, and a page that sums them up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from ..ir.errors import PenstockError
from ..runtime.children import end_with_parent, start_module
from .report import FACTORS, KINDS, PAPERS, markdown_table, reason, reproduce, to_stderr, write
from .rule import DERIVED, DIFFERS, FITTED, MEASURED, Changed, FigureRow, Tally

LONGEST_FIRST = ("mobius", "mics", "fuyou", "ftpipe")
ROWS = "rows.json"


def reproduce_all(
    out: Path, jobs: int, only: Mapping[str, Sequence[str]] | None = None, say: Callable[[str], None] = to_stderr
) -> list[Path]:
    """Write every paper's page into a folder of its name in `out`, and `out`/README.md, `jobs` papers at a time.

    `only`: findings by paper; without it, all.
    """
    written: list[Path] = []
    with ThreadPoolExecutor(jobs) as pool:
        wanted = only or {}
        calls = {paper: partial(_run_alone, paper, out / paper, wanted.get(paper, ())) for paper in LONGEST_FIRST}
        running = {pool.submit(call): paper for paper, call in calls.items()}
        for done in as_completed(running):
            written += done.result()
            say(f"{running[done]} is done")
    return [*written, *write_summary(out)]


def _run_alone(paper: str, out: Path, only: Sequence[str]) -> list[Path]:
    child = start_module(f"{__package__}.everything", [paper, str(out), *only], stdout=subprocess.PIPE, text=True)
    told, _ = child.communicate()
    if child.returncode:
        raise PenstockError(f"{paper}: its process has ended with exit code {child.returncode}, and has said why")
    return [Path(path) for path in json.loads(told)]


def _one(paper: str, out: Path, only: Sequence[str]) -> list[Path]:
    return write(reproduce(paper, only, say=lambda text: to_stderr(f"{paper}: {text}")), out)


def write_summary(out: Path) -> list[Path]:
    """Write `out`/README.md if `out` has the pages of all papers."""
    if not all((out / paper / ROWS).exists() for paper in PAPERS):
        return []
    (out / "README.md").write_text(summary(pages(out)))
    return [out / "README.md"]


def pages(out: Path) -> dict[str, dict[str, Any]]:
    """The rows.json of every paper."""
    return {paper: json.loads((out / paper / ROWS).read_text()) for paper in PAPERS}


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One page about all papers: how many rows agree, and which do not, each with its reason."""
    tallies = {paper: Tally(**page["tally"]) for paper, page in found.items()}
    whole = sum(tallies.values(), Tally())
    columns = (
        "paper", "measured", "agree", "share", "differ, reason checked", "order", "of these agree", "fitted", "derived"
    )  # fmt: skip
    rows = [_counted(f"[{_title(found[paper])}]({paper}/README.md)", counts) for paper, counts in tallies.items()]
    lines = [
        "# The papers in simulation",
        "",
        "Made by `penstock reproduce all --out docs/reproduce`. Four papers' tables and figures stand beside",
        "simulations of programs of our own on the papers' machines. Nothing ran on a GPU.",
        "",
        f"**{whole.said}.**",
        "",
        *KINDS,
        "- No row is tuned by itself: assumptions hold for all figures of a paper, and its page lists them.",
        "",
        *markdown_table(columns, [*rows, _counted("**all**", whole)]),
        "",
        "## What stands for each framework",
        "",
        *markdown_table(
            ("paper", *FACTORS), [(_title(p), *row) for p in found.values() for row in p["factors"].items()]
        ),
        "",
        "## What was fitted",
        "",
        *markdown_table(("paper", "row", "what was fitted to it, once"), _following(found, FITTED)),
        "",
        "## What follows from other rows",
        "",
        *markdown_table(("paper", "row", "what it follows from"), _following(found, DERIVED)),
        "",
        "## Where ours differs",
        "",
    ]
    for page in found.values():
        lines += [f"### {page['title']}", "", *markdown_table(DIFFERENCES, list(_differences(page))), ""]
    return "\n".join(lines).rstrip() + "\n"


DIFFERENCES = ("figure", "row", "paper", "ours", "kind", "why")


def _title(page: Mapping[str, Any]) -> str:
    return str(page["title"]).removesuffix(" in simulation")


def _counted(name: str, counts: Tally) -> Sequence[str]:
    apart = f"{counts.checked} of {counts.measured - counts.agreeing}"
    rest = counts.ordered, counts.in_order, counts.fitted, counts.derived
    return name, str(counts.measured), str(counts.agreeing), counts.share, apart, *map(str, rest)


def _rows(page: Mapping[str, Any]) -> Iterator[tuple[str, FigureRow]]:
    for finding in page["findings"]:
        for row in finding["rows"]:
            yield finding["key"], FigureRow(**row | {"checks": [Changed(**check) for check in row["checks"]]})


def _following(found: Mapping[str, Mapping[str, Any]], kind: str) -> list[Sequence[str]]:
    return [
        (_title(page), f"{key}: {row.setting}, {row.quantity}", row.follows)
        for page in found.values() for key, row in _rows(page) if row.kind == kind
    ]  # fmt: skip


def _differences(page: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The rows that differ, the measured ones first."""
    rows = [(key, row) for key, row in _rows(page) if row.verdict == DIFFERS]
    for key, row in sorted(rows, key=lambda found: found[1].kind != MEASURED):
        yield key, f"{row.setting}, {row.quantity}", row.paper, row.ours, row.kind, reason(row)


if __name__ == "__main__":
    end_with_parent()  # half an hour of a core would go on for nobody
    print(json.dumps([str(path) for path in _one(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])]))
