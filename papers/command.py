"""`penstock reproduce` and `predict`: the command line finds them through the entry point `penstock.commands`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..ir.errors import PlanError

app = typer.Typer()
ALL = "all"


@app.command(epilog="Example: penstock reproduce mobius --only fig5,fig6 --out out/mobius")
def reproduce(
    paper: Annotated[str, typer.Argument(help="mobius, ftpipe, fuyou or mics; or all, into folders of --out")],
    out: Annotated[Path | None, typer.Option(help="write README.md, rows.json and figures to this directory")] = None,
    only: Annotated[str | None, typer.Option(help="some of its findings, such as fig5,fig9; without it: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="plain data on stdout instead of tables")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="with all: the number of papers at a time")] = 2,
) -> None:
    """A paper's tables and figures beside simulations of our own programs on its machines. Takes minutes."""
    from . import report as papers
    from .everything import pages, reproduce_all, write_summary

    if out is not None:
        papers.check_drawable()  # raise now, not after minutes of simulation
    if paper == ALL:
        if out is None or only:
            given = "no --out" if out is None else f"--only {only}"
            raise PlanError(f"reproduce all with {given}: it writes all pages; say reproduce all --out FOLDER")
        for path in reproduce_all(out, jobs):
            papers.to_stderr(f"written {path}")
        if as_json:
            print(json.dumps(pages(out), indent=1))
        return
    wanted = [key.strip() for key in (only or "").split(",") if key.strip()]
    report = papers.reproduce(paper, wanted, say=papers.to_stderr)
    if out is not None:
        for path in (*papers.write(report, out), *(write_summary(out.parent) if out.name == paper else ())):
            papers.to_stderr(f"written {path}")
    if as_json:
        print(json.dumps(papers.to_json(report), indent=1))
        return
    from ..cli.tables import console

    screen = console()
    for table in papers.tables(report):
        screen.print(table)


@app.command(
    epilog="Example: penstock predict --check bench/published.tsv --kept bench/results/predictions.jsonl "
    "--out docs/predictions.md"
)
def predict(
    check: Annotated[Path, typer.Option(help="a table of published runs: TSV with the columns of bench/published.tsv")],
    kept: Annotated[
        Path | None, typer.Option(help="JSON lines of what was simulated: read, and added to, so that a run goes on")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the page to this file")] = None,
    only: Annotated[str, typer.Option(help="rows whose text has this")] = "",
    auto: Annotated[bool, typer.Option(help="search the best plan of each row as well")] = True,
    minutes: Annotated[float, typer.Option(min=0.0, help="after which no simulation is begun")] = float("inf"),
) -> None:
    """Published runs of other systems beside simulations: as they do it, and at best. Takes minutes to hours."""
    from . import predictions
    from .report import to_stderr

    found = predictions.compare(check, kept, only, auto, 60 * minutes, to_stderr)
    if out is not None:
        given = [f"--check {check}", *([f"--kept {kept}"] if kept else []), f"--out {out}"]
        out.write_text(predictions.page(found, f"penstock predict {' '.join(given)}"))
        to_stderr(f"written {out}")
    from ..cli.tables import console, table

    screen = console()
    rows = [(cells[0], cells[1], cells[3], *cells[4:9:2], *cells[9:]) for cells in predictions.table_rows(found)]
    screen.print(table("a second", ("system", "model", "batch", "theirs", "as they do it", "auto", "their peak",
                                    "our peak", "fits"), rows))  # fmt: skip
    screen.print(table("summary", ("what", "result"), predictions.summary(found)))
