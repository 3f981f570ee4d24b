"""`penstock reproduce`: a paper's tables and figures beside the simulator's results for our own programs.

Each paper is a module with its experiments and its findings. A finding is a function from the experiments to rows
"paper, ours, verdict", with the rule by which both numbers count, the reason if they differ, and charts. Each paper has
one table of assumptions.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..ir.errors import PlanError
from .figures import Chart, check_drawable, draw
from .rule import (
    DERIVED,
    DIFFERS,
    FITTED,
    MEASURED,
    NEAR,
    NEARER,
    ORDER,
    FigureRow,
    Tally,
    marked,
    tally,
    without_finding,
)

if TYPE_CHECKING:
    from rich.table import Table

    from .experiments import Experiments

__all__ = ["PAPERS", "check_drawable", "markdown_table", "reproduce", "tables", "to_json", "to_stderr", "write"]
PAPERS = ("mobius", "ftpipe", "fuyou", "mics")
FACTORS = ("factor", "what it is")
COLUMNS = ("setting", "number", "paper", "ours", "kind", "verdict")
KINDS = (
    f"- *{MEASURED}*: the paper prints this number. Ours agrees within {NEAR:.0%} of it, above and below. Only these",
    "  are counted.",
    f"- *{ORDER}*: which of two is larger, what fits, a bound on one side, words.",
    f"- *{FITTED}*: something of a machine was fitted to the row or its claim. *{DERIVED}*: true by construction,",
    "  or it follows from other numbers of the paper.",
    "- A claim is judged in one row and in brackets elsewhere. A range over several settings is two numbers: the",
    "  lowest and the highest of ours are judged by its ends. *With ...: number* is the row after that one change.",
)


@dataclass(frozen=True)
class Finding:
    """One table or figure. `reason` says what its rows that differ have in common, and is shown only if some do; each
    such row has its own reason besides."""

    key: str
    title: str
    claim: str
    rule: str
    rows: Sequence[FigureRow]
    reason: str = ""
    charts: Sequence[Chart] = ()

    @property
    def differs(self) -> bool:
        return any(row.verdict == DIFFERS for row in self.rows)

    @property
    def reason_given(self) -> str:
        return self.reason if self.differs else ""


@dataclass(frozen=True)
class Report:
    paper: str
    title: str
    assumptions: Mapping[str, str]
    findings: Sequence[Finding]
    factors: Mapping[str, str] = field(default_factory=dict)  # what stands for the framework -> what it is
    left_out: Mapping[str, str] = field(default_factory=dict)  # figure -> why it is not simulated
    made_from: Mapping[str, Any] = field(default_factory=dict)  # see `freshness`

    @property
    def tally(self) -> Tally:
        return tally(row for finding in self.findings for row in finding.rows)


class Paper(Protocol):
    """The names that a paper's module defines."""

    EXPERIMENTS: type[Experiments]
    FINDINGS: Sequence[Callable[[Any], Finding]]  # their names are the keys
    FITTED: Mapping[str, str]  # "key", "key: setting" or "key: setting, quantity" -> what was fitted to these rows


def paper_module(name: str) -> Paper:
    """Import a paper's module. Raises `PlanError` for an unknown paper."""
    if name not in PAPERS:
        raise PlanError(f"no paper {name!r}; allowed are {', '.join(PAPERS)}")
    return cast("Paper", importlib.import_module(f"{__package__}.{name}"))


def reproduce(
    name: str,
    only: Sequence[str] = (),
    setup: type[Experiments] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Make all findings of a paper, or those whose keys are in `only`. `say` gets texts about the progress.

    Raises `PlanError` for an unknown paper or key.
    """
    from .freshness import made_from
    from .lab import Lab

    paper = paper_module(name)
    makers = {maker.__name__: maker for maker in paper.FINDINGS}
    unknown = [key for key in only if key not in makers]
    if unknown:
        raise PlanError(f"--only {unknown[0]!r}: {name} has {', '.join(makers)}")
    if odd := without_finding(paper.FITTED, makers):
        raise PlanError(f"FITTED names {odd[0]!r}: {name} has {', '.join(makers)}")
    experiments = (setup or paper.EXPERIMENTS)(Lab(say))
    findings = []
    for key in only or makers:
        say(f"{key} ...")
        found = makers[key](experiments)
        findings.append(replace(found, rows=marked(key, found.rows, paper.FITTED)))
    made = made_from(name, experiments)
    told = experiments.factors, experiments.left_out
    return Report(name, experiments.title, experiments.assumptions(), findings, *told, made)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- output ------------------------------------------------------------------------------------------------------------


def tables(report: Report) -> Iterator[Table]:
    """Tables for a terminal: the assumptions, one table per finding, and the figures that are not simulated."""
    from ..cli.tables import table

    yield table(
        f"{report.title}: assumptions, the same for every figure", ("what", "assumed"), [*report.assumptions.items()]
    )
    for finding in report.findings:
        rows = [row.cells for row in finding.rows]
        made = table(f"{finding.key}: {finding.title}", COLUMNS, rows)
        made.caption = f"The paper: {finding.claim}\nCounted: {finding.rule}"
        made.caption += "".join(f"\n{line}" for line in reasons(finding))
        made.caption_justify = "left"
        yield made
    if report.left_out:
        yield table("not simulated", ("figure", "why"), [*report.left_out.items()])


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data, without the charts."""
    findings = [{k: v for k, v in asdict(f).items() if k != "charts"} | {"differs": f.differs} for f in report.findings]
    return {
        "paper": report.paper,
        "title": report.title,
        "assumptions": report.assumptions,
        "factors": report.factors,
        "findings": findings,
        "left_out": report.left_out,
        "tally": asdict(report.tally),
        "made_from": report.made_from,
    }


def write(report: Report, out: Path) -> list[Path]:
    """Write README.md, rows.json and every chart (PNG, SVG) into `out`. Raises `PlanError` without matplotlib."""
    import json

    out.mkdir(parents=True, exist_ok=True)
    written = [path for finding in report.findings for chart in finding.charts for path in draw(chart, out)]
    (out / "rows.json").write_text(json.dumps(to_json(report), indent=1) + "\n")
    (out / "README.md").write_text(markdown(report))
    return [out / "README.md", out / "rows.json", *written]


def markdown(report: Report) -> str:
    """The report as a page that refers to the charts beside it."""
    counts = report.tally
    lines = [
        f"# {report.title}",
        "",
        f"Made by `penstock reproduce {report.paper} --out docs/reproduce/{report.paper}`: our own programs, planned "
        "and",
        "simulated on the papers' machines. Nothing ran on a GPU.",
        "",
        f"**{counts.said}** within {NEAR:.0%}. Of the others {counts.checked} of {counts.measured - counts.agreeing} "
        "have a reason that was checked: what it names was changed,",
        f"and the number came nearer by {NEARER:.0%} of the way at least.",
        f"Not counted: {counts.ordered} claims of order, of which {counts.in_order} agree, "
        f"{counts.fitted} fitted rows and {counts.derived} derived ones.",
        "",
        *KINDS,
        "",
        "## Assumptions, the same for every figure",
        "",
        *markdown_table(("what", "assumed"), [*report.assumptions.items()]),
    ]
    if report.factors:
        lines += ["", "## What stands for the framework", "", *markdown_table(FACTORS, [*report.factors.items()])]
    rows_of = [(finding.key, row) for finding in report.findings for row in finding.rows]
    for kind, title, what in (
        (FITTED, "Fitted, once, and not counted", "what was fitted to it"),
        (DERIVED, "Derived, and not counted", "what it follows from"),
    ):
        if some := [(f"{key}: {r.setting}, {r.quantity}", r.follows) for key, r in rows_of if r.kind == kind]:
            lines += ["", f"## {title}", "", *markdown_table(("row", what), some)]
    for finding in report.findings:
        rows = [row.cells for row in finding.rows]
        lines += ["", f"## {finding.key}: {finding.title}", "", f"*The paper:* {finding.claim}", ""]
        lines += [f"*Counted:* {finding.rule}", ""]
        lines += markdown_table(COLUMNS, rows)
        lines += ["", *reasons(finding, "- **{}:** {}")] if finding.differs else []
        for chart in finding.charts:
            lines += ["", f"![{chart.title}]({chart.name}.svg)"]
    if report.left_out:
        lines += ["", "## Not simulated", "", *markdown_table(("figure", "why"), [*report.left_out.items()])]
    return "\n".join(lines) + "\n"


def reasons(finding: Finding, form: str = "{}: {}") -> list[str]:
    """A line about what differs, and one for each row that does."""
    shared = [form.format("Why ours differs", finding.reason_given)] if finding.reason_given else []
    rows = [row for row in finding.rows if row.verdict == DIFFERS and (row.why or row.checks)]
    return shared + [form.format(f"{row.setting}, {row.quantity}", reason(row)) for row in rows]


def reason(row: FigureRow) -> str:
    """The reason why a row differs, and its number after each change."""
    return "; ".join([row.why] * bool(row.why) + [f"with {check.changed}: {check.ours}" for check in row.checks])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(['---'] * len(columns))}|"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
