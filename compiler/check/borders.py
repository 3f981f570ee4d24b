"""Packed rows once more, with every second document another one: what the others compute must stay as it is.

In: an op graph, a batch whose rows hold several documents, and a function that runs the graph. Out: a `CaptureError`
that names the first module that lets a document see another one. `graph/masks` proves where tokens meet, and this shows
that masks hide what they should.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...graph.dataflow import Dataflow
from ...graph.opgraph import OpGraph, value_tensors
from ...ir.errors import CaptureError
from ..packing.borders import POSITIONS

LIMIT = 1e-4  # of a value's norm: experts with other numbers of tokens add up in another order

RunNodes = Callable[[Mapping[str, Any], Collection[fx.Node]], Mapping[fx.Node, Tensor]]  # batch, nodes -> their values


def require_closed_borders(graph: OpGraph, batch: Mapping[str, Any], run: RunNodes) -> bool:
    """Run the graph with other documents in the place of every second one, and compare the last hidden values of the
    others' tokens. Returns whether there was something to compare."""
    ids, positions = batch["input_ids"], batch[POSITIONS]
    begins = torch.cat([torch.zeros_like(ids[:, :1]), (positions.diff(dim=-1) != 1).long()], 1)
    document, hidden = begins.cumsum(-1), _hidden_nodes(graph, ids.shape)
    if not hidden or not bool(begins.any()):
        return False

    def differing(nodes: list[fx.Node]) -> fx.Node | None:
        ours = run(batch, nodes)
        for parity in (0, 1):
            changed = document % 2 == parity
            other = torch.where(changed, torch.where(ids > 0, ids - 1, ids + 1), ids)
            theirs = run({**batch, "input_ids": other}, nodes)
            for node in nodes:
                if not _same(ours[node], theirs[node], ~changed.to(ours[node].device)):
                    return node
        return None

    if differing(hidden[-1:]) is None:
        return True
    node = differing(hidden) or hidden[-1]
    place = f"{node.meta['module_path'] or 'the model'} ({node.meta['module_type']})"
    raise CaptureError(
        f"example_inputs[{POSITIONS!r}] begins anew inside of rows, but what a document computes changes with "
        f"another one: tokens see across borders first in {place}, at {node.meta['source']}. "
        "Allowed: a mask that hides every other document; one document in a row"
    )


def _hidden_nodes(graph: OpGraph, shape: torch.Size) -> list[fx.Node]:
    """The values on the way to the loss with a vector for each token."""
    flow = Dataflow(graph.nodes)
    return [node for node in flow.sort_nodes(flow.ancestors([graph.outputs["loss"]])) if _is_hidden(node, shape)]


def _is_hidden(node: fx.Node, shape: torch.Size) -> bool:
    tensors = list(value_tensors(node.meta["val"]))
    if len(tensors) != 1 or tensors[0].dim() != 3 or not tensors[0].is_floating_point():
        return False
    return tuple(tensors[0].shape[:2]) == tuple(shape) and tensors[0].shape[2] != shape[1]  # no scores of pairs


def _same(ours: Tensor, theirs: Tensor, tokens: Tensor) -> bool:
    ours, theirs = ours[tokens].double(), theirs[tokens].double()
    return bool((ours - theirs).norm() <= LIMIT * ours.norm())
