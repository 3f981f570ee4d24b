"""Precisions through the public API equal their statement in plain PyTorch: losses, every gradient, updated weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.check.check import check
from penstock.ir import ops
from penstock.ir.program import profile_memory
from penstock.tests.compiler.eager_baseline import assert_close
from penstock.tests.compiler.fleet_matrix import DEVICE, DRAM, SSD, TIERS, in_process, with_counts
from penstock.tests.compiler.plain_precision import Plain, Promotes, Upcasts, upcasting

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
MACHINE = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")


def compiled(model: nn.Module, batch: Any, precision: str, micro_batches: int = 2, **options: Any) -> penstock.Job:
    return penstock.compile(
        model, options.pop("hardware", MACHINE), example_inputs=batch, precision=precision,
        **{"optimizer": SGD, "micro_batches": micro_batches, **options},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums inside a matrix product depend on the number of threads; a worker has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_true_bf16_of_a_model_that_upcasts_inside_is_that_of_cast_parameters() -> None:
    """One micro-batch: the same calls in the same order, so that every bit is the same."""
    model, batch = upcasting()
    plain = Plain(model, SGD, 1)
    with compiled(model, batch, "bf16-true", 1) as job:
        specs = job.folder.interface.stages.values()
        assert {p.dtype for spec in specs for p in spec.params} == {"bfloat16"}
        assert {b.dtype for spec in specs for b in spec.buffers} == {"float32"}
        for _ in range(3):
            assert float(job.step(batch)) == plain.step(batch)
        found = job.state_dict()
        assert all(torch.equal(found[name], master) for name, master in plain.masters.items())


def test_the_model_is_neither_cast_nor_made_for_the_capture() -> None:
    model, batch = upcasting()
    with torch.device("meta"):
        hollow = Upcasts()
    spec = {name: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for name, x in batch.items()}
    job = compiled(hollow, spec, "bf16-true")
    assert all(p.is_meta and p.dtype == torch.float32 for p in hollow.parameters())
    assert job.plan.hash == compiled(model, batch, "bf16-true").plan.hash
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_true_bf16_passes_the_check_against_eager() -> None:
    model, batch = upcasting()
    report = check(compiled(model, batch, "bf16-true", max_grad_norm=0.5), model, [batch] * 2)
    assert report.passed and report.skipped is None


def test_names_are_what_plans_and_people_see_and_old_words_still_load(tmp_path: Path) -> None:
    model, batch = upcasting()
    job = compiled(model, batch, "bf16")
    assert job.plan.precision == "bf16-mixed" and "bf16-mixed" in job.explain()
    job.write(tmp_path)
    for name in ("plan.json", "settings.json"):
        document = json.loads((tmp_path / name).read_text())
        assert document["precision"] == "bf16-mixed"
        (tmp_path / name).write_text(json.dumps({**document, "precision": "bf16"}))
    again = penstock.load(tmp_path, model)
    assert again.plan == job.plan and again.folder.settings == job.folder.settings


def test_an_unknown_precision_is_refused_with_the_nearest() -> None:
    model, batch = upcasting()
    with pytest.raises(penstock.errors.PlanError, match='the nearest is "bf16-true"'):
        compiled(model, batch, "bf16-tru")


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

SELDOM = ("one device", "weights in DRAM")


def placed(model: nn.Module, batch: Any, precision: str, place: str, **options: Any) -> penstock.Job:
    devices, shards, depth, tier, schedule = PLACES[place]
    mesh = f"mesh{{shards={shards}, depth={depth}}}"
    passes = f"coarsen, {mesh}, partition-balanced{{stages={2 * depth}}}, map-round-robin, {schedule}"
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB", ssd="1GB")
    line = f"{passes}, {TIERS[tier, shards > 1]}"
    return compiled(model, batch, precision, 4, hardware=hardware, strategy=line, **options)


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        *((place, "bf16-true") for place in PLACES if place not in SELDOM),
        ("two devices", "bf16-mixed"),
        *(pytest.param(place, "bf16-true", marks=pytest.mark.slow) for place in SELDOM),
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


def test_gradients_add_up_in_their_own_type_if_asked() -> None:
    model, batch = upcasting()
    wide, own = Plain(model, SGD, 8), Plain(model, SGD, 8, sums=torch.bfloat16)
    with compiled(model, batch, "bf16-true", 8, gradient_dtype="compute") as job:
        assert {p.grad_bytes for s in job.folder.interface.stages.values() for p in s.params if p.numel == 6 * 16} == {
            192
        }
        for _ in range(3):
            assert float(job.step(batch)) == own.step(batch)
            wide.step(batch)
        assert_close(job.state_dict(), {**job.state_dict(), **{n: p.data for n, p in own.masters.items()}}, 0.0)
        plan = job.plan
    assert any(not torch.equal(own.masters[n], p) for n, p in wide.masters.items())
    assert compiled(model, batch, "bf16-true", 8, plan=plan, gradient_dtype="fp32").plan.gradient_dtype == "compute"
    with pytest.raises(penstock.errors.PlanError, match='gradient_dtype=\'bf16\'; it is "fp32", or "compute"'):
        compiled(model, batch, "bf16-true", gradient_dtype="bf16")


@pytest.mark.parametrize("place", ["two devices", "states on SSD", "two hops"])
def test_the_run_holds_what_the_account_says(place: str) -> None:
    model, batch = upcasting()
    job = placed(model, batch, "bf16-true", place)
    machine = in_process(job, model)
    machine.step(with_counts(job, batch))
    expected = {f"device{p.device}": profile_memory(p).peak_bytes[ops.DEVICE] for p in machine.programs["step"]}
    assert {name: machine.accounts[name].peak_bytes for name in expected} == expected


def promoting(tier: str, keeps: bool = False, schedule: str = "schedule-pipeline", **options: Any) -> Any:
    """A job in two stages on one device, the model with roundings where the stages are cut, and a batch."""
    torch.manual_seed(3)
    model, (_, batch) = Promotes(keeps), upcasting()
    line = f"coarsen, mesh, partition-balanced{{stages=2}}, map-round-robin, {schedule}, {TIERS[tier, False]}"
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB", ssd="1GB")
    job = compiled(model, batch, "bf16-mixed", 4, hardware=hardware, strategy=line, **options)
    last = [name for name in job.plan.decisions.stages[0] if name.startswith("layers.")][-1]
    cuts = (int(last.split(".")[1].partition("#")[0]),)
    like = Promotes(keeps, () if keeps or options else cuts)
    like.load_state_dict(model.state_dict())
    return job, Plain(like, SGD, 4, autocast=True), batch


def crossing(job: penstock.Job) -> set[str]:
    return {output.dtype for output in job.folder.interface.stages["stage0"].outputs}


@pytest.mark.parametrize("tier", [DEVICE, DRAM, SSD])
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
