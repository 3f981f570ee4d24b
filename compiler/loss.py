"""The loss of a training step, as the plan carries it out: one micro-batch at a time, and yet that of the whole batch.

`capture` traces a step and rewrites its loss: terms that divide by a count (`counted.py`), or all of it by the user's
own `loss_weight` (`weighted.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..graph.loss.counted import count_terms
from ..graph.loss.gradient import require_gradient
from ..graph.loss.weighted import weigh_loss
from ..graph.loss_terms import NUM_ITEMS
from ..graph.opgraph import OpGraph
from ..ir.errors import PlanError
from ..ir.precision import FP32, Precision
from .capture.guard import LossFn
from .capture.inputs import takes_item_count
from .capture.trace import trace_in


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    by_user: bool = False,
    precision: Precision = FP32,
    device_kind: str = "cpu",
    **options: Any,
) -> OpGraph:
    """The op graph of one micro-batch, such that the mean of its losses is that of the whole batch; see `OpGraph.loss`.

    by_user: the user gives `loss_weight`, which replaces what would be counted. options: as in `trace_loss`. Raises
    `CaptureError` as `trace` does.
    """
    return rewrite_loss(trace_loss(model, example_inputs, loss_fn, by_user, precision, device_kind, **options), by_user)


def trace_loss(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: LossFn | None,
    by_user: bool,
    precision: Precision,
    device_kind: str,
    **options: Any,
) -> OpGraph:
    """The op graph of these inputs, with the loss as the model makes it. `options`: further ones of the trace."""
    count = not by_user and takes_item_count(model)
    return trace_in(
        precision, model, example_inputs, loss_fn=loss_fn, count_items=count, device_kind=device_kind, **options
    )


def rewrite_loss(graph: OpGraph, by_user: bool, is_whole: bool = False) -> OpGraph:
    """Rewrite the loss, so that its mean over micro-batches is the loss of the whole batch. `is_whole`: it is never
    cut."""
    require_gradient(graph)
    return weigh_loss(graph) if by_user else count_terms(graph, is_whole)


def refuse_item_count(example_inputs: Any) -> None:
    """Raise `PlanError` for a batch that holds `num_items_in_batch` itself."""
    if isinstance(example_inputs, Mapping) and NUM_ITEMS in example_inputs:
        raise PlanError(
            f"example_inputs[{NUM_ITEMS!r}]: leave it out of the batch. It is counted over every global batch and "
            "handed to the model; loss_weight= is for a rule of your own"
        )
