"""The ops of a team: what they give, refuse and put on links, and that lanes of a team are fed alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops import Context, Value
from penstock.ir.program import Program, bind, device_mesh, parse_program, print_program, work_of
from penstock.ir.verify import verify
from penstock.runtime.reference.run import Reference
from penstock.runtime.simulate import simulate
from penstock.runtime.simulate.collectives import rounds_of
from penstock.tests.ir.program.two_stages import (
    MICRO_BATCHES,
    ROWS,
    buffers_of,
    interface_of,
    models,
    weights_of,
    with_team_ops,
)

TEAM = 4


def lane() -> Program:
    return with_team_ops(interface_of(*models()), TEAM)


def test_every_member_gets_its_part_of_what_all_have() -> None:
    """The reference runs a lane's program for each member; their inputs are the same micro-batch."""
    first, second = models()
    stages = dict(zip(lane().interface.stages, (first, second)))
    machine = Reference([lane()], stages, weights_of(first, second), None, buffers_of(first, second))
    given = torch.arange(ROWS * MICRO_BATCHES)
    counts = torch.tensor([[3, 1, 0, 0], [0, 0, 4, 0], [1, 1, 1, 1], [2, 0, 0, 2]], dtype=torch.int32)
    results = machine.evaluate({"ids": given, "counts": counts.flatten().repeat(MICRO_BATCHES)})["results"]
    rows = given[:ROWS]
    assert [t.tolist() for t in results["part"]] == [[0]]  # of the first member, which speaks for its team
    assert torch.equal(results["whole"][0], rows)
    assert torch.equal(results["traded"][0], rows[:1].repeat(TEAM))
    assert torch.equal(results["part_of_sum"][0], TEAM * rows[:1])
    assert torch.equal(results["total"][0], rows.sum()[None])
    assert results["passed"][0] == rows[-1:] and results["passed_back"][0] == rows[1:2]
    assert results["number"][0].tolist() == [0]
    assert results["routed"][0].tolist() == [0, 1, 2, 0, 0, 1, *[0] * 10]  # three of its own rows, one, two
    assert torch.equal(results["returned"][0], rows)


def test_a_team_runs_one_micro_batch_on_all_its_devices() -> None:
    program = lane()
    assert program.interface.total_micro_batches == MICRO_BATCHES and program.interface.teams == 1
    bound = bind([program])
    assert [p.device for p in bound] == list(range(TEAM))
    assert {node.kwargs["micro_batch"] for p in bound for node in p.ops() if node.target is ops.load} == {0}
    assert {node.kwargs["group"] for p in bound for node in p.ops() if node.target is ops.sum_parts} == {"team.0.0"}
    assert device_mesh(program.interface, 2).mesh_dim_names == ("replica", "team", "pipeline")
    text = print_program(program)
    assert print_program(parse_program(text, program.interface, 0, "evaluate")) == text


def test_links_carry_what_theory_says() -> None:
    """Bytes sent by all members, by op, for parts of b bytes of a value of N b: N (N - 1) b / N, N (N - 1) b, ..."""
    program = lane()
    whole, part, n = 8 * ROWS, 8 * ROWS // TEAM, TEAM
    want = {
        "gather_parts": n * (n - 1) * part,
        "all_to_all": n * (n - 1) / n * whole,
        "scatter_sum": n * (n - 1) / n * whole,
        "sum_parts": 2 * n * (n - 1) / n * part,
        "pass_on": n * part,
        "to_experts": n * (n - 1) / n * whole,
        "from_experts": n * (n - 1) / n * whole,
    }
    hardware = Hardware.preset("rtx4090x4-1rc")
    for node in program.ops():
        work = work_of(program, node)
        if work.group:
            rounds = rounds_of(range(n), hardware, work.moved_bytes, work.rounds, pattern=work.pattern)
            name = node.target.name  # type: ignore[union-attr]
            assert sum(sum(r.hops.values()) for r in rounds) == pytest.approx(want.pop(name, n * part)), name
    assert not want
    assert simulate([program], hardware).step_s > 0


@pytest.mark.parametrize("op", [ops.to_experts, ops.from_experts])
@pytest.mark.parametrize(
    ("shape", "counts", "said"),
    [
        ((8, 6), Value("tensor", 128, ops.DEVICE, (32,), "int64"), r"int32 \[4 x experts\].*; found int64 \[32\]"),
        ((8, 6), Value("tensor", 96, ops.DEVICE, (24,), "int32"), r"as many experts each; found int32 \[24\]"),
        ((), Value("tensor", 128, ops.DEVICE, (32,), "int32"), "without dimensions has no rows"),
    ],
)
def test_what_cannot_be_sent_by_count_is_refused(op: ops.Op, shape: Any, counts: Value, said: str) -> None:
    context = Context(lane().interface, 0)
    with pytest.raises(ValueError, match=said):
        op.infer(context, Value("tensor", 192, ops.DEVICE, shape, "float32"), counts, group=ops.TEAM)


def test_an_exchange_by_count_has_room_for_all_rows_of_all_members() -> None:
    context, value = Context(lane().interface, 0), Value("tensor", 4 * 30, ops.DEVICE, (10, 3), "float32")
    counts = Value("tensor", 4 * 32, ops.DEVICE, (32,), "int32")
    found = ops.to_experts.infer(context, value, counts, group=ops.TEAM)
    assert found.shape == (TEAM * 10, 3) and found.bytes == TEAM * value.bytes
    assert ops.from_experts.infer(context, found, counts, group=ops.TEAM) == value
    sent = ops.to_experts.work(context, value, counts, group=ops.TEAM)
    returned = ops.from_experts.work(context, found, counts, group=ops.TEAM)
    assert sent.moved_bytes == returned.moved_bytes == value.bytes  # where all experts have as many rows


@pytest.mark.parametrize(
    ("op", "fields", "said"),
    [
        (ops.own_part, {"dim": 1}, r"dimension 1 of \[4, 6\] has no 4 equal parts"),
        (ops.scatter_sum, {"dim": 2}, r"dimension 2 is none of the 2 of a value \[4, 6\]"),
        (ops.all_to_all, {"split_dim": 1, "concat_dim": 0}, r"dimension 1 of \[4, 6\] has no 4 equal parts"),
    ],
)
def test_what_cannot_be_divided_is_refused(op: ops.Op, fields: dict[str, Any], said: str) -> None:
    context = Context(lane().interface, 0)
    with pytest.raises(ValueError, match=said):
        op.infer(context, Value("tensor", 96, ops.DEVICE, (4, 6), "float32"), group=ops.TEAM, **fields)


def test_an_all_to_all_keeps_bytes_and_exchanges_dimensions() -> None:
    context, value = Context(lane().interface, 0), Value("tensor", 4 * 48, ops.DEVICE, (2, 3, 8), "float32")
    found = ops.all_to_all.infer(context, value, group=ops.TEAM, split_dim=2, concat_dim=1)
    assert found.shape == (2, 12, 2) and found.bytes == value.bytes
    back = ops.all_to_all.infer(context, found, group=ops.TEAM, split_dim=1, concat_dim=2)
    assert back == value


def test_members_meet_in_one_order() -> None:
    """A written-out program in which one member leaves out a call: the others would wait for it."""
    programs = bind([lane()])
    gone = next(node for node in programs[1].ops() if node.target is ops.pass_on)
    results = programs[1].results()
    programs[1].returns({name: nodes for name, nodes in results.items() if nodes != [gone]})
    programs[1].graph.erase_node(gone)
    with pytest.raises(VerifyError, match=r"calls group 'team\.0\.0'"):
        verify(programs)
