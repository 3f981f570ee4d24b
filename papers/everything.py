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
from ..runtime.children import start_module
from .report import PAPERS, markdown_table, reproduce, to_stderr, write
from .table import DIFFERS
from .tally import Tally

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
    whole = sum(tallies.values(), Tally(0, 0, 0, 0, 0))
    columns = ("paper", "rows with a claim", "two-sided", "agree", "share", "fitted", "sizes of models")
    rows = [
        _counted(f"[{found[paper]['title'].removesuffix(' in simulation')}]({paper}/README.md)", counts)
        for paper, counts in tallies.items()
    ]
    lines = [
        "# The papers in simulation",
        "",
        "Made by `penstock reproduce all --out docs/reproduce`. Four papers' tables and figures stand beside",
        "simulations of programs of our own on the papers' machines. Nothing ran on a GPU.",
        "",
        "- A row is *two-sided* if the paper's claim is a number or a range with two bounds. It agrees within 15% of",
        "  the number, or inside the range. Bounds on one side, and words, have verdicts but are not counted.",
        "- A claim is judged in one row. Where the number is shown in another way too, the claim is in brackets.",
        "- *Fitted* rows are those to which something of a machine's description was fitted; they are not counted.",
        "- No row is tuned by itself: assumptions hold for all figures of a paper, and its page lists them.",
        "",
        *markdown_table(columns, [*rows, _counted("**all**", whole)]),
        "",
        "## What was fitted",
        "",
        *markdown_table(FITTED, [row for page in found.values() for row in _fitted(page)]),
        "",
        "## Where ours differs",
        "",
    ]
    for page in found.values():
        lines += [f"### {page['title']}", "", *markdown_table(DIFFERENCES, list(_differences(page))), ""]
    return "\n".join(lines).rstrip() + "\n"


DIFFERENCES = ("figure", "row", "paper", "ours", "why")
FITTED = ("paper", "row", "what was fitted to it, once")


def _counted(name: str, counts: Tally) -> Sequence[str]:
    share = f"{counts.agreeing / counts.two_sided:.0%}" if counts.two_sided else ""
    numbers = counts.claimed, counts.two_sided, counts.agreeing
    return name, *map(str, numbers), share, str(counts.fitted), str(counts.sizes)


def _fitted(page: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    title = page["title"].partition(" (")[0]
    for finding in page["findings"]:
        for row in finding["rows"]:
            if row["fitted"]:
                yield title, f"{finding['key']}: {row['setting']}, {row['quantity']}", row["fitted"]


def _differences(page: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for finding in page["findings"]:
        for row in finding["rows"]:
            if row["verdict"] == DIFFERS:
                yield finding["key"], f"{row['setting']}, {row['quantity']}", row["paper"], row["ours"], row["why"]


if __name__ == "__main__":
    print(json.dumps([str(path) for path in _one(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])]))
