"""Mutants are drawn where a test can notice them, the same ones for a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tests.mutants import OTHER_ROOMS, ROOT, draw, likely_tests, mutants_of

SOURCE = '''"""Not 0 and not 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    X = 0 or 1

@dataclass(frozen=True)
class A:
    b: Literal[0] = 1

def f(x: Literal[True], *rest, max=None) -> Literal[False]:
    assert x < 3, 0 + x
    if x not in "é" and y.min(x) == max(x):
        raise ValueError(f"{x + 1}" + 0)
'''


def change(source: str) -> list[str]:
    return [mutant.applied(source).splitlines()[mutant.line - 1].strip() for mutant in mutants_of("a.py", source)]


def test_messages_annotations_and_what_only_type_checkers_read_are_left_out() -> None:
    assert change(SOURCE) == [
        "b: Literal[0] = 0",
        "assert x <= 3, 0 + x",
        'if x  in "é" and y.min(x) == max(x):',
        'if x not in "é" or y.min(x) == max(x):',
        'if x not in "é" and y.min(x) != max(x):',
        'if x not in "é" and y.min(x) == min(x):',
    ]


@pytest.mark.slow
def test_the_seed_decides_what_is_drawn() -> None:
    first = draw(ROOT, ["ir"], 20, seed=1)
    assert len(first) == 20 and draw(ROOT, ["ir"], 20, seed=1) == first and draw(ROOT, ["ir"], 8, seed=1) == first[:8]
    assert draw(ROOT, ["ir"], 20, seed=2) != first
    assert {mutant.file.split("/")[0] for mutant in first} == {"ir"}


def test_the_tests_of_a_file_come_first(tmp_path: Path) -> None:
    for name, text in {
        "ir/a/one.py": "",
        "ir/a/__init__.py": "from .one import x",
        "ir/b.py": "from .a import x",
        "tests/ir/a/test_one.py": "",
        "tests/ir/a/test_all.py": "",
        "tests/test_direct.py": "from penstock.ir.a.one import x",
        "tests/test_far.py": "from penstock.ir.b import y",
        "tests/test_other.py": "import penstock",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for room in ("runtime", "graph", "passes", *OTHER_ROOMS):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    own = ["tests/ir/a/test_one.py", "tests/ir/a/test_all.py"]
    assert likely_tests(tmp_path, "ir/a/one.py") == [*own, "tests/test_direct.py", "tests/test_far.py"]
