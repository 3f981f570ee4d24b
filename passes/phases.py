"""Phases of a program: runs of ops that need the weights of one stage, and how weights are handed over to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ..ir import ops
from ..ir.calls import op_of
from ..ir.program import Program


@dataclass
class Phase:
    """A run of ops that need one stage's weights. `last`: index of the phase after which the weights leave."""

    stage: str
    kind: str  # "forward" | "backward"
    nodes: list[fx.Node]
    last: int = 0


def phases(program: Program) -> list[Phase]:
    """The phases in issue order. A backward that follows its own forward directly belongs to the same phase."""
    return program.once(_phases)


def _phases(program: Program) -> list[Phase]:
    found: list[Phase] = []
    for node in program.ops():
        op = op_of(node)
        if not op.parts:
            continue
        stage = str(node.args[0])
        kind = "backward" if op.is_backward else "forward"
        if found and found[-1].stage == stage:
            found[-1].nodes.append(node)
        else:
            found.append(Phase(stage, kind, [node]))
    keeps = {  # stages that keep all saved tensors until their backward: their weights stay as well
        str(n.args[0])
        for n in program.ops()
        if op_of(n).takes_kept and isinstance(n.args[2], fx.Node) and not n.args[2].meta["type"].classes
    }
    last = {phase.stage: i for i, phase in enumerate(found)}
    halved: set[str] = set()  # stages with a half of a backward so far: the other half needs the same weights
    for i, phase in enumerate(found):
        if any(node.target is ops.backward_input for node in phase.nodes):
            halved.add(phase.stage)
        stays = phase.stage in keeps or phase.stage in halved
        phase.last = last[phase.stage] if stays else i
    return found


def fetched_phases(order: list[Phase], stages: Collection[str]) -> list[int]:
    """Indices of the phases that begin with a fetch: those whose weights are not there from an earlier phase."""
    held: dict[str, int] = {}
    found = []
    for i, phase in enumerate(order):
        if phase.stage in stages and held.get(phase.stage, -1) < i:
            found.append(i)
            held[phase.stage] = phase.last
    return found


def hand_over(order: list[Phase], begin: int, weights: fx.Node) -> None:
    """Let the phase `begin`, and the later ones of its stage until the weights leave, run on `weights`."""
    phase = order[begin]
    for later in order[begin : phase.last + 1]:
        for node in later.nodes if later.stage == phase.stage else ():
            node.args = (node.args[0], weights, *node.args[2:])
