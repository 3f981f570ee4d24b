"""`insert-ssd`: as little on SSD as DRAM asks for, weights read ahead of their fetch, errors that say what lacks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.compiler.search.fit import check_fit
from penstock.compiler.search.host_memory import host_needs
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import ParamSpec, plan_arena, profile_memory
from penstock.ir.verify import verify
from penstock.passes.decisions import OnSsd
from penstock.passes.draft import Draft
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.memory.insert_ssd import InsertSsd, read_weights
from penstock.passes.optimizer.dram_peak import DramPeak
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.optimizer.overlap_optimizer import TIMINGS, OverlapOptimizer
from penstock.passes.optimizer.ssd_room import MOST_READS_AHEAD, SsdRoom, tiers_at
from penstock.passes.optimizer.updates import write_updates
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import Chain, apply, chain, draft_of, text_of, to_schedule, trace_case

EVERYTHING = 10**9


def machine(dram: int = EVERYTHING, num_devices: int = 1, ssd: str | None = "1GB", **links: str) -> Hardware:
    """All DRAM is usable."""
    return Hardware.cpu(num_devices, memory="8MB", dram=dram, ssd=ssd, **links).with_(dram_usable_fraction=1.0)


def swapping_job(hardware: Hardware, depth: int = 7, width: int = 64, **options: object) -> Draft:
    """Equal stages, all of which come from DRAM."""
    draft = draft_of(chain(depth, width), hardware, **{"micro_batches": 2, **options})
    apply(draft, *to_schedule(depth + 1))
    names = [s.spec.name for s in draft.stages]
    decisions = {"rematerialise": names, "fetch": {name: {} for name in names}}
    return apply(draft, InsertRemat(), InsertFetch(), decisions=decisions)


def dram_bytes(draft: Draft) -> int:
    return sum(profile_memory(p).peak_bytes[ops.DRAM] for p in draft.programs)


def least_bytes(num_devices: int) -> int:
    """DRAM with which anything fits at all."""
    with pytest.raises(DoesNotFit) as caught:
        InsertSsd().plan(swapping_job(machine(1, num_devices), 9, 32))
    return 1 + caught.value.missing_bytes


def test_text(golden: Golden) -> None:
    draft = swapping_job(machine(), depth=2, width=16)
    decision = OnSsd(stages={"stage0": "all", "stage1": "states", "stage2": "all"}, ahead=1)
    golden(text_of(apply(draft, InsertSsd(), decisions={"ssd": decision})), "two-of-three-stages")


def test_roomy_dram_leaves_the_ssd_alone() -> None:
    draft = swapping_job(machine())
    assert InsertSsd().plan(draft).stages == {}
    assert draft.notes["insert-ssd"] == "DRAM holds everything"
    assert InsertSsd().plan(swapping_job(machine(ssd=None))).stages == {}


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_less_dram_puts_more_on_ssd_states_first(num_devices: int) -> None:
    """And the finished programs keep the budget, by the verifier."""
    need = dram_bytes(apply(swapping_job(machine(num_devices=num_devices), 9, 32), InsertOptimizer()))
    least = least_bytes(num_devices)
    amounts = []
    for share in (1.0, 0.6, 0.0):
        budget = int(least + share * (need - least))
        draft = swapping_job(machine(budget, num_devices), 9, 32)
        apply(draft, InsertSsd(), OverlapOptimizer(), memory=True)
        assert dram_bytes(draft) <= budget
        tiers = draft.ssd.stages
        if "all" in tiers.values():
            assert len(tiers) == len(draft.stages)  # all states are there before any weights
        amounts.append((len(tiers), list(tiers.values()).count("all")))
    assert [states for states, _ in amounts] == sorted(states for states, _ in amounts)
    assert amounts[0] == (0, 0) and amounts[1][0] > 0 and amounts[-1] == (10, 10)


def test_loading_counts_too() -> None:
    """Of a frozen model a step takes little more DRAM than what lasts; loading takes a stage more."""
    with torch.device("meta"):
        model = Chain(7, 64)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    graph = trace(model, {"x": torch.randn(2, 64), "labels": torch.zeros(2, dtype=torch.int64)})

    def plan_for(dram: int) -> Draft:
        draft = apply(draft_of(graph, machine(dram), micro_batches=2), *to_schedule(8))
        names = [s.spec.name for s in draft.stages]
        decisions = {"rematerialise": names, "fetch": {name: {} for name in names}}
        apply(draft, InsertRemat(), InsertFetch(), decisions=decisions)
        return apply(draft, InsertSsd(), OverlapOptimizer(), memory=True)

    roomy = plan_for(EVERYTHING)
    need = host_needs(roomy.programs, roomy.lane_hardware)[0]
    assert need.memory == "dram0" and need.loading_bytes > need.step_bytes and not roomy.ssd.stages
    tight = plan_for(need.loading_bytes - 1)
    assert tight.ssd.stages
    check_fit(tight)


def test_stages_on_ssd_are_spread_over_the_model() -> None:
    room = SsdRoom(swapping_job(machine(), depth=11, width=16))
    first = sorted(int(name.removeprefix("stage")) for name in room.stages_of([0])[:4])
    assert max(b - a for a, b in pairwise(first)) <= 5 and first[-1] - first[0] >= 6


@pytest.mark.parametrize("tier", ["states", "all"])
def test_a_tier_that_is_asked_for(tier: str) -> None:
    draft = swapping_job(machine())
    decision = InsertSsd(tier=tier).plan(draft)
    assert decision.stages == {s.spec.name: tier for s in draft.stages}
    apply(draft, InsertSsd(tier=tier), OverlapOptimizer(), memory=True)
    kept = profile_memory(draft.programs[0]).persistent
    assert kept.ssd["states"] > 0 and kept.dram["states"] == 0
    assert (kept.dram["weights"] == 0) == (kept.ssd["weights"] > 0) == (tier == "all")


def test_too_little_dram_even_so() -> None:
    least = 3000
    with pytest.raises(DoesNotFit, match=r"dram0 has 2\.93 KiB usable") as caught:
        InsertSsd().plan(swapping_job(machine(least)))
    assert caught.value.memory == "dram0" and "smaller stages" in str(caught.value)
    enough = least + caught.value.missing_bytes
    with pytest.raises(DoesNotFit):
        InsertSsd().plan(swapping_job(machine(enough - 1)))
    apply(swapping_job(machine(enough)), InsertSsd(), OverlapOptimizer(), memory=True)


def test_states_alone_on_ssd_may_not_be_enough() -> None:
    enough = dram_bytes(apply(swapping_job(machine()), InsertSsd(tier="all"), OverlapOptimizer()))
    with pytest.raises(DoesNotFit, match=r"with states alone on SSD \(tier=all: weights too\)"):
        InsertSsd(tier="states").plan(swapping_job(machine(enough // 2)))
    apply(swapping_job(machine(enough)), InsertSsd(), OverlapOptimizer(), memory=True)


def test_too_small_disks() -> None:
    with pytest.raises(DoesNotFit, match="ssd0") as caught:
        InsertSsd(tier="all").plan(swapping_job(machine(ssd="100kB")))
    assert caught.value.memory == "ssd0"
    size = int((90_000 + caught.value.missing_bytes) / 0.9) + 1
    apply(swapping_job(machine(ssd=size)), InsertSsd(tier="all"), OverlapOptimizer(), memory=True)  # type: ignore[arg-type]


def test_no_disks() -> None:
    with pytest.raises(PassError, match=r"tier=all needs SSDs, and host 0 of .* has none"):
        InsertSsd(tier="all").plan(swapping_job(machine(ssd=None)))
    with pytest.raises(DoesNotFit, match=r"and there are no SSDs \(give it some: ssds=2\)"):
        InsertSsd().plan(swapping_job(machine(dram=3000, ssd=None)))


def test_resident_stages_stay_on_their_device() -> None:
    draft = draft_of(chain(), machine(), micro_batches=2)
    apply(draft, *to_schedule(4), InsertRemat(), InsertFetch())
    assert InsertSsd(tier="all").plan(draft).stages == {}


@pytest.mark.parametrize(
    ("stages", "ahead", "said"),
    [
        ({"stage9": "all"}, 1, "ssd names 'stage9'; the stages whose weights come from DRAM are"),
        ({"stage0": "weights"}, 1, "ssd has 'weights' of stage0"),
        ({"stage0": "all"}, 99, "ssd reads 99 phases ahead"),
    ],
)
def test_decisions_that_cannot_be_carried_out(stages: dict[str, Any], ahead: int, said: str) -> None:
    decision = OnSsd.model_construct(stages=stages, ahead=ahead)
    with pytest.raises(PassError, match=said):
        InsertSsd().rewrite(swapping_job(machine()), decision)


def test_an_option_that_means_nothing() -> None:
    with pytest.raises(PassError, match="tier='some' is none of auto, states, all"):
        InsertSsd(tier="some").plan(swapping_job(machine()))


def test_insert_optimizer_refuses_what_is_on_ssd() -> None:
    with pytest.raises(PassError, match="use overlap-optimizer"):
        apply(swapping_job(machine()), InsertSsd(tier="states"), InsertOptimizer())


def test_the_deeper_the_queue_the_earlier_the_reads() -> None:
    texts, arenas = [], []
    for ahead in range(3):
        draft = swapping_job(machine())
        read_weights(draft.programs[0], [s.spec.name for s in draft.stages], ahead)
        texts.append([n.target.name for n in draft.programs[0].ops() if n.target in (ops.read, ops.forward)])
        arenas.append(plan_arena(draft.programs[0], ops.DRAM)[1])
    before_first = [text.index("forward") for text in texts]
    assert before_first == [1, 2, 3] and arenas[0] <= arenas[1] < arenas[2]


def test_disks_slower_than_the_link_are_read_further_ahead() -> None:
    aheads = []
    for h2d in ("0.5GB/s", "3GB/s", "100GB/s"):
        decision = InsertSsd(tier="all").plan(swapping_job(machine(h2d=h2d)))
        aheads.append(decision.ahead)
    assert aheads == [1, 3, MOST_READS_AHEAD]


@pytest.mark.parametrize(
    ("precision", "clip", "name"),
    [
        ("fp32", 1.0, "gpt2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("fp32", None, "chain"), ("bf16", None, "gpt2"), ("fp16", None, "chain"))
        ),
    ],
)
def test_bytes_are_those_of_the_finished_programs(precision: str, clip: float | None, name: str) -> None:
    """For each tier, queue and timing, exact and speculative: no copy of a program is needed to know its DRAM."""
    graph = chain(3, 16) if name == "chain" else trace_case(name, dropout=0.0)[0]
    for level in (0, 3, 5, 8):
        for timing in TIMINGS[1:4]:
            draft = draft_of(graph, machine(num_devices=2), precision=precision, max_grad_norm=clip)
            apply(draft, *to_schedule(4), InsertRemat(), InsertFetch(swap=True))
            room = SsdRoom(draft)
            names = room.stages_of([0])
            tiers = {s: "states" for s in names[:level]} | {s: "all" for s in names[: max(0, level - 4)]}
            updates = replace(room.updates(tiers), speculative=timing.lag == 1)
            whole = [stage for stage, tier in tiers.items() if tier == "all"]
            guessed = [peak.bytes(updates, timing, whole, ahead=1) for peak in room.hosts[0]]
            InsertSsd().rewrite(draft, OnSsd(stages=tiers, ahead=1))
            again = [DramPeak(p).bytes(updates, timing) for p in draft.programs]
            write_updates(draft.programs, draft.lane_hardware, updates, [timing] * 2)
            found = [profile_memory(p).peak_bytes[ops.DRAM] for p in draft.programs]
            slack = 16 if updates.max_norm is not None else 0
            assert all(0 <= a - b <= slack for a, b in zip(guessed, found)), (level, timing, guessed, found)
            assert again == guessed


@pytest.mark.parametrize("to", ["dram", "ssd"])
def test_activations_in_dram_are_counted_with_the_rest(to: str) -> None:
    draft = draft_of(trace_case("gpt2", dropout=0.0)[0], machine(), micro_batches=2)
    apply(draft, *to_schedule(4), ChooseActivations(to=to, swap=True, tier="all"), InsertFetch(swap=True))
    assert any(n.target is ops.offload for n in draft.programs[0].ops())
    room = SsdRoom(draft)
    tiers = tiers_at(room.specs, room.stages_of([0]), 6)
    updates, whole = room.updates(tiers), [stage for stage, tier in tiers.items() if tier == "all"]
    guessed = room.hosts[0][0].bytes(updates, TIMINGS[0], whole, ahead=2)
    InsertSsd().rewrite(draft, OnSsd(stages=tiers, ahead=2))
    write_updates(draft.programs, draft.lane_hardware, updates, TIMINGS[:1])
    assert profile_memory(draft.programs[0]).peak_bytes[ops.DRAM] == guessed
    verify(draft.programs, draft.lane_hardware)


def test_evaluation_reads_the_weights_that_are_on_ssd() -> None:
    hardware = machine()
    draft = swapping_job(hardware)
    fetch = {s.spec.name: {} for s in draft.stages}
    ssd = InsertSsd(tier="all").plan(draft)
    apply(draft, InsertSsd(), OverlapOptimizer(), decisions={"ssd": ssd})
    evaluation = evaluation_programs(draft, fetch)
    verify(evaluation, hardware)
    for program, training in zip(evaluation, draft.programs):
        assert sum(n.target is ops.read for n in program.ops()) == len(draft.stages)
        assert plan_arena(program, ops.DRAM)[1] <= plan_arena(training, ops.DRAM)[1]
        assert profile_memory(program).persistent.dram["weights"] == 0


def test_untrained_stages_have_no_states_to_move() -> None:
    draft = swapping_job(machine(), depth=3)
    stages = draft.programs[0].interface.stages
    frozen = {**stages, "stage0": replace(stages["stage0"], params=tuple(frozen_params(stages["stage0"].params)))}
    tiers = {level: tiers_at(frozen, list(frozen), level) for level in (1, 4, 8)}
    assert tiers == {
        1: {},
        4: {f"stage{i}": "states" for i in (1, 2, 3)},
        8: {f"stage{i}": "all" for i in range(4)},
    }


def frozen_params(params: tuple[ParamSpec, ...]) -> list[ParamSpec]:
    return [replace(p, requires_grad=False) for p in params]
