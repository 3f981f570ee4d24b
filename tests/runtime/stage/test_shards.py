"""Stages spread over devices: pieces, what the verifier refuses, what the simulator counts, and gloo's sums."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import (
    Interface,
    ParamSpec,
    Program,
    StageSpec,
    parse_program,
    persistent_bytes,
    place_frees,
    print_program,
    profile_memory,
)
from penstock.ir.verify import verify
from penstock.ir.verify.case import Case
from penstock.ir.verify.training import check_gradients
from penstock.runtime.simulate import simulate
from penstock.runtime.stage.arena import allocate, grads_layout, weights_layout
from penstock.runtime.stage.shards import blocks_of, gathered, piece_of, whole_of
from penstock.tests.ir.program.two_stages import interface_of, models, spread


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=3), count=st.integers(1, 7))
def test_pieces_make_the_whole(shape: list[int], count: int) -> None:
    tensor = torch.randn(shape)
    pieces = [piece_of(tensor, index, count) for index in range(count)]
    assert {piece.numel() for piece in pieces} == {-(-tensor.numel() // count)}
    assert torch.equal(whole_of(pieces, shape), tensor)


def test_gradients_of_odd_pieces_fill_their_place_without_gaps() -> None:
    """Pieces of small parameters in low precision are no whole number of cache lines."""
    rows = [("a", (5,), "bfloat16"), ("b", (3, 3), "float32"), ("c", (7,), "bfloat16")]
    part = StageSpec("stage0", (), (), params=tuple(ParamSpec(*row) for row in rows)).shard(2)
    views = grads_layout(part).views(torch.zeros(part.grad_bytes, dtype=torch.uint8))
    assert {name: view.numel() for name, view in views.items()} == {"a": 3, "b": 5, "c": 4}
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
    assert [view.unique().tolist() for view in views.values()] == [[1.0], [2.0], [3.0]]


@settings(max_examples=20, deadline=None)
@given(numels=st.lists(st.integers(1, 40), min_size=1, max_size=4), count=st.integers(1, 5))
def test_flat_shards_make_the_whole_stage(numels: list[int], count: int) -> None:
    """Also with weights of two precisions."""
    dtypes = ["float32" if i % 2 else "float16" for i in range(len(numels))]
    params = tuple(ParamSpec(f"p{i}", (n,), dtype) for i, (n, dtype) in enumerate(zip(numels, dtypes)))
    spec = StageSpec("stage0", (), (), params)
    values = {p.name: torch.randn(p.shape).to(getattr(torch, p.dtype)) for p in params}
    part = spec.shard(count)
    rows = allocate(count * part.weight_bytes, torch.device("cpu")).view(count, -1)
    for index, row in enumerate(rows):
        for name, view in weights_layout(part).views(row).items():
            view.copy_(piece_of(values[name], index, count))
    whole = {p.name: torch.full(p.shape, 7, dtype=getattr(torch, p.dtype)) for p in params}
    for target, source in gathered(rows, part, whole):
        target.copy_(source)
    assert all(torch.equal(whole[name], values[name]) for name in values)
    staging = torch.full(((count + 1) * part.grad_bytes,), 7, dtype=torch.uint8)
    own = torch.empty(part.grad_bytes, dtype=torch.uint8)
    blocks = blocks_of(values, part, count, staging, own)
    assert sum(block.own.nbytes for block in blocks) == part.grad_bytes
    for index in range(count):
        pieces = {}
        for block in blocks:
            block.pack(values)
            block.own.copy_(block.rows[index])
            pieces |= block.named()
        assert all(torch.equal(pieces[name], piece_of(values[name], index, count)) for name in values)


def interface() -> Interface:
    return interface_of(*models())


def test_the_text_says_what_is_spread_and_reads_back() -> None:
    program = spread(interface())[0]
    text = print_program(program, comments=True)
    assert 'stage0_shard = rt.fetch("stage0.weights", group="shards")' in text
    assert print_program(parse_program(text, program.interface, 0), comments=True) == text


def test_each_device_keeps_its_part() -> None:
    programs = spread(interface())
    verify(programs, Hardware.cpu(num_devices=2))
    whole = sum(spec.trained_params for spec in programs[0].interface.stages.values())
    states = [persistent_bytes(program).dram["states"] for program in programs]
    assert whole * 8 <= sum(states) <= whole * 8 + 8 * 2 * 10  # 8 bytes each, and zeros behind each parameter
    assert profile_memory(programs[0]).arena_bytes >= sum(s.weight_bytes for s in programs[0].interface.stages.values())


Edit = Callable[[str], str]


def edited(edits: dict[int, Edit]) -> list[Program]:
    programs = spread(interface())
    shown = [print_program(program) for program in programs]
    texts = [edits.get(device, str)(text) for device, text in enumerate(shown)]
    assert texts != shown
    return [parse_program(text, programs[0].interface, device) for device, text in enumerate(texts)]


def unscattered(text: str) -> str:
    """The gradients of stage 1 go on as they are."""
    found = re.search(r'    stage1_own = rt.reduce_scatter\((\w+), group="shards"\)\n', text)
    assert found is not None
    return text.replace(found[0], "").replace("stage1_own", found[1])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.replace('fetch("stage1.weights", group="shards")', 'fetch("stage1.weights")'), "must be shard"),
        (unscattered, "stage1 is spread over 'shards' here, but these gradients are whole"),
        (lambda t: t.replace('rt.step("stage0", stage0_dram)', 'rt.step("stage1", stage0_dram)'), "belong to stage0"),
        (lambda t: t.replace('group="shards"', 'group="others"', 1), "no group 'others'; there are shards"),
    ],
)
def test_what_one_device_may_not_leave_out(edit: Edit, said: str) -> None:
    with pytest.raises(VerifyError, match=said):
        verify(edited({1: edit}))


def test_devices_must_meet_in_the_same_order() -> None:
    def crossed(text: str) -> str:
        rows = text.split("\n")
        at = [i for i, row in enumerate(rows) if "reduce_scatter" in row]
        return "\n".join([*rows[: at[0]], *rows[at[1] : at[1] + 5], *rows[at[0] : at[1]], *rows[at[1] + 5 :]])

    with pytest.raises(VerifyError, match="meets grads of stage0 to reduce_scatter here and grads of stage1"):
        verify(edited({0: crossed}))


def test_gradients_that_no_group_adds_up() -> None:
    """Both devices train the stage, and each would keep what its own micro-batches say."""
    whole = replace(interface(), groups={"pair": ((0, "", ""), (1, "", ""))})
    programs = []
    for device, micro_batches in enumerate(([0, 1], [2])):
        program = Program(device, whole)
        losses, grads = [], None
        (weights,) = program.emit(ops.resident, "stage0.weights")
        for m in micro_batches:
            (ids,) = program.emit(ops.load, program.batch, "ids", micro_batch=m)
            h, kept = program.emit(ops.forward, "stage0", weights, ids, micro_batch=m)
            losses.append(h)
            grads = program.emit(ops.backward, "stage0", weights, kept, [ids], [h], grads, micro_batch=m)[0]
        program.emit(ops.step, "stage0", grads)
        program.returns({"h": losses})
        programs.append(program)
    for program in programs:
        place_frees(program)
        program.with_interface(stages={"stage0": whole.stages["stage0"]})
    with pytest.raises(VerifyError, match="gradients of stage0 were not summed with those of device 1"):
        check_gradients(Case(programs))


def test_a_gather_moves_what_is_not_there_yet() -> None:
    """(N - 1) / N of the weights go over each link, without P2P through DRAM: up from one, down to the next."""
    members = tuple((device, "", "") for device in range(4))
    spec = StageSpec("stage0", (), (), (ParamSpec("w", (1024, 1024), "float32"),))
    shared = Interface({"stage0": spec}, {}, 4, groups={"shards": members})
    programs = []
    for device in range(4):
        program = Program(device, shared)
        (shard,) = program.emit(ops.fetch, "stage0.weights", group="shards")
        (weights,) = program.emit(ops.all_gather, shard, group="shards")
        program.emit(ops.free, shard)
        program.emit(ops.free, weights)
        program.returns({})
        programs.append(program)
    hardware = Hardware.preset("mobius-topo4")
    timeline = simulate(programs, hardware)
    down, up = timeline.moved_bytes["gpu2.down"], timeline.moved_bytes["gpu2.up"]
    assert (down, up) == (4 << 20, 3 << 20)  # its shard and the others'; passed on, what three others lack
    rate = hardware.links()["rc0.0.down"].bandwidth
    assert timeline.step_s == pytest.approx(4 * (4 << 20) / rate, rel=0.3)  # all four share the root complex
