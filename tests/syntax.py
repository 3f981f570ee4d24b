"""The syntax of the product's files, parsed once for all the tests of a process that look at the source."""

from __future__ import annotations

import ast
import functools


@functools.cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Every node of the tree, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(source)))
