"""`insert-two-hop`: three ways to add gradients up over lanes give the same, and move what theory says."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import parse_program, print_program, profile_memory
from penstock.ir.verify import verify
from penstock.passes.draft import Draft
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import assert_trains_like_eager, chain, draft_of, text_of, trace_case

LINE = (
    "coarsen, mesh{{shards=2}}, partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, "
    "insert-shard{{tier=device, hold=false}}, insert-two-hop{{every={}}}, insert-optimizer"
)
MICRO_BATCHES = 3  # of each of four devices


def make_draft(every: str, memory: str = "64MB", graph: object = None) -> Draft:
    machine = Hardware.cpu(num_devices=4, memory=memory, hosts=2)
    draft = draft_of(graph or chain(depth=4, width=64), machine, micro_batches=4 * MICRO_BATCHES)  # type: ignore[arg-type]
    run_passes(draft, parse_pipeline(LINE.format(every), 4))
    return draft


def between_hosts(draft: Draft) -> int:
    moved = simulate(draft.programs, draft.machine).moved_bytes
    return moved["nic0.up"]


def test_the_second_hop_is_taken_once_a_step() -> None:
    """Two devices on each of two hosts: only the sums over replicas pass the network, for each device 2 (R-1)/R of its
    half of the gradients (MiCS 3.4)."""
    crossing = {every: between_hosts(make_draft(every)) for every in ("two-hop", "step", "micro-batch")}
    grads = sum(stage.spec.grad_bytes for stage in make_draft("step").stages)
    assert crossing["two-hop"] == crossing["step"] == pytest.approx(grads, rel=0.05)
    assert crossing["micro-batch"] == MICRO_BATCHES * crossing["two-hop"]


def test_the_first_hop_is_taken_with_every_micro_batch() -> None:
    counts = {}
    for every in ("two-hop", "step", "micro-batch"):
        nodes = list(make_draft(every).programs[0].ops())
        counts[every] = [sum(n.target is op for n in nodes) for op in (ops.reduce_scatter, ops.all_reduce, ops.add)]
    stages, m = 5, MICRO_BATCHES
    assert counts["step"] == [stages, stages, 0]
    assert counts["two-hop"] == [m * stages, stages, 0]
    assert counts["micro-batch"] == [m * stages, m * stages, (m - 1) * stages]


def test_an_all_reduce_brings_every_device_the_whole_sum() -> None:
    """A group of two moves half of the gradients once more, and the hop between hosts stays as it is (Mobius eq. 2)."""
    moved = {e: simulate((draft := make_draft(e)).programs, draft.machine).moved_bytes for e in ("step", "all-reduce")}
    grads = sum(stage.spec.grad_bytes for stage in make_draft("step").stages)
    more = moved["all-reduce"]["cpu0.nvlink.up"] - moved["step"]["cpu0.nvlink.up"]
    assert more == pytest.approx(grads / 2, rel=0.05)
    assert moved["all-reduce"]["nic0.up"] == moved["step"]["nic0.up"]


@pytest.mark.slow
def test_two_hops_need_less_memory() -> None:
    peaks = {e: profile_memory(make_draft(e).programs[0]).peak_bytes[ops.DEVICE] for e in ("step", "two-hop")}
    assert peaks["two-hop"] < peaks["step"]
    between = (peaks["two-hop"] + peaks["step"]) // 2
    wide, tight = make_draft("auto"), make_draft("auto", memory=f"{between}B")
    assert text_of(wide) == text_of(make_draft("step"))
    assert sum(n.target is ops.reduce_scatter for n in tight.programs[0].ops()) == 5 * MICRO_BATCHES


@pytest.mark.parametrize(
    "every", ["two-hop", *(pytest.param(e, marks=pytest.mark.slow) for e in ("micro-batch", "step", "all-reduce"))]
)
def test_training_is_eagers(every: str) -> None:
    graph, batches = trace_case("gpt2")
    assert_trains_like_eager(make_draft(every, graph=graph), [batches[i % 3] for i in range(12)], 5e-6)


def test_what_the_pass_refuses() -> None:
    with pytest.raises(PassError, match="every='day' is none of auto, step, two-hop, micro-batch, all-reduce"):
        make_draft("day")
    line = LINE.format("two-hop")
    for wrong, said in [
        (line.replace("insert-shard{tier=device, hold=false}", "insert-fetch"), "put insert-shard before it"),
        (line.replace("insert-two-hop{every=two-hop}, insert-optimizer", "insert-optimizer, insert-two-hop"),
         "pass 'insert-two-hop' comes after 'insert-optimizer'"),
    ]:  # fmt: skip
        draft = draft_of(chain(depth=2), Hardware.cpu(num_devices=4), micro_batches=4)
        with pytest.raises(PassError, match=said):
            run_passes(draft, parse_pipeline(wrong, 4))


Edit = Callable[[str], str]


def without(text: str) -> str:
    """The sums over replicas of a stage are left out; who reads them reads what would be summed."""
    found = re.search(r"    (\w+), = rt\.all_reduce\((\w+),.*\n", text)
    assert found is not None
    return text.replace(found[0], "").replace(found[1], found[2])


def after(op: str, added: str) -> Edit:
    """Another line after the first of an op, whose result takes the place of that one's."""

    def edit(text: str) -> str:
        found = re.search(rf"    (\w+)(,?) = rt\.{op}\(.*\n", text)
        assert found is not None
        head, tail = text[: found.end()], text[found.end() :]
        return head + f"    more, = {added.format(found[1])}\n" + tail.replace(found[1], "more")

    return edit


def forget(text: str) -> str:
    """Micro-batch 1 is not added to micro-batch 0, which is freed."""
    found = re.search(r"rt\.reduce_scatter\((\w+_m1), (\w+_m0), group=\"shards\"\)", text)
    assert found is not None
    return text.replace(found[0], f'rt.reduce_scatter({found[1]}, group="shards")\n    rt.free({found[2]})')


SUM = 'rt.all_reduce({}, group="replicas")'


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without, "were not summed over the replicas of other lanes"),
        (after("all_reduce", SUM), "were summed over 'replicas' before"),
        (after("reduce_scatter", SUM), "summed over shards are added to such summed over replicas and shards"),
        (forget, "lack micro-batch 0"),
    ],
)  # fmt: skip
def test_each_gradient_is_summed_over_each_group_once(edit: Edit, said: str) -> None:
    draft = make_draft("two-hop")
    (program,) = draft.programs
    text = edit(print_program(program))
    assert text != print_program(program)
    with pytest.raises(VerifyError, match=said):
        verify([parse_program(text, program.interface, 0)], draft.lane_hardware)
