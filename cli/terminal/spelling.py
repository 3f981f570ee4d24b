"""Advice in the spelling of the command line: `--micro-batches 1` in place of `micro_batches=1`.

Refusals, warnings and remarks name the arguments of `penstock.compile` as Python writes them. In: such a text. Out: the
same text with options in the place of arguments. Arguments inside a call, `compile(..., plan=job.plan)`, stay.
"""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

# Arguments that are options of other names, and those that are options of their own.
OPTIONS = {"ssd_dirs": "ssd-dir", "timeout_s": "timeout", "search_s": "search-seconds"} | {
    name: name.replace("_", "-")
    for name in (
        "hardware", "batch", "sequence", "micro_batches", "precision", "gradient_dtype", "boundary_dtype", "strategy",
        "plan", "profile", "max_grad_norm", "ssd_verify", "kernels", "compile_stages", "cuda_graphs", "seed",
    )
}  # fmt: skip
FIGURES = ("memory", "dram")  # of a machine, in quotes: --set keeps them as they are
LEFT_OUT = {"micro_batches": "auto", "max_grad_norm": "None", "profile": "None"}  # values that no option has
_VALUE = r"""("[^"]*"|'[^']*'|\[[^][]*\]|\.\.\.|[\w+-]+(?:\.\w+)*)"""
_ARGUMENT = re.compile(rf"""(?<![\w.,{{'"-])({'|'.join((*OPTIONS, *FIGURES))})(?:={_VALUE}|(?=[ ;,)]|$))""")
_IN_CALL = re.compile(r"\w\([^()]*$")


def on_command_line(text: str) -> str:
    """The text with options of the command line in the place of arguments of `penstock.compile`, and of figures of a
    machine. A name without a value is an argument where it has an underscore; it is a word elsewhere."""

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        is_word = "_" not in name if value is None else name in FIGURES and value[0] not in "\"'"
        return found[0] if is_word or _IN_CALL.search(text, 0, found.start()) else _option(name, value)

    return _ARGUMENT.sub(option, text)


def _option(name: str, text: str | None) -> str:
    """An argument and the text of its value in Python, as an option. None: no value."""
    option = f"--set {name}=" if name in FIGURES else f"--{OPTIONS[name]} "
    if text is None:
        return option.rstrip()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a name, or a hash such as 1e9b
        value = text
    if str(value) == LEFT_OUT.get(name):
        return f"no {option}".rstrip()
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{OPTIONS[name]}"
    values = value if isinstance(value, list) else [value]
    return " ".join(f"{option}{'...' if each is ... else shlex.quote(str(each))}" for each in values)


def spell(data: Any) -> Any:
    """Put options in the place of arguments in all texts of plain data."""
    if isinstance(data, str):
        return on_command_line(data)
    if isinstance(data, Mapping):
        return {key: spell(value) for key, value in data.items()}
    return [spell(value) for value in data] if isinstance(data, list | tuple) else data


class Screen(Console):
    """A console of the command line, which prints all texts in its spelling."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(on_command_line(text), **options)


@contextmanager
def spell_warnings() -> Iterator[None]:
    """Show warnings in the spelling of the command line."""
    with warnings.catch_warnings():
        show_before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            text = on_command_line(str(message))
            show_before(message if text == str(message) else category(text), category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
