"""The trust in the files of a job: as data that is verified first, or as the user's own code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

HINT = "A file that you have read and trust runs as it is with load(..., trust=True), or --trust"


@dataclass(frozen=True)
class Trust:
    """`whole`: a file is run as it is. Otherwise it may hold only what is printed, and it may name autograd
    functions and enums of `modules`, which the user's own process has imported, besides torch.

    What is more of the user's own in the files that this process has printed: `statements` are imports, and classes,
    functions and constants copied from a script that nothing can import; `calls` are the names of functions that the
    graphs call, such as an op of `torch.library`.
    """

    whole: bool = False
    modules: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    @staticmethod
    def here(texts: Iterable[str]) -> Trust:
        """Trust in what this process has imported already, as far as the files of these texts import from it."""
        named: set[str] = set()
        for text in texts:
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # what is wrong with it is said when it is verified
            named |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
        return Trust(modules=tuple(sorted(named & sys.modules.keys())))

    def union(self, other: Trust) -> Trust:
        """Trust in the user's own code of both."""
        statements, calls = {*self.statements, *other.statements}, {*self.calls, *other.calls}
        return replace(self, statements=tuple(sorted(statements)), calls=tuple(sorted(calls)))

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Trust:
        return Trust(**{**raw, **{name: tuple(raw[name]) for name in ("modules", "statements", "calls")}})


ONLY_VERIFIED = Trust()  # nothing outside of torch
TRUSTED = Trust(whole=True)  # what the user vouches for
