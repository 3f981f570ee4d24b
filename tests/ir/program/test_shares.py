"""The program of a lane with fewer micro-batches: the same text, without the turns that it lacks."""

from __future__ import annotations

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import bind, first_micro_batches, print_program, share_of
from penstock.ir.verify import verify
from penstock.ir.verify.shares import check_meetings
from penstock.passes.decisions import Lanes
from penstock.passes.draft import Draft
from penstock.passes.sharding.by_speed import shares
from penstock.passes.sharding.gradient_sums import MICRO_BATCH, sum_gradients
from penstock.passes.sharding.insert_two_hop import InsertTwoHop
from penstock.runtime.simulate import simulate
from penstock.tests.compiler.pairs import slower
from penstock.tests.passes.running import apply, chain, draft_of

LINE = "coarsen, mesh{depth=%d, by_speed=true}, partition-balanced{stages=2}, map-round-robin, %s, insert-remat, %s"


def make_draft(
    depth: int = 1, schedule: str = "schedule-pipeline", end: str = "insert-fetch, insert-optimizer"
) -> Draft:
    hardware = slower(Hardware.cpu(num_devices=2 * depth), depth, 3.0)
    line = LINE % (depth, schedule, end)
    return apply(draft_of(chain(), hardware, micro_batches=8), *parse_pipeline(line, 2 * depth), memory=True)


@pytest.mark.parametrize(
    "depth,schedule", [(1, "schedule-pipeline"), (2, "schedule-1f1b"), (2, "schedule-zero-bubble")]
)
def test_a_smaller_share_has_as_many_ops_as_a_plan_for_it(depth: int, schedule: str) -> None:
    """But for the sums over replicas."""
    draft = make_draft(depth, schedule)
    assert draft.mesh.micro_batches == [6, 2]
    smaller = share_of(draft.programs, 2)
    hardware = draft.lane_hardware
    alone = draft_of(chain(), hardware, micro_batches=2)
    line = LINE.replace("mesh{depth=%d, by_speed=true}, ", "") % (schedule, "insert-fetch, insert-optimizer")
    apply(alone, *parse_pipeline(line, depth))
    for program, other in zip(smaller, alone.programs):
        own = [line for line in print_program(program).splitlines() if "replicas" not in line]
        assert len(own) == len(print_program(other).splitlines())
        assert print_program(first_micro_batches(program, 2)) == print_program(program)


def test_bound_programs_run_the_whole_batch_once() -> None:
    draft = make_draft(2, "schedule-1f1b")
    programs = bind(draft.programs)
    verify(programs, draft.machine)
    turns = [(p.device, node.kwargs["micro_batch"]) for p in programs for node in p.ops() if node.target is ops.forward]
    assert {m for device, m in turns if device < 2} == set(range(6))
    assert {m for device, m in turns if device >= 2} == {6, 7}


def test_a_sum_over_replicas_in_every_micro_batch_is_refused() -> None:
    hardware = slower(Hardware.cpu(num_devices=4), 2, 3.0)
    line = (LINE % (1, "schedule-pipeline", "insert-shard{tier=device, hold=false}")).replace("depth=1", "shards=2")
    draft = apply(draft_of(chain(), hardware, micro_batches=8), *parse_pipeline(line, 4))
    every = InsertTwoHop(every=MICRO_BATCH)
    with pytest.raises(PassError, match="unequal numbers of micro-batches cannot add up after each of them"):
        every.rewrite(draft, every.plan(draft))
    for program in draft.programs:
        sum_gradients(program, MICRO_BATCH)
    with pytest.raises(VerifyError, match="a lane of 2 micro-batches does not take part in this `all_reduce`"):
        check_meetings(draft.programs, share_of(draft.programs, 2))


def test_shares_end_as_early_as_they_can() -> None:
    assert shares(8, [1.0, 3.0]) == [6, 2]
    assert shares(8, [1.0, 1.0]) == [4, 4]
    assert shares(4, [1.0, 100.0]) == [3, 1]  # at least one each
    best = min(max(a * 1.0, b * 1.7, (13 - a - b) * 2.9) for a in range(1, 12) for b in range(1, 13 - a))
    found = shares(13, [1.0, 1.7, 2.9])
    assert max(n * s for n, s in zip(found, [1.0, 1.7, 2.9])) == best and sum(found) == 13


def test_unequal_shares_take_less_time() -> None:
    """The simulated step on a machine of which one device is a third as fast."""
    hardware = slower(Hardware.cpu(num_devices=2), 1, 3.0)
    steps = []
    for line in (LINE, LINE.replace(", by_speed=true", "")):
        line %= (1, "schedule-pipeline", "insert-fetch, insert-optimizer")
        draft = apply(draft_of(chain(width=256), hardware, micro_batches=8), *parse_pipeline(line, 2))
        steps.append(simulate(draft.programs, hardware).step_s)
    assert steps[0] < 0.7 * steps[1]


def test_an_asynchronous_schedule_refuses_unequal_shares() -> None:
    with pytest.raises(PassError, match="mesh has unequal shares of the batch"):
        hardware = slower(Hardware.cpu(num_devices=2), 1, 3.0)
        line = "coarsen, mesh{by_speed=true}, partition-balanced, map-round-robin, schedule-async{accumulate=2}"
        apply(draft_of(chain(), hardware, micro_batches=8), *parse_pipeline(line, 2))


def test_shares_that_are_not_the_batch_are_refused() -> None:
    hardware = slower(Hardware.cpu(num_devices=4), 2, 3.0)
    passes = parse_pipeline("coarsen, mesh{shards=2, by_speed=true}", 4)
    draft = draft_of(chain(), hardware, micro_batches=8)
    passes[0].rewrite(draft, passes[0].plan(draft))
    for given, message in (([6, 3], "4 lanes have one number each, 8 in all"), ([3, 2, 2, 1], "same number")):
        with pytest.raises(PassError, match=message):
            passes[1].rewrite(draft, Lanes(lanes=[[0], [1], [2], [3]], shards=2, micro_batches=given))
    few = draft_of(chain(), hardware, micro_batches=3)
    passes[0].rewrite(few, passes[0].plan(few))
    with pytest.raises(PassError, match=r"3 micro-batches cannot be shared out by speed among 2 groups.* is 4"):
        passes[1].plan(few)


def test_the_plan_keeps_shares() -> None:
    lanes = Lanes(lanes=[[1], [0]], micro_batches=[5, 3])
    assert Lanes.model_validate_json(lanes.model_dump_json()) == lanes
    assert lanes.describe() == "2 devices: 2 replicas, which run 5, 3 micro-batches"
    assert "micro_batches" not in Lanes(lanes=[[0], [1]]).model_dump_json()
