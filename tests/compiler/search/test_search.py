"""The search: what it tries, that it keeps the fastest, and what it says of the others."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.plan import Plan
from penstock.compiler.search import attempts, compiled, moves
from penstock.compiler.search.attempts import Attempts, Wishes
from penstock.compiler.search.bounds import ideal_bounds, machine_bound
from penstock.compiler.search.candidate import PLAIN, Candidate
from penstock.compiler.search.candidates import (
    device_orders,
    divisors,
    mappings,
    micro_batch_counts,
    partitions,
    schedules,
    stage_counts,
)
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.layouts import LayoutEstimate
from penstock.compiler.search.moves import Position, has_unlike_blocks
from penstock.compiler.search.search import Sweep, search
from penstock.compiler.search.trial import Pruned, Skipped, Trial, why_not
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import DoesNotFit, PassError, PlanError, VerifyError
from penstock.passes.draft import Draft, Options
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.passes.sharding.insert_shard import InsertShard
from penstock.passes.sharding.mesh import Mesh
from penstock.passes.table import PASSES
from penstock.tests.compiler.eager_baseline import SGD, zoo_case
from penstock.tests.zoo import zoo


def cpu(num_devices: int, memory: str = "64MB", **figures: Any) -> penstock.Hardware:
    return penstock.Hardware.cpu(num_devices=num_devices, memory=memory, **figures)


@pytest.mark.parametrize(
    ("batch", "devices", "usual", "last_resort"),
    [
        (8, 2, [2, 4, 8], []),
        (8, 1, [1, 2, 4], [8]),
        (64, 4, [4, 8, 16], [32, 64]),
        (6, 4, [3, 6], []),  # no divisor is 4: the nearest below
        (7, 5, [7], []),  # or above, if that is nearer
        (1, 8, [1], []),
    ],
)
def test_numbers_of_micro_batches(batch: int, devices: int, usual: list[int], last_resort: list[int]) -> None:
    """As many as devices first, up to four times as many, the rest only in need; all divide the batch."""
    assert micro_batch_counts(batch, cpu(devices)) == (usual, last_resort)


def test_what_is_on_a_mesh_that_chooses_its_shards_gathers_them() -> None:
    """So does what the search makes of a strategy with such a mesh, or gradients of what nobody gathered are summed."""
    named = Candidate.parse("mics", 4)
    assert named.mesh is not None and not named.mesh.shards
    for candidate in (named, PLAIN.on(named.mesh)):
        assert candidate.is_shared and candidate.find(InsertShard) is not None


def test_numbers_of_stages() -> None:
    """From the fewest that fit, in whole rounds over the devices, never more than blocks."""
    model, batch = zoo()["gpt2"](num_layers=6)
    graph = trace(model, batch)
    counts = {}
    for memory in ("64MB", "250kB", "1kB"):
        draft = Draft(graph, cpu(2, memory), Options(micro_batches=2))
        coarsen = Coarsen()
        coarsen.rewrite(draft, coarsen.plan(draft))
        counts[memory] = stage_counts(draft)
        assert counts[memory] == sorted(set(counts[memory])) and counts[memory][-1] <= len(draft.blocks)
    assert counts["64MB"][0] == 2 and {4, 6, 8} <= set(counts["64MB"])
    assert counts["250kB"][0] > 2
    assert counts["1kB"] == [len(draft.blocks)]  # nothing fits: the finest partition is still tried, to say by how much


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["250kB", "64MB"])
def test_no_rival_is_faster_in_the_simulator(memory: str) -> None:
    """Each rival is compiled again by itself and simulated: none beats the choice, and each took what it claims."""
    model, batch = zoo_case("gpt2")
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD}
    job = penstock.compile(model, cpu(2, memory), micro_batches=4, **options)
    assert job.plan.predicted is not None and job.plan.predicted.step_s == pytest.approx(job.simulate().step_s)
    rivals = [r for r in job.plan.rivals if r.step_s is not None and not r.reason.startswith("the same plan")]
    assert len(rivals) >= 5
    for rival in rivals:
        again = penstock.compile(
            model, cpu(2, memory), strategy=rival.passes, micro_batches=rival.micro_batches, **options
        )
        assert again.simulate().step_s == pytest.approx(rival.step_s)
        assert again.simulate().step_s >= job.plan.predicted.step_s
        assert "slower" in rival.reason or "as fast" in rival.reason


@pytest.mark.slow
def test_every_partitioner_mapping_schedule_and_strategy_is_tried_or_ruled_out() -> None:
    """With the chosen number of micro-batches; what is ruled out has a reason that can be checked."""
    model, batch = zoo_case("gpt2")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 4, "search_s": 330.0}  # with patience
    plan = penstock.compile(model, cpu(3, "250kB"), example_inputs=batch, **options).plan
    looked_at = [r for r in plan.rivals if r.micro_batches == plan.micro_batches]
    seen = {part.partition("{")[0] for r in looked_at for part in r.passes.split(", ")}
    seen |= {part.partition("{")[0] for part in plan.passes.split(", ")}
    deciding = [kind for kind in PASSES.values() if kind.fields()[0] in ("stages", "devices", "schedule")]
    assert {kind.name for kind in deciding if kind.synchronous} <= seen
    named = [name for name in STRATEGIES if Candidate.parse(name, 3).is_synchronous]
    assert {f"{name}, {plan.micro_batches} micro-batches" for name in named} <= {r.name for r in looked_at} | {
        f"{plan.strategy}, {plan.micro_batches} micro-batches"
    }
    for rival in looked_at:
        assert (
            rival.step_s is not None
            or rival.reason.startswith(("pruned", "does not fit", "the same plan"))
            or any(word in rival.reason for word in ("cannot", "need", "nearest", "use map-round-robin"))
        ), rival


MACHINES = {
    "two equal": lambda: cpu(2, "500kB"),
    "roomy": lambda: cpu(3, "64MB"),
    "one": lambda: cpu(1, "2MB"),
    "unequal": lambda: unequal("300kB", "64MB"),
    "two root complexes": lambda: penstock.Hardware.preset("mobius-topo2+2"),
}
FEW = {"roomy"}


@pytest.mark.parametrize("machine", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in MACHINES])
@pytest.mark.parametrize("frozen", [0.0, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.4, 0.8))])
@pytest.mark.parametrize("model", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))])
def test_bounds_are_no_higher_than_the_simulation(machine: str, model: str, frozen: float) -> None:
    """Whatever partition, mapping, schedule and tier, and whatever part of the model comes first and is not trained."""
    made, batch = zoo_case(model)
    params = list(made.parameters())
    for param in params[: int(frozen * len(params))]:
        param.requires_grad_(False)
    graph = trace(made, batch)
    compiler = CandidateCompiler(graph, MACHINES[machine](), Options(micro_batches=4))
    count = 0
    for cut in list(partitions(compiler.lane(PLAIN))):
        tried = [(schedule, False) for schedule in schedules()]
        for schedule, swap in (*tried, (SchedulePipeline(), True)):
            candidate = PLAIN.with_(cut, mappings(compiler.hardware)[0], schedule).with_swap(swap)
            try:
                placed = compiler.place(candidate)
                bound = placed.bound()
                timeline = compiler.finish(placed).timeline
            except (DoesNotFit, PassError, PlanError):
                continue
            assert 0 < bound.seconds <= timeline.step_s * (1 + 1e-9), (candidate, bound)
            assert machine_bound(placed.draft).seconds <= timeline.from_rest_s * (1 + 1e-9)
            fused_s, least = ideal_bounds(placed.draft)
            assert 0 < least.seconds <= fused_s * (1 + 1e-9) and fused_s <= timeline.step_s * (1 + 1e-9)
            count += 1
    assert count >= 3


class HalfFrozen(nn.Module):
    """Linear layers of which the first ones are not trained."""

    def __init__(self, frozen: int, trained: int, width: int = 128):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(frozen + trained)))
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_pruning_compares_steps_among_many() -> None:
    """The second candidate is slower from rest, and faster among many: one device computes frozen layers of the next
    step beside the other's backward."""
    hardware = unequal("640MB", "640MB")
    wishes = Wishes(asked=None, micro_batches=1, batch_size=1, options=Options(micro_batches=1))
    tried = Attempts(lambda count: trace(HalfFrozen(8, 2), {"x": torch.ones(4096, 128)}), hardware, wishes)
    orders = [PLAIN.with_(PartitionBalanced(stages=2, order=order)) for order in ("", "1 0")]
    tried.look(1, orders)
    first, second = (tried.compiler(1).finish(tried.compiler(1).place(order)) for order in orders)
    assert first.timeline.from_rest_s < second.timeline.from_rest_s and first.step_s > second.step_s
    assert [trial.step_s for trial in tried.trials] == [first.step_s, second.step_s]
    assert tried.best_candidate == orders[1]
    for found in (first, second):
        assert 0 < tried.compiler(1).place(found.candidate).bound().seconds <= found.step_s


@pytest.mark.slow
def test_out_of_time_there_is_a_plan_and_a_list_of_what_was_not_tried() -> None:
    model, batch = zoo_case("gpt2")
    plan = penstock.compile(model, cpu(2), example_inputs=batch, optimizer=SGD, search_s=0.0).plan
    reasons = Counter(rival.reason for rival in plan.rivals)
    assert reasons.pop(Skipped.NO_COPIES.value) == 1 and set(reasons) == {"not tried: out of time"}
    assert plan.predicted is not None


def test_each_partitioner_mapping_and_strategy_is_judged_though_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bound or its simulation, within a share of the time; what else is left is not."""
    monkeypatch.setattr(attempts, "OWED", 100.0)
    monkeypatch.setattr(attempts, "SEARCH_S", 0.05)  # else it is a short search
    model, batch = zoo_case("gpt2")
    plan = penstock.compile(model, cpu(3), example_inputs=batch, optimizer=SGD, search_s=0.05).plan
    judged = [rival for rival in plan.rivals if not rival.reason.startswith("not tried")]
    passes = {part.partition("{")[0] for rival in judged for part in rival.passes.split(", ")}
    passes |= {part.partition("{")[0] for part in plan.passes.split(", ")}
    kinds = [kind for kind in PASSES.values() if kind.synchronous and kind.fields()[0] in ("stages", "devices")]
    assert {kind.name for kind in kinds} - {"map-replicas"} <= passes
    named = [name for name in STRATEGIES if Candidate.parse(name, 3).is_synchronous]
    said = {rival.name.partition(",")[0] for rival in judged}
    assert set(named) - said <= {plan.strategy}
    assert len(judged) < len(plan.rivals)


@pytest.mark.slow
def test_lanes_that_promise_more_come_before_all_moves() -> None:
    """A pipeline with large activations over slow links loses to lanes that hold the model each."""
    sweep = _sweep(cpu(4, link="10MB/s"))
    sweep.everything()
    of_lanes = [trial.candidate.mesh is not None for trial in sweep.trials]
    assert of_lanes.index(True) <= 8 and sweep.best is not None and sweep.best.candidate.mesh is not None


@pytest.mark.parametrize(
    ("seen", "tried"),
    [
        ([], True),
        ([30.0], True),  # not far from the best
        ([41.0], False),
        ([Pruned(41.0, "ssd0")], False),
        ([41.0, Pruned(38.0)], True),
        ([DoesNotFit("gpu0 has less", memory="gpu0", missing_bytes=1)], True),  # more micro-batches may fit
    ],
)
def test_a_layout_far_from_the_best_is_not_tried_with_more_micro_batches(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any], tried: bool
) -> None:
    mesh, looked = Mesh(2), list[int]()
    of_mesh = [Trial(PLAIN.on(mesh), 2, *([each] if isinstance(each, float) else [None, each])) for each in seen]
    here = SimpleNamespace(
        best=SimpleNamespace(step_s=20.0, count=2), best_candidate=PLAIN, usual=[2, 4],
        trials=[*of_mesh, Trial(PLAIN, 2, 20.0)], look=lambda count, candidates: looked.append(count),
    )  # fmt: skip
    here.seen_s = functools.partial(Attempts.seen_s, here)
    rows = [LayoutEstimate(mesh, count, bound_s=1.0, estimate_s=10.0) for count in (2, 4)]
    monkeypatch.setattr(moves, "estimates", lambda lane, counts: rows)
    monkeypatch.setattr(moves, "layout_scouts", lambda *_: iter(()))
    list(moves.lanes(SimpleNamespace(attempts=here, base=PLAIN, lane=None, count=2)))  # type: ignore[arg-type]
    assert looked == ([4] if tried else [])


def test_the_number_of_micro_batches_that_gains_nothing_is_the_last() -> None:
    """One device takes longer with each further micro-batch."""
    sweep = _sweep(cpu(1))
    sweep.scout()
    sweep.more_micro_batches()
    first, second, *more = sweep.usual
    assert more and {trial.count for trial in sweep.trials} == {first, second}


def _sweep(machine: penstock.Hardware) -> Sweep:
    graph = functools.cache(lambda count: trace(*_model_and_rows(64 // count)))
    return Sweep(graph, machine, Wishes(None, None, 64, Options()))


def _model_and_rows(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    return Averaged(nn.ModuleList(layers)), {"x": torch.zeros(rows, 256, 8)}


class Averaged(nn.Module):
    """The mean square of what a list of layers gives."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.slow
def test_models_of_unlike_blocks() -> None:
    """They are tried by strategies whose stages are no contiguous blocks, before what else is looked at."""
    for name, unlike in (("gpt2", False), ("t5", True)):
        model, batch = zoo()[name]()
        wishes = Wishes(asked=None, micro_batches=2, batch_size=2, options=Options(micro_batches=2))
        tried = Attempts(lambda count, model=model, batch=batch: trace(model, batch), cpu(2), wishes)
        assert has_unlike_blocks(Position(tried, 2, PLAIN)) == unlike


@pytest.mark.slow
def test_who_cannot_be_proven_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = zoo_case("gpt2")
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 4}
    first = penstock.compile(model, cpu(2, "250kB"), **options).plan
    prove, refused = attempts.prove, []

    def stubborn(best: Any) -> Any:
        if not refused:
            refused.append(best.name)
            raise DoesNotFit("memories are too tight")
        return prove(best)

    monkeypatch.setattr(attempts, "prove", stubborn)
    second = penstock.compile(model, cpu(2, "250kB"), **options).plan
    assert first.predicted is not None and second.predicted is not None
    assert second.hash != first.hash and second.predicted.step_s >= first.predicted.step_s
    reason = next(rival.reason for rival in second.rivals if rival.name == refused[0])
    assert reason == "does not fit: memories are too tight"


def unequal(*memories: str) -> penstock.Hardware:
    """CPU devices of these memories; each is half as fast as the one before it."""
    base = cpu(len(memories))
    devices = [
        device.model_copy(
            update={
                "memory_bytes": penstock.Hardware.cpu(memory=memory).devices[0].memory_bytes,
                "peak_flops": {dtype: rate / 2**i for dtype, rate in device.peak_flops.items()},
            }
        )
        for i, (device, memory) in enumerate(zip(base.devices, memories))
    ]
    return penstock.Hardware.model_validate({**base.model_dump(), "devices": [d.model_dump() for d in devices]})


def test_orders_of_unequal_devices() -> None:
    assert device_orders(cpu(4)) == [""]
    assert set(device_orders(unequal("64MB", "32MB"))) == {"", "1 0"}
    many = device_orders(unequal("64MB", "32MB", "16MB", "8MB"))
    assert many[0] == "" and "3 2 1 0" in many and len(many) == 6
    assert len({tuple(sorted(order.split())) for order in many[1:]}) == 1


def test_a_reason_is_short_where_bytes_say_it_all_and_else_whole() -> None:
    short = DoesNotFit("a long story\nof many lines", memory="gpu0", missing_bytes=3 * 2**30)
    assert why_not(short) == "does not fit: gpu0 lacks 3.00 GiB"
    assert why_not(PassError("a pass\n  refused")) == "a pass refused"
    ring = VerifyError("device 1, line 7: deadlock, 2 places wait in a ring:\n    device 1\n--> 7     x = rt.recv()")
    assert why_not(ring) == "refused by the verifier: device 1, line 7: deadlock, 2 places wait in a ring"


def test_what_is_ruled_out_says_by_which_bound() -> None:
    row = Trial(PLAIN, 4, reason=Pruned(0.5, "gpu0 compute"))
    assert row.rival(0.4).reason == "pruned: cannot be below 500 ms (gpu0 compute)"


def test_more_devices_than_blocks_and_one_block() -> None:
    """Devices beyond the blocks stay idle; nothing breaks."""
    model, batch = zoo_case("mlp")
    plan = penstock.compile(model, cpu(7), example_inputs=batch, optimizer=SGD).plan
    assert len(plan.decisions.stages) <= len(plan.decisions.blocks)
    assert plan.predicted is not None and plan.predicted.step_s > 0


@pytest.mark.slow
def test_candidates_that_do_not_fit_are_listed_with_the_reason() -> None:
    model, batch = zoo_case("gpt2")
    plan = penstock.compile(model, cpu(1, "260kB"), example_inputs=batch, optimizer=SGD, micro_batches=4).plan
    missed = [rival for rival in plan.rivals if rival.step_s is None]
    short = [rival for rival in missed if rival.reason.startswith("does not fit")]
    assert short and all("cpu0 lacks" in rival.reason or "needs" in rival.reason for rival in short)


@pytest.mark.parametrize(
    ("step_s", "burden", "is_kept"),
    [
        (0.9, (5, 50, 500), True),
        (1.0, (3, 99, 999), True),
        (1.0, (4, 39, 999), True),
        (1.0 + 1e-12, (4, 40, 399), True),
        (1.0, (4, 40, 400), False),
        (1.0, (5, 0, 0), False),
        (1.001, (0, 0, 0), False),
    ],
)
def test_of_equals_the_one_that_writes_less_moves_less_and_is_shorter(
    step_s: float, burden: tuple[int, int, int], is_kept: bool
) -> None:
    tried = Attempts(lambda _: pytest.fail("it is traced"), cpu(1), Wishes(None, 1, 8, Options()))
    plans: list[Any] = [SimpleNamespace(step_s=1.0, burden=(4, 40, 400)), SimpleNamespace(step_s=step_s, burden=burden)]
    for plan in plans:
        tried.keep(plan)
    assert tried.best is plans[is_kept]


def test_the_first_of_equals_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer stages come first, so that equal times give the simpler plan."""
    model, batch = zoo_case("mlp")

    monkeypatch.setattr(compiled, "step_seconds_here", lambda *args: 1.0)
    plan = penstock.compile(model, cpu(1), example_inputs=batch, optimizer=SGD).plan
    assert len(plan.decisions.stages) == 1 and plan.micro_batches == 1
    reasons = {rival.reason for rival in plan.rivals if rival.step_s and not rival.reason.startswith("the same plan")}
    assert reasons == {"as fast, and moves no less"}


@pytest.mark.slow
def test_enough_memory_for_everything_makes_the_plan_faster() -> None:
    model, batch = zoo_case("gpt2")
    step_s = [
        penstock.compile(model, cpu(2, m), example_inputs=batch, optimizer=SGD, micro_batches=4).simulate().step_s
        for m in ("240kB", "64MB")
    ]
    assert step_s[1] < step_s[0]


def test_a_model_without_anything_to_train() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.layer(x).mean()

    import torch

    with pytest.raises(PlanError, match="nothing to train"):
        penstock.compile(Frozen(), cpu(1), example_inputs={"x": torch.zeros(4, 2)})


@pytest.mark.slow
def test_a_plan_is_replayed_without_a_search() -> None:
    model, batch = zoo_case("mlp")
    plan = penstock.compile(model, cpu(2), example_inputs=batch, optimizer=SGD, micro_batches=4).plan
    again: Plan = penstock.compile(model, cpu(2), example_inputs=batch, optimizer=SGD, plan=plan).plan
    assert again.hash == plan.hash and not again.rivals and plan.rivals


def test_the_nearest_miss_is_reported() -> None:
    """By fewer bytes with more memory."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    graph = trace(model, batch)
    missing_bytes = []
    for memory in ("100kB", "150kB"):
        with pytest.raises(DoesNotFit) as caught:
            search(lambda _: graph, cpu(2, memory), Wishes(Candidate.parse("balanced", 2), 4, 8, Options()))
        missing_bytes.append(caught.value.missing_bytes)
    assert missing_bytes[0] > missing_bytes[1] > 0


@pytest.mark.slow
def test_a_plan_that_lacks_dram_came_further_than_one_that_lacks_a_device() -> None:
    """Every host is short of DRAM whatever the cut; that some cut also misses a device by less says nothing."""
    model, _ = zoo()["gpt2"](dropout=0.0)
    state_bytes = 4 * sum(p.numel() for p in model.parameters())
    graph = trace(*zoo()["gpt2"](dropout=0.0))
    machine = penstock.Hardware.cpu(num_devices=2, memory="230kB", dram=state_bytes // 2)
    with pytest.raises(DoesNotFit) as caught:
        search(lambda _: graph, machine, Wishes(None, 2, 4, Options(micro_batches=2)))
    assert caught.value.memory == "dram0"


def test_divisors_come_in_order_and_of_large_numbers_soon() -> None:
    """Of a number of 10 digits, which tens of thousands of trials find."""
    assert [divisors(number) for number in (1, 2, 12, 36)] == [
        [1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36],
    ]  # fmt: skip
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
