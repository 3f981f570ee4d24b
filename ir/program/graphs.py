"""The stages of a program that run from CUDA graphs, and the memory that their graphs hold until the job ends.

A graph computes at fixed places: those of the weights, which must be on the device for good, and memory of its own for
all that it takes, saves and gives. So each micro-batch that waits between its forward and its backward needs a pair of
graphs, a slot. What a forward saves is in its slot; the account has it there, at all times, not in values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from .. import ops
from ..calls import op_of
from ..stages.stage import StageSpec, TensorSpec, aligned
from .program import Program, donated_operands, values_of, work_of

# What torch's allocator may take beside the bytes that are asked for, of memory that only one slot uses: a segment of
# small tensors, and one for large ones that is not full.
SEGMENTS_BYTES = 22 << 20
PRODUCTS_BYTES = 33 << 20  # workspace of cuBLAS, at most: that of a Hopper, and its rounding

FETCHED = "its weights do not stay on the device"
KEEPS_CLASSES = "the plan keeps results of single calls"
LEAVES = "its gradients are read beside computation"
APART = "a step adds up its gradients in several places"
DIFFERS = "its backwards do not all take the same gradients"
NO_BACKWARD = "the program runs no backward of it"


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of a stage: `slots` of a forward that keeps what backward needs and its backward; and, if
    `again`, one slot of a forward that keeps nothing and a backward that rematerialises. `takes`: per output, whether
    backward takes a gradient of it."""

    slots: int
    again: bool
    takes: tuple[bool, ...]


def graphs_of_stages(program: Program) -> dict[str, StageGraphs]:
    """The stages that run from graphs; none where the plan has no graphs."""
    if not program.interface.cuda_graphs:
        return {}
    reasons = reasons_without_graphs(program)
    return {stage: _graphs(program, stage) for stage in _stages(program) if stage not in reasons}


def reasons_without_graphs(program: Program) -> dict[str, str]:
    """Stages that run as written, with the reason."""
    found = {stage: _reason(program, stage) for stage in _stages(program)}
    return {stage: reason for stage, reason in found.items() if reason}


def no_graphs_text(reasons: Mapping[str, str]) -> str:
    """The sentence that refuses a plan of which no stage can run from graphs."""
    why = "; ".join(f"{stage}: {reason}" for stage, reason in reasons.items())
    return f"cuda_graphs=True, but no stage of this plan can run from CUDA graphs: {why}. Leave it out"


def graph_bytes(program: Program, fetched: Collection[str] = ()) -> int:
    """Bytes of all graphs, for good. Also of stages that could run from graphs by themselves, but not as this
    program uses them: their ops count nothing of what they save. `fetched`: stages that will be, and have none."""
    if not program.interface.cuda_graphs:
        return 0
    context, total = ops.Context(program.interface, program.device), 0
    for stage in (stage for stage in _stages(program) if stage not in fetched):
        weights = [_weights(call) for call in _calls(program, stage)]
        if any(ops.counts_in_graph(context, stage, value) for value in weights):
            total += _bytes_of(program.interface.stages[stage], _graphs(program, stage))
    return total


def _bytes_of(spec: StageSpec, graphs: StageGraphs) -> int:
    """Bytes of a stage's graphs. Gradients of parameters add up at one place for all slots."""
    around = _bytes(spec.inputs) + 2 * _bytes(spec.outputs) + _bytes([i for i in spec.inputs if i.requires_grad])
    around += SEGMENTS_BYTES + PRODUCTS_BYTES
    kept = around + spec.kept_bytes + max(spec.forward_workspace_bytes, spec.backward_workspace_bytes)
    again = (
        around
        + spec.kept_bytes
        + max(spec.light_workspace_bytes, spec.whole_again.workspace_bytes, spec.backward_workspace_bytes)
    )
    grads = sum(aligned(param.grad_bytes) for param in spec.params if param.requires_grad)
    return graphs.slots * kept + graphs.again * again + grads


def _bytes(tensors: Iterable[TensorSpec]) -> int:
    return sum(aligned(tensor.bytes) for tensor in tensors)


def _stages(program: Program) -> list[str]:
    return list(dict.fromkeys(str(node.args[0]) for node in program.ops() if node.target is ops.forward))


def _calls(program: Program, stage: str, op: ops.Op | None = None) -> list[fx.Node]:
    """The forwards and backwards of a stage, or those calls of it that are of one op."""
    wanted = (ops.forward, ops.backward) if op is None else (op,)
    return [node for node in program.ops() if node.target in wanted and node.args[0] == stage]


def _weights(call: fx.Node) -> ops.Value:
    bound: ops.Value = op_of(call).bind(call.args, call.kwargs)["weights"].meta["type"]
    return bound


def _graphs(program: Program, stage: str) -> StageGraphs:
    live = most = 0
    again = False
    takes: tuple[bool, ...] = ()
    for node in _calls(program, stage):
        if node.target is ops.forward:
            keeps = node.kwargs.get("keep", True) is True
            live += keeps
            again |= not keeps
        else:
            bound = ops.backward.bind(node.args, node.kwargs)
            live -= bound["kept"] is not None
            takes = tuple(dout is not None for dout in bound["douts"])
        most = max(most, live)
    return StageGraphs(most, again, takes)


def _reason(program: Program, stage: str) -> str:
    spec, calls = program.interface.stages[stage], _calls(program, stage)
    if spec.ungraphable:
        return spec.ungraphable
    if any(_weights(call).owned for call in calls):
        return FETCHED
    if any(node.kwargs.get("keep", True) not in (True, False) for node in calls if node.target is ops.forward):
        return KEEPS_CLASSES
    backwards = _calls(program, stage, ops.backward)
    if not backwards:
        return NO_BACKWARD
    bound = [ops.backward.bind(node.args, node.kwargs) for node in backwards]
    if len({tuple(dout is not None for dout in each["douts"]) for each in bound}) > 1:
        return DIFFERS
    if sum(each["grads"] is None for each in bound) > 1:
        return APART
    if any(_leaves(program, values_of(node)[-1]) for node in backwards):
        return LEAVES
    return ""


def _leaves(program: Program, grads: fx.Node) -> bool:
    """Whether anything reads these gradients that neither is computation nor takes them over. What does is over before
    the update, and so before the next step adds up gradients at the same place."""
    for user in grads.users:
        if user.op == "output":
            return True
        takes_over = grads in donated_operands(user)
        if op_of(user).streams and work_of(program, user).stream != ops.COMPUTE and not takes_over:
            return True
        after = [value for value in values_of(user) if value.meta["type"].kind == "grads"] if takes_over else []
        if user.target is not ops.backward and any(_leaves(program, value) for value in after):
            return True
    return False
