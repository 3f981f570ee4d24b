"""Results of parts of a layer of experts, joined part by part, of which backward needs no values.

A part takes what the parts before it gave, and puts its own rows into it (`join_part`). The gradient of what it took is
that of what it gives, without its own rows: no value says so. Where each part is a stage, nothing of what the parts
before gave need be kept until backward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ...runtime.experts.split_experts import join_part


def passes_through(value: fx.Node, is_here: Callable[[fx.Node], bool]) -> bool:
    """Whether all readers of a value in a stage put rows into it, and what they give is read in the stage in no other
    way. `is_here`: whether the stage runs a node."""
    readers = [user for user in value.users if is_here(user)]
    return bool(readers) and all(_joins(user, value) and _is_read_by_joins(user, is_here) for user in readers)


def _joins(node: fx.Node, value: fx.Node) -> bool:
    return node.target is join_part and node.args[0] is value and value not in node.args[1:]


def _is_read_by_joins(value: fx.Node, is_here: Callable[[fx.Node], bool]) -> bool:
    return all(_joins(user, value) and _is_read_by_joins(user, is_here) for user in value.users if is_here(user))
