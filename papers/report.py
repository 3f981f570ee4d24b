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
from .table import DIFFERS, NEAR, FigureRow
from .tally import Tally, marked, tally, without_finding

if TYPE_CHECKING:
    from rich.table import Table

    from .experiments import Experiments

__all__ = ["PAPERS", "check_drawable", "markdown_table", "reproduce", "tables", "to_json", "to_stderr", "write"]
PAPERS = ("mobius", "ftpipe", "fuyou", "mics")


@dataclass(frozen=True)
class Finding:
    """One table or figure. `reason` says what its rows that differ have in common, and is shown only if some do; each
    such row has its own reason besides. `sizes`: the rows only say which models these are."""

    key: str
    title: str
    claim: str
    rule: str
    rows: Sequence[FigureRow]
    reason: str = ""
    charts: Sequence[Chart] = ()
    sizes: bool = False

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
    left_out: Mapping[str, str] = field(default_factory=dict)  # figure -> why it is not simulated
    made_from: Mapping[str, Any] = field(default_factory=dict)  # see `freshness`

    @property
    def tally(self) -> Tally:
        return sum((tally(f.rows, f.sizes) for f in self.findings), Tally(0, 0, 0, 0, 0))


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
    return Report(name, experiments.title, experiments.assumptions(), findings, experiments.left_out, made)


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
        made = table(f"{finding.key}: {finding.title}", ("setting", "number", "paper", "ours", ""), rows)
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
        "simulated on the papers' machines. Nothing ran on a GPU. A verdict is *agrees* where our number lies in the "
        "paper's",
        f"range, or within {NEAR:.0%} of its single number. Where ours differs, the reason stands below the table. A "
        "claim in",
        "brackets is judged in another row.",
        "",
        f"**{counts.said}**: those whose claim is a number or a range with two bounds. Not counted: {counts.fitted} "
        "rows to",
        f"which the machine was fitted, {counts.sizes} sizes of models, and claims with one bound or in words. All "
        f"{counts.claimed} rows with",
        "a claim have a verdict.",
        "",
        "## Assumptions, the same for every figure",
        "",
        *markdown_table(("what", "assumed"), [*report.assumptions.items()]),
    ]
    rows_of = ((finding.key, row) for finding in report.findings for row in finding.rows)
    if fitted := [(f"{key}: {row.setting}, {row.quantity}", row.fitted) for key, row in rows_of if row.fitted]:
        lines += ["", "## Fitted, once, and not counted", "", *markdown_table(("row", "what was fitted to it"), fitted)]
    for finding in report.findings:
        rows = [row.cells for row in finding.rows]
        lines += ["", f"## {finding.key}: {finding.title}", "", f"*The paper:* {finding.claim}", ""]
        lines += [f"*Counted:* {finding.rule}", ""]
        lines += markdown_table(("setting", "number", "paper", "ours", "verdict"), rows)
        lines += ["", *reasons(finding, "- **{}:** {}")] if finding.differs else []
        for chart in finding.charts:
            lines += ["", f"![{chart.title}]({chart.name}.svg)"]
    if report.left_out:
        lines += ["", "## Not simulated", "", *markdown_table(("figure", "why"), [*report.left_out.items()])]
    return "\n".join(lines) + "\n"


def reasons(finding: Finding, form: str = "{}: {}") -> list[str]:
    """A line about what differs, and one for each row that does."""
    shared = [form.format("Why ours differs", finding.reason_given)] if finding.reason_given else []
    rows = [row for row in finding.rows if row.verdict == DIFFERS and row.why]
    return shared + [form.format(f"{row.setting}, {row.quantity}", row.why) for row in rows]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(['---'] * len(columns))}|"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
