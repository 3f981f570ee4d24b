"""No runtime lacks an op: the same names, and parameters that any program's call fits."""

from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.calls import op_of
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Earlier, HookCall, Program, place_frees
from penstock.runtime.device.runtime import DeviceRuntime
from penstock.runtime.reference.ops import ReferenceRuntime
from penstock.runtime.simulate import simulate
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.ir.program.two_stages import (
    evaluation,
    interface_of,
    models,
    spread,
    training,
    with_hooks,
    with_team_ops,
)


@pytest.mark.parametrize("op", ops.ALL.values(), ids=ops.ALL)
@pytest.mark.parametrize("runtime", [ReferenceRuntime, DeviceRuntime])
def test_every_op_is_a_method_with_the_ops_signature(runtime: type, op: ops.Op) -> None:
    found = list(inspect.signature(getattr(runtime, op.name)).parameters.values())[1:]
    want = list(op.signature.parameters.values())
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in want]


@given(st.sampled_from(list(ops.ALL.values())), st.data())
def test_operands_are_bound_as_python_binds_them(op: ops.Op, data: st.DataObject) -> None:
    names = list(op.signature.parameters)
    args = tuple(range(data.draw(st.integers(0, len(names) + 1))))
    kwargs = dict.fromkeys(data.draw(st.lists(st.sampled_from([*names, "unknown"]), unique=True)), -1)
    try:
        bound = op.signature.bind(*args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError, match=f"^{re.escape(str(error))}$"):
            op.bind(args, kwargs)
        return
    bound.apply_defaults()
    assert list(op.bind(args, kwargs).items()) == list(bound.arguments.items())


# Per trait, and value of it, the ops that have it; all others have the default.
HOLDERS = {
    ("streams", ()): "free member resident",
    ("allowed_in", ops.TRAINING): "add all_reduce backward backward_input backward_weight clip forward hook norm redo "
    "reduce_scatter step",
    ("allowed_in", ops.EVALUATION): "evaluate",
    ("allowed_in", (ops.ASYNCHRONOUS,)): "predict split stash",
    ("allowed_in", ops.EVERYWHERE): "all_gather all_to_all fetch free from_experts gather_parts load member offload "
    "own_part pass_on read recv resident scatter_sum send sum_parts to_experts write",
    ("parts", ("forward",)): "forward",
    ("parts", ("evaluate",)): "evaluate",
    ("parts", ("backward_input", "backward_weight")): "backward",
    ("parts", ("backward_input",)): "backward_input",
    ("parts", ("backward_weight",)): "backward_weight",
    ("takes_kept", True): "backward backward_input",
    ("gives_gradients", True): "backward backward_weight",
    ("is_backward", True): "backward backward_input backward_weight",
    ("passes_on", True): "add all_to_all fetch from_experts gather_parts offload own_part pass_on read recv "
    "scatter_sum sum_parts to_experts write",
    ("prepares", True): "all_gather all_reduce all_to_all clip fetch from_experts gather_parts hook load member norm "
    "own_part pass_on recv resident scatter_sum sum_parts to_experts",
    ("transfers", True): "fetch offload read send write",
    ("meets", ops.PEER): "recv send",
    ("meets", ops.GROUP): "all_gather all_reduce all_to_all from_experts gather_parts pass_on reduce_scatter "
    "scatter_sum sum_parts to_experts",
    ("persists_in", ops.DEVICE): "resident",
    ("persists_in", ops.DRAM): "fetch",
    ("persists_in", ops.SSD): "read",
    ("updates", "stage"): "redo step",
    ("updates", "to"): "write",
    ("result_in_arena", True): "all_gather fetch offload read reduce_scatter write",
    ("workspace_in_arena", True): "reduce_scatter",
}  # fmt: skip


@pytest.mark.parametrize(("trait", "value"), HOLDERS, ids=str)
def test_a_trait_is_held_by_these_ops(trait: str, value: object) -> None:
    assert " ".join(sorted(op.name for op in ops.ALL.values() if getattr(op, trait) == value)) == HOLDERS[trait, value]


def test_a_trait_has_no_other_values_and_names_operands_of_its_op() -> None:
    for op in ops.ALL.values():
        for trait in ("allowed_in", "parts", "meets", "persists_in", "updates"):
            value = getattr(op, trait)
            assert not value or (trait, value) in HOLDERS
        assert not op.updates or op.updates in op.signature.parameters
        assert op.signature.parameters.keys() >= set(op.donates)


def test_the_reference_has_no_op_of_its_own() -> None:
    own = {name for name, member in inspect.getmembers(ReferenceRuntime, callable) if not name.startswith("_")}
    assert own == ops.ALL.keys()


def test_the_simulator_times_every_op() -> None:
    interface = interface_of(*models(tied=True), tied=True)
    hooked = with_hooks(interface, HookCall("aten.neg.default", (Earlier(0),)))
    swapped, evaluated = training(hooked, swap=True, max_norm=1.0), evaluation(interface)
    results = evaluated[1].results()
    with evaluated[1].graph.inserting_before(evaluated[1].graph.output_node()):
        total = evaluated[1].emit(ops.add, *results["loss"][:2])
    evaluated[1].returns({"loss": total})
    place_frees(evaluated[1])
    shared = spread(interface)
    stored = pipeline(2, ssd="all", clip=True, speculative=True)
    split = pipeline(2, split=True)
    versions = [Program(device, interface) for device in range(2)]
    (weights,) = versions[0].emit(ops.resident, "stage0.weights")
    versions[0].emit(ops.stash, "stage0", weights)
    versions[0].emit(ops.predict, "stage0", weights, updates=1)
    loaded = versions[0].emit(ops.load, versions[0].batch, "ids", micro_batch=0)
    *_, grads = versions[0].emit(ops.backward, "stage0", weights, None, loaded, [None], micro_batch=0)
    versions[0].emit(ops.split, "stage0", grads)
    place_frees(versions[0])
    team = [with_team_ops(interface)]
    programs = (*swapped, *evaluated, *shared, *stored, *split, *versions, *team)
    assert {op_of(n).name for p in programs for n in p.ops()} == ops.ALL.keys()
    timed = set()
    for programs in (swapped, evaluated, shared, stored, split, versions, team):
        timed |= {span.op for span in simulate(programs, Hardware.cpu(num_devices=2, ssd="1GB")).spans}
    assert timed == {name for name, op in ops.ALL.items() if op.streams}
