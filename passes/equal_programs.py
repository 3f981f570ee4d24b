"""Programs that differ in names alone: what was decided for one device holds for all that are alike.

In: programs of one draft. Out: a key that is equal where memory and order are the same op by op, which is all that
rematerialisation and fetching look at. Models of identical layers have few different devices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import fx

from ..ir import ops
from ..ir.program import Program, StageSpec

Result = TypeVar("Result")


def look(program: Program, specs: Sequence[StageSpec]) -> Hashable:
    """A key that is equal for programs with equal ops, operands, sizes and stages (`specs`, in order) but for names."""
    number = {spec.name: i for i, spec in enumerate(specs)}
    position: dict[fx.Node, int] = {}
    rows: list[Hashable] = []
    for node in program.graph.nodes:
        position[node] = len(position)
        reads = tuple(position[value] for value in node.all_input_nodes)
        if node.op != "call_function" or not isinstance(node.target, ops.Op):
            rows.append((str(node.target), reads))
            continue
        stage = str(node.args[0]).partition(".")[0] if node.args else ""
        absent = tuple(arg is None for arg in node.args)  # what a rematerialised backward does not get
        how = (node.kwargs.get("keep"), node.kwargs.get("params"), node.kwargs.get("unpack_once"))
        rows.append((node.target.name, reads, absent, how, number.get(stage), _sizes(node.meta.get("type"))))
    return tuple(rows), tuple(_stage(spec) for spec in specs)


def once(known: dict[Hashable, Result], key: Hashable, make: Callable[[], Result]) -> Result:
    """The known result for the key, else a new one from `make`."""
    if key not in known:
        known[key] = make()
    return known[key]


def _sizes(types: Any) -> Hashable:
    values = types if isinstance(types, tuple) else (types,)
    return tuple((v.bytes, v.memory, v.owned) for v in values if isinstance(v, ops.Value))


def _stage(spec: StageSpec) -> Hashable:
    params = tuple((p.bytes, p.requires_grad, p.dtype, p.shared) for p in spec.params)
    costs = (spec.kept_bytes, spec.forward_workspace_bytes, spec.light_workspace_bytes, spec.backward_workspace_bytes)
    again = spec.whole_again
    buffers = tuple((b.bytes, b.name in spec.changing_buffers, b.name in spec.repeated_buffers) for b in spec.buffers)
    return params, buffers, costs, again.workspace_bytes, spec.rematerialisable
