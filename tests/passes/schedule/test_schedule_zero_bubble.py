"""`schedule-zero-bubble`: orders, what may be held, deadlocks, and training as by fill and drain."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops import rest_bytes
from penstock.ir.program import Program
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.schedule.flow import Flow
from penstock.passes.schedule.schedule_1f1b import BackwardFirst, Schedule1F1B
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.passes.schedule.schedule_zero_bubble import ScheduleZeroBubble
from penstock.runtime.simulate import simulate
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, zoo_case
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    Chain,
    apply,
    assert_trains_like_eager,
    chain,
    cut,
    draft_of,
    text_of,
    to_schedule,
    trace_case,
    traced_model,
)
from penstock.tests.shown_elsewhere import slow_but

LETTERS = {ops.forward: "F", ops.backward: "B", ops.backward_input: "I", ops.backward_weight: "W"}
Passes = list


def through(schedule: object, stages: int = 0) -> Passes:
    return [*to_schedule(stages)[:-1], schedule]


def whole(schedule: object, stages: int = 0) -> Passes:
    return [*through(schedule, stages), InsertRemat(), InsertFetch(), InsertOptimizer()]


def turns(program: Program) -> str:
    """Letters with their micro-batch: F0 I0 W0."""
    found = [n for n in program.ops() if n.target in LETTERS]
    return " ".join(f"{LETTERS[n.target]}{n.kwargs['micro_batch']}" for n in found)  # type: ignore[index]


def most_held(program: Program) -> dict[str, int]:
    """Per stage the micro-batches between a forward and the end of its backward."""
    held, most = defaultdict(int), defaultdict(int)
    for node in program.ops():
        if node.target in (ops.forward, ops.backward, ops.backward_weight):
            stage = str(node.args[0])
            held[stage] += 1 if node.target is ops.forward else -1
            most[stage] = max(most[stage], held[stage])
    return most


def test_the_text(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=2), micro_batches=2), *through(ScheduleZeroBubble()))
    golden(text_of(draft), "two-devices")


def test_weights_wait_until_a_device_is_idle_or_full() -> None:
    """Four equal stages on four devices. The first hands no gradient back, and its backward is whole."""
    draft = draft_of(chain(depth=8, width=128, rows=64), Hardware.cpu(num_devices=4), micro_batches=6)
    apply(draft, *through(ScheduleZeroBubble(), 4))
    assert [turns(p) for p in draft.programs] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 I0 F3 I1 W0 W1 F4 I2 F5 I3 W2 W3 I4 W4 I5 W5",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 F5 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 W0 F2 I2 F3 I3 W1 F4 I4 F5 I5 W2 W3 W4 W5",
    ]


@pytest.mark.slow
def test_the_bubble_shrinks() -> None:
    """From N - 1 turns of a forward and a backward by two of the halves that wait."""
    graph, hardware = chain(depth=16, width=512, rows=256), Hardware.cpu(num_devices=4, memory="1GB")
    step_s = {}
    for schedule in (Schedule1F1B(), ScheduleZeroBubble()):
        draft = apply(draft_of(graph, hardware, micro_batches=8), *through(schedule, 4))
        step_s[schedule.name] = simulate(draft.programs, hardware).step_s
    turn_s = step_s["schedule-1f1b"] / 11  # of which a third is forward
    assert step_s["schedule-zero-bubble"] == pytest.approx((8 + 3 * 1 / 3) * turn_s, rel=0.05)


# T5's layers share a bias: the halves of a backward add up its gradients from three layers in another order, which
# rounds otherwise with some dropout masks. So it is compared in float64.
@pytest.mark.parametrize(
    ("name", "double", "rounding"), [("gpt2", False, 0.0), pytest.param("t5", True, 1e-16, marks=pytest.mark.slow)]
)
def test_training_is_bit_for_bit_that_of_fill_and_drain(name: str, double: bool, rounding: float) -> None:
    graph, batches = trace_case(name, double=double)
    runs = []
    for schedule in (SchedulePipeline(), ScheduleZeroBubble()):
        draft = apply(draft_of(graph, micro_batches=3, max_grad_norm=1.0), *whole(schedule, 4))
        runs.append(assert_trains_like_eager(draft, batches, tolerance=1e-6))
    assert any(n.target is ops.backward_weight for p in draft.programs for n in p.ops())
    first, second = (run.weights() for run in runs)
    assert all((first[key] - second[key]).abs().max() <= rounding for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["wide_resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "mixtral"))]
)
def test_training_is_bit_for_bit_that_of_eager(name: str) -> None:
    graph, batches = trace_case(name)
    draft = apply(draft_of(graph, micro_batches=3), *whole(ScheduleZeroBubble(), 4))
    assert_trains_like_eager(draft, batches)


@pytest.mark.parametrize("frozen", slow_but(["norm", "layers"], ["layers.0", "layers.2", "norm", "layers"]))
def test_frozen_parts(frozen: str) -> None:
    """A stage without trained parameters has whole backwards, or none where nothing in front of it is trained."""
    model = Chain(depth=4)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen) and frozen not in name.split("."))
    batches = [{"x": torch.randn(2, 16), "labels": torch.randint(4, (2,))} for _ in range(3)]
    graph, batches = traced_model(model, batches)
    draft = apply(draft_of(graph, micro_batches=3), *whole(ScheduleZeroBubble(), 5))
    assert_trains_like_eager(draft, batches)
    split = {str(n.args[0]) for p in draft.programs for n in p.ops() if n.target is ops.backward_weight}
    assert split == {"layers.0": {"stage2", "stage3", "stage4"}, "layers.2": {"stage1", "stage3", "stage4"},
                     "norm": {"stage1", "stage2", "stage3", "stage4"}, "layers": set()}[frozen]  # fmt: skip


@pytest.mark.slow
def test_stages_that_are_swapped_and_computed_again() -> None:
    """Weights come from DRAM: a stage's stay from its first half of a backward on. Saved tensors are made again for
    the first half, and kept for the second."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(2, 16), "labels": torch.randint(4, (2,))} for _ in range(3)]
    graph, batches = traced_model(Chain(depth=7), batches)
    passes = [*through(ScheduleZeroBubble(), 8), InsertRemat(always=True), InsertFetch(swap=True), InsertOptimizer()]
    draft = apply(draft_of(graph, Hardware.cpu(num_devices=2, memory="64kB"), micro_batches=3), *passes, memory=True)
    found = [n for p in draft.programs for n in p.ops()]
    assert {n.target for n in found} >= {ops.fetch, ops.offload, ops.backward_weight}
    assert all(n.args[2] is None for n in found if n.target is ops.backward_input)
    assert_trains_like_eager(draft, batches)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_cut_and_no_mapping_deadlocks_or_holds_more_than_1f1b(data: st.DataObject) -> None:
    draft = draft_of(trace_case("t5")[0], micro_batches=data.draw(st.integers(1, 5)))
    apply(draft, *to_schedule()[:1])
    names = [block.name for block in draft.blocks]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1))))
    num_devices = data.draw(st.integers(1, 4))
    draft.machine = Hardware.cpu(num_devices=num_devices)
    devices = data.draw(st.lists(st.integers(0, num_devices - 1), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    apply(draft, *through(ScheduleZeroBubble())[1:], decisions={"stages": cut(names, cuts), "devices": devices})
    flow = Flow(draft.programs[0].interface, draft.devices)
    promised = max(BackwardFirst(flow, draft).most.values())
    assert all(count <= promised for program in draft.programs for count in most_held(program).values())


def test_what_lies_between_the_halves_is_what_was_planned() -> None:
    """Gradients that wait, of every stage of a model with norms, attention and products: as counted from its blocks."""
    graph, batches = trace_case("t5")
    draft = apply(draft_of(graph, micro_batches=3), *whole(ScheduleZeroBubble(), 4))
    machine = assert_trains_like_eager(draft, batches, tolerance=1e-6, steps=1)
    for stage in draft.stages[1:]:
        runner, spec = machine.world.stage(0, stage.spec.name).runner, stage.spec
        weights = machine.world.stage(0, spec.name).weights
        runner.bind(weights)
        inputs = [
            torch.randn(i.shape) if i.dtype == "float32" else torch.ones(i.shape, dtype=getattr(torch, i.dtype))
            for i in spec.inputs
        ]
        outputs, kept = runner.forward(inputs, 0)
        douts = [torch.ones_like(o) if want.requires_grad else None for o, want in zip(outputs, spec.outputs)]
        _, rest = runner.backward_input(kept, inputs, douts, 0)
        planned = rest_bytes(replace(spec, kept_bytes=runner.kept_bytes))
        assert planned - 0.5 * spec.split_bytes <= rest.num_bytes <= planned, spec.name


def test_a_pass_that_takes_whole_backwards_says_so() -> None:
    passes = [*through(ScheduleZeroBubble()), ChooseActivations()]
    with pytest.raises(PassError, match="needs whole backwards, but the schedule splits them; use insert-remat"):
        apply(draft_of(chain(), micro_batches=2), *passes)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("strategy", ["zero-bubble", "interleaved", "looped-bfs"])
def test_two_processes(strategy: str) -> None:
    model, batch = zoo_case("t5")
    eager = Eager(copy.deepcopy(model))
    hardware = Hardware.cpu(num_devices=2, memory="64MB", dram="1GB")
    options = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": strategy}
    with penstock.compile(model, hardware, example_inputs=batch, **options) as job:
        assert ("rt.backward_weight(" in job.code(1)) == (strategy == "zero-bubble")
        for _ in range(2):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)


AROUND = (
    "mesh{depth=2}, partition-balanced{stages=2}, map-round-robin, {}, insert-remat, insert-fetch, insert-optimizer",
    "mesh{depth=2, shards=2}, partition-balanced{stages=2}, map-round-robin, {}, insert-remat, insert-shard, "
    "insert-optimizer",
    "partition-balanced{stages=4}, map-round-robin, {}, insert-remat, insert-fetch, overlap-optimizer",
)


@pytest.mark.slow
@pytest.mark.parametrize("line", AROUND)
def test_replicas_shards_and_the_update_under_the_backward(line: str) -> None:
    graph, batches = trace_case("t5")
    passes = parse_pipeline(f"coarsen, {line}".replace("{}", "schedule-zero-bubble"), 4)
    draft = draft_of(graph, Hardware.cpu(num_devices=4, memory="64MB"), micro_batches=4, max_grad_norm=1.0)
    apply(draft, *passes)
    assert any(n.target is ops.backward_weight for p in draft.programs for n in p.ops())
    assert_trains_like_eager(draft, [*batches, batches[0]], tolerance=1e-5, steps=1)
