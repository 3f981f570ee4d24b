"""`keep-stages`: stages stay as far as memory holds them beside those that are fetched, if a step is then shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.compiler.search.bounds import lower_bound
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.ir.verify import verify
from penstock.passes.base import Pass
from penstock.passes.draft import Draft
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.memory.insert_ssd import InsertSsd
from penstock.passes.memory.keep_stages import KeepStages
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.optimizer.overlap_optimizer import OverlapOptimizer
from penstock.passes.optimizer.timing import tie_groups
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import apply, chain, draft_of, text_of, to_schedule, trace_case

DEPTH = 5
TAIL = (InsertRemat(), InsertFetch(), InsertOptimizer())


def ready(memory: str, num_devices: int = 1, micro_batches: int = 2, **machine: str) -> Draft:
    hardware = Hardware.cpu(num_devices=num_devices, memory=memory, **machine)
    draft = draft_of(chain(DEPTH, width=64, rows=8), hardware, micro_batches=micro_batches)
    return apply(draft, *to_schedule(DEPTH + 1))


def test_text(golden: Golden) -> None:
    draft = draft_of(chain(depth=3), Hardware.cpu(num_devices=1, memory="60kB"), micro_batches=2)
    apply(draft, *to_schedule(4), KeepStages(share=1.0), *TAIL, memory=True)
    golden(text_of(draft), "keeps-stage0")


def test_a_roomy_device_decides_nothing() -> None:
    assert KeepStages().plan(ready("64MB")) == []


def test_residents_are_updated_on_their_device_and_never_move() -> None:
    draft = apply(ready("700kB"), KeepStages(share=1.0), *TAIL, memory=True)
    assert 0 < len(draft.resident) < len(draft.stages)
    for node in draft.programs[0].ops():
        stage = str(node.args[0]).partition(".")[0] if node.args else ""
        if node.target is ops.step:
            memory = node.args[1].meta["type"].memory
            assert memory == (ops.DEVICE if stage in draft.resident else ops.DRAM)
        if node.target in (ops.fetch, ops.resident):
            assert (node.target is ops.resident) == (stage in draft.resident)


TAILS: dict[str, tuple[Pass, ...]] = {
    "dram": TAIL,
    "moved": (ChooseActivations(), InsertFetch(), OverlapOptimizer()),
    "ssd": (ChooseActivations(tier="all"), InsertFetch(), InsertSsd(tier="all"), OverlapOptimizer()),
}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(280, 1300), st.sampled_from([-1.0, 0.3, 0.6, 1.0]), st.sampled_from(sorted(TAILS)), st.booleans())
def test_memory_holds_them_and_no_step_is_below_its_bound(
    memory_kb: int, share: float, tail: str, clipped: bool
) -> None:
    draft = ready(f"{memory_kb}kB", ssd="1GB", h2d="50MB/s", d2h="50MB/s")
    draft.options = replace(draft.options, max_grad_norm=0.5 if clipped else None)
    tier = "all" if tail == "ssd" else "none"
    before = replace(draft)
    apply(draft, KeepStages(share=share, tier=tier), *TAILS[tail])
    budget = draft.lane_hardware.devices[0].budget_bytes
    if draft.resident:  # else memory may hold no plan of these passes at all
        assert profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE] <= budget
        verify(draft.programs, draft.lane_hardware)
        bound = lower_bound(before, tier=tier if tail == "ssd" else None, resident=True)
        assert bound.seconds <= simulate(draft.programs, draft.lane_hardware).step_s * (1 + 1e-9)


def test_more_memory_keeps_no_less() -> None:
    kept = [len(KeepStages(share=1.0).plan(ready(f"{size}kB"))) for size in (280, 640, 880, 1150)]
    assert kept == sorted(kept) and kept[0] < kept[-1]


def test_stages_that_share_a_parameter_stay_together() -> None:
    graph, _ = trace_case("gpt2")
    for size in (400, 500, 600, 800):
        draft = apply(draft_of(graph, Hardware.cpu(1, memory=f"{size}kB"), micro_batches=2), *to_schedule(4))
        tied = {stage for rows in tie_groups(draft).values() for _, stage, _ in rows}
        assert len(tied & set(KeepStages(share=1.0).plan(draft))) in (0, len(tied)), size
        assert len(tied) == 2


@pytest.mark.parametrize(
    ("resident", "fetch", "words"),
    [
        (["stage9"], {}, "resident names 'stage9'; the stages are stage0"),
        (["stage0"], {"stage0": {}}, "fetch names stage0, which is resident"),
    ],
)
def test_wrong_decisions(resident: list[str], fetch: dict[str, dict[str, int]], words: str) -> None:
    draft = ready("700kB")
    with pytest.raises(PassError, match=words):
        apply(draft, KeepStages(), *TAIL, decisions={"resident": resident, "fetch": fetch})


def test_wrong_options() -> None:
    with pytest.raises(PassError, match=r"option share=1\.5; allowed: 0 to 1"):
        KeepStages(share=1.5)
    with pytest.raises(PassError, match="'keep-stages': option tier='disk' is none of auto, states, all, none"):
        KeepStages(tier="disk")
