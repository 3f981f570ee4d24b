"""`take-turns`: which fetches have turns and which, where they help, and that values stay as they are."""

from __future__ import annotations

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import infer_all, link_turn_of, parse_program, print_program, takes_turns
from penstock.passes.draft import Draft
from penstock.passes.memory.take_turns import TakeTurns, number_fetches, sharing
from penstock.runtime.simulate import simulate
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.simulate.test_engine import machine


def make_draft(hardware: Hardware, **shape: object) -> Draft:
    programs = pipeline(hardware.num_devices, 2 * hardware.num_devices, 2, width=256, **shape)  # type: ignore[arg-type]
    return Draft(None, hardware, programs=programs)  # type: ignore[arg-type]


def turns_of(draft: Draft) -> dict[str, list[int | None]]:
    """Per stage, the turns of its fetches in text order."""
    found: dict[str, list[int | None]] = {}
    for program in draft.programs:
        for node in program.ops():
            if node.target is ops.fetch:
                found.setdefault(node.meta["type"].stage, []).append(link_turn_of(node))
    return found


def test_what_is_needed_first_has_the_first_turn() -> None:
    draft = make_draft(machine(2))
    number_fetches(draft.programs, draft.lane_hardware, "fp32")
    # The last stage of each device stays for its backward.
    assert turns_of(draft) == {"stage0": [0, 5], "stage2": [2], "stage1": [1, 4], "stage3": [3]}
    text = print_program(draft.programs[0])
    assert 'rt.fetch("stage0.weights", link_turn=0)' in text
    again = parse_program(text, draft.programs[0].interface, 0)
    infer_all(again)
    assert print_program(again) == text and takes_turns(again)


def test_only_devices_that_share_a_root_complex_take_turns() -> None:
    hardware = machine(3)
    apart = hardware.model_dump(mode="json")
    apart["hosts"][0]["root_complexes"] *= 2
    apart["devices"][2]["root_complex"] = 1
    assert sharing(make_draft(hardware).programs, hardware) == {0, 1, 2}
    two = Hardware.model_validate(apart)
    draft = make_draft(two)
    assert sharing(draft.programs, two) == {0, 1}
    number_fetches(draft.programs, two, "fp32")
    assert [takes_turns(program) for program in draft.programs] == [True, True, False]
    apart["devices"][1]["root_complex"] = 1
    apart["hosts"][0]["root_complexes"] *= 2
    apart["devices"][2]["root_complex"] = 2
    alone = make_draft(Hardware.model_validate(apart))
    assert not TakeTurns(always=True).plan(alone)  # nothing is shared
    assert not TakeTurns(always=True).plan(make_draft(hardware, fetched=False))


def test_turns_are_taken_where_the_simulated_step_gains_by_them() -> None:
    """Two devices want weights at the same time; the second needs its own only after the first has computed."""
    tight = machine(2).with_(optimizer_params_per_s=1e12)
    draft = make_draft(tight, flops=2e8)
    fair_s = simulate(draft.programs, tight).step_s
    assert TakeTurns().plan(draft)
    assert not any(takes_turns(program) for program in draft.programs)  # planning changes nothing
    TakeTurns().rewrite(draft, True)
    assert simulate(draft.programs, tight).step_s < 0.99 * fair_s
    computing = make_draft(tight, flops=1e11)
    assert not TakeTurns().plan(computing) and TakeTurns(always=True).plan(computing)
    on_cpu = Hardware.cpu(2, memory="8MB")
    assert not TakeTurns().plan(make_draft(on_cpu)) and TakeTurns(always=True).plan(make_draft(on_cpu))


def test_it_comes_last() -> None:
    with pytest.raises(PassError, match=r"take-turns.*needs optimizer.*put insert-optimizer before it"):
        parse_pipeline(
            "coarsen, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, take-turns, "
            "insert-optimizer",
            2,
        )


@pytest.mark.parametrize("turn", ["-1", "1.5", '"first"'])
def test_a_turn_that_is_no_number_is_refused(turn: str) -> None:
    (program,) = pipeline(1, 1, 1)
    text = print_program(program).replace('fetch("stage0.weights")', f'fetch("stage0.weights", link_turn={turn})')
    with pytest.raises(VerifyError, match="link_turn is"):
        infer_all(parse_program(text, program.interface, 0))


def test_an_activation_has_no_turn() -> None:
    (program,) = pipeline(1, 2, 1, moved="dram")
    activation = next(node for node in program.ops() if node.target is ops.fetch and node.meta["type"].kind == "tensor")
    activation.kwargs = {"link_turn": 0}
    with pytest.raises(VerifyError, match="comes before all weights"):
        infer_all(program)
