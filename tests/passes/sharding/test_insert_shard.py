"""`insert-shard`: where shards lie, how far ahead stages are gathered and which stay whole, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import bind, gpu_connections, persistent_bytes, profile_memory
from penstock.passes.draft import Draft
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import apply, assert_trains_like_eager, chain, draft_of, text_of, trace_case

START = "coarsen, mesh{{{mesh}}}, partition-min-stage, map-round-robin, {schedule}, insert-remat"
TOLERANCE = 5e-6  # sums over lanes in another order than eager's, of terms below 10, after two steps of rate 0.05


def line(shard: str = "", rest: str = "insert-two-hop, insert-optimizer", mesh: str = "shards=2", **more: str) -> str:
    return f"{START.format(mesh=mesh, schedule=more.get('schedule', 'schedule-1f1b'))}, insert-shard{{{shard}}}, {rest}"


def make_draft(strategy: str, graph: Any = None, hosts: int = 1, **hardware: Any) -> tuple[Draft, dict[str, Any]]:
    machine = Hardware.cpu(num_devices=4, hosts=hosts, **hardware)
    draft = draft_of(chain(depth=6, width=64) if graph is None else graph, machine, micro_batches=8)
    decisions, _ = run_passes(draft, parse_pipeline(strategy, 4))
    return draft, decisions


def gathers(draft: Draft) -> list[Any]:
    return [node for node in draft.programs[0].ops() if node.target is ops.all_gather]


def test_memory_decides_where_shards_lie_and_what_stays_whole() -> None:
    """With less memory first fewer stages stay whole, then shards leave for DRAM, then nothing comes ahead."""
    seen = []
    for memory in ("4MB", "1.2MB", "700kB", "500kB", "450kB"):
        draft, decisions = make_draft(line(), memory=memory)
        made = decisions["sharding"]
        seen.append((made.tier, made.ahead, len(made.held)))
        assert (
            profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE] <= Hardware.cpu(1, memory).devices[0].budget_bytes
        )
        assert bool(decisions["fetch"]) == (made.tier == "dram")
    assert seen == [("device", 2, 7), ("device", 2, 1), ("dram", 2, 3), ("dram", 1, 1), ("dram", 0, 1)]


def test_what_is_held_is_gathered_once() -> None:
    held, _ = make_draft(line())
    again, _ = make_draft(line("hold=false"))
    stages = len(held.stages)
    assert len(gathers(held)) == stages
    assert len(gathers(again)) > 3 * stages  # two micro-batches a lane, forward and backward
    moved = [sum(simulate(d.programs, d.machine).moved_bytes.values()) for d in (held, again)]
    assert moved[0] < 0.6 * moved[1]


def test_shards_take_their_part_of_the_device() -> None:
    draft, _ = make_draft(line("tier=device, hold=false"))
    whole = sum(s.spec.weight_bytes for s in draft.stages)
    persistent = persistent_bytes(draft.programs[0])
    assert persistent.device["weights"] == pytest.approx(whole / 2, rel=0.05)
    assert persistent.device["states"] == pytest.approx(whole, rel=0.05)  # 8 bytes for each 4 of weights
    assert sum(persistent.dram.values()) == 0


def test_layouts_by_name_leave_weights_whole() -> None:
    """ZeRO-1 and ZeRO-2 gather each stage once. ZeRO-1 adds up gradients between devices once a step, and so moves
    fewer bytes; ZeRO-2 does it with each micro-batch, and never has those of all stages."""
    (one, made), (two, _) = (make_draft(name) for name in ("zero1", "zero2"))
    names = [stage.spec.name for stage in one.stages if stage.spec.params]
    assert made["sharding"].held == names and len(names) > 3
    assert len(gathers(one)) == len(gathers(two)) == len(names)
    scatters = [sum(node.target is ops.reduce_scatter for node in d.programs[0].ops()) for d in (one, two)]
    assert scatters == [len(names), 2 * len(names)]  # two micro-batches a device
    moved_bytes = [sum(simulate(d.programs, d.machine).moved_bytes.values()) for d in (one, two)]
    peak_bytes = [profile_memory(d.programs[0]).peak_bytes[ops.DEVICE] for d in (one, two)]
    assert moved_bytes[0] < moved_bytes[1] and peak_bytes[0] > peak_bytes[1]
    with pytest.raises(VerifyError, match=r"missing(?s:.*)arena of fetched weights"):  # of what must stay
        apply(draft_of(chain(depth=6, width=64), Hardware.cpu(4, memory="500kB"), micro_batches=8),
              *parse_pipeline("zero2", 4), memory=True)  # fmt: skip


def test_groups_over_hosts_gather_in_a_hierarchy() -> None:
    inside, _ = make_draft(line(), hosts=2)
    over, decisions = make_draft(line(mesh="shards=4"), hosts=2)
    assert not any(node.kwargs.get("hierarchical") for node in gathers(inside))
    assert all(node.kwargs["hierarchical"] for node in gathers(over))
    assert 'group="shards", hierarchical=True)' in text_of(over)
    assert decisions["sharding"].hierarchical
    flat, _ = make_draft(line("hierarchical=false", mesh="shards=4"), hosts=2)
    assert "hierarchical" not in text_of(flat)
    with pytest.raises(PassError, match="hierarchical=true needs groups with the same number of members"):
        make_draft(line("hierarchical=true"), hosts=2)


def test_a_gpu_connects_to_other_hosts_and_inside_its_own_for_a_hierarchy() -> None:
    """Beside ring and tree of the group: messages to and from another host, and a communicator of the own host."""
    hardware = Hardware.cpu(num_devices=6, hosts=3)
    gpus = [device.model_copy(update={"kind": "cuda"}) for device in hardware.devices]
    found = []
    for how in ("false", "true"):
        draft = draft_of(chain(depth=2), hardware, micro_batches=6)
        run_passes(draft, parse_pipeline(line(f"tier=device, hierarchical={how}", mesh="shards=6"), 6))
        made = gpu_connections(bind(draft.programs), hardware.model_copy(update={"devices": gpus}))
        found += {(each.groups, each.connections) for each in made.values()}
    assert found == [(1, 4), (2, 8)]


def test_a_saved_decision_gives_the_same_programs() -> None:
    draft, decisions = make_draft(line("prefetch=1"), memory="900kB")
    again = draft_of(chain(depth=6, width=64), Hardware.cpu(num_devices=4, memory="900kB"), micro_batches=8)
    run_passes(again, parse_pipeline(line("prefetch=1"), 4), decisions)
    assert text_of(again) == text_of(draft)


@pytest.mark.parametrize(
    ("shard", "rest", "mesh", "schedule"),
    [
        pytest.param(
            "tier=device, hold=false",
            "insert-two-hop, insert-optimizer",
            "shards=2, depth=2",
            "schedule-1f1b",
            marks=pytest.mark.slow,
        ),
        ("tier=dram", "insert-two-hop, overlap-optimizer", "shards=2", "schedule-1f1b"),
        ("tier=device, hold_all=true", "insert-two-hop{every=step}, insert-optimizer", "shards=2", "schedule-1f1b"),
        pytest.param(
            "tier=ssd", "insert-ssd, overlap-optimizer", "shards=4", "schedule-pipeline", marks=pytest.mark.slow
        ),
        pytest.param(
            "tier=device, hold=false", "insert-optimizer", "shards=2", "schedule-zero-bubble", marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_eagers(shard: str, rest: str, mesh: str, schedule: str) -> None:
    """GPT-2 with its tied table, saved tensors kept while weights leave."""
    graph, batches = trace_case("gpt2")
    draft, _ = make_draft(line(shard, rest, mesh, schedule=schedule), graph, ssd="1GB")
    assert_trains_like_eager(draft, [batches[i % 3] for i in range(8)], TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (line(mesh="depth=2"), r"no lanes share their weights.* mesh\{shards=2\}"),
        (line("tier=ssd"), r"tier=ssd needs insert-ssd after it"),
        (line("tier=disk"), "option tier='disk' is none of auto, device, dram, ssd"),
        (line("hold=false, hold_all=true"), "hold_all=true holds what hold=false lets go: leave one of them out"),
        (line("prefetch=9"), "option prefetch=9; allowed: 0 to 8"),
        (line("hierarchical=maybe"), "option hierarchical='maybe' is none of"),
        (line().replace("insert-shard", "insert-fetch, insert-shard"), "decides fetch, as insert-fetch does"),
        (line().replace("schedule-1f1b, insert-remat", "schedule-async"), "decides"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_shards(strategy: str, said: str) -> None:
    with pytest.raises(PassError, match=said):
        make_draft(strategy, ssd="1GB")
