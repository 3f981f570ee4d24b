"""`schedule-async`: training bit for bit that of a sequential loop with the same versions, orders, refusals."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from penstock.compiler.capture.trace import trace, trace_in
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import Precision
from penstock.ir.program import Program, homes_of, profile_memory
from penstock.ir.verify.asynchronous import readings
from penstock.passes.decisions import Lanes
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_async import ScheduleAsync
from penstock.passes.sharding.mesh import Mesh
from penstock.runtime.reference.run import Reference
from penstock.tests.passes.running import (
    apply,
    chain,
    draft_of,
    join_batches,
    reference,
    to_schedule,
    trace_case,
    traced_model,
)
from penstock.tests.passes.sequential import Sequential
from penstock.tests.zoo import zoo

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def asynchronous(
    graph: Any, weights: str = "current", devices: int = 2, stages: int = 0, accumulate: int = 1, **options: Any
) -> Draft:
    draft = draft_of(graph, Hardware.cpu(num_devices=devices), **options)
    schedule = ScheduleAsync(weights=weights, accumulate=accumulate)
    return apply(draft, *to_schedule(stages)[:3], schedule, memory=True)


FAST = {
    ("gpt2", "predict", "adamw", 2, 0.05),
}
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in FAST else pytest.mark.slow)
    for case in itertools.product(
        ("gpt2", "t5"), ("current", "stash", "predict"), ("adamw", "momentum"), (1, 2, 3), (None, 0.05)
    )
]


@pytest.mark.parametrize(("name", "weights", "rule", "accumulate", "max_norm"), CASES)
def test_it_trains_as_the_sequential_loop_does(
    name: str, weights: str, rule: str, accumulate: int, max_norm: float | None
) -> None:
    """GPT-2 with tied weights on three devices, T5 with edges between stages that are no neighbours on two, several
    stages on a device; dropout; two calls; mini-batches of several micro-batches, and a norm that clips most."""
    graph, batches = trace_case(name)
    devices, stages = (3, 4) if name == "gpt2" else (2, 6)
    optimizer = {"adamw": ADAMW, "momentum": MOMENTUM}[rule]
    options = {"micro_batches": 6, "max_grad_norm": max_norm}
    draft = asynchronous(graph, weights, devices, stages, accumulate, **options)
    machine, loop = reference(draft, optimizer), Sequential(draft, weights, optimizer)
    for _ in range(2):
        losses = machine.step(join_batches([*batches, *batches]))["results"]["loss"]
        assert torch.equal(torch.stack(losses), torch.stack(loop.step([*batches, *batches])))
    for stage in loop.stages:
        for param, value in stage.names.items():
            found = machine.stage_weights[stage.spec.name][param]
            assert torch.equal(found, value), (stage.spec.name, param)
    assert max_norm is None or sum(squares > max_norm**2 for squares in loop.squares) > 1
    assert loop.sharing
    for rows in loop.sharing.values():
        copies = [machine.stage_weights[stage.spec.name][param] for stage, param in rows]
        assert all(torch.equal(copies[0], other) for other in copies)
    assert_same_versions(draft, loop, ScheduleAsync(weights=weights, accumulate=accumulate))
    assert_peaks(draft, machine)


@pytest.mark.parametrize("weights", ["current", pytest.param("predict", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fp16_skips_mini_batches_that_overflow_in_every_stage(weights: str, accumulate: int) -> None:
    """The loss is so large that its gradients overflow at first: then no stage takes the mini-batch, the scale of a
    later one is halved, and, on masters, all is as in the sequential loop."""
    model, batches = LargeLoss(), [LargeLoss.batch(seed) for seed in range(8)]
    shapes = {n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in batches[0].items()}
    graph = trace_in(Precision.of("fp16"), model, shapes)
    draft = asynchronous(graph, weights, 3, 3, accumulate, micro_batches=8, precision="fp16", max_grad_norm=0.5)
    assert draft.programs[0].interface.scale_lag == -(-2 // accumulate)
    machine, loop = reference(draft, ADAMW, precision="fp16"), Sequential(draft, weights, ADAMW)
    for _ in range(3):
        losses = machine.step(join_batches(batches))["results"]["loss"]
        assert torch.equal(torch.stack(losses), torch.stack(loop.step(batches)))
    for stage in loop.stages:
        for param, value in stage.masters.items():
            assert torch.equal(machine.stage_weights[stage.spec.name][param], value), (stage.spec.name, param)
    assert 1 < loop.overflows < 3 * 8 // accumulate - 2
    assert machine.world.loss_scale is not None
    assert machine.world.loss_scale.scale == loop.scales[-1] == loop.scales[0] / 2**loop.overflows


class LargeLoss(torch.nn.Module):
    """Three layers and a loss whose gradients, times 65536, are beyond fp16, and fit again before a step ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": 2 * x.float().square().sum()}

    @staticmethod
    def batch(seed: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["dram", "states", "all"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_stages_off_the_device_train_as_the_sequential_loop_does(tier: str, max_norm: float | None) -> None:
    """Weights are fetched again after each update, in DRAM or on states that come from SSD and go back there."""
    graph, batches = trace_case("gpt2")
    hardware = Hardware.cpu(num_devices=2, ssd="1GB")
    draft = draft_of(graph, hardware, micro_batches=6, max_grad_norm=max_norm)
    schedule = ScheduleAsync(accumulate=2, tier=tier)
    apply(draft, *to_schedule(4)[:3], schedule, memory=True)
    machine, loop = reference(draft, ADAMW), Sequential(draft, "current", ADAMW, whole=True)
    for _ in range(2):
        losses = machine.step(join_batches([*batches, *batches]))["results"]["loss"]
        assert torch.equal(torch.stack(losses), torch.stack(loop.step([*batches, *batches])))
    for stage in loop.stages:
        for param, value in stage.names.items():
            assert torch.equal(machine.stage_weights[stage.spec.name][param], value), (stage.spec.name, param)
    homes = {name: home for program in draft.programs for name, home in homes_of(program).items()}
    wanted = {"dram": ("dram", "dram"), "states": ("dram", "ssd"), "all": ("ssd", "ssd")}[tier]
    assert {(home.weights, home.states) for home in homes.values()} == {wanted}
    assert_same_versions(draft, loop, schedule)


LANES = {
    "replicas-current": (1, "current", 2, None),
    "replicas-stash": (1, "stash", 2, None),
    "replicas-clipped": (1, "predict", 4, 0.05),
    "shards": (2, "current", 4, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LANES)
def test_lanes_train_as_the_sequential_loop_does(case: str) -> None:
    """Two pipelines of two devices and three stages: each mini-batch has micro-batches of both, whose gradients are
    summed before the update. Shards are gathered again after each update."""
    shards, weights, accumulate, max_norm = LANES[case]
    graph, batches = trace_case("gpt2")
    draft = draft_of(graph, Hardware.cpu(num_devices=4), micro_batches=12, max_grad_norm=max_norm)
    schedule = ScheduleAsync(weights=weights, accumulate=accumulate)
    apply(draft, Coarsen(), Mesh(shards=shards, depth=2), PartitionBalanced(stages=3), MapRoundRobin())
    apply(draft, schedule, memory=True)
    machine, loop = reference(draft, ADAMW), Sequential(draft, weights, ADAMW, whole=shards > 1)
    assert loop.lanes == 2 and loop.accumulate == accumulate // 2
    for _ in range(2):
        losses = machine.step(join_batches(batches * 4))["results"]["loss"]
        assert torch.equal(torch.stack(losses), torch.stack(loop.step(batches * 4)))
    for stage in loop.stages:
        for param, value in stage.names.items():
            assert torch.equal(machine.stage_weights[stage.spec.name][param], value), (stage.spec.name, param)
    assert_same_versions(draft, loop, schedule)


@pytest.mark.slow
def test_a_tier_is_the_first_that_fits() -> None:
    """The device while it holds everything, then DRAM; what an early fetch would overfill is fetched late."""
    graph, found = chain(depth=4, width=64, rows=2), {}
    for memory in ("600kB", "300kB", "220kB"):
        draft = draft_of(graph, Hardware.cpu(num_devices=2, memory=memory, ssd="1GB"), micro_batches=6)
        apply(draft, *to_schedule(4)[:3], ScheduleAsync(tier="auto"), memory=True)
        plan = ScheduleAsync(tier="auto").plan(draft)
        found[memory] = set(plan["optimizer"].values()), any(plan["fetch"].values())
    assert found == {"600kB": ({"device"}, False), "300kB": ({"dram"}, True), "220kB": ({"dram"}, False)}


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (ScheduleAsync(tier="disk"), "tier='disk'; there are auto, device, dram, states, all"),
        (ScheduleAsync(tier="all"), "has a host without SSDs; use tier=dram"),
        (ScheduleAsync(tier="dram", weights="stash"), "use weights=current, or tier=device"),
    ],
)
def test_tiers_that_cannot_be_are_refused(schedule: ScheduleAsync, words: str) -> None:
    draft = apply(draft_of(chain(), micro_batches=2), *to_schedule()[:3])
    with pytest.raises(PassError, match=words):
        schedule.plan(draft)


def assert_same_versions(draft: Draft, loop: Sequential, schedule: ScheduleAsync) -> None:
    """Check the versions that the programs read, and the staleness that the plan states."""
    found = {key: row for program in draft.programs for key, row in readings(program).items()}
    stale: dict[str, int] = {}
    for stage in loop.stages:
        name, counts = stage.spec.name, range(6)
        forwards = [(loop.version(m - stage.delay), loop.version(m - stage.shared_delay)) for m in counts]
        own = stage.lag if stage.late > stage.shared else 0
        backwards = [(loop.version(m - own), loop.version(m - stage.lag)) for m in counts]
        backwards = backwards if loop.mode != "stash" else forwards
        for part, there in enumerate((set(stage.names) - stage.shared, stage.shared)):
            if there and stage.optimizer is not None:
                assert [found[name, m].forward[part] for m in counts] == [row[part] for row in forwards]
                assert [found[name, m].backward[part] for m in counts] == [row[part] for row in backwards]  # type: ignore[index]
                where = f"tie.{draft.graph.ties().get(min(there), min(there))}" if part else name
                stale[where] = max(m // loop.accumulate - forwards[m][part] for m in counts)
    assert schedule.plan(draft)["staleness"] == stale


def assert_peaks(draft: Draft, machine: Reference) -> None:
    """Versions of weights and gradients that wait for their sum are in the plan's peaks."""
    for program in draft.programs:
        planned = profile_memory(program).peak_bytes[ops.DEVICE]
        assert 0.9 * planned <= machine.accounts[f"device{program.device}"].peak_bytes <= 1.1 * planned


def turns(program: Program) -> str:
    """Forwards, backwards and updates as letters with their micro-batch: F0 F1 B0 U."""
    letters = {ops.forward: "F", ops.backward: "B", ops.step: "U"}
    found = [(letters[n.target], n.kwargs.get("micro_batch", "")) for n in program.ops() if n.target in letters]  # type: ignore[index]
    return " ".join(f"{letter}{m}" for letter, m in found)


def test_a_stage_at_distance_d_does_d_and_one_forwards_first() -> None:
    hardware = Hardware.cpu(num_devices=4)
    draft = draft_of(chain(depth=4, width=128, rows=64), hardware, micro_batches=5)
    apply(draft, *to_schedule()[:3], ScheduleAsync())
    assert [turns(p) for p in draft.programs] == [
        "F0 F1 F2 F3 B0 U F4 B1 U B2 U B3 U B4 U",
        "F0 F1 F2 B0 U F3 B1 U F4 B2 U B3 U B4 U",
        "F0 F1 B0 U F2 B1 U F3 B2 U F4 B3 U B4 U",
        "F0 B0 U F1 B1 U F2 B2 U F3 B3 U F4 B4 U",
    ]
    backwards = [n for p in draft.programs for n in p.ops() if n.target is ops.backward]
    assert [n.args[2] is None for n in backwards] == 15 * [True] + 5 * [False]  # all but the last stage compute again


def test_stashing_holds_a_copy_of_the_weights_for_each_version_under_way() -> None:
    graph, hardware = chain(depth=4, width=128, rows=2), Hardware.cpu(num_devices=4)
    peaks, copies = {}, {}
    for weights in ("current", "stash"):
        draft = draft_of(graph, hardware, micro_batches=12)
        apply(draft, *to_schedule()[:3], ScheduleAsync(weights=weights))
        peaks[weights] = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
        copies[weights] = [sum(n.target is ops.stash for n in p.ops()) for p in draft.programs]
    sizes = [s.spec.weight_bytes for s in draft.stages]
    more = [b - a for a, b in zip(peaks["current"], peaks["stash"])]
    assert [round(extra / size) for extra, size in zip(more, sizes)] == [3, 2, 1, 0]
    assert copies == {"current": [0, 0, 0, 0], "stash": [9, 10, 11, 0]}


@pytest.mark.slow
def test_a_frozen_stage_has_no_updates_and_no_staleness() -> None:
    model, batch = zoo()["llama"](dropout=0.0)
    for part in (model.model.embed_tokens, model.model.layers[0]):  # type: ignore[union-attr, index]
        part.requires_grad_(False)  # type: ignore[operator]
    graph, batches = traced_model(model, [batch] * 4)
    draft = asynchronous(graph, devices=2, micro_batches=4, stages=4)
    machine, loop = reference(draft, MOMENTUM), Sequential(draft, "current", MOMENTUM)
    losses = machine.step(join_batches(batches))["results"]["loss"]
    assert torch.equal(torch.stack(losses), torch.stack(loop.step(batches)))
    frozen = [s.spec.name for s in draft.stages if not s.spec.trained_params]
    assert frozen and not set(frozen) & ScheduleAsync().plan(draft)["staleness"].keys()


@pytest.mark.slow
def test_bf16_trains() -> None:
    """On fp32 masters, which the prediction starts from."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    shapes = {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in batch.items()}
    graph = trace(model, shapes, autocast=torch.bfloat16)
    draft = asynchronous(graph, "predict", micro_batches=4, precision="bf16")
    machine = reference(draft, ADAMW, precision="bf16")
    losses = [float(machine.step(join_batches([batch] * 4))["loss"]) for _ in range(4)]
    assert losses[-1] < 0.8 * losses[0]
    named = {name: w for rows in machine.stage_weights.values() for name, w in rows.items()}
    assert named["transformer.wte.weight"].dtype is torch.float32
    assert torch.equal(named["transformer.wte.weight"], named["lm_head.weight"])


@pytest.mark.slow
def test_fp16_needs_updates_on_every_device() -> None:
    """A device learns of overflows, and so of the loss scale, from its own updates."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    model.requires_grad_(False)
    model.transformer.h[0].requires_grad_(True)  # type: ignore[union-attr, index]
    shapes = {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in batch.items()}
    graph = trace_in(Precision.of("fp16"), model, shapes)
    draft = apply(draft_of(graph, micro_batches=2, precision="fp16"), *to_schedule(3)[:3])
    with pytest.raises(PassError, match="which makes the loss, has no trained parameters"):
        ScheduleAsync().plan(draft)


def test_it_knows_its_options_and_runs_alone() -> None:
    draft = apply(draft_of(chain(), micro_batches=2), *to_schedule()[:3])
    with pytest.raises(PassError, match="weights='old'; there are current, stash, predict"):
        ScheduleAsync(weights="old").plan(draft)
    draft.mesh = Lanes(lanes=[[0], [1]])
    with pytest.raises(PassError, match=r"each of 2 copies of the pipeline takes an equal part; .* is accumulate=2"):
        ScheduleAsync().plan(draft)
    draft.mesh = Lanes(lanes=[[0], [1]], team=2)
    with pytest.raises(PassError, match="mesh has teams of 2"):
        ScheduleAsync().plan(draft)
    draft.mesh = Lanes(lanes=[])
    decision = {**ScheduleAsync().plan(draft), "staleness": {}}
    with pytest.raises(PassError, match=r"staleness is \{\}"):
        ScheduleAsync().rewrite(draft, decision)
