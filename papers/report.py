"""`penstock reproduce`: a paper's tables and figures beside what the simulator says of our own programs.

Each paper is a module that lists its findings: functions from a lab and a setup to rows "paper, ours, verdict" with the
rule by which both count, the reason where they differ, and a chart. Assumptions are one table per paper. Nothing is
fitted: a verdict is "agrees" where our number lies in the paper's range, or within 15% of its single number.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..ir.errors import PlanError
from .figures import Chart, check_drawable, draw

if TYPE_CHECKING:
    from rich.table import Table

    from .lab import Lab

__all__ = ["check_drawable", "reproduce", "tables", "to_json", "to_stderr", "write"]
PAPERS = ("mobius", "ftpipe", "fuyou", "mics")
NEAR = 0.15  # of a single number of the paper
AGREES, DIFFERS, NO_CLAIM = "agrees", "differs", ""


@dataclass(frozen=True)
class Row:
    """One number of a figure. `paper` is empty where the paper gives none; `value` is ours as a number."""

    setting: str
    quantity: str
    paper: str
    ours: str
    verdict: str = NO_CLAIM
    value: float | None = None


@dataclass(frozen=True)
class Finding:
    """One table or figure. `reason` says why ours differs; it is shown only where it does."""

    key: str
    title: str
    claim: str
    rule: str
    rows: Sequence[Row]
    reason: str = ""
    charts: Sequence[Chart] = ()

    @property
    def differs(self) -> bool:
        return any(row.verdict == DIFFERS for row in self.rows)


@dataclass(frozen=True)
class Report:
    paper: str
    title: str
    assumptions: Sequence[tuple[str, str]]
    findings: Sequence[Finding]
    left_out: Sequence[tuple[str, str]] = field(default_factory=list)  # figure, why no simulation speaks of it


class Paper(Protocol):
    """What a paper's module gives."""

    TITLE: str
    FULL: Any  # its setup
    FINDINGS: Mapping[str, Callable[[Lab, Any], Finding]]
    LEFT_OUT: Sequence[tuple[str, str]]

    def assumptions(self, lab: Lab, setup: Any) -> Sequence[tuple[str, str]]: ...


def number(setting: str, quantity: str, value: float | None, unit: str = "", digits: int = 2) -> Row:
    """A number of ours that the paper gives none for; None: it does not fit."""
    return Row(setting, quantity, "", spell(value, unit, digits), NO_CLAIM, value)


def between(setting: str, quantity: str, value: float, low: float, high: float, unit: str = "", digits: int = 2) -> Row:
    """Agrees where low <= value <= high; an infinite bound means "more than" or "less than"."""
    if high == float("inf"):
        paper = f"> {low:g}{unit}"
    elif low == float("-inf"):
        paper = f"< {high:g}{unit}"
    else:
        paper = f"{low:g} to {high:g}{unit}"
    return Row(setting, quantity, paper, spell(value, unit, digits), AGREES if low <= value <= high else DIFFERS, value)


def near(setting: str, quantity: str, value: float, paper: float, unit: str = "", digits: int = 2) -> Row:
    """Agrees within `NEAR` of the paper's number."""
    verdict = AGREES if abs(value / paper - 1) <= NEAR else DIFFERS
    return Row(setting, quantity, f"{paper:g}{unit}", spell(value, unit, digits), verdict, value)


def same(setting: str, quantity: str, paper: str, ours: str) -> Row:
    """Words that agree where they are the same."""
    return Row(setting, quantity, paper, ours, AGREES if paper == ours else DIFFERS)


def spell(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "does not fit" if value is None else f"{value:.{digits}f}{unit}"


def paper_module(name: str) -> Any:
    """Raises `PlanError` for a paper that is not there."""
    if name not in PAPERS:
        raise PlanError(f"no paper {name!r}; allowed are {', '.join(PAPERS)}")
    return importlib.import_module(f"{__package__}.{name}")


def reproduce(
    name: str, only: Sequence[str] = (), setup: Any = None, say: Callable[[str], None] = lambda text: None
) -> Report:
    """All findings of a paper, or those whose keys are in `only`. `say` is told of the progress.

    Raises `PlanError` for a paper or a key that is not there.
    """
    from .lab import Lab

    module: Paper = paper_module(name)
    unknown = [key for key in only if key not in module.FINDINGS]
    if unknown:
        raise PlanError(f"--only {unknown[0]!r}: {name} has {', '.join(module.FINDINGS)}")
    lab, setup = Lab(say), setup or module.FULL
    findings = []
    for key in only or module.FINDINGS:
        say(f"{key} ...")
        findings.append(module.FINDINGS[key](lab, setup))
    return Report(name, module.TITLE, module.assumptions(lab, setup), findings, module.LEFT_OUT)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- output ------------------------------------------------------------------------------------------------------------


def tables(report: Report) -> Iterator[Table]:
    """For a terminal: the assumptions, then a table per finding."""
    from ..cli.tables import table

    yield table(f"{report.title}: assumptions, the same for every figure", ("what", "assumed"), report.assumptions)
    for finding in report.findings:
        rows = [(r.setting, r.quantity, r.paper, r.ours, r.verdict) for r in finding.rows]
        made = table(f"{finding.key}: {finding.title}", ("setting", "number", "paper", "ours", ""), rows)
        made.caption = "\n".join(_caption(finding))
        made.caption_justify = "left"
        yield made
    if report.left_out:
        yield table("not simulated", ("figure", "why"), report.left_out)


def _caption(finding: Finding) -> list[str]:
    lines = [f"The paper: {finding.claim}", f"Counted: {finding.rule}"]
    return lines + [f"Why ours differs: {finding.reason}"] if finding.differs and finding.reason else lines


def to_json(report: Report) -> dict[str, Any]:
    """Plain data, without the charts."""
    findings = [{k: v for k, v in asdict(f).items() if k != "charts"} | {"differs": f.differs} for f in report.findings]
    return {
        "paper": report.paper,
        "title": report.title,
        "assumptions": dict(report.assumptions),
        "findings": findings,
        "left_out": dict(report.left_out),
    }


def write(report: Report, out: Path) -> list[Path]:
    """README.md, rows.json, and every chart as PNG and SVG, below `out`. Raises `PlanError` without matplotlib."""
    import json

    out.mkdir(parents=True, exist_ok=True)
    written = [path for finding in report.findings for chart in finding.charts for path in draw(chart, out)]
    (out / "rows.json").write_text(json.dumps(to_json(report), indent=1) + "\n")
    (out / "README.md").write_text(markdown(report))
    return [out / "README.md", out / "rows.json", *written]


def markdown(report: Report) -> str:
    """The report as a page, beside which the charts lie."""
    counted = [row.verdict for finding in report.findings for row in finding.rows]
    lines = [
        f"# {report.title}",
        "",
        f"Made by `penstock reproduce {report.paper} --out docs/reproduce/{report.paper}`: our own programs, planned "
        "and",
        "simulated on the papers' machines. Nothing ran on a GPU. A verdict is *agrees* where our number lies in the "
        "paper's",
        f"range, or within {NEAR:.0%} of its single number; of {len(counted) - counted.count(NO_CLAIM)} rows that have "
        f"one, {counted.count(AGREES)} agree. Where ours differs, the reason stands below the table.",
        "",
        "## Assumptions, the same for every figure",
        "",
        *_markdown_table(("what", "assumed"), report.assumptions),
    ]
    for finding in report.findings:
        rows = [(r.setting, r.quantity, r.paper, r.ours, r.verdict) for r in finding.rows]
        lines += ["", f"## {finding.key}: {finding.title}", "", f"*The paper:* {finding.claim}", ""]
        lines += [f"*Counted:* {finding.rule}", ""]
        lines += _markdown_table(("setting", "number", "paper", "ours", "verdict"), rows)
        if finding.differs and finding.reason:
            lines += ["", f"*Why ours differs:* {finding.reason}"]
        for chart in finding.charts:
            lines += ["", f"![{chart.title}]({chart.name}.svg)"]
    if report.left_out:
        lines += ["", "## Not simulated", "", *_markdown_table(("figure", "why"), report.left_out)]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(['---'] * len(columns))}|"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
