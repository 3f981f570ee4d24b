"""`overlap-optimizer`: the same weights as without it, less DRAM, and steps under the backward pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory, work_of
from penstock.ir.verify import verify
from penstock.passes.base import Pass
from penstock.passes.decisions import OnSsd
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.memory.insert_ssd import InsertSsd
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.optimizer.overlap_optimizer import (
    WORTH,
    OverlapOptimizer,
    clipping_of,
    predicted_s,
    with_clipping,
    written_bytes,
)
from penstock.passes.optimizer.timing import UNCLIPPED, Timing, updates_of
from penstock.passes.optimizer.updates import slots, write_updates
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_1f1b import Schedule1F1B
from penstock.passes.sharding.mesh import Mesh
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    Batch,
    apply,
    assert_trains_like_eager,
    chain,
    draft_of,
    join_batches,
    reference,
    text_of,
    to_schedule,
    trace_case,
)
from penstock.tests.shown_elsewhere import slow_but, slow_rows_but


def machine(num_devices: int = 1, dram: int = 10**9, ssd: str = "1GB", **links: str) -> Hardware:
    return Hardware.cpu(num_devices, memory="8MB", dram=dram, ssd=ssd, **links).with_(dram_usable_fraction=1.0)


def ready(
    hardware: Hardware, tiers: dict[str, str] | str, graph: Any = None, stages: int = 4, **options: object
) -> Draft:
    """All stages swapped; `tiers`: what is on SSD, or "states" or "all" of every stage."""
    graph = chain(3, 16) if graph is None else graph
    draft = draft_of(graph, hardware, **{"micro_batches": 2, **options})
    apply(draft, *to_schedule(stages))
    names = [s.spec.name for s in draft.stages]
    found = dict.fromkeys(names, tiers) if isinstance(tiers, str) else tiers
    decisions = {
        "rematerialise": [s.spec.name for s in draft.stages if s.spec.rematerialisable],
        "fetch": {name: {} for name in names},
        "ssd": OnSsd.model_validate({"stages": found}),
    }
    return apply(draft, InsertRemat(), InsertFetch(), InsertSsd(), decisions=decisions)


def order_of(draft: Draft, device: int = 0) -> list[str]:
    """Of the last op before the first backward of a stage to the end: what moves and updates."""
    interesting = {ops.backward, ops.offload, ops.read, ops.write, ops.step, ops.redo, ops.norm, ops.clip}
    rows = []
    for node in draft.programs[device].ops():
        if node.target in interesting and not str(node.args[0]).endswith(".weights"):
            what = node.kwargs.get("to") or node.args[0]
            stage = str(what).partition(".")[0] if isinstance(what, str) else what.meta["type"].stage  # type: ignore
            rows.append(f"{node.target.name} {stage.removeprefix('stage')}")  # type: ignore[union-attr]
    return rows


@pytest.mark.parametrize("clip", ["", "exact", "speculative"])
def test_text(clip: str, golden: Golden) -> None:
    options = {"max_grad_norm": 1.0} if clip else {}
    tiers = {"stage0": "all", "stage2": "states", "stage3": "all"}
    draft = ready(machine(), tiers, micro_batches=1, **options)
    golden(text_of(apply(draft, OverlapOptimizer(clip=clip or "auto"))), clip or "unclipped")


def test_states_come_and_go_under_the_backward_of_other_stages() -> None:
    draft = ready(machine(), "states", micro_batches=1)
    updates = updates_of(draft, dict.fromkeys((s.spec.name for s in draft.stages), ops.SSD))
    write_updates(draft.programs, draft.lane_hardware, updates, [Timing(lag=1, buffers=2)])
    assert order_of(draft) == [
        "read 3", "backward 3", "offload 3", "read 2", "backward 2", "offload 2", "step 3", "write 3", "read 1",
        "backward 1", "offload 1", "step 2", "write 2", "read 0", "backward 0", "offload 0", "step 1", "write 1",
        "step 0", "write 0",
    ]  # fmt: skip


@given(
    count=st.integers(1, 12),
    lag=st.integers(0, 1),
    buffers=st.integers(1, 4),
    late=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_slots_hold_every_move_once_in_an_order_that_can_be_done(
    count: int, lag: int, buffers: int, late: int, seed: int
) -> None:
    draw = random.Random(seed)
    order = [f"stage{i}" for i in range(count)]
    waiting = draw.sample(order, min(late, count))
    on_ssd = [stage for stage in order if draw.random() < 0.7]
    found = slots(order, waiting, on_ssd, Timing(lag, buffers))
    moves = [move for slot in found for move in slot]
    assert len(moves) == len(set(moves)) == len(order) + 2 * len(on_ssd)
    place = {move: (i, j) for i, slot in enumerate(found) for j, move in enumerate(slot)}
    for number, stage in enumerate(order, 1):
        assert place["step", stage][0] >= number  # its gradients are there
        if stage in on_ssd:
            assert place["read", stage] < place["step", stage] < place["write", stage]
    held = most = 0
    for kind, _ in moves:
        held += {"read": 1, "write": -1, "step": 0}[kind]
        most = max(most, held)
    assert most <= buffers + (0 if len(on_ssd) == count else 1)


# --- the same weights -----------------------------------------------------------------------------------------------

ADAM = torch.optim.AdamW
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "clipped": {"max_grad_norm": 0.1},
    "clipped in bf16": {"precision": "bf16", "max_grad_norm": 0.1},
    "never clipped": {"max_grad_norm": 1e6},
}


def train(draft: Draft, batches: list[Batch], precision: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    budgets = {"dram": sum(profile_memory(p).peak_bytes[ops.DRAM] for p in draft.programs)}
    budgets["ssd"] = sum(profile_memory(p).peak_bytes[ops.SSD] for p in draft.programs)
    runner = reference(draft, ADAM, precision=precision, budgets=budgets)
    losses = [runner.step(join_batches(batches))["loss"] for _ in range(3)]
    return losses, runner.weights()


NORMED = [name for name, options in CASES.items() if "max_grad_norm" in options or name == "fp16"]
EVERY = [*((name, "exact") for name in CASES), *((name, "speculative") for name in NORMED)]
QUICK = [("fp16", "speculative")]


@pytest.mark.parametrize(
    ("name", "clip", "model"),
    [
        pytest.param(*case, model, marks=() if case in QUICK and model == "gpt2" else pytest.mark.slow)
        for model in ("gpt2", "wide_resnet")
        for case in EVERY
    ],
)
def test_the_same_weights_as_insert_optimizer(name: str, clip: str, model: str) -> None:
    """Bit for bit; "gpt2" has a weight that two stages share."""
    options = CASES[name]
    graph, batches = trace_case(model, dropout=0.0)
    batches, precision = batches[:2], options.get("precision", "fp32")
    usual = ready(machine(2), {}, graph, **options)
    tiers = {s.spec.name: tier for s, tier in zip(usual.stages, ["all", "states", "all", "states"])}
    draft = ready(machine(2), tiers, graph, **options)
    apply(usual, InsertOptimizer())
    apply(draft, OverlapOptimizer(clip=clip), memory=True)
    (losses, weights), (want_losses, want) = (train(d, batches, precision) for d in (draft, usual))
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses))
    assert weights.keys() == want.keys() and all(torch.equal(weights[n], want[n]) for n in want)


@pytest.mark.parametrize("precision", slow_but(["fp16"], ["fp32", "fp16"]))
def test_resident_stages_beside_swapped_ones(precision: str) -> None:
    """Those are clipped and stepped on their device after the norm, these judged after it."""
    graph, batches = trace_case("mlp", dropout=0.0)
    options = {"precision": precision, "max_grad_norm": 0.05, "micro_batches": 2}
    drafts = [draft_of(graph, machine(2), **options) for _ in range(2)]
    decisions = {"rematerialise": [], "fetch": {"stage0": {}, "stage1": {}}}
    for draft in drafts:
        apply(draft, *to_schedule(4), InsertRemat(), InsertFetch(), decisions=decisions)
    apply(drafts[0], InsertSsd(tier="all"), OverlapOptimizer(clip="speculative"), memory=True)
    apply(drafts[1], InsertOptimizer())
    kinds = {n.target.name for p in drafts[0].programs for n in p.ops()}  # type: ignore[union-attr]
    assert {"redo", "clip", "resident", "read"} <= kinds and "stage0" in drafts[0].ssd.stages
    (losses, weights), (want_losses, want) = (train(d, batches[:2], precision) for d in drafts)
    assert all(torch.equal(a, b) for a, b in zip(losses, want_losses))
    assert all(torch.equal(weights[n], want[n]) for n in want)


def test_as_eager_pytorch_with_states_on_ssd() -> None:
    """Losses, gradients, weights; tied, clipped, on two devices."""
    graph, batches = trace_case("gpt2", dropout=0.0)
    draft = ready(machine(2), "all", graph, max_grad_norm=0.1)
    apply(draft, OverlapOptimizer(), memory=True)
    assert_trains_like_eager(draft, batches[:2], 2e-6)


def test_one_forward_one_backward() -> None:
    graph, batches = trace_case("gpt2", dropout=0.0)
    draft = draft_of(graph, machine(2), micro_batches=2, max_grad_norm=0.1)
    apply(draft, Coarsen(), PartitionBalanced(stages=2), MapRoundRobin(), Schedule1F1B())
    names = [s.spec.name for s in draft.stages]
    apply(draft, InsertRemat(), InsertFetch(swap=True), decisions={"rematerialise": names})
    apply(draft, InsertSsd(tier="all"), OverlapOptimizer(clip="speculative"), memory=True)
    assert_trains_like_eager(draft, batches[:2], 2e-6)


def test_replicas_step_their_own_copies() -> None:
    graph, batches = trace_case("mlp", dropout=0.0)
    draft = draft_of(graph, machine(2), micro_batches=2)
    apply(draft, Coarsen(), Mesh(), PartitionBalanced(stages=2), MapRoundRobin(), Schedule1F1B())
    names = [s.spec.name for s in draft.stages]
    apply(draft, InsertRemat(), InsertFetch(swap=True), decisions={"rematerialise": names})
    apply(draft, InsertSsd(tier="states"), OverlapOptimizer(), memory=True)
    assert set(draft.ssd.stages) == set(names)
    assert_trains_like_eager(draft, batches[:2], 1e-6)


@pytest.mark.parametrize("kind", [InsertSsd, OverlapOptimizer])
def test_plans_change_no_program_and_survive_json(kind: type[Pass]) -> None:
    draft = draft_of(chain(3, 16), machine(), micro_batches=2, max_grad_norm=1.0)
    before: list[Pass] = [*to_schedule(4), InsertRemat(), InsertFetch(swap=True), InsertSsd(tier="all")]
    apply(draft, *(before[:-1] if kind is InsertSsd else before))
    text, p = text_of(draft), kind()
    decision = p.plan(draft)
    document = TypeAdapter(type(decision))
    assert p.plan(draft) == decision == document.validate_json(document.dump_json(decision))
    assert text_of(draft) == text


# --- what it takes --------------------------------------------------------------------------------------------------


def test_less_dram_than_insert_optimizer() -> None:
    graph = chain(7, 64)
    usual = apply(ready(machine(), {}, graph, stages=8), InsertOptimizer())
    states, everything = (apply(ready(machine(), t, graph, stages=8), OverlapOptimizer()) for t in ("states", "all"))
    need = [profile_memory(d.programs[0]).peak_bytes[ops.DRAM] for d in (usual, states, everything)]
    assert need[0] > 1.2 * need[1] > 1.2 * 1.2 * need[2]


def with_disks(rate: float) -> Hardware:
    """Read and written at so many bytes/s."""
    document = machine().model_dump()
    disk = document["hosts"][0]["ssds"][0]
    disk["read_bandwidth"] = disk["write_bandwidth"] = rate
    disk["latency_s"] = 0.0
    return Hardware.model_validate(document)


def wide(hardware: Hardware, **options: object) -> Draft:
    return ready(hardware, "all", chain(11, 128, rows=64), stages=12, **options)


@pytest.mark.parametrize(
    ("rate", "micro_batches"),
    slow_rows_but([(200e6, 2)], [(200e6, 2), (500e6, 6)]),
    ids=["slow disks", "much computation"],
)
def test_a_step_takes_little_more_than_its_slowest_resource(rate: float, micro_batches: int) -> None:
    hardware = with_disks(rate)
    draft = apply(wide(hardware, micro_batches=micro_batches), OverlapOptimizer())
    timeline = simulate(draft.programs, hardware)
    disks_s = sum(amount for link, amount in timeline.moved_bytes.items() if link.startswith("ssd0")) / rate
    compute_s = sum(s.end_s - s.start_s for s in timeline.spans if s.stream == ops.COMPUTE)
    bound_s = max(disks_s, compute_s)
    assert bound_s <= timeline.step_s < 1.06 * bound_s


@pytest.mark.slow
def test_overlap_is_worth_it() -> None:
    hardware = with_disks(500e6)
    programs = [apply(wide(hardware, micro_batches=6), OverlapOptimizer(overlap=o)).programs for o in (True, False)]
    took_s, behind_s = (simulate(p, hardware).step_s for p in programs)
    assert behind_s > 1.3 * took_s


def test_without_overlap_no_step_begins_before_the_last_backward_ends() -> None:
    for tiers in ("all", "states", {}):
        draft = apply(ready(machine(), tiers), OverlapOptimizer(overlap=False))
        spans = simulate(draft.programs, draft.lane_hardware).spans
        last = max(s.end_s for s in spans if s.op == "backward")
        assert min(s.start_s for s in spans if s.op == "step") >= last


def test_buffers_are_as_many_as_dram_holds() -> None:
    needs = []
    for dram in (10**9, None, None, None):
        draft = ready(machine(dram=needs[-1] - 1 if dram is None else dram), "all", chain(7, 64), stages=8)
        apply(draft, OverlapOptimizer(), memory=True)
        needs.append(profile_memory(draft.programs[0]).peak_bytes[ops.DRAM])
    assert needs == sorted(set(needs), reverse=True)


# --- clipping -------------------------------------------------------------------------------------------------------


def test_speculation_steps_before_the_norm_and_judges_behind_it() -> None:
    draft = apply(ready(machine(), "states", max_grad_norm=1.0), OverlapOptimizer(clip="speculative"))
    rows = [row.split()[0] for row in order_of(draft)]
    assert "clip" not in rows and rows.index("norm") > max(i for i, row in enumerate(rows) if row == "step")
    assert rows[-4:] == ["redo"] * 4
    kept = profile_memory(draft.programs[0]).persistent.ssd
    assert kept["undo"] > 0


def test_fp16_is_judged_by_overflow_alone() -> None:
    draft = apply(ready(machine(), "all", precision="fp16"), OverlapOptimizer(clip="speculative"))
    assert {n.kwargs["max_norm"] for n in draft.programs[0].ops() if n.target is ops.redo} == {UNCLIPPED}


@pytest.mark.slow
def test_auto_takes_what_is_faster_and_says_so() -> None:
    hardware = with_disks(500e6)
    draft = wide(hardware, micro_batches=6, max_grad_norm=1.0)
    apply(draft, OverlapOptimizer())
    said = draft.notes["overlap-optimizer"]
    assert said.startswith("clips speculative; ") and "a step that is clipped takes" in said
    took_s = [float(said.partition(f"{clip} clipping takes ")[2].split()[0]) for clip in ("exact", "speculative")]
    assert took_s[0] > 1.3 * took_s[1]
    assert f"{simulate(draft.programs, hardware).step_s:.4g}" == f"{took_s[1]:.4g}"


def test_auto_is_exact_where_speculation_gains_nothing() -> None:
    """Disks are busy all the time in any case."""
    assert OverlapOptimizer().plan(wide(with_disks(200e6), max_grad_norm=1.0))["clipping"] == "exact"


def test_auto_is_exact_where_undoing_has_no_room() -> None:
    graph = chain(7, 64)
    roomy = apply(ready(machine(), "all", graph, stages=8, max_grad_norm=1.0), OverlapOptimizer(clip="exact"))
    size = int(profile_memory(roomy.programs[0]).peak_bytes[ops.SSD] * 1.5 / 0.9)
    draft = ready(machine(ssd=size), "all", graph, stages=8, max_grad_norm=1.0)  # type: ignore[arg-type]
    assert OverlapOptimizer().plan(draft)["clipping"] == "exact"
    assert "speculative clipping does not fit" in draft.notes["overlap-optimizer"]


def test_bytes_written_are_noted() -> None:
    draft = apply(ready(machine(), "all"), OverlapOptimizer())
    written = sum(written_bytes(p) for p in draft.programs)
    assert written == profile_memory(draft.programs[0]).persistent.total(ops.SSD)
    assert "are written to SSD in a step" in draft.notes["overlap-optimizer"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": "sometimes"}, "clip='sometimes' is none of auto, exact, speculative"),
        ({"clip": "speculative", "overlap": False}, "not overlap=false"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PassError, match=said):
        OverlapOptimizer(**options).plan(ready(machine(), {}))


def test_decisions_that_cannot_be_carried_out() -> None:
    draft = ready(machine(), "states")
    names = [s.spec.name for s in draft.stages]
    for where, clipping, said in (
        (dict.fromkeys(names, "dram"), "", "stage0 is on SSD, so it is stepped on ssd; optimizer says 'dram'"),
        (dict.fromkeys(names[1:], "ssd"), "", "optimizer says nothing of stage0"),
        (dict.fromkeys(names, "ssd"), "exact", "clipping is 'exact'; with these options it is ''"),
    ):
        with pytest.raises(PassError, match=said):
            OverlapOptimizer().rewrite(draft, {"optimizer": where, "clipping": clipping})


# --- any chain, any budget ------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    depth=st.integers(1, 6),
    devices=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    dram=st.integers(5, 400),
    disk=st.sampled_from([None, 50, 400, 10**6]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    clip=st.sampled_from([None, 1.0]),
    overlap=st.booleans(),
)
def test_budgets_hold_or_the_plan_does_not_fit(
    depth: int, devices: int, micro_batches: int, dram: int, disk: int | None, precision: str, clip: float | None,
    overlap: bool,
) -> None:  # fmt: skip
    """Sizes in kB. Without overlap, gradients wait in DRAM, which insert-ssd does not know."""
    hardware = machine(devices, dram * 1000, None if disk is None else f"{disk}kB")  # type: ignore[arg-type]
    options = {"precision": precision, "max_grad_norm": clip, "micro_batches": micro_batches}
    draft = draft_of(chain(depth, 32), hardware, **options)
    apply(draft, *to_schedule(depth + 1), InsertRemat(always=True), InsertFetch(swap=True))
    try:
        apply(draft, InsertSsd())
    except DoesNotFit as error:
        assert error.missing_bytes > 0 and error.memory in ("dram0", "ssd0")
        return
    apply(draft, OverlapOptimizer(overlap=overlap), memory=overlap)
    verify(draft.programs)


@pytest.mark.slow
def test_a_part_of_the_stages_is_stepped_early_where_the_copies_of_all_take_too_long() -> None:
    """What is stepped before the norm is copied first; those whose gradients come first have the time for it."""
    wide = Hardware.preset("mobius-topo2+2").with_(memory="8MB")
    host = wide.hosts[0]
    bandwidth = wide.devices[0].d2h_bandwidth
    slow = [host.model_copy(update={"dram_bandwidth": bandwidth, "optimizer_params_per_s": bandwidth / 60})]
    hardware = Hardware.model_validate({**wide.model_dump(), "hosts": [h.model_dump() for h in slow]})
    draft = draft_of(chain(12, 64), hardware, micro_batches=4, max_grad_norm=1.0)
    apply(draft, *to_schedule(12), InsertRemat(swap=True), InsertFetch(swap=True))
    names = [stage.spec.name for stage in draft.stages]
    half = clipping_of(draft, names, 0.5)
    assert isinstance(half, list) and 0 < len(half) < len(names)
    last = [stages[-1].spec.name for d in range(4) if (stages := draft.stages_on(d))]
    assert set(last) <= set(half)  # their gradients come first
    assert clipping_of(draft, names, 0.0) == "exact" and clipping_of(draft, names, 1.0) == "speculative"
    updates = updates_of(draft, dict.fromkeys(names, ops.DRAM))
    took_s = {}
    for clipping in ("exact", "speculative"):
        took_s[clipping] = predicted_s(draft, with_clipping(updates, clipping))
    decision = OverlapOptimizer().plan(draft)
    chosen_s = predicted_s(draft, with_clipping(updates, decision["clipping"]))
    assert chosen_s is not None and all(s is not None and chosen_s <= s * WORTH for s in took_s.values())
    OverlapOptimizer().rewrite(draft, {**decision, "clipping": half})
    early = [n.args[0] for p in draft.programs for n in p.ops() if n.kwargs.get("speculative")]
    assert set(early) == set(half)
    copies = sum(work_of(p, n).copied_bytes for p in draft.programs for n in p.ops() if n.target is ops.step)
    assert copies == sum(profile_memory(p).persistent.dram["undo"] for p in draft.programs) > 0


def test_a_list_of_early_stages_is_checked() -> None:
    draft = ready(machine(), "states", micro_batches=1, max_grad_norm=1.0)
    decision = OverlapOptimizer(clip="speculative").plan(draft)
    with pytest.raises(PassError, match=r"clipping names 'stage9'; the stages are stage0"):
        OverlapOptimizer().rewrite(draft, {**decision, "clipping": ["stage9"]})
