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
from penstock.runtime.stage.arena import allocate
from penstock.runtime.stage.shards import FlatStage, piece_of, whole_of
from penstock.tests.ir.program.two_stages import interface_of, models, spread


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=3), count=st.integers(1, 7))
def test_pieces_make_the_whole(shape: list[int], count: int) -> None:
    tensor = torch.randn(shape)
    pieces = [piece_of(tensor, index, count) for index in range(count)]
    assert {piece.numel() for piece in pieces} == {-(-tensor.numel() // count)}
    assert torch.equal(whole_of(pieces, shape), tensor)


def flat_stages(spec: StageSpec, count: int) -> list[FlatStage]:
    return [FlatStage(spec, spec.segments(count), index, count) for index in range(count)]


def params_of(numels: list[int], tied: bool = False) -> tuple[ParamSpec, ...]:
    """Of two precisions, the lower with gradients in fp32; every third is frozen. `tied`: the first is."""
    rows = [
        ParamSpec(f"p{i}", (n,), "float32" if i % 2 else "float16", i % 3 != 2, sum_dtype="" if i % 2 else "float32")
        for i, n in enumerate(numels)
    ]
    return (replace(rows[0], shared=tied), *rows[1:])


@settings(max_examples=60, deadline=None)
@given(numels=st.lists(st.integers(1, 9000), max_size=6), count=st.integers(1, 40), tied=st.booleans())
def test_unlike_pieces_are_those_of_all_members(numels: list[int], count: int, tied: bool) -> None:
    spec = StageSpec("stage0", (), (), params_of(numels, tied) if numels else ())
    every = {tuple(p for p in spec.pieces(count, index) if p.numel) for index in range(count)}
    assert set(spec.unlike_pieces(count)) == every
    assert len(spec.unlike_pieces(count)) <= 1 + 4 * len(numels)


@settings(max_examples=40, deadline=None)
@given(numels=st.lists(st.integers(1, 2000), min_size=1, max_size=6), count=st.integers(1, 5), tied=st.booleans())
def test_gathered_slices_are_the_parameters(numels: list[int], count: int, tied: bool) -> None:
    """What each member has lies in its slice, and all slices, one after the other, are the whole parameters."""
    spec = StageSpec("stage0", (), (), params_of(numels, tied))
    values = {p.name: torch.randn(p.shape).to(getattr(torch, p.dtype)) for p in spec.params}
    flats, counted = flat_stages(spec, count), spec.shard(count)
    whole = torch.full((flats[0].whole.total_bytes,), 7, dtype=torch.uint8)
    assert len(whole) == count * counted.weight_bytes
    for flat in flats:
        shard = allocate(flat.own.total_bytes, torch.device("cpu"))
        assert len(shard) == counted.weight_bytes
        for name, view in flat.own.views(shard).items():
            view.copy_(flat.piece_of(name, values[name]))
        for rows, own in zip(flat.weight_rows(whole), flat.weight_slices(shard), strict=True):
            rows[flat.index].copy_(own)
    views = flats[0].whole.views(whole)
    assert all(torch.equal(views[name], value) for name, value in values.items())
    assert all(view.data_ptr() % 64 == whole.data_ptr() % 64 for view in views.values())
    for name, value in values.items():
        assert torch.equal(whole_of([flat.piece_of(name, value) for flat in flats], value.shape), value)


@settings(max_examples=40, deadline=None)
@given(numels=st.lists(st.integers(1, 2000), min_size=1, max_size=6), count=st.integers(1, 5))
def test_gradients_lie_as_they_are_scattered(numels: list[int], count: int) -> None:
    """Row i of each segment is what member i keeps, and no element of a gradient is in two rows or in none."""
    spec = StageSpec("stage0", (), (), params_of(numels))
    counted, flats = spec.shard(count), flat_stages(spec, count)
    grads = {p.name: torch.randn(p.shape).to(getattr(torch, p.grad_dtype)) for p in spec.params if p.requires_grad}
    all_rows = flats[0].new_grads(torch.device("cpu"))
    assert sum(rows.nbytes for rows in all_rows) == count * counted.grad_bytes
    for name, view in flats[0].grad_views(all_rows).items():
        view.copy_(grads[name])
    assert sum(int(rows.count_nonzero()) for rows in all_rows) == sum(int(g.count_nonzero()) for g in grads.values())
    for flat in flats:
        own = allocate(flat.own_grads.total_bytes, torch.device("cpu"))
        assert len(own) == counted.grad_bytes
        for rows, place in zip(all_rows, flat.grad_slices(own), strict=True):
            place.copy_(rows[flat.index])
        for name, view in flat.own_grads.views(own).items():
            assert torch.equal(view, flat.piece_of(name, grads[name]))


def test_a_shared_parameter_is_cut_alike_in_every_stage() -> None:
    """Its gradients of two stages are added up shard by shard."""
    table = ParamSpec("table", (1000, 3), "float32", shared=True)
    first = StageSpec("stage0", (), (), (table, ParamSpec("a", (17,), "float32")))
    last = StageSpec("stage1", (), (), (ParamSpec("b", (4000,), "float32"), table))
    whole = Interface({"stage0": first, "stage1": last}, {}, 3, groups={"all": tuple((d, "", "") for d in range(3))})
    value = torch.randn(table.shape)
    for index in range(3):
        stages = [
            FlatStage(whole.stages[stage], whole.segments_of(stage, "all"), index, 3) for stage in ("stage0", "stage1")
        ]
        pieces = [flat.piece_of("table", value) for flat in stages]
        assert torch.equal(*pieces)
        assert whole.part_of("stage0", "all").grad_bytes == stages[0].own_grads.total_bytes


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
    flat = [segment for spec in programs[0].interface.stages.values() for segment in spec.segments(2)]
    slices = [segment.length for segment in flat if segment.trained]
    assert sum(slices) * 2 >= whole and states == [8 * sum(slices)] * 2  # 8 bytes each, with what fills slices up
    assert profile_memory(programs[0]).arena_bytes >= sum(s.weight_bytes for s in programs[0].interface.stages.values())


Edit = Callable[[str], str]


def edit_text(edits: dict[int, Edit]) -> list[Program]:
    programs = spread(interface())
    shown = [print_program(program) for program in programs]
    texts = [edits.get(device, str)(text) for device, text in enumerate(shown)]
    assert texts != shown
    return [parse_program(text, programs[0].interface, device) for device, text in enumerate(texts)]


def leave_unscattered(text: str) -> str:
    """The gradients of stage 1 go on as they are."""
    found = re.search(r'    stage1_own = rt.reduce_scatter\((\w+), group="shards"\)\n', text)
    assert found is not None
    return text.replace(found[0], "").replace("stage1_own", found[1])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.replace('fetch("stage1.weights", group="shards")', 'fetch("stage1.weights")'), "must be shard"),
        (leave_unscattered, "stage1 is spread over 'shards' here, but these gradients are whole"),
        (lambda t: t.replace('rt.step("stage0", stage0_dram)', 'rt.step("stage1", stage0_dram)'), "belong to stage0"),
        (lambda t: t.replace('group="shards"', 'group="others"', 1), "no group 'others'; there are shards"),
    ],
)
def test_what_one_device_may_not_leave_out(edit: Edit, said: str) -> None:
    with pytest.raises(VerifyError, match=said):
        verify(edit_text({1: edit}))


def test_devices_must_meet_in_the_same_order() -> None:
    def cross(text: str) -> str:
        rows = text.split("\n")
        at = [i for i, row in enumerate(rows) if "reduce_scatter" in row]
        return "\n".join([*rows[: at[0]], *rows[at[1] : at[1] + 5], *rows[at[0] : at[1]], *rows[at[1] + 5 :]])

    with pytest.raises(VerifyError, match="meets grads of stage0 to reduce_scatter here and grads of stage1"):
        verify(edit_text({0: cross}))


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
