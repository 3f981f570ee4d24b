"""The freshness of a page: a hash of the paper's experiments, and the seconds of a few small steps.

The hash is over the sources of `papers/` that make the page, without comments and docstrings, and over the
documents of its machines. Passes and simulator are not in it, as most of their changes leave the figures alone; the
small steps notice those that do not: a page is old if they take other seconds now.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.machine.hardware import Hardware

if TYPE_CHECKING:
    from .experiments import Experiments

HERE = Path(__file__).parent
NO_PART_OF_PAGES = ("command.py", "everything.py", "freshness.py", "predictions.py", "published.py")


def made_from(name: str, experiments: Experiments) -> dict[str, Any]:
    """`hash`: see above; `steps`: the seconds of the small steps, by what they are."""
    return {"hash": page_hash(name, experiments), "steps": small_steps(experiments)}


def page_hash(name: str, experiments: Experiments) -> str:
    digest = hashlib.sha256()
    for path in sources(name):
        digest.update(code_of(path.read_text()).encode())
    for preset in experiments.presets:
        digest.update(Hardware.preset(preset).model_dump_json(exclude_defaults=True).encode())
    return digest.hexdigest()[:16]


def sources(name: str) -> list[Path]:
    """The files that make the page of a paper: those of all papers, and its own."""
    from .report import PAPERS

    shared = [p for p in HERE.glob("*.py") if p.stem not in PAPERS and p.name not in NO_PART_OF_PAGES]
    own = [HERE / f"{name}.py"] if (HERE / f"{name}.py").exists() else [*(HERE / name).glob("*.py")]
    return sorted(shared + own)


def code_of(source: str) -> str:
    """A source without comments, docstrings and line breaks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def small_steps(experiments: Experiments) -> dict[str, float]:
    return {name: float(f"{seconds:.9g}") for name, seconds in _steps(experiments)}


def _steps(experiments: Experiments) -> Iterator[tuple[str, float]]:
    for name, work, hardware, line in experiments.small():
        step_s = experiments.lab.trial(work, hardware, line).step_s
        yield name, -1.0 if step_s is None else step_s
