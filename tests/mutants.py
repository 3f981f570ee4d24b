"""Changes one token of the code at random, runs the tests that are likely to notice, and says whether one did.

    python tests/mutants.py --number 60 --seed 1 --minutes 90 runtime ir/program/memory.py

Everything happens in a copy of the tree. A test counts only if it passes there without the change. One line per mutant:
the verdict, the place, the token before and after, the line, and the first test that failed. Those that survive tell
where an assertion is missing, or where code does nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ir", "runtime", "graph", "passes")
OTHER_ROOMS = ("codegen", "compiler", "data", "training", "integrations", "cli", "papers")
OTHER = {
    "and": "or", "or": "and", "not": "", "True": "False", "False": "True", "0": "1", "1": "0", "<": "<=", "<=": "<",
    ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "+=": "-=", "-=": "+=", "min": "max",
    "max": "min", "any": "all", "all": "any", "break": "continue", "continue": "break",
}  # fmt: skip
BUILTINS = {"min", "max", "any", "all"}  # only where they are called
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", flags=re.MULTILINE)
MOST_FILES = 12  # of tests that run for one mutant
UNWANTED = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")


@dataclass(frozen=True, order=True)
class Mutant:
    """`line` counts from 1, `column` from 0; `new` stands for the token `old`."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        text, end = lines[self.line - 1], self.column + len(self.old)
        assert text[self.column : end] == self.old
        lines[self.line - 1] = text[: self.column] + self.new + text[end:]
        return "".join(lines)


# --- drawing


def silent(tree: ast.AST) -> Iterator[ast.AST]:
    """Code that no test can or need notice: annotations, code for type checkers only, messages, decorators."""
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(annotation=annotation) | ast.arg(annotation=annotation) if annotation is not None:
                yield annotation
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                yield node
            case ast.Assert(msg=ast.AST() as message):
                yield message
            case ast.Raise() | ast.JoinedStr():
                yield node
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                yield from decorators
                if returns is not None:
                    yield returns
            case ast.ClassDef(decorator_list=decorators):
                yield from decorators


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every change of one token that a test could notice; after a few of them the source does not parse."""
    lines = source.splitlines()
    spans = []
    for node in silent(ast.parse(source)):  # columns of `ast` count bytes of UTF-8
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        spans.append(tuple((row, len(lines[row - 1].encode()[:column].decode())) for row, column in (begin, end)))
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    found = []
    for before, token, after in zip([tokens[0], *tokens], tokens, tokens[1:]):
        if token.string not in OTHER or token.type not in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            continue
        if token.string in BUILTINS and (before.string == "." or after.string != "("):
            continue
        if any(begin <= token.start < end for begin, end in spans):
            continue
        found.append(Mutant(file, *token.start, token.string, OTHER[token.string]))
    return found


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def product_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Python files at or below these paths, relative to the root. ValueError for a path that has none."""
    found: set[str] = set()
    for path in paths:
        files = [root / path] if path.endswith(".py") else list((root / path).rglob("*.py"))
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"no Python files at {path!r} in {root}")
        found |= {file.relative_to(root).as_posix() for file in files}
    return sorted(found)


def draw(root: Path, paths: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Random mutants, the same for the same files, number and seed; with a larger number, more come after them."""
    sources = {file: (root / file).read_text("utf-8") for file in product_files(root, paths)}
    every = [mutant for file, source in sources.items() for mutant in mutants_of(file, source)]
    random.Random(seed).shuffle(every)
    return list(islice((m for m in every if parses(m.applied(sources[m.file]))), number))


# --- which tests


def imported(root: Path, file: str) -> set[str]:
    """The files of the tree that a file imports, as far as its text says."""
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse((root / file).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ("penstock", *Path(file).parent.parts)
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            names |= {base, *((*base, alias.name) for alias in node.names)}
    places = {"/".join(parts[1:]) for parts in names if len(parts) > 1 and parts[0] == "penstock"}
    return {file for place in places for file in (f"{place}.py", f"{place}/__init__.py") if (root / file).is_file()}


@cache
def importers(root: Path) -> dict[str, set[str]]:
    """For each file, the files that import it."""
    found: dict[str, set[str]] = {}
    for file in product_files(root, (*ROOMS, *OTHER_ROOMS, "tests")):
        for other in imported(root, file):
            found.setdefault(other, set()).add(file)
    return found


def likely_tests(root: Path, file: str) -> list[str]:
    """Test files, most likely first: the file's own, its folder's, then tests that lead to it by the fewest imports."""
    own = Path("tests", file).parent
    mirrored = sorted((root / own).glob("test_*.py"), key=lambda path: (path.stem != f"test_{Path(file).stem}", path))
    order = [path.relative_to(root).as_posix() for path in mirrored]
    seen, level = {file}, [file]
    while level and len(order) < MOST_FILES:
        level = sorted({user for one in level for user in importers(root).get(one, ())} - seen)
        seen |= set(level)
        order += [user for user in level if Path(user).name.startswith("test_") and user not in order]
    return order[:MOST_FILES]


# --- running


class Copy:
    """A copy of the tree under `folder`, in which tests run under the package's name."""

    def __init__(self, folder: Path, limit_s: float):
        self.folder, self.root, self.limit_s = folder, folder / "penstock", limit_s
        shutil.copytree(ROOT, self.root, ignore=UNWANTED)
        self.green: dict[str, bool] = {}  # per test whether it passes without a change

    def first_failure(self, tests: Sequence[str]) -> str | None:
        """The first test that fails; "" where none does. None if the time limit has passed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as output:
            run = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = run.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
            output.seek(0)
            failed = FAILED.search(output.read())
        return "" if code == 0 else failed[1] if failed else "pytest itself"

    def is_green(self, test: str) -> bool:
        if test not in self.green:
            self.green[test] = self.first_failure([test]) == ""
        return self.green[test]

    def verdict(self, mutant: Mutant) -> tuple[str, str]:
        """The outcome of the mutant, and the test that showed it."""
        path = self.root / mutant.file
        source = path.read_text("utf-8")
        tests = likely_tests(self.root, mutant.file)
        if not tests:
            return "untested", ""
        path.write_text(mutant.applied(source), "utf-8")
        try:
            failure = self.first_failure(tests)
        finally:
            path.write_text(source, "utf-8")
        if failure is None:
            return "timed out", ""
        if failure == "":
            return "survived", ""
        return ("noticed" if failure == "pytest itself" or self.is_green(failure) else "red before"), failure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=ROOMS, help=f"files and folders; without any {', '.join(ROOMS)}")
    parser.add_argument("--number", type=int, default=60, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90, help="after which no further mutant is tried")
    parser.add_argument("--limit", type=float, default=300, help="seconds of the tests of one mutant")
    given = parser.parse_args(arguments)
    drawn = draw(ROOT, given.paths, given.number, given.seed)
    counts: Counter[str] = Counter()
    until_s = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), given.limit)
        for mutant in drawn:
            if time.monotonic() > until_s:
                counts["not tried"] += 1
                continue
            began_s = time.monotonic()
            verdict, test = copy.verdict(mutant)
            counts[verdict] += 1
            line = (ROOT / mutant.file).read_text("utf-8").splitlines()[mutant.line - 1].strip()
            change = f"{mutant.old} -> {mutant.new or 'nothing'}"
            took = f"{time.monotonic() - began_s:.0f} s"
            print(f"{verdict:10} {mutant.file}:{mutant.line}  [{change}]  {line}  {test} ({took})", flush=True)
    print(f"{len(drawn)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main()
