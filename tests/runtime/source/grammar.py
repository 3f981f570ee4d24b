"""Hostile files by the grammar of docs/security.md: somewhere in a derivation a piece of another kind is put.

Each file is that of the small model with one more item, statement or member; where the file is trusted, the piece runs
as soon as the derivation is evaluated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.tests.runtime.source.hostile import PAYLOADS, Hostile

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
LEAVES = {  # names of the grammar without a line of their own
    "new": "fresh", "kind": "Fresh", "block": "TinyBlock", "part": "self.embed", "tensor": "ids",
    "function": "torch.is_tensor", "method": "eq", "number": "1", "text": '"a"',
}  # fmt: skip
SYMBOL = re.compile(r"<(\w+)>")
# Pieces of another kind, in place of a form. C() opens the canary.
EXPRESSIONS = PAYLOADS | {
    "generator": "[*(C() for _ in [1])]",
    "starred": "[*map(open, ['CANARY'], ['w'])]",
    "set": "{x for x in [C()] if 0}",
    "and": "1 and C()",
    "not in": "1 not in [C()]",
    "method of text": '"{0}".join(map(open, ["CANARY"], "w"))',
    "attribute of a number": "(1).__class__.__mro__[1].__subclasses__() and C()",
    "format": "'{}'.format(C())",
    "conditional lambda": "(lambda: 0 if C() else 1)()",
    "a class by type": "type('K', (), {'x': C()})",
    "module of a function": "torch.nn.functional.warnings.sys.modules['builtins'].open('CANARY', 'w')",
    "keywords": "dict(**{'x': C()})",
}
STATEMENTS = {
    "import": "import os\nos.system('touch CANARY')",
    "from import": "from os import system as fresh\nfresh('touch CANARY')",
    "while": "while C() is None:\n\tpass",
    "assert": "assert C()",
    "raise": "raise ValueError(C())",
    "try": "try:\n\tpass\nfinally:\n\tC()",
    "with as": "with C() as fresh:\n\tpass",
    "match": "match C():\n\tcase _:\n\t\tpass",
    "def": "def fresh():\n\tC()\nfresh()",
    "class": "class Fresh:\n\tx = C()",
    "if": "if C() is not None:\n\tpass",
    "annotation": "fresh: int = C()",
    "walrus": "(fresh := C())",
    "del": "fresh = [C()]\ndel fresh[0]",
    "for of a call": "for fresh in [C()]:\n\tpass",
    "attribute assigned": "torch.fresh = C()",
    "augmented": "fresh = []\nfresh += [C()]",
}
BASES = {
    "a condition": "Stage if C() else Stage",
    "two bases": "Stage, type('K', (), {'x': C()})",
    "a metaclass": "Stage, metaclass=type(C() and Stage())",
    "a call": "type(C() and Stage())",
    "an index": "[C(), Stage][1]",
}
CLASSES = {
    "a decorator": "@[C(), lambda k: k][1]\nclass Fresh(Stage):\n\tpass",
    "a body": "class Fresh(Stage):\n\tx = C()",
    "a default": "class Fresh(Stage):\n\tdef forward(self, x=C()):\n\t\treturn x",
    "an annotation": "class Fresh(Stage):\n\tdef forward(self, x: C()):\n\t\treturn x",
    "a result": "class Fresh(Stage):\n\tdef forward(self) -> C():\n\t\treturn 1",
    "a nested class": "class Fresh(Stage):\n\tclass Inner:\n\t\tx = C()",
    "a subclass hook": "class Fresh(Stage):\n\tdef __init_subclass__(cls):\n\t\tC()\nclass Other(Fresh):\n\tpass",
    "a descriptor": (
        "class Name(Stage):\n\tdef __set_name__(self, owner, name):\n\t\tC()\nclass Fresh(Stage):\n\tx = Name()"
    ),
}
TABLES = {
    "a value": 'STAGES = {"stage0": (C(), TinyBlock)[1]}',
    "a key": 'STAGES = {[C(), "stage0"][1]: TinyBlock}',
    "unpacked": "STAGES = {**{'stage0': C()}}",
    "by comprehension": "STAGES = {'stage0': C() for _ in [1]}",
}
HOSTILE = {
    **dict.fromkeys(("value", "plain", "empty", "member", "call"), EXPRESSIONS),
    **dict.fromkeys(("statement", "build", "item", "import"), STATEMENTS),
    "base": BASES,
    "class": CLASSES,
    "table": TABLES,
}
# A place in the small model's file, the depth of its lines there, and what may be derived at it.
PLACES = (
    ("\n\nclass TinyBlock(Scope):", 0, ("item", "import")),
    ('\n\nSTAGES = {"stage0": Stage0}', 0, ("class", "table")),
    ("        mask = ids.ne(0)", 2, ("statement",)),
    ("        self.blocks = Scope()", 2, ("build",)),
)


def read_grammar() -> dict[str, list[str]]:
    """The forms of each name, from the page."""
    (block,) = re.findall(r"```text\n(item .*?)```", PAGE.read_text(), re.DOTALL)
    forms: dict[str, list[str]] = {}
    for line in block.splitlines():
        name, right = re.split(r"\s*=\s*", line, maxsplit=1)
        found = [form.encode().decode("unicode_escape") for form in right.split(" | ")]
        forms.setdefault(name, []).extend(found)
    return forms


class Fuzz:
    """Derives pieces of files. `rng`: what decides. `hostile`: a piece of another kind is put somewhere."""

    def __init__(self, rng: random.Random, hostile: bool = True):
        self.rng, self.forms, self.hostile = rng, read_grammar(), hostile

    def derive(self, name: str, depth: int) -> tuple[str, str]:
        """A derivation of `name` with a piece of another kind in it, and the kind and the place of that."""
        ways = [form for form in self.forms.get(name, ()) if self._open(form)]
        if depth <= 0 or not ways or (name in ("item", "import") and self.rng.random() < 0.3):
            if not self.hostile:
                return self._leaf(name), name
            kind = self.rng.choice([*HOSTILE[name]])
            return HOSTILE[name][kind], f"{kind} as {name}"
        form = self.rng.choice(ways)
        chosen = self.rng.choice(self._open(form))
        inner, what = self.derive(chosen[1], depth - 1)
        begin, end = chosen[0]
        inner = indent_lines(inner, form[:begin])
        before, after = (
            SYMBOL.sub(lambda m, part=part: indent_lines(self._leaf(m[1]), part[: m.start()]), part)
            for part in (form[:begin], form[end:])
        )
        needs_brackets = chosen[1] in ("value", "plain", "empty", "member", "call")
        return before + (f"({inner})" if needs_brackets else inner) + after, what

    def _open(self, form: str) -> list[tuple[tuple[int, int], str]]:
        """The places of a form at which something hostile would be evaluated: not below a `def`."""
        found = [(match.span(), match[1]) for match in SYMBOL.finditer(form) if match[1] in HOSTILE]
        return [row for row in found if "def " not in form[: row[0][0]]]

    def _leaf(self, name: str) -> str:
        """The plainest form of a name."""
        if name in LEAVES:
            return LEAVES[name]
        form = self.forms[name][0]
        return SYMBOL.sub(lambda m: indent_lines(self._leaf(m[1]), form[: m.start()]), form)


def indent_lines(text: str, before: str) -> str:
    """A text whose lines are indented as the line is at whose end it is put."""
    tabs = re.match(r"\t*", before.rpartition("\n")[2])
    return text.replace("\n", "\n" + (tabs[0] if tabs else ""))


def derive_files(text: str, canary: str, number: int, seed: int, hostile: bool = True) -> Iterator[tuple[Hostile, str]]:
    """A number of different files, each with its kind: the piece, and the name of the grammar in whose place it is."""
    fuzz, seen = Fuzz(random.Random(seed), hostile), set[str]()
    while len(seen) < number:
        place, depth, names = fuzz.rng.choice(PLACES)
        piece, what = fuzz.derive(fuzz.rng.choice(names), fuzz.rng.choice((0, 1, 1, 2, 2, 3, 4, 5)))
        piece = "\t" * depth + piece.replace("\n", "\n" + "\t" * depth)
        piece = piece.replace("\t", "    ").replace("C()", "open('CANARY', 'w')").replace("CANARY", canary)
        if piece in seen:
            continue
        seen.add(piece)
        assert text.count(place) == 1
        yield Hostile(f"{what}: {piece.strip()}", text.replace(place, f"\n{piece}\n{place}")), what
