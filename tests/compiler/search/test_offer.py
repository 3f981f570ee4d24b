"""A device that computes slower than planned leads to a plan that gives it less."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.search.offer import Offer
from penstock.ir.errors import PlanError
from penstock.ir.machine.overrides import slower, with_slower
from penstock.ir.units import format_seconds
from penstock.runtime.simulate import simulate

TIERS = "insert-remat, insert-fetch, insert-optimizer"
LINE = f"coarsen, mesh, partition-balanced, map-round-robin, schedule-pipeline, {TIERS}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def compile_job(**options: object) -> penstock.Job:
    torch.manual_seed(0)
    example = {"x": torch.randn(64, 256), "y": torch.randn(64, 256)}
    given = {"hardware": penstock.Hardware.cpu(num_devices=2), "strategy": LINE, "micro_batches": 8, **options}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return penstock.compile(Net(), example_inputs=example, optimizer=optimizer, **given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_offer_says_what_it_gains_and_how_to_take_it(tmp_path: Path) -> None:
    job = compile_job()
    assert job.replanner is not None
    offer = job.replanner.offer({1: 3.0})
    assert offer is not None and offer.plan.decisions.mesh is not None
    assert offer.plan.decisions.mesh.micro_batches == [6, 2]
    assert 0.3 < offer.gain < 0.6  # at best 6 in place of 12 units of the fast device's seconds
    said = str(offer)
    assert said.startswith("cpu1 takes 3.0x as long as planned: with 2 replicas, which run 6, 2 micro-batches, a step")
    less = f"a step would take {format_seconds(offer.before_s - offer.after_s)}, {offer.gain:.0%}, less"
    assert less in said and "plan=offer.plan" in said
    plan, hardware = offer.write(tmp_path / "offer")
    taken = compile_job(hardware=hardware, plan=plan, strategy="auto", micro_batches="auto")
    assert taken.plan.hash == offer.plan.hash and taken.hardware == offer.hardware
    assert taken.plan.predicted is not None and taken.plan.predicted.step_s == pytest.approx(offer.after_s)
    assert Offer.from_data(offer.to_data()) == offer


@pytest.mark.slow
def test_no_offer_where_none_gains() -> None:
    """On a machine that is known to be unequal, and planned so, the same slowness is no news."""
    hardware = with_slower(penstock.Hardware.cpu(num_devices=2), {1: 3.0})
    job = compile_job(hardware=hardware, strategy=LINE.replace("mesh", "mesh{by_speed=true}"))
    assert job.replanner is not None
    assert job.replanner.offer({1: 1.02}) is None


@pytest.mark.slow
def test_a_pipeline_is_offered_other_stages() -> None:
    job = compile_job(strategy=LINE.replace("mesh, ", ""))
    assert job.replanner is not None
    offer = job.replanner.offer({1: 3.0})
    assert offer is not None and offer.plan.decisions.mesh is None
    decisions = offer.plan.decisions
    blocks = [sum(len(s) for s, at in zip(decisions.stages, decisions.devices) if at == device) for device in (0, 1)]
    assert blocks[0] > blocks[1] and "with other stages, " in str(offer)


@pytest.mark.slow
def test_an_asynchronous_pipeline_is_offered_others_of_its_kind_only() -> None:
    """With the same updates: a plan with one for the whole batch, though faster, would train otherwise."""
    schedule = "schedule-async{accumulate=4}"
    line = f"coarsen, mesh{{depth=2}}, partition-balanced{{stages=2, asynchronous=true}}, map-round-robin, {schedule}"
    job = compile_job(strategy=line, hardware=penstock.Hardware.cpu(num_devices=4))
    assert job.replanner is not None
    offer = job.replanner.offer({1: 3.0})
    assert offer is not None and schedule in offer.plan.passes


def test_a_slower_device_takes_longer_in_everything() -> None:
    device = penstock.Hardware.preset("rtx4090x1").devices[0]
    half = slower(device, 2.0)
    assert half.rates is not None and half.compute_s(1e12, 1e9, "bf16", 10) == pytest.approx(
        2 * device.compute_s(1e12, 1e9, "bf16", 10)
    )


def test_a_loaded_job_has_no_graph_to_plan_again(tmp_path: Path) -> None:
    job = penstock.load(compile_job().write(tmp_path), Net())
    planned = simulate(job.programs, job.hardware)
    slow = simulate(job.programs, with_slower(job.hardware, {1: 3.0}))
    assert job.offer([planned, slow, planned]) is None
    with pytest.raises(PlanError, match="make it with compile"):
        job.offer([slow, planned, slow])
