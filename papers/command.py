"""`penstock reproduce`: the command line finds it through the entry point `penstock.commands`."""

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
