"""Asynchronous programs that would train something else are refused, with the line."""

from __future__ import annotations

import functools

import pytest

from penstock.ir.errors import VerifyError
from penstock.ir.program import Program, infer_all, parse_program, place_frees, print_program
from penstock.ir.verify import verify
from penstock.passes.schedule.schedule_async import ScheduleAsync
from penstock.tests.passes.running import apply, draft_of, to_schedule, trace_case


@functools.cache
def programs(weights: str) -> tuple[Program, ...]:
    options = {"max_grad_norm": 0.5} if weights == "clipped" else {}
    draft = draft_of(trace_case("gpt2")[0], micro_batches=3, **options)
    kinds = {"clipped": ScheduleAsync(), "fetched": ScheduleAsync(tier="dram")}
    schedule = kinds.get(weights) or ScheduleAsync(weights=weights)
    return tuple(apply(draft, *to_schedule(2)[:3], schedule).programs)


def edit(weights: str, device: int, old: str, new: str) -> list[Program]:
    """The programs with one change to one's text; frees come where they belong then."""
    made = list(programs(weights))
    text = print_program(made[device])
    assert old in text, text
    made[device] = parse_program(text.replace(old, new, 1), made[device].interface, device)
    infer_all(made[device])
    place_frees(made[device])
    return made


LAST_STEP = '    rt.step("stage0", g0_m2_summed)\n'
CASES = {
    "missing": ("current", 0, LAST_STEP, "", "stage0 has 2 updates, there are 3 mini-batches"),
    "twice": ("current", 0, LAST_STEP, 2 * LAST_STEP, "update 3 of stage0 has gradients of mini-batch 2"),
    "loss": ("current", 1, "[1.0], None, micro_batch=0", "[0.5], None, micro_batch=0", "the loss counts 0.5"),
    "added-up": ("current", 0, "], None, micro_batch=1", "], g0_m0_summed, micro_batch=1", "each has an update of its"),
    "not-stashed": ("stash", 0, 'backward("stage0", w0_v0, None', 'backward("stage0", w0, None', "stashes its weights"),
    "too-far": (
        "predict",
        0,
        "updates=1, shared=1)",
        "updates=2, shared=1)",
        "runs on weights as of version 2, but mini-batch 1",
    ),
    "predicted": ("predict", 0, 'backward("stage0", w0, ', 'backward("stage0", w0_for_m1, ', "not on predicted ones"),
    "other-norm": ("clipped", 0, "norm_m1_world, max", "norm_m0_world, max", "mini-batch 1 meet the norm of 0"),
    "stale": ("fetched", 0, 'forward("stage0", w0_2', 'forward("stage0", w0_1', "stage0 has had 1 updates, but line"),
    "swapped": ("current", 0, 'rt.resident("stage0', 'rt.fetch("stage0', "is fetched, so it is stepped in dram"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_names_what_is_wrong(case: str) -> None:
    weights, device, old, new, words = CASES[case]
    with pytest.raises(VerifyError, match=words):
        verify(edit(weights, device, old, new))


def test_versions_are_for_asynchronous_programs() -> None:
    made = [p.copy().with_interface(asynchronous=False) for p in programs("stash")]
    for program in made:
        infer_all(program)
    with pytest.raises(VerifyError, match="`split` is not allowed in `step`"):
        verify(made)
