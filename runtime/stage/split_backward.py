"""Backward of a stage in two halves: the gradients of its inputs at once, those of its parameters later.

The halves are torch's own (`torch.distributed.pipelining`), which fill the bubbles of its zero-bubble schedules. The
first walks the graph from the outputs to the inputs and notes the gradients at the nodes where parameters come in; the
second enters at these nodes. Sums are made in the order of a whole backward, so the gradients are bit for bit the same.

What is built on them here holds for the halves of torch 2.13 to 2.15. Those of 2.11 and 2.12 lose a gradient of a
parameter that is used both before and after an input comes in; `wrong_halves` finds that, and refuses what it finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import layer_norm

from ...ir.errors import PlanError

BackwardGroup = dict[
    str, Any
]  # "params", and the "intermediates" at which their gradients enter, with the "grads" there


@dataclass
class Rest:
    """The values that the first half keeps for the second: the graph between parameters and the gradients noted above
    them, and gradients of parameters over outputs that no input reaches. `num_bytes` includes what the graph saved."""

    groups: list[BackwardGroup] = field(default_factory=list)
    whole: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0

    def tensors(self) -> list[Tensor]:
        """The noted gradients."""
        noted = (g for group in self.groups for row in group["grads"] for g in row if g is not None)
        return [*noted, *self.whole.values()]

    def drop(self) -> None:
        """Let go of the graph and of all gradients."""
        self.groups, self.whole = [], {}


class _Output(GradientEdge):
    """An edge that replaces an output for `stage_backward_input`, which asks an output for the function that made
    it, enters there, and detaches the output in the end. An edge need not be detached."""

    @property
    def requires_grad(self) -> bool:
        return True

    @property
    def grad_fn(self) -> Any:
        return self.node

    def detach_(self) -> None:
        """Do nothing: the edge is gone when its holder lets go of it."""


def input_half(
    edges: Sequence[GradientEdge],
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    params: Mapping[str, nn.Parameter],
) -> Rest:
    """Set the gradients of the leaves that require one, from `values` that enter at `edges`. `params`: the trained
    parameters. The graph stays as it is, for the other half."""
    # Imported here: few plans split the backward, and a worker starts a second sooner without it.
    from ..torch_names import stage_backward_input

    outputs: list[Any] = [_Output(*edge) for edge in edges]
    _, groups = stage_backward_input(outputs, list(values), list(leaves), iter(params.values()))
    groups = _disjoint(groups)
    inputs = {_accumulator(leaf) for leaf in leaves if leaf.requires_grad}
    apart = [i for i, edge in enumerate(edges) if not _leads_to(edge.node, inputs)]
    if not apart:
        return Rest(groups)
    # No path from these outputs meets a path that leads to an input: nothing is computed twice.
    roots, given = ([row[i] for i in apart] for row in (edges, values))
    found = torch.autograd.grad(roots, list(params.values()), given, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    return Rest(groups, {name: g for name, g in zip(params, found) if g is not None})


def weight_half(rest: Rest, params: Mapping[str, nn.Parameter]) -> None:
    """Add the gradients of the parameters to their `.grad`. The rest is used up."""
    with _any_dtype(params):
        _weight_half(rest, params)


@contextmanager
def _any_dtype(params: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let torch's half set gradients in the dtype of parameters whose gradients are added up in a wider one; in the end
    they have that."""
    wide = {name: param.grad_dtype for name, param in params.items() if param.grad_dtype != param.dtype}
    for name in wide:
        params[name].grad_dtype = None
    yield
    for name, dtype in wide.items():
        param, grad = params[name], params[name].grad
        param.grad = None if grad is None else grad.to(dtype)
        param.grad_dtype = dtype


def _weight_half(rest: Rest, params: Mapping[str, nn.Parameter]) -> None:
    from ..torch_names import stage_backward_weight

    groups, whole = rest.groups, rest.whole
    rest.drop()
    so_far = {name: params[name].grad for name in whole}
    for name in whole:  # the parts of one micro-batch are added up before they join the sum so far
        params[name].grad = None
    if groups:
        # The path of a parameter that is used twice crosses nodes that other parameters need as well.
        stage_backward_weight(iter(params.values()), groups, retain_graph=True)
    for name, part in whole.items():
        param, before = params[name], so_far[name]
        total = part if param.grad is None else param.grad + part
        param.grad = total if before is None else before.add_(total)


def _disjoint(groups: Sequence[BackwardGroup]) -> list[BackwardGroup]:
    """The groups, united if they share a parameter, without nodes that no gradient reached. A parameter that is used
    twice may come in two groups, and its gradient would then count twice."""
    united: list[dict[str, dict[Any, Any]]] = []
    for group in groups:
        noted = zip(group["intermediates"], group.get("grads") or [])
        grads = {node: row for node, row in noted if row is not None}
        if not grads:
            continue
        params = dict.fromkeys(group["params"])
        apart = []
        for other in united:
            if other["params"].keys() & params.keys():
                params, grads = {**other["params"], **params}, {**other["grads"], **grads}
            else:
                apart.append(other)
        united = [*apart, {"params": params, "grads": grads}]
    return [
        {"params": list(g["params"]), "intermediates": list(g["grads"]), "grads": list(g["grads"].values())}
        for g in united
    ]


def _accumulator(leaf: Tensor) -> Any:
    """The node of the graph that stands for a leaf."""
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _leads_to(node: Any, goals: set[Any]) -> bool:
    """Whether a gradient at the node flows to one of the goals."""
    seen, stack = {node}, [node]
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        fresh = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= fresh
        stack += fresh
    return False


@functools.cache
def wrong_halves() -> str:
    """The fault of torch's halves on a small graph, in which a matrix is used twice with others between, a vector
    before and after an input comes in, and an output that no input reaches shares a parameter with the other; "" where
    they give the gradients of a whole backward, bit for bit."""
    whole = _sample_gradients(lambda edges, grads, leaves, params: torch.autograd.backward(edges, grads))
    try:
        halves = _sample_gradients(lambda *given: weight_half(input_half(*given), given[-1]))
    except (PlanError, RuntimeError, AttributeError, TypeError) as error:
        return f"its backward in two halves fails: {error}"
    differ = [name for name, g in whole.items() if (halves[name] is None) != (g is None) or not _equal(halves[name], g)]
    return f"its backward in two halves gives another gradient of {differ[0]} than a whole one" if differ else ""


def require_halves() -> None:
    """Raise `PlanError` where torch's halves are wrong."""
    if fault := wrong_halves():
        raise PlanError(
            f"torch {torch.__version__}: {fault}, so no backward is split. Take a schedule with whole backwards, such "
            "as schedule-1f1b, or torch 2.13 or newer"
        )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _sample_gradients(backward: Callable[..., None]) -> dict[str, Tensor | None]:
    """The gradients of the sample's parameters after two micro-batches, and of the inputs of the second."""
    made = torch.Generator().manual_seed(0)
    shapes = {"twice": (4, 4), "between": (4, 4), "bias": (4,), "vector": (4,), "apart": (4,), "unused": (4,)}
    params = {name: nn.Parameter(torch.randn(shape, generator=made)) for name, shape in shapes.items()}
    twice, between, bias, vector, apart, _ = params.values()
    for _ in range(2):
        x, y = leaves = [torch.randn(3, 4, generator=made).requires_grad_() for _ in range(2)]
        inner = torch.tanh((x + vector) @ twice) + (layer_norm(y, (4,)) @ between + bias)
        outputs = [(inner @ twice * vector + y) * apart.abs(), apart.abs() * bias]
        grads = [torch.randn(out.shape, generator=made) for out in outputs]
        backward([get_gradient_edge(out) for out in outputs], grads, leaves, params)
    return {name: p.grad for name, p in params.items()} | {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
