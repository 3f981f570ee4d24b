"""Copies of programs, and what is remembered of a program for as long as it stays the same."""

from __future__ import annotations

import pytest

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.program import Program, infer_all, parse_program, place_frees, print_program, profile_memory, work_of
from penstock.tests.ir.program.handmade import pipeline


def test_a_copy_is_the_same_program_and_changes_alone() -> None:
    for program in pipeline(2, 2, 2):
        text = print_program(program, comments=True)
        copy = program.copy()
        assert print_program(copy, comments=True) == text
        infer_all(copy)
        assert [work_of(copy, node) for node in copy.ops()] == [work_of(program, node) for node in program.ops()]
        for free in [node for node in copy.ops() if node.target is ops.free]:
            copy.graph.erase_node(free)
        assert print_program(program, comments=True) == text != print_program(copy, comments=True)
        place_frees(copy)
        assert print_program(copy, comments=True) == text


def test_what_is_remembered_follows_every_change() -> None:
    """After a change the profile is that of the same text read anew, and types are inferred again."""
    program = pipeline(2, 2, 2)[0]
    before = profile_memory(program)
    assert profile_memory(program) is before
    for free in [node for node in program.ops() if node.target is ops.free]:
        program.graph.erase_node(free)
    anew = parse_program(print_program(program), program.interface, program.device)
    assert profile_memory(program).peak_bytes == profile_memory(anew).peak_bytes != before.peak_bytes
    place_frees(program)
    assert profile_memory(program).peak_bytes == before.peak_bytes


def test_inference_runs_again_where_an_operand_or_the_interface_changed() -> None:
    program = Program(0, pipeline(2, 2, 1)[0].interface)
    (left,) = program.emit(ops.load, program.batch, "x", micro_batch=0)
    (right,) = program.emit(ops.load, program.batch, "x", micro_batch=0)
    (total,) = program.emit(ops.add, left, right)
    moved = work_of(program, total).traffic_bytes
    spec = program.interface.batch["x"]
    wider = {"x": type(spec)("x", (2 * spec.shape[0], *spec.shape[1:]), spec.dtype)}
    infer_all(program.with_interface(batch=wider))
    assert work_of(program, total).traffic_bytes == 2 * moved
    left.meta["type"] = ops.Value("norm", 4)
    with pytest.raises(VerifyError, match="left must be tensor"):
        program.emit(ops.add, left, right)
