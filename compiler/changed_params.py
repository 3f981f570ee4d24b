"""Whether what forward does to parameters in place lasts under a plan, as it does in eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph.opgraph import OpGraph, ParamChange
from ..ir import ops
from ..ir.errors import PlanError
from ..ir.program import Interface, ParamSpec, Program, StageHome, homes_of


def require_lasting(graph: OpGraph, programs: Sequence[Program]) -> None:
    """Raises `PlanError` naming the parameter and the line where a plan would lose a change.

    An element-wise change is made to the masters of a trained parameter, too, wherever they are: it always lasts. The
    rows that `max_norm` changes depend on the batch: only weights that forward itself runs on keep them.
    """
    if not graph.changes:
        return
    ties, interface = graph.ties(), programs[0].interface
    for program in programs:
        for stage, home in homes_of(program).items():
            for param in interface.stages[stage].params:
                name = ties.get(param.name, param.name)
                change = graph.changes.get(name)
                why = None if change is None else next(_reasons(param, change, home, interface), None)
                if change is not None and why is not None:
                    raise PlanError(
                        f"{change.source}\n  forward changes {name} in place, which this plan would lose: {why}. Leave "
                        "the change out of forward, or choose a strategy that keeps the weights on one device, such as "
                        'strategy="1f1b"'
                    )


def _reasons(param: ParamSpec, change: ParamChange, home: StageHome, interface: Interface) -> Iterator[str]:
    if param.requires_grad and change.calls:
        return
    if home.weights != ops.DEVICE or home.group:
        yield "its weights live elsewhere than on the device that runs forward"
    if interface.master:
        yield "its masters are kept in fp32 beside the weights that forward runs on"
    if len(interface.lanes) > 1 and not change.calls:
        yield "each copy of the model would change the rows of its own part of the batch"
