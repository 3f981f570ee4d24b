"""Plain words: the habits of docs/style.md are counted in each room, and the counts may only fall.

Names of functions and docstrings come from the syntax tree, comments and names from the tokens, pages are counted
without their code. A count above its ceiling is a new habit; a count below it is a ceiling to lower.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from penstock.cli.options import AnswerOptions, PlanOptions, TrainOptions
from penstock.tests.syntax import tree_of

ROOT = Path(__file__).resolve().parents[1]
HABITS = ("participle", "preposition", "relative clause", "behind", "as many", "such as one", "lies, stands", "file")
CEILINGS: dict[str, tuple[int, ...]] = {  # a room, and its number of each habit, in the order above
    "ir": (4, 1, 0, 0, 0, 0, 0, 0),
    "runtime": (2, 2, 0, 0, 0, 0, 0, 0),
    "graph": (0, 0, 0, 0, 0, 0, 13, 0),
    "passes": (0, 0, 0, 0, 0, 0, 0, 0),
    "codegen": (0, 0, 0, 0, 0, 0, 0, 0),
    "compiler": (0, 1, 0, 0, 0, 0, 1, 0),
    "data": (0, 0, 0, 0, 0, 0, 0, 0),
    "training": (13, 0, 0, 0, 0, 0, 0, 0),
    "integrations": (0, 0, 0, 0, 0, 0, 0, 0),
    "cli": (0, 0, 0, 0, 0, 0, 0, 0),
    "papers": (13, 9, 0, 3, 5, 0, 7, 0),
    "bench": (1, 0, 0, 1, 0, 0, 1, 0),
    "docs": (0, 0, 0, 4, 5, 0, 8, 0),
    "examples": (0, 0, 0, 0, 0, 0, 1, 0),
    "tests": (56, 53, 45, 76, 33, 0, 108, 0),
    ".": (0, 0, 0, 0, 0, 0, 0, 0),
}
FIRST_PAGES = ["README.md", "AGENTS.md", "docs/index.md"]
FIRST_PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "tutorials").glob("*.md"))
# A pronoun where a noun is cheap, and everyday words for technical acts.
STRICT = re.compile(r"\bones\b|\bas far as\b|\bwhat each\b|\bof which nothing\b|\bin front\b", re.IGNORECASE)
UNCOUNTED = {"CHANGELOG.md", "style.md", Path(__file__).name}  # the past, and the habits themselves


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


IRREGULAR = words(
    "begun bent born borne bought broken brought built caught chosen done drawn driven fed forgotten found frozen given"
    " gone grown heard held hidden kept known laid lent lost made met paid said seen sent shown sought spent spoken"
    " stolen stuck sunk swept taken taught thought thrown told torn understood woken won worn wound written"
)
REGULAR = re.compile(r"\w{2,}ed")
NO_PARTICIPLES = {"deepspeed", "embed", "exceed", "hundred", "need", "proceed", "seed", "speed"}
ACTS = words(  # `check_written` is a verb and its object, `is_written` a question
    "accept are assert await be charge check encode exchange had has have is need needs num print raise read reject"
    " remove require requires run save settle stop tell trade was were write"
)
PREPOSITIONS = words(
    "above across after against along among apart around at before behind below beneath beside between beyond by in"
    " inside into of off out outside over past since through under until up within without"
)
CLAUSE = re.compile(r"(How|What|Whatever|When|Where|Which|Who|Whose|Why)\b")
PHRASES = {
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "as many": re.compile(r"\b(so|as) many\b", re.IGNORECASE),
    "such as one": re.compile(r"\bsuch as (one|ones|those|that)\b", re.IGNORECASE),
    "lies, stands": re.compile(r"\b(lies?|lying|lain|stands?|stood|standing)\b(?! for\b)", re.IGNORECASE),
}
ANY_PHRASE = re.compile("|".join(phrase.pattern for phrase in PHRASES.values()), re.IGNORECASE)
MAYBE_PHRASE = re.compile(  # also over the seams of strings and of comments, and in names
    r"behind|(so|as)\W+many|such\W+as|(\b|_)(lies?|lying|lain|stands?|stood|standing)(\b|_)", re.IGNORECASE
)
VAGUE = {"parts", "facts", "work", "sight", "taken", "unread", "alike"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module
PAGE_CODE = re.compile(r"^```.*?^```|`[^`]*`", re.DOTALL | re.MULTILINE)


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (REGULAR.fullmatch(word) is not None and word not in NO_PARTICIPLES)


def is_answer(function: Function) -> bool:
    """Whether the function is a property that is true or false: an adjective, such as `closed`, names it well."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in function.decorator_list}
    truth = function.returns is not None and ast.unparse(function.returns) == "bool"
    return truth and bool(decorators & {"property", "cached_property"})


def habits_of_name(function: Function) -> Iterator[str]:
    parts = function.name.strip("_").lower().split("_")
    if parts[0] == "test" or is_answer(function):
        return
    if is_participle(parts[-1]) and parts[0] not in ACTS:
        yield "participle"
    if parts[0] in PREPOSITIONS:
        yield "preposition"


def comments_and_names(source: str) -> Iterator[str]:
    """The blocks of comments and the names of a module, each on one line."""
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            block.append(token.string.lstrip("#: "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            if block:
                yield " ".join(block)
            block = []
            if token.type == tokenize.NAME:
                yield token.string.replace("_", " ")
    yield " ".join(block)


def habits_of_text(text: str) -> list[str]:
    if ANY_PHRASE.search(text) is None:
        return []
    return [habit for habit, phrase in PHRASES.items() for _ in phrase.findall(text)]


def documented(tree: ast.Module) -> Iterator[Documented]:
    """The module and its classes and functions; expressions, which hold none, are passed over."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Documented):
            yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, field, ())
            pending += inner if isinstance(inner, list) else ()


def strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def habits_of_module(source: str) -> Iterator[str]:
    tree = tree_of(source)
    for node in documented(tree):
        if isinstance(node, Function):
            yield from habits_of_name(node)
        if CLAUSE.match(ast.get_docstring(node) or ""):
            yield "relative clause"
    if habits_of_text(
        " ".join(source.replace("#", " ").replace("_", " ").split())
    ):  # strings and tokens take their time
        for text in (*strings(tree), *comments_and_names(source)):
            yield from habits_of_text(text)


def habits_of_page(page: str) -> Iterator[str]:
    yield from habits_of_text(" ".join(PAGE_CODE.sub(" ", page).split()))


def files_of(room: str) -> list[Path]:
    top = ROOT.glob("*") if room == "." else (ROOT / room).rglob("*")
    return sorted(f for f in top if f.suffix in (".py", ".md") and f.name not in UNCOUNTED)


def habits_of(room: str) -> Counter[str]:
    habits: Counter[str] = Counter()
    for file in files_of(room):
        text = file.read_text("utf-8")
        habits.update(habits_of_module(text) if file.suffix == ".py" else habits_of_page(text))
        habits["file"] += file.stem in VAGUE
    return habits


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_has_no_habit_more_often_than_before(room: str) -> None:
    habits = habits_of(room)
    counts = tuple(habits[habit] for habit in HABITS)
    row = f'"{room}": {counts},'
    more = [
        f"{habit}: {count}, were {ceiling}"
        for habit, count, ceiling in zip(HABITS, counts, CEILINGS[room], strict=True)
        if count > ceiling
    ]
    assert not more, f"{room} has new habits, see docs/style.md: {'; '.join(more)}"
    assert counts == CEILINGS[room], f"lower the ceiling: {row}"


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_pages_have_no_habit(page: str) -> None:
    """The pages of the first hour, also without the habits that other pages may have."""
    text = " ".join(PAGE_CODE.sub(" ", (ROOT / page).read_text("utf-8")).split())
    assert habits_of_text(text) == []
    assert STRICT.findall(text) == []


def test_no_help_of_the_command_line_is_a_riddle() -> None:
    """A help text begins with a noun, a verb or a value, never with a preposition or a relative clause."""
    groups: list[Any] = [TrainOptions, PlanOptions, AnswerOptions]
    hints = [hint for group in groups for hint in get_type_hints(group, include_extras=True).values()]
    helps = [option.help for hint in hints for option in get_args(hint)[1:]]
    assert len(helps) > 50
    riddle = re.compile(r"(of|in which|at which|to be|as|what|which|how)\b|.*\bones\b", re.IGNORECASE)
    assert [text for text in helps if riddle.match(text)] == []


def test_all_rooms_are_counted() -> None:
    folders = {folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")}
    rooms = {folder.name for folder in folders if next(folder.rglob("*.py"), None)}
    assert rooms - {"build", "out"} <= CEILINGS.keys()


@pytest.mark.parametrize(
    ("source", "habits"),
    [
        ("def found(): ...", ["participle"]),
        ("def beside_own_copy(): ...", ["preposition"]),
        ("def is_kept(): ...\ndef check_kept(): ...\ndef kept_rows(): ...\ndef seed(): ...", []),
        ("class A:\n    @property\n    def closed(self) -> bool: ...", []),
        ("class A:\n    @property\n    def closed(self) -> int: ...", ["participle"]),
        ('def rows():\n    """What has rows."""', ["relative clause"]),
        ('def rows():\n    """Find the rows.\n\n    What has none is refused."""', []),
        ("x = 1  # as\n# many, behind the others", ["behind", "as many"]),
        ("rows_behind = f'{x} stands for y and lies'", ["behind", "lies, stands"]),
        ("# one\nx = 'such as' + 'one'\n# many", []),
    ],
)
def test_habits_are_seen(source: str, habits: list[str]) -> None:
    assert sorted(habits_of_module(source)) == sorted(habits)


def test_code_in_a_page_is_not_counted() -> None:
    assert list(habits_of_page("so\nmany\n\n```text\nbehind\n```\nand `behind`.")) == ["as many"]
