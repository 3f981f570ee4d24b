"""No runtime lacks an op: the same names, and parameters that any program's call fits."""

from __future__ import annotations

import inspect

import pytest

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, place_frees
from penstock.runtime.device.runtime import DeviceRuntime
from penstock.runtime.reference.ops import ReferenceRuntime
from penstock.runtime.simulate import simulate
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.ir.program.two_stages import evaluation, interface_of, models, spread, training


@pytest.mark.parametrize("op", ops.ALL.values(), ids=ops.ALL)
@pytest.mark.parametrize("runtime", [ReferenceRuntime, DeviceRuntime])
def test_every_op_is_a_method_with_the_ops_signature(runtime: type, op: ops.Op) -> None:
    found = list(inspect.signature(getattr(runtime, op.name)).parameters.values())[1:]
    want = list(op.signature.parameters.values())
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in want]


def test_the_reference_has_no_op_of_its_own() -> None:
    own = {name for name, member in inspect.getmembers(ReferenceRuntime, callable) if not name.startswith("_")}
    assert own == ops.ALL.keys()


def test_the_simulator_times_every_op() -> None:
    interface = interface_of(*models(tied=True), tied=True)
    swapped, evaluated = training(interface, swap=True, max_norm=1.0), evaluation(interface)
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
    programs = (*swapped, *evaluated, *shared, *stored, *split, *versions)
    assert {n.target.name for p in programs for n in p.ops()} == ops.ALL.keys()  # type: ignore[union-attr]
    timed = set()
    for programs in (swapped, evaluated, shared, stored, split, versions):
        timed |= {span.op for span in simulate(programs, Hardware.cpu(num_devices=2, ssd="1GB")).spans}
    assert timed == ops.ALL.keys() - {"free", "resident"}  # they take no time
