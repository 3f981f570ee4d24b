"""Precisions through the public API equal their statement in plain PyTorch: losses, every gradient, updated weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.check import check
from penstock.ir import ops
from penstock.ir.program import profile_memory
from penstock.runtime.optimizer.rounding import round_into
from penstock.tests.compiler.eager_baseline import assert_close
from penstock.tests.compiler.fleet_matrix import DEVICE, DRAM, SSD, TIERS, in_process, with_counts
from penstock.tests.compiler.plain_precision import WIDTH, Plain, PlainPure, Promotes, Upcasts, upcasting
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.shown_elsewhere import slow_but

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
MACHINE = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")


def compile_job(model: nn.Module, batch: Any, precision: str, micro_batches: int = 2, **options: Any) -> penstock.Job:
    return penstock.compile(
        model, options.pop("hardware", MACHINE), example_inputs=batch, precision=precision,
        **{"optimizer": SGD, "micro_batches": micro_batches, "strategy": "balanced", **options},
    )  # fmt: skip


@pytest.mark.slow
def test_true_bf16_of_a_model_that_upcasts_inside_is_that_of_cast_parameters() -> None:
    """One micro-batch: the same calls in the same order, so that every bit is the same."""
    model, batch = upcasting()
    plain = Plain(model, SGD, 1)
    with compile_job(model, batch, "bf16-true", 1) as job:
        specs = job.folder.interface.stages.values()
        assert {p.dtype for spec in specs for p in spec.params} == {"bfloat16"}
        assert {b.dtype for spec in specs for b in spec.buffers} == {"float32"}
        for _ in range(3):
            assert float(job.step(batch)) == plain.step(batch)
        found = job.state_dict()
        assert all(torch.equal(found[name], master) for name, master in plain.masters.items())


@pytest.mark.slow
def test_the_model_is_neither_cast_nor_made_for_the_capture() -> None:
    model, batch = upcasting()
    with torch.device("meta"):
        hollow = Upcasts()
    spec = {name: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for name, x in batch.items()}
    job = compile_job(hollow, spec, "bf16-true")
    assert all(p.is_meta and p.dtype == torch.float32 for p in hollow.parameters())
    assert job.plan.hash == compile_job(model, batch, "bf16-true").plan.hash
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
def test_true_bf16_passes_the_check_against_eager() -> None:
    model, batch = upcasting()
    report = check(compile_job(model, batch, "bf16-true", max_grad_norm=0.5), model, [batch] * 2)
    assert report.passed and report.skipped is None


def test_names_are_what_plans_and_people_see_and_old_words_still_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)
    model, batch = upcasting()
    job = compile_job(model, batch, "bf16")
    assert job.plan.precision == "bf16-mixed"
    job.write(tmp_path)
    for name in ("plan.json", "settings.json"):
        document = json.loads((tmp_path / name).read_text())
        assert document["precision"] == "bf16-mixed"
        (tmp_path / name).write_text(json.dumps({**document, "precision": "bf16"}))
    again = penstock.load(tmp_path, model)
    assert again.plan == job.plan and again.folder.settings == job.folder.settings
    assert "bf16-mixed" in reasons_of(again)


def test_an_unknown_precision_is_refused_with_the_nearest() -> None:
    model, batch = upcasting()
    with pytest.raises(penstock.errors.PlanError, match='the nearest is "bf16-true"'):
        compile_job(model, batch, "bf16-tru")


# By name: devices, shards, depth of a pipeline, tier, schedule.
PLACES = {
    "one device": (1, 1, 1, DEVICE, "schedule-pipeline"),
    "weights in DRAM": (1, 1, 1, DRAM, "schedule-pipeline"),
    "states on SSD": (1, 1, 1, SSD, "schedule-1f1b"),
    "two devices": (2, 1, 2, DEVICE, "schedule-1f1b"),
    "split backwards": (2, 1, 2, DEVICE, "schedule-zero-bubble"),
    "lanes with shards": (4, 2, 1, DRAM, "schedule-pipeline"),
    "two hops": (4, 2, 1, DEVICE, "schedule-1f1b"),
}

SELDOM = ("one device", "weights in DRAM", "two devices", "split backwards", "two hops")


def placed(model: nn.Module, batch: Any, precision: str, place: str, **options: Any) -> penstock.Job:
    devices, shards, depth, tier, schedule = PLACES[place]
    mesh = f"mesh{{shards={shards}, depth={depth}}}"
    passes = f"coarsen, {mesh}, partition-balanced{{stages={2 * depth}}}, map-round-robin, {schedule}"
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB", ssd="1GB")
    line = f"{passes}, {TIERS[tier, shards > 1]}"
    return compile_job(model, batch, precision, 4, hardware=hardware, strategy=line, **options)


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        ("lanes with shards", "bf16-true"),
        ("two devices", "bf16-mixed"),
        *(pytest.param(p, "bf16-true", marks=pytest.mark.slow) for p in PLACES if p != "lanes with shards"),
        *(pytest.param(p, "bf16-mixed", marks=pytest.mark.slow) for p in PLACES if p != "two devices"),
    ],
)
def test_gradients_of_micro_batches_add_up_in_fp32(place: str, precision: str) -> None:
    """One replica adds in the order of plain PyTorch: every bit is the same. Several add up in another order, which
    rounds fp32 sums by 2^-24 and now and then a weight of 8 bits to its neighbour."""
    model, batch = upcasting()
    plain = Plain(model, SGD, 4, autocast=precision == "bf16-mixed")
    job = placed(model, batch, precision, place)
    assert {p.grad_dtype for s in job.folder.interface.stages.values() for p in s.params} == {"float32"}
    machine, given, reordered = in_process(job, model), with_counts(job, batch), job.folder.interface.lanes
    for _ in range(3):
        found, want = float(machine.step(given)["loss"]), plain.step(batch)
        assert found == pytest.approx(want, rel=2**-9 if reordered else 0.0, abs=0.0)
        assert_close(machine.grads, plain.gradients, 2e-2 if reordered else 0.0)
    assert_close(machine.weights(), {n: p.data for n, p in plain.masters.items()}, 1e-3 if reordered else 0.0)


@pytest.mark.slow
def test_gradients_add_up_in_their_own_type_if_asked() -> None:
    model, batch = upcasting()
    wide, own = Plain(model, SGD, 8), Plain(model, SGD, 8, sums=torch.bfloat16)
    with compile_job(model, batch, "bf16-true", 8, gradient_dtype="compute") as job:
        assert {p.grad_bytes for s in job.folder.interface.stages.values() for p in s.params if p.numel == 6 * 16} == {
            192
        }
        for _ in range(3):
            assert float(job.step(batch)) == own.step(batch)
            wide.step(batch)
        assert_close(job.state_dict(), {**job.state_dict(), **{n: p.data for n, p in own.masters.items()}}, 0.0)
        plan = job.plan
    assert any(not torch.equal(own.masters[n], p) for n, p in wide.masters.items())
    assert compile_job(model, batch, "bf16-true", 8, plan=plan, gradient_dtype="fp32").plan.gradient_dtype == "compute"
    with pytest.raises(penstock.errors.PlanError, match='gradient_dtype=\'bf16\'; it is "fp32", or "compute"'):
        compile_job(model, batch, "bf16-true", gradient_dtype="bf16")


@pytest.mark.parametrize("place", slow_but(["two hops"], ["two devices", "states on SSD", "two hops"]))
def test_the_run_holds_what_the_account_says(place: str) -> None:
    model, batch = upcasting()
    job = placed(model, batch, "bf16-true", place)
    machine = in_process(job, model)
    machine.step(with_counts(job, batch))
    expected = {f"device{p.device}": profile_memory(p).peak_bytes[ops.DEVICE] for p in machine.programs["step"]}
    found = {name: machine.accounts[name].peak_bytes for name in expected}
    if job.folder.interface.shards == 1:
        assert found == expected
    else:  # small shards are planned with ends that fill them up, which the reference does not hold
        assert all(0.85 * expected[name] <= found[name] <= expected[name] for name in expected)


def promoting(tier: str, keeps: bool = False, schedule: str = "schedule-pipeline", **options: Any) -> Any:
    """A job in two stages on one device, the model with roundings where the stages are cut, and a batch."""
    torch.manual_seed(3)
    model, (_, batch) = Promotes(keeps), upcasting()
    line = f"coarsen, mesh, partition-balanced{{stages=2}}, map-round-robin, {schedule}, {TIERS[tier, False]}"
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB", ssd="1GB")
    job = compile_job(model, batch, "bf16-mixed", 4, hardware=hardware, strategy=line, **options)
    last = [name for name in job.plan.decisions.stages[0] if name.startswith("layers.")][-1]
    cuts = (int(last.split(".")[1].partition("#")[0]),)
    like = Promotes(keeps, () if keeps or options else cuts)
    like.load_state_dict(model.state_dict())
    return job, Plain(like, SGD, 4, autocast=True), batch


def crossing(job: penstock.Job) -> set[str]:
    return {output.dtype for output in job.folder.interface.stages["stage0"].outputs}


@pytest.mark.parametrize("tier", slow_but([SSD], [DEVICE, DRAM, SSD]))
def test_what_autocast_leaves_in_fp32_is_rounded_between_stages_alike_in_every_tier(tier: str) -> None:
    job, plain, batch = promoting(tier)
    assert crossing(job) == {"bfloat16"}
    machine, given = in_process(job, job.model), with_counts(job, batch)
    for _ in range(3):
        assert float(machine.step(given)["loss"]) == plain.step(batch)
        assert_close(machine.grads, plain.gradients, 0.0)
    assert_close(machine.weights(), {n: p.data for n, p in plain.masters.items()}, 0.0)
    assert machine.accounts["device0"].peak_bytes == profile_memory(machine.programs["step"][0]).peak_bytes[ops.DEVICE]


@pytest.mark.parametrize("options", [{"keeps": True}, {"boundary_dtype": "fp32"}], ids=["model's wish", "user's wish"])
def test_what_is_asked_for_in_fp32_stays_so_between_stages(options: dict[str, Any]) -> None:
    job, plain, batch = promoting(DEVICE, **options)
    assert crossing(job) == {"float32"}
    with job:
        for _ in range(2):
            assert float(job.step(batch)) == plain.step(batch)
        found = job.state_dict()
    assert_close({n: found[n] for n in plain.masters}, {n: p.data for n, p in plain.masters.items()}, 0.0)


def test_messages_of_a_cast_value_have_half_the_bytes() -> None:
    narrow, wide = (promoting(DEVICE, **options)[0] for options in ({}, {"boundary_dtype": "fp32"}))
    sizes = [[o.bytes for o in job.folder.interface.stages["stage0"].outputs] for job in (narrow, wide)]
    assert [2 * size for size in sizes[0]] == sizes[1]


def pure(model: nn.Module, micro_batches: int = 4, optimizer: Any = SGD, **options: Any) -> PlainPure:
    plain = PlainPure(model, optimizer, micro_batches, **options)

    def noise(name: str, step: int, count: int) -> Tensor:
        """The addend of `round_into`: 1 + k 2^-23 goes up for the noises from 2^16 - k on."""
        low, high = torch.zeros(count, dtype=torch.int64), torch.full((count,), 65536)
        while bool((high - low > 1).any()):
            middle = (low + high) // 2
            found = torch.empty(count, dtype=torch.bfloat16)
            round_into(found, 1 + (65536 - middle).float() * 2**-23, (0, step, 0, name))
            low = torch.where(found.float() > 1, middle, low)
            high = torch.where(found.float() > 1, high, middle)
        return low

    plain.noise = noise
    return plain


@pytest.mark.parametrize("place", [p if p not in SELDOM else pytest.param(p, marks=pytest.mark.slow) for p in PLACES])
def test_pure_bf16_is_rounded_alike_wherever_the_weights_lie(place: str) -> None:
    """The noise is that of the package, the rest is stated again. Replicas add up in another order, so that here and
    there a weight of 8 bits goes to the other neighbour."""
    model, batch = upcasting()
    plain, job = pure(model), placed(model, batch, "bf16-pure", place)
    assert job.folder.interface.rounds and not job.folder.interface.master
    machine, given, reordered = in_process(job, model), with_counts(job, batch), job.folder.interface.lanes
    for _ in range(3):
        found, want = float(machine.step(given)["loss"]), plain.step(batch)
        assert found == pytest.approx(want, rel=2**-8 if reordered else 0.0, abs=0.0)
        assert_close(machine.grads, plain.gradients, 2e-2 if reordered else 0.0)
    weights = dict(plain.model.named_parameters())
    assert_close(machine.weights(), weights, 2**-7 if reordered else 0.0)
    assert {w.dtype for w in machine.weights().values()} == {torch.bfloat16}
    planned_bytes = profile_memory(machine.programs["step"][0]).peak_bytes[ops.DEVICE]
    found_bytes = machine.accounts["device0"].peak_bytes
    assert found_bytes <= planned_bytes if reordered else found_bytes == planned_bytes  # shards' plans count their ends


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, 0.1])
def test_pure_bf16_on_a_real_device_saved_and_resumed(tmp_path: Path, norm: float | None) -> None:
    """The norm is added up in another order than torch does: a weight may then go to the other neighbour in bf16."""
    near = 0.0 if norm is None else 2**-7
    model, batch = upcasting()
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    plain = pure(model, 2, optimizer, max_norm=norm)
    with compile_job(model, batch, "bf16-pure", optimizer=optimizer, max_grad_norm=norm) as job:
        for _ in range(2):
            assert float(job.step(batch)) == pytest.approx(plain.step(batch), rel=near, abs=0.0)
        job.save(tmp_path / "checkpoint")
    with compile_job(model, batch, "bf16-pure", optimizer=optimizer, max_grad_norm=norm) as job:
        job.resume(tmp_path / "checkpoint")
        assert float(job.step(batch)) == pytest.approx(plain.step(batch), rel=near, abs=0.0)
        found = job.state_dict()
    assert_close({n: found[n] for n in plain.masters}, {n: p.data for n, p in plain.model.named_parameters()}, near)


@pytest.mark.slow
def test_pure_bf16_passes_the_check_against_eager() -> None:
    model, batch = upcasting()
    report = check(compile_job(model, batch, "bf16-pure"), model, [batch] * 2)
    assert [d for d in report.differences if d.against == "captured graph" and d.largest] == []


@pytest.mark.slow
def test_an_optimizer_that_rounds_itself_is_left_to_it() -> None:
    model, batch = upcasting()
    job = compile_job(model, batch, "bf16-pure", optimizer=partial(torchao_adamw(), bf16_stochastic_round=True))
    assert not job.folder.interface.rounds and not job.folder.interface.master
    with job:
        losses = [float(job.step(batch)) for _ in range(3)]
        assert losses[-1] < losses[0]


def torchao_adamw() -> Any:
    return pytest.importorskip("torchao.optim")._AdamW


class OnlyFull(torch.optim.AdamW):
    """An optimizer that has no step for bf16."""

    def __init__(self, params: Any, lr: float = 1e-3, bf16_stochastic_round: bool = False):
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(p.dtype == torch.bfloat16 for p in group["params"]):
                raise RuntimeError("no kernel for BFloat16")
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "precision", "dtype", "told"),
    [
        (torch.optim.SparseAdam, "bf16-true", torch.float32, "like torch.optim.AdamW"),
        (torch.optim.LBFGS, "bf16-pure", torch.float32, "like torch.optim.AdamW"),
        (OnlyFull, "fp32", torch.bfloat16, 'in bfloat16 .*updates fp32 masters, like "bf16-true"'),
        (partial(OnlyFull, bf16_stochastic_round=True), "bf16-pure", torch.float32, "updates fp32 masters"),
    ],
)
def test_an_optimizer_without_a_step_is_refused_with_what_works(
    optimizer: Any, precision: str, dtype: torch.dtype, told: str
) -> None:
    model, batch = upcasting()
    with pytest.raises(penstock.errors.PlanError, match=told):
        compile_job(model.to(dtype), batch, precision, optimizer=optimizer)


@pytest.mark.slow
def test_masters_and_rounded_weights_need_no_step_for_bf16() -> None:
    model, batch = upcasting()
    for precision in ("bf16-true", "bf16-pure"):
        compile_job(model, batch, precision, optimizer=OnlyFull)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(features)))
        return found


def weighted_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output.float().sum(-1) * batch["weight"]).mean()


@pytest.mark.parametrize("shards", slow_but([2], [1, 2]))
def test_an_overflow_in_one_replica_undoes_the_step_in_all(shards: int) -> None:
    """The last row alone makes gradients beyond 65504 / 65536, which fp16 cannot hold once the loss is scaled."""
    torch.manual_seed(0)
    model = Small()
    good = {"features": torch.randn(4, 6), "weight": torch.full((4,), 1e-3)}
    bad = {**good, "weight": torch.tensor([1e-3, 1e-3, 1e-3, 1e4])}
    tier = TIERS[DEVICE, shards > 1]
    line = f"coarsen, mesh{{shards={shards}, depth=1}}, partition-balanced{{stages=2}}, map-round-robin, schedule-1f1b"
    hardware = penstock.Hardware.cpu(num_devices=4, memory="64MB", dram="1GB")
    job = compile_job(model, good, "fp16", 4, hardware=hardware, strategy=f"{line}, {tier}", loss_fn=weighted_loss)
    assert job.plan.precision == "fp16-mixed" and len(job.folder.interface.lanes) == 4
    machine = in_process(job, model)

    def everywhere() -> list[Tensor]:
        states = [*machine.world.stages.values(), *machine.world.replicas.values()]
        assert len(states) == 8
        return [t.clone() for state in states for t in (*state.masters.values(), *state.weights.values())]

    assert machine.world.loss_scale is not None
    machine.step(good)
    before, scale = everywhere(), machine.world.loss_scale.scale
    machine.step(bad)
    assert machine.world.loss_scale.scale == scale / 2
    assert all(map(torch.equal, everywhere(), before))
    machine.step(good)
    assert machine.world.loss_scale.scale == scale / 2
    assert not any(map(torch.equal, machine.weights().values(), before[:1]))
