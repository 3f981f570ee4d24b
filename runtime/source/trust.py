"""The trust in the files of a job: as data that is verified first, or as the user's own code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass

HINT = "A file that you have read and trust runs as it is with load(..., trust=True), or --trust"


@dataclass(frozen=True)
class Trust:
    """`whole`: a file is run as it is. Otherwise it may hold only what is printed, and it may name autograd
    functions and enums of `modules`, which the user's own process has imported, besides torch."""

    whole: bool = False
    modules: tuple[str, ...] = ()

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


ONLY_VERIFIED = Trust()  # nothing outside of torch
OWN = Trust(whole=True)  # what this process has printed itself
