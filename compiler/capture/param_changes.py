"""Parameters that forward changes in place (`clamp_` under no_grad, an embedding's `max_norm`), and what of it lasts.

In: a recorded graph. Out: per parameter a `ParamChange`. A change that lasts until the next step is made by eager once
in a step, whatever the micro-batches; a program makes it in every forward, on a copy of the weights if they live
elsewhere. So it must be one that changes nothing the second time, before anything else reads the parameter; an
element-wise one is taken out of the graph, and made by whoever binds or updates the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from ...graph.dataflow import closure
from ...graph.edit import erase_dead, replace_all
from ...graph.opgraph import OpGraph, ParamChange
from ...ir.edges import written_roots
from ...ir.errors import CaptureError
from ...ir.program import HookCall
from ...runtime.optimizer.hooks import call_hooks
from .gradient_hooks import Refused, Tracer

_REMEDY = (
    "a program makes it once per micro-batch, where eager makes it once per step: leave it out of forward, or use an "
    "element-wise change that does nothing the second time (self.weight.clamp_(-1, 1)), before the weight is used"
)


def changes_of(graph: OpGraph) -> dict[str, ParamChange]:
    """The parameters that forward changes, by first name. Raises CaptureError for changes that are none of the two."""
    ties, found = graph.ties(), dict[str, ParamChange]()
    writes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for name in _params_of_write(graph, node):
            writes.setdefault(ties.get(name, name), []).append(node)
    for name, nodes in writes.items():
        where, readers = nodes[0].meta["source"], list(_readers(graph, name, ties))
        own = closure(nodes, lambda node: node.all_input_nodes)
        early = [n for n in readers if n < nodes[-1] and not _serves(n, own)]
        if all(map(_renorms, nodes)) and len(nodes) == len(readers) == 1:
            found[name] = ParamChange(where)
            continue
        if early:
            raise CaptureError(f"{where}\n  forward changes {name} in place after it has been used: {_REMEDY}")
        found[name] = ParamChange(where, _calls(graph, name, nodes))
    return found


def _serves(reader: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a value that is read from a parameter goes into its change alone. Views see what is changed."""
    return reader in own and (reader.meta["alias_of"] is not None or own.issuperset(reader.users))


def take_out(graph: OpGraph) -> None:
    """Remove the nodes that make the element-wise changes: runners make them, before forward."""
    ties, idle = graph.ties(), [node for node in graph.nodes if not node.users]
    for node in list(graph.nodes):
        if any((change := graph.changes.get(ties.get(n, n))) and change.calls for n in _params_of_write(graph, node)):
            replace_all(graph, {node: node.all_input_nodes[0]})
    erase_dead(graph, kept=idle)
    graph.module.recompile()


def _calls(graph: OpGraph, name: str, nodes: list[fx.Node]) -> tuple[HookCall, ...]:
    param = graph.parameters()[name]
    value = torch.empty(param.shape, dtype=param.dtype, device="meta")
    tracer = Tracer(value)
    where = nodes[0].meta["source"]
    try:
        with torch.no_grad(), tracer:
            for node in nodes:
                _replay(node, value)
            calls = tracer.calls_for(tracer.index_of(value))
    except Refused as error:
        raise CaptureError(f"{where}\n  forward changes {name} in place and {error}: {_REMEDY}") from None
    samples = torch.cat([torch.linspace(-3.0, 3.0, 97), torch.tensor([-1e4, -1e-4, 1e-4, 1e4])]).to(param.dtype)
    once = call_hooks(calls, samples)
    if not torch.equal(call_hooks(calls, once), once):
        raise CaptureError(f"{where}\n  forward changes {name} in place, again and again: {_REMEDY}")
    return calls


def _replay(node: Any, value: torch.Tensor) -> Any:
    """Run a node and what it is made of on the tensor that stands for the parameter."""
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        return value
    args: Any = fx.node.map_aggregate(node.args, lambda n: _replay(n, value))
    kwargs: Any = fx.node.map_aggregate(node.kwargs, lambda n: _replay(n, value))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function" and callable(node.target):
        return node.target(*args, **kwargs)
    raise Refused("uses inputs or other tensors for it")


def _params_of_write(graph: OpGraph, node: fx.Node) -> Iterator[str]:
    """The names of the parameters that a node changes."""
    for written in written_roots(node):
        if written.op == "get_attr" and graph.node_parameters(written):
            yield str(written.target)
    if node.op == "call_module" and _max_norm_of(graph, node) is not None:
        yield f"{node.target}.weight"


def _max_norm_of(graph: OpGraph, node: fx.Node) -> float | None:
    module = graph.module.get_submodule(str(node.target))
    return module.max_norm if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None


def _renorms(node: fx.Node) -> bool:
    return node.op == "call_module" or node.target in (nn.functional.embedding, nn.functional.embedding_bag)


def _readers(graph: OpGraph, name: str, ties: dict[str, str]) -> Iterator[fx.Node]:
    """The nodes that read a parameter under any of its names, but for the nodes that only fetch it."""
    for node in graph.nodes:
        if node.op == "get_attr":
            if ties.get(str(node.target), str(node.target)) == name:
                yield from node.users
        elif any(ties.get(own, own) == name for own in graph.node_parameters(node)):
            yield node
