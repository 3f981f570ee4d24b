"""The ops of a team: what they give, refuse and put on links, and that lanes of a team are fed alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops import Context, Value
from penstock.ir.program import Program, bind, parse_program, print_program, work_of
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
from penstock.tests.runtime.device.test_device_mesh import device_mesh

TEAM = 4


def lane() -> Program:
    return with_team_ops(interface_of(*models()), TEAM)


def test_the_interface_knows_every_op_of_a_team() -> None:
    assert set(ops.TEAM_OPS) == {op.name for op in vars(ops.team).values() if isinstance(op, ops.Op)}


def test_every_member_gets_its_part_of_what_all_have() -> None:
    """The reference runs a lane's program for each member; their inputs are the same micro-batch."""
    first, second = models()
    stages = dict(zip(lane().interface.stages, (first, second)))
    machine = Reference([lane()], stages, weights_of(first, second), None, buffers_of(first, second))
    given = torch.arange(ROWS * MICRO_BATCHES)
    routes = torch.tensor([[0, 1], [2, 0], [4, 5], [6, 1]] * TEAM, dtype=torch.int32)  # two experts on each member
    results = machine.evaluate({"ids": given, "routes": routes.repeat(MICRO_BATCHES, 1)})["results"]
    rows = given[:ROWS]
    assert [t.tolist() for t in results["part"]] == [[0]]  # of the first member, which speaks for its team
    assert torch.equal(results["whole"][0], rows)
    assert torch.equal(results["traded"][0], rows[:1].repeat(TEAM))
    assert torch.equal(results["part_of_sum"][0], TEAM * rows[:1])
    assert torch.equal(results["total"][0], rows.sum()[None])
    assert results["passed"][0] == rows[-1:] and results["passed_back"][0] == rows[1:2]
    assert results["number"][0].tolist() == [0]
    assert results["routed"][0].tolist() == [*[0, 1] * TEAM, *[0, 3] * TEAM, *[0] * 16]  # rows of all, by expert
    assert torch.equal(results["returned"][0], 2 * rows)


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
    visits = n * (1 - 15 / 28)  # of a row whose two experts are any of eight
    want = {
        "gather_parts": n * (n - 1) * part,
        "all_to_all": n * (n - 1) / n * whole,
        "scatter_sum": n * (n - 1) / n * whole,
        "sum_parts": 2 * n * (n - 1) / n * part,
        "pass_on": n * part,
        "to_experts": n * (n - 1) / n * round(whole * visits),
        "from_experts": n * (n - 1) / n * round(whole * visits),
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


def routes(shape: tuple[int, ...], dtype: str = "int32") -> Value:
    return Value("tensor", 4 * math.prod(shape), ops.DEVICE, shape, dtype)


@pytest.mark.parametrize("op", [ops.to_experts, ops.from_experts])
@pytest.mark.parametrize(
    ("shape", "given", "experts", "said"),
    [
        ((8, 6), routes((32, 2), "int64"), 8, r"int32 \[tokens of all members, .*; found int64 \[32, 2\]"),
        ((8, 6), routes((30, 2)), 8, r"equally many tokens of each member; found int32 \[30, 2\]"),
        ((8, 6), routes((32, 2)), 6, r"4 members have equally many experts; found experts=6"),
        ((9, 6), routes((32, 2)), 8, r"\[9, 6\] (is of no 32 // 4 tokens|has no room for 2 rows of each of 32 tokens)"),
        ((), routes((32, 2)), 8, "without dimensions has no tokens or rows"),
    ],
)
def test_what_cannot_be_sent_by_count_is_refused(op: ops.Op, shape: Any, given: Value, experts: int, said: str) -> None:
    context = Context(lane().interface, 0)
    with pytest.raises(ValueError, match=said):
        op.infer(context, Value("tensor", 192, ops.DEVICE, shape, "float32"), given, group=ops.TEAM, experts=experts)


@pytest.mark.parametrize(("each", "visits"), [(1, 1), (2, 4 * (1 - 15 / 28)), (7, 4)])
def test_a_token_goes_to_a_member_once_whose_experts_it_has(each: int, visits: float) -> None:
    """Of 8 experts of 4 members, with room for all rows of all members."""
    context, value = Context(lane().interface, 0), Value("tensor", 4 * 30, ops.DEVICE, (10, 3), "float32")
    given, fields = routes((TEAM * 10, each)), {"group": ops.TEAM, "experts": 8}
    found = ops.to_experts.infer(context, value, given, **fields)
    assert found.shape == (TEAM * 10 * each, 3) and found.bytes == TEAM * each * value.bytes
    assert ops.from_experts.infer(context, found, given, **fields) == value
    sent = ops.to_experts.work(context, value, given, **fields)
    returned = ops.from_experts.work(context, found, given, **fields)
    assert sent.moved_bytes == returned.moved_bytes == round(value.bytes * visits)


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
