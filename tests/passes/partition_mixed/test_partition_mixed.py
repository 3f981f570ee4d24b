"""`partition-mixed`: stages of any blocks, connected, convex and in order, within each device's memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition_mixed.balance import exchange, longest_first
from penstock.passes.partition_mixed.coarsen import (
    Limits,
    ends_bytes,
    is_hidden,
    merge_by_type,
    merge_small,
)
from penstock.passes.partition_mixed.estimate import PipelineEstimate, Wires
from penstock.passes.partition_mixed.graph import Clusters, block_graph
from penstock.passes.partition_mixed.memory import Footprints
from penstock.passes.partition_mixed.partition_mixed import PartitionMixed
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_async import ScheduleAsync
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import apply, assert_trains_like_eager, chain, draft_of, trace_case, traced_model
from penstock.tests.passes.test_training import ROUNDING, case

BEHIND = [MapRoundRobin(), SchedulePipeline(), InsertRemat(), InsertFetch(), InsertOptimizer()]
T5 = "t5-3b:num_layers=4,num_decoder_layers=4"


def coarsen_graph(graph: Any, hardware: Hardware, level: str, **options: Any) -> Draft:
    draft = draft_of(graph, hardware, **options)
    p = Coarsen(level=level)
    p.rewrite(draft, p.plan(draft))
    return draft


def t5_graph(target: int = 4) -> Any:
    rows = {"shape": [4, 512], "dtype": "int64"}
    labels = {"shape": [4, target], "dtype": "int64"}
    model = find_model(T5).on_meta()
    return trace(model, {"input_ids": rows, "attention_mask": rows, "labels": labels}, device_kind="cuda")


def assert_well_formed(draft: Draft, decision: dict[str, Any]) -> None:
    """Every block once; stages connected, convex and in topological order; devices that exist."""
    names = [name for stage in decision["stages"] for name in stage]
    assert sorted(names) == sorted(block.name for block in draft.blocks)
    assert len(decision["planned_for"]) == len(decision["stages"])
    assert set(decision["planned_for"]) <= set(range(draft.lane_hardware.num_devices))
    home = {name: i for i, stage in enumerate(decision["stages"]) for name in stage}
    maker = {node: block.name for block in draft.blocks for node in block.outputs}
    edges = [(maker[n], block.name) for block in draft.blocks for n in block.inputs if n in maker]
    assert all(home[a] <= home[b] for a, b in edges)  # in order, so convex
    whole = nx.Graph(edges)
    whole.add_nodes_from(names)
    if nx.is_connected(whole):
        assert all(nx.is_connected(whole.subgraph(stage)) for stage in decision["stages"])


@pytest.mark.parametrize(
    ("name", "level", "num_devices"),
    [
        *(pytest.param("gpt2", *of, marks=pytest.mark.slow) for of in product(("layer", "operator"), (2, 3))),
        *(pytest.param("t5", *of, marks=pytest.mark.slow) for of in product(("layer", "operator"), (2, 3))),
        ("in_place", "operator", 3),
        pytest.param("wide_resnet", "operator", 2, marks=pytest.mark.slow),
    ],
)
def test_trains_like_eager(name: str, level: str, num_devices: int) -> None:
    graph, batches, tolerance = case(name)
    draft = coarsen_graph(graph, Hardware.cpu(num_devices=num_devices), level, micro_batches=2)
    decision = PartitionMixed().plan(draft)
    assert_well_formed(draft, decision)
    assert draft.notes["partition-mixed"].startswith("L=")
    apply(draft, PartitionMixed(), *BEHIND)
    # Operators of one layer in several stages: gradients meet in another order than autograd's.
    assert_trains_like_eager(draft, batches[:2], max(tolerance, 1e-6 if level == "operator" else 0.0))


@pytest.mark.slow
def test_trains_like_eager_where_stages_are_swapped() -> None:
    graph, batches, _ = case("t5")
    draft = coarsen_graph(graph, Hardware.cpu(num_devices=2, memory="330kB"), "operator", micro_batches=2)
    apply(draft, PartitionMixed(), *BEHIND, memory=True)
    assert "swapped" in draft.notes["partition-mixed"]
    assert any(n.target is ops.fetch for p in draft.programs for n in p.ops())
    assert_trains_like_eager(draft, batches[:2], ROUNDING)


@pytest.mark.slow
def test_an_encoder_decoder_is_balanced_where_neighbours_cannot_be() -> None:
    """Long questions, short answers: the encoder has the work, the decoder the weights. Neither contiguous halves nor
    their order can share both out; the simulator agrees."""
    hardware = Hardware.preset("ftpipe-2080ti").with_(num_devices=4, memory="5.2GB")
    options = Options(micro_batches=8, state_bytes_per_param=0.0)
    base = Draft(t5_graph(), hardware, options)
    Coarsen().rewrite(base, Coarsen().plan(base))

    def step_s(partition: Any) -> float:
        draft = Draft(base.graph, hardware, options, blocks=base.blocks)
        apply(draft, partition, *BEHIND, memory=True)
        return simulate(draft.programs, hardware, precision="fp32").step_s

    assert step_s(PartitionMixed()) < 0.9 * step_s(PartitionBalanced(stages=4))


@pytest.mark.slow
def test_a_resident_plan_keeps_what_it_promises() -> None:
    """The need of a device, foreseen for sets of blocks, is little above that of programs that rematerialise all."""
    hardware = Hardware.preset("ftpipe-2080ti").with_(num_devices=4)
    draft = coarsen_graph(t5_graph(64), hardware, "operator", micro_batches=16, state_bytes_per_param=0.0)
    decision = PartitionMixed(stages=8).plan(draft)
    apply(draft, PartitionMixed(stages=8), *BEHIND[:2])
    everything = [stage.spec.name for stage in draft.stages if stage.spec.rematerialisable]
    InsertRemat().rewrite(draft, everything)
    graph = block_graph(draft.blocks, hardware, "fp32")
    memory = Footprints(draft, graph)
    place = {block.name: i for i, block in enumerate(draft.blocks)}
    for device, program in enumerate(draft.programs):
        mine = [s for s, d in zip(decision["stages"], decision["planned_for"]) if d == device]
        need = memory.resident_bytes([memory.stage([place[name] for name in stage]) for stage in mine])
        peak = profile_memory(program).peak_bytes[ops.DEVICE]
        assert peak <= 1.02 * need <= 1.35 * peak


@pytest.mark.slow
def test_unequal_devices_get_what_they_can_do_and_hold() -> None:
    fast, slow = (Hardware.preset("ftpipe-2080ti").devices[i] for i in (0, 1))
    slow = slow.model_copy(update={"peak_flops": {"fp32": fast.peak_flops["fp32"] / 3}, "memory_bytes": 4 * 2**30})
    slow = slow.model_copy(update={"memory_bandwidth": fast.memory_bandwidth / 3})
    hardware = Hardware.preset("ftpipe-2080ti").model_copy(update={"devices": [fast, slow]})
    draft = coarsen_graph(t5_graph(), hardware, "layer", micro_batches=8, state_bytes_per_param=0.0)
    decision = PartitionMixed().plan(draft)
    assert_well_formed(draft, decision)
    graph = block_graph(draft.blocks, hardware, "fp32")
    place = {block.name: i for i, block in enumerate(draft.blocks)}
    busy = [0, 0]
    for stage, device in zip(decision["stages"], decision["planned_for"]):
        busy[device] += sum(graph.load_ns[device][place[name]] for name in stage)
    assert busy[1] < 1.3 * busy[0]  # a third of the speed, so about a quarter of the work


def test_a_block_larger_than_any_device_is_named() -> None:
    draft = coarsen_graph(chain(width=256), Hardware.cpu(num_devices=2, memory="300kB"), "layer")
    with pytest.raises(DoesNotFit, match=r"block 'layers\.[0-3]' alone needs .* on a device; the largest has"):
        PartitionMixed().plan(draft)


def test_more_stages_than_blocks_are_refused_and_more_devices_are_not() -> None:
    draft = coarsen_graph(chain(depth=1), Hardware.cpu(num_devices=5), "layer", micro_batches=2)
    with pytest.raises(PassError, match="stages=9, but 2 blocks allow at most 2"):
        PartitionMixed(stages=9).plan(draft)
    assert_well_formed(draft, PartitionMixed().plan(draft))


def test_one_device_holds_everything_in_one_stage() -> None:
    draft = coarsen_graph(trace_case("gpt2")[0], Hardware.cpu(num_devices=1), "operator")
    decision = PartitionMixed().plan(draft)
    assert len(decision["stages"]) == 1 and decision["planned_for"] == [0]


class Wide(nn.Module):
    """A chain whose middle is far wider than its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096), nn.Linear(4096, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)).exp()).square().mean()


def test_clusters_hide_their_messages_behind_their_computation() -> None:
    graph, _ = traced_model(Wide(), [{"x": torch.randn(64, 8)}])
    draft = coarsen_graph(graph, Hardware.cpu(num_devices=2), "operator")
    blocks = block_graph(draft.blocks, draft.lane_hardware, "fp32")
    clusters = Clusters(blocks.succ, blocks.load_ns[0], [0] * blocks.num_blocks)
    limits = Limits(1, Wires.from_hardware(draft.lane_hardware).slowest_ns_per_byte)
    place = {block.name: i for i, block in enumerate(draft.blocks)}
    assert max(ends_bytes(clusters, blocks, place["up"])) == 64 * 4096 * 4
    assert not is_hidden(clusters, blocks, place["up"], limits)
    merge_small(clusters, blocks, limits)
    merge_by_type(clusters, blocks, 1, 0.0, limits)
    assert len(clusters.members[clusters.home[place["up"]]]) > 1
    assert len(clusters) == 1 or all(is_hidden(clusters, blocks, c, limits) for c in clusters.members)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 14), st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=40), st.randoms())
def test_contractions_never_close_a_cycle_and_refuse_only_where_they_would(
    count: int, pairs: list[tuple[int, int]], random: Any
) -> None:
    succ: list[set[int]] = [set() for _ in range(count)]
    for a, b in pairs:
        if min(a, b) < max(a, b) < count:
            succ[min(a, b)].add(max(a, b))
    clusters = Clusters(succ, [1] * count, [1] * count)
    for _ in range(20):
        if len(clusters) < 2:
            break
        a, b = random.sample(list(clusters.members), 2)
        names = {c: (a if c in (a, b) else c) for c in clusters.members}
        merged = nx.DiGraph((names[c], names[d]) for c, row in clusters.succ.items() for d in row)
        merged.remove_edges_from([(a, a)])
        assert clusters.merge(a, b) == nx.is_directed_acyclic_graph(merged)
        order = clusters.list_in_order()
        assert sorted(order) == sorted(clusters.members) and [clusters.place[c] for c in order] == sorted(
            clusters.place.values()
        )
        for c, row in clusters.succ.items():
            assert all(clusters.place[c] < clusters.place[d] and c in clusters.pred[d] for d in row)
    assert sum(clusters.load_ns.values()) == count


def test_longest_first_and_exchanges_keep_to_memory() -> None:
    draft = coarsen_graph(
        chain(depth=6, width=64), Hardware.cpu(num_devices=2, memory="700kB"), "layer", micro_batches=4
    )
    blocks = block_graph(draft.blocks, draft.lane_hardware, "fp32")
    memory = Footprints(draft, blocks)
    members = [[i] for i in range(blocks.num_blocks)]
    needs = [memory.stage(own) for own in members]
    flow = PipelineEstimate(blocks, members, Wires.from_hardware(draft.lane_hardware), 4)
    assert longest_first(flow.load_ns, needs, memory, swapped=False, by_bytes=False) is None  # states do not fit
    devices = longest_first(flow.load_ns, needs, memory, swapped=True, by_bytes=False)
    assert devices is not None
    better = exchange(flow, devices, needs, memory, swapped=True)
    assert flow.step_ns(better) <= flow.step_ns(devices)
    for device in (0, 1):
        assert memory.fits(device, [need for need, d in zip(needs, better) if d == device], swapped=True)


@pytest.mark.slow
def test_two_thousand_operators_are_planned() -> None:
    rows = {"shape": [4, 512], "dtype": "int64"}
    model = find_model("t5-3b:num_layers=30,num_decoder_layers=30").on_meta()
    graph = trace(model, {"input_ids": rows, "attention_mask": rows, "labels": rows}, device_kind="cuda")
    draft = coarsen_graph(
        graph, Hardware.preset("ftpipe-2080ti"), "operator", micro_batches=8, state_bytes_per_param=0.0
    )
    assert len(draft.blocks) >= 2000
    assert_well_formed(draft, PartitionMixed().plan(draft))


@pytest.mark.slow
def test_an_asynchronous_device_holds_what_is_under_way() -> None:
    """What is counted of a device's stages is what its program takes, whatever the number of micro-batches."""
    found = []
    for micro_batches in (8, 24):
        draft = draft_of(trace_case("t5")[0], Hardware.cpu(num_devices=2), micro_batches=micro_batches)
        apply(draft, Coarsen(), PartitionMixed(stages=6, asynchronous=True), MapRoundRobin(), ScheduleAsync())
        graph = block_graph(draft.blocks, draft.lane_hardware, "fp32", draft.graph)
        memory, number = Footprints(draft, graph), {block.name: i for i, block in enumerate(draft.blocks)}
        members = [[number[name] for name in names] for names in draft.partition]
        flow = PipelineEstimate(graph, members, Wires.from_hardware(draft.lane_hardware), 4, asynchronous=True)
        memory.count_under_way(members, flow.distances())
        stages = [(memory.stage(own), device) for own, device in zip(members, draft.devices)]
        needs = [memory.resident_bytes([own for own, device in stages if device == d]) for d in range(2)]
        peaks = [profile_memory(program).peak_bytes[ops.DEVICE] for program in draft.programs]
        assert all(0.85 * peak <= need <= 1.5 * peak for need, peak in zip(needs, peaks)), (needs, peaks)
        found.append(needs)
    assert found[0] == found[1]


def test_many_micro_batches_of_an_asynchronous_pipeline_need_not_fit_at_once() -> None:
    """Inputs of few are under way; those of all together are larger than any device."""
    draft = draft_of(trace_case("gpt2")[0], Hardware.cpu(num_devices=2), micro_batches=10**8)
    apply(draft, Coarsen(), PartitionMixed(stages=4, asynchronous=True))
    assert sorted(name for own in draft.partition for name in own) == sorted(block.name for block in draft.blocks)
