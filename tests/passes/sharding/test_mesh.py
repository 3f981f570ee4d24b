"""`mesh` and `insert-shard`: lanes, with whole stages or with shards of them, train as one device does."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.graph.opgraph import OpGraph
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import persistent_bytes, profile_memory
from penstock.ir.verify import verify
from penstock.passes.decisions import Lanes
from penstock.passes.draft import Draft
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.passes.sharding.insert_shard import InsertShard
from penstock.passes.sharding.mesh import Mesh
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    apply,
    assert_trains_like_eager,
    chain,
    draft_of,
    join_batches,
    reference,
    text_of,
    trace_case,
)
from penstock.tests.shown_elsewhere import slow_but

# Gradients of micro-batches are added on each device and then over devices, in eager one after the other: another order
# of fp32 additions of at most three terms of size below 10, after two steps of learning rate 0.05.
TOLERANCE = 2e-6


def make_draft(strategy: str, graph: OpGraph, num_devices: int = 2, micro_batches: int = 2, **options: Any) -> Draft:
    draft = draft_of(graph, Hardware.cpu(num_devices=num_devices), micro_batches=micro_batches, **options)
    return apply(draft, *parse_pipeline(strategy, num_devices), memory=True)


@pytest.mark.parametrize("strategy", ["data-parallel", "zero3-offload"])
def test_the_text(golden: Golden, strategy: str) -> None:
    draft = make_draft(strategy, chain(depth=2), max_grad_norm=1.0)
    golden(text_of(draft), strategy)
    draft.programs = evaluation_programs(draft, {s.spec.name: {} for s in draft.stages})
    golden(text_of(draft), f"{strategy}-evaluation")


@pytest.mark.parametrize("strategy", ["data-parallel", "zero3-offload"])
@pytest.mark.parametrize(
    ("name", "num_devices", "max_norm"),
    [("gpt2", 3, 0.5), *(pytest.param(name, 3, None, marks=pytest.mark.slow) for name in ("gpt2", "t5"))],
)
def test_training_is_eagers(strategy: str, name: str, num_devices: int, max_norm: float | None) -> None:
    """Both models have tied weights; with dropout."""
    graph, batches = trace_case(name)
    draft = make_draft(strategy, graph, num_devices, 3, max_grad_norm=max_norm)
    assert_trains_like_eager(draft, batches, TOLERANCE)


@pytest.mark.parametrize("strategy", slow_but(["data-parallel"], ["data-parallel", "zero3-offload"]))
def test_several_micro_batches_a_device(strategy: str) -> None:
    graph, batches = trace_case("gpt2", dropout=0.0)
    draft = make_draft(strategy, graph, 2, 4)
    assert_trains_like_eager(draft, [*batches, batches[0]], TOLERANCE)


@pytest.mark.parametrize("strategy", slow_but(["data-parallel"], ["data-parallel", "zero3-offload"]))
def test_replicas_stay_equal_and_evaluate_alike(strategy: str) -> None:
    graph, batches = trace_case("gpt2", dropout=0.0)
    alone = draft_of(graph, Hardware.cpu(num_devices=1), micro_batches=2)
    apply(alone, *parse_pipeline("balanced", 1))
    draft, outputs = make_draft(strategy, graph), []
    for case in (alone, draft):
        fetch = {s.spec.name: {} for s in draft.stages} if case is draft and strategy == "zero3-offload" else {}
        evaluation = evaluation_programs(case, fetch)
        verify(evaluation, case.lane_hardware)
        machine = reference(case, evaluation=evaluation)
        machine.step(join_batches(batches[:2]))
        outputs.append(machine.evaluate(join_batches(batches[:2]))["results"])
    for name, rows in outputs[0].items():
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(rows, outputs[1][name], strict=True))
    if strategy == "data-parallel":
        assert machine.world.replicas.keys() == {(1, s.spec.name) for s in draft.stages}
        for (_, stage), state in machine.world.replicas.items():
            for name, value in machine.world.stages[stage].masters.items():
                assert (state.masters[name] == value).all()


def test_shards_take_their_part_of_dram_and_links() -> None:
    """ZeRO-3's bytes over links without P2P (Mobius eq. 2): each of N devices takes in both directions, for W bytes of
    weights and as many of gradients, 2 W + (N - 1) / N W from DRAM, and 2 (N - 1) / N W + W to it."""
    hardware = Hardware.preset("mobius-topo4")
    draft = draft_of(chain(depth=6, width=256), hardware, micro_batches=4)
    apply(draft, *parse_pipeline("zero3-offload", 4), memory=True)
    weights = sum(s.spec.weight_bytes for s in draft.stages)
    moved = simulate(draft.programs, hardware).moved_bytes
    down = sum(size for link, size in moved.items() if link.startswith("gpu") and link.endswith(".down"))
    up = sum(size for link, size in moved.items() if link.startswith("gpu") and link.endswith(".up"))
    last = draft.stages[-1].spec.weight_bytes  # gathered once for both phases
    assert down == pytest.approx(4 * (2.75 * weights - last), rel=0.02)
    assert up == pytest.approx(4 * (2.5 * weights - 0.75 * last), rel=0.02)
    for program in draft.programs:
        assert persistent_bytes(program).dram["weights"] == pytest.approx(weights / 4, rel=0.05)


def test_gathers_come_one_phase_ahead_where_memory_allows() -> None:
    """The arena holds two stages and a shard, however many follow; without room for that, one stage less."""
    graph, sizes = chain(depth=8, width=64), []
    for memory in ("2GB", "800kB"):
        hardware = Hardware.cpu(num_devices=2, memory=memory)
        draft = draft_of(graph, hardware, micro_batches=2)
        apply(draft, *parse_pipeline("zero3-offload", 2), memory=True)
        sizes.append(profile_memory(draft.programs[0]).arena_bytes)
    block = draft.stages[1].spec.weight_bytes
    assert 2 * block < sizes[0] < 2.6 * block
    assert sizes[1] <= sizes[0]


def test_what_cannot_be_shared() -> None:
    with pytest.raises(PassError, match=r"5 micro-batches cannot be shared out equally among 3 lanes.* is 6"):
        make_draft("data-parallel", chain(), 3, 5)
    with pytest.raises(PassError, match="changes a buffer in every forward"):
        make_draft("zero3-offload", trace_case("wide_resnet")[0])
    draft = draft_of(chain(), Hardware.cpu(num_devices=4), micro_batches=4)
    with pytest.raises(PassError, match=r"3 shards x 1 deep are 3 devices, and 4 .* is 4"):
        Mesh(shards=3).plan(draft)
    with pytest.raises(PassError, match=r"they hold each of the devices 0 to 3 once"):
        Mesh().rewrite(draft, Lanes(lanes=[[0], [1], [2], [2]]))
    with pytest.raises(PassError, match=r"3 shards; the 4 lanes cannot"):
        Mesh().rewrite(draft, Lanes(lanes=[[0], [1], [2], [3]], shards=3))
    with pytest.raises(PassError, match=r"no lanes share their weights; say how many"):
        InsertShard().rewrite(draft, {})


def test_one_device_needs_no_other() -> None:
    draft = make_draft("data-parallel", chain(), 1, 2)
    assert ops.all_reduce not in {n.target for n in draft.programs[0].ops()}
    with pytest.raises(PassError, match="no lanes share their weights"):
        make_draft("zero3-offload", chain(), 1, 2)
