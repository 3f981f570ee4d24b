"""Words in brackets, such as `pip install 'penstock[adapters]'`, are printed as they are: no text is markup."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import click
import pytest
import typer
from rich.console import Console

import penstock
from penstock.cli.answer import print_answer
from penstock.cli.main import add_commands, app
from penstock.cli.tables import console, table
from penstock.cli.terminal.working import working
from penstock.tests.syntax import nodes_of

TEXT = "needs peft: pip install 'penstock[adapters]' :warning:"
ROOT = Path(penstock.__file__).resolve().parent
ROOMS = ("cli", "training", "integrations", "papers", "compiler", "data")


def test_answers_and_tables_print_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    screen = console()
    print_answer(screen, [f"no faster   {TEXT}"])
    screen.print(table(TEXT, (TEXT,), [(TEXT,)]))
    assert capsys.readouterr().out.count(TEXT) == 4  # the answer, a title, a heading and a cell


def test_the_line_of_a_search_prints_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120, markup=False, emoji=False)
    monkeypatch.setattr("penstock.cli.terminal.working.Console", lambda **options: terminal)
    with working() as tell:
        tell(f"with {TEXT}")
        terminal.print("a line, at which the one below is drawn again")
    assert TEXT in shown.getvalue()


def calls(file: Path) -> list[ast.Call]:
    return [node for node in nodes_of(file.read_text("utf-8")) if isinstance(node, ast.Call)]


def test_no_console_reads_markup() -> None:
    consoles = [
        (file.relative_to(ROOT), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords})
        for room in ROOMS
        for file in sorted((ROOT / room).rglob("*.py"))
        for call in calls(file)
        if isinstance(call.func, ast.Name) and call.func.id in ("Console", "Screen")
    ]
    assert len(consoles) >= 4
    assert not [str(file) for file, given in consoles if (given.get("markup"), given.get("emoji")) != ("False",) * 2]


def test_no_help_has_brackets() -> None:
    """Typer reads the markup of help texts, and offers no way to escape it in all of its forms."""
    add_commands()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    texts = [(name, command.help) for name, command in commands.items()]
    texts += [(name, command.epilog) for name, command in commands.items()]
    texts += [
        (f"{name} {param.name}", param.help)
        for name, command in commands.items()
        for param in command.params
        if isinstance(param, click.Option) or hasattr(param, "help")
    ]
    assert len(texts) > 50
    assert not [name for name, text in texts if "[" in (text or "")]
