"""The stages that `profile` runs: one block of each distinct hash (layer similarity), as a stage of its own.

In: op graph, blocks, and the hashes that have no seconds yet. Out: the stages to be timed, with what their inputs must
look like; and, once they have been timed, the blocks with their seconds. This file runs nothing:
`runtime.measure.blocks` does that, on the printed stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from ..ir.errors import PlanError
from .blocks import Block
from .opgraph import OpGraph, value_tensors
from .stages import PlannedStage, build_block_stages
from .turn_seconds import TurnSeconds

Measured = Mapping[str, Mapping[str, TurnSeconds]]  # device name -> block hash -> seconds


@dataclass(frozen=True)
class BlockSample:
    """A block that stands for all blocks of its hash. `rows`: per input of indices, the number of rows to index."""

    hash: str
    stage: PlannedStage
    rows: Mapping[str, int]


def distinct(blocks: Sequence[Block]) -> dict[str, Block]:
    """The first block of each hash, by hash, in order."""
    found: dict[str, Block] = {}
    for block in blocks:
        found.setdefault(block.hash, block)
    return found


def samples(graph: OpGraph, blocks: Sequence[Block], wanted: Iterable[str]) -> list[BlockSample]:
    """One sample per wanted hash. Raises `PlanError` where a value between blocks is no tensor."""
    first = distinct(blocks)
    stages = {stage.blocks[0]: stage for stage in build_block_stages(graph, blocks)}
    return [BlockSample(key, stages[first[key].name], index_rows(stages[first[key].name].graph)) for key in wanted]


def with_seconds(blocks: Sequence[Block], measured: Measured) -> list[Block]:
    """The blocks with their seconds by device name. Raises `PlanError` for an entry that is missing or not a time."""
    found = []
    for block in blocks:
        seconds = {}
        for device, entries in measured.items():
            if block.hash not in entries:
                raise PlanError(f"profile: there is no entry for block {block.name!r} ({block.hash}) on {device}")
            seconds[device] = check_seconds(entries[block.hash], f"block {block.name!r} ({block.hash}) on {device}")
        found.append(replace(block, seconds=seconds))
    return found


def check_seconds(seconds: TurnSeconds, what: str) -> TurnSeconds:
    """Return `seconds`. Raises `PlanError` for a time that is NaN, infinite, zero, negative or no number."""
    for field in fields(seconds):
        value = getattr(seconds, field.name)
        if value is None and field.name == "taking_s":
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise PlanError(f"profile: {field.name} of {what} is {value!r}; a measured time is positive and finite")
    return seconds


def index_rows(graph: fx.GraphModule) -> dict[str, int]:
    """The number of rows that each integer input indexes, by name, if an embedding or a loss over classes reads it,
    directly or through views."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and _is_integer(node):
            rows = [n for n in _rows_read(graph, node) if n is not None]
            if rows:
                found[str(node.target)] = min(rows)
    return found


def _rows_read(graph: fx.GraphModule, start: fx.Node) -> list[int | None]:
    rows, stack, seen = [], [start], {start}
    while stack:
        node = stack.pop()
        for user in node.users:
            rows.append(_rows_of(graph, user, node))
            if _is_integer(user) and user not in seen:
                seen.add(user)
                stack.append(user)
    return rows


def _rows_of(graph: fx.GraphModule, user: fx.Node, index: fx.Node) -> int | None:
    functional = torch.nn.functional
    if user.op == "call_module":
        leaf = graph.get_submodule(str(user.target))
        if isinstance(leaf, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            return leaf.num_embeddings
        classes = isinstance(leaf, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))
    else:
        if user.target in (functional.embedding, torch.embedding):
            table = next(n for n in user.all_input_nodes if n is not index)
            return int(table.meta["val"].shape[0])
        classes = user.target in (functional.cross_entropy, functional.nll_loss)
    if not classes:
        return None
    scores = next(n for n in user.all_input_nodes if n is not index)
    shape = scores.meta["val"].shape
    return int(shape[1] if len(shape) > 1 else shape[0])


def _is_integer(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    tensors = list(value_tensors(value))
    return bool(tensors) and all(not t.is_floating_point() and t.dtype != torch.bool for t in tensors)
