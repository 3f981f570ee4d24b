"""Adapters of stages that are fetched stay on the device: training is eager's, and frozen bytes alone move."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.report.tiers import weights_text
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.program import profile_memory
from penstock.tests.compiler.eager_baseline import Eager, assert_close, assert_same_states
from penstock.tests.compiler.job.adapters.adapted_models import BATCH, MICRO_BATCHES, llama, lora

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
HEAD = "drop-masks, chunk-loss, coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline"
DRAM = f"{HEAD}, insert-remat, insert-fetch{{swap=true}}, insert-optimizer"
SSD = f"{HEAD}, choose-activations{{swap=true}}, insert-fetch{{swap=true}}, insert-ssd{{tier=all}}, overlap-optimizer"
# Additions of micro-batches and of a layer's two paths round in another order, as in test_adapters_train.py; AdamW
# divides by the root of what is about 1e-6 of the gradients' squares, so that the last bits count more.
TOLERANCE = 2e-5


def model(num_layers: int = 4) -> Any:
    return lora(llama(num_hidden_layers=num_layers, hidden_size=64, intermediate_size=256), r=2)


def compile_job(given: Any, strategy: str, memory: str = "2MB", num_devices: int = 1, **options: Any) -> Job:
    machine = penstock.Hardware.cpu(num_devices, memory=memory, dram="200MB", ssd="1GB")
    kept = {"optimizer": ADAMW, "micro_batches": MICRO_BATCHES, **options}
    job = penstock.compile(given, machine, example_inputs=BATCH, strategy=strategy, **kept)
    specs = job.folder.interface.stages.values()
    assert job.plan.decisions.fetch and any(spec.staying for spec in specs)
    assert {spec.name for spec in specs if spec.trained_params} == {spec.name for spec in specs if spec.staying}
    return job


def of(job: Job, kind: Any) -> list[Any]:
    return [node for program in job.programs for node in program.ops() if node.target is kind]


@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [
        pytest.param(DRAM, 1, {}, id="dram", marks=pytest.mark.slow),
        pytest.param(DRAM, 1, {"max_grad_norm": 0.1}, id="dram-clipped"),
        pytest.param(SSD, 1, {}, id="ssd", marks=pytest.mark.slow),
        pytest.param(SSD, 1, {"max_grad_norm": 0.1}, id="ssd-clipped", marks=pytest.mark.slow),
        pytest.param(DRAM, 2, {}, id="two-devices", marks=[pytest.mark.multi, pytest.mark.slow]),
    ],
)
def test_training_is_eagers(strategy: str, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    given = model(num_layers=2)
    eager = Eager(given, ADAMW, **options)
    if strategy is SSD:
        options = {**options, "ssd_dirs": [tmp_path], "ssd_verify": True}
    with compile_job(given, strategy, num_devices=devices, **options) as job:
        for _ in range(3):
            assert_close({"loss": job.step(BATCH)}, {"loss": eager.step(BATCH)}, 1e-6)
        assert_same_states(job, eager, TOLERANCE)
        assert_close(job.state_dict(), eager.model.state_dict(), TOLERANCE)
        assert_close({"loss": job.evaluate(BATCH)["loss"]}, {"loss": eager.evaluate(BATCH)}, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])  # masters beside the weights, and none
def test_low_precision_is_that_of_a_plan_that_stays(precision: str) -> None:
    """Bit for bit: the same kernels on the same values, wherever these were between them."""

    def run(strategy: str, memory: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        machine = penstock.Hardware.cpu(1, memory=memory, dram="200MB")
        kept = {"optimizer": ADAMW, "micro_batches": MICRO_BATCHES, "precision": precision}
        with penstock.compile(model(), machine, example_inputs=BATCH, strategy=strategy, **kept) as job:
            assert bool(job.plan.decisions.fetch) == ("swap" in strategy)
            return [float(job.step(BATCH)) for _ in range(3)], job.state_dict()

    losses, weights = run(DRAM, "2MB")
    expected, held = run(f"{HEAD}, insert-remat{{always=true}}, insert-fetch, insert-optimizer", "64MB")
    assert losses == expected
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DRAM, SSD], ids=["dram", "ssd"])
def test_frozen_bytes_alone_move_as_predicted(strategy: str, tmp_path: Path) -> None:
    options = {} if strategy is DRAM else {"ssd_dirs": [tmp_path]}
    with compile_job(model(), strategy, **options) as job:
        assert set(job.plan.decisions.optimizer.values()) <= {"device", "dram", "ssd"}
        assert {job.plan.decisions.optimizer[n.args[0]] for n in of(job, ops.step)} == {"device"}
        assert not of(job, ops.write)
        assert not [node for node in of(job, ops.offload) if node.meta["type"].kind == "grads"]
        for _ in range(3):
            job.step(BATCH)
        found, told = job.last, job.simulate()
        assert found is not None
        assert found.moved_bytes["dram0 -> cpu0"] == told.moved_bytes["cpu0.down"]
        assert found.moved_bytes.get("cpu0 -> dram0", 0) == told.moved_bytes.get("cpu0.up", 0)
        assert found.moved_bytes.get("dram0 -> ssd0", 0) == 0
        peak = profile_memory(job.programs[0]).peak_bytes[ops.DEVICE]
        assert found.peak_bytes["cpu0"] == peak == job.plan.predicted.peak_bytes["cpu0"]
    interface = job.folder.interface
    adapters = [spec for spec in interface.stages.values() if spec.staying]
    device = profile_memory(job.programs[0]).persistent.device
    assert device["states"] == sum(interface.state_bytes(spec) for spec in adapters) > 0
    assert device["weights"] == sum(spec.staying_bytes for spec in adapters)
    told = {weights_text(job.plan.decisions, spec) for spec in adapters}
    assert all("fetched for each use, and" in text and "that are trained on the device" in text for text in told)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_a_plan_with_all_on_the_device(tmp_path: Path) -> None:
    with compile_job(model(), DRAM) as job:
        job.step(BATCH)
        job.save(tmp_path / "checkpoint")
        job.save_pretrained(tmp_path / "adapter")
        expected = [float(job.step(BATCH)) for _ in range(2)]
    options = {"optimizer": ADAMW, "micro_batches": MICRO_BATCHES, "strategy": "balanced"}
    machine = penstock.Hardware.cpu(1, memory="64MB")
    with penstock.compile(model(), machine, example_inputs=BATCH, **options) as other:
        assert not other.plan.decisions.fetch
        other.resume(tmp_path / "checkpoint")
        assert [float(other.step(BATCH)) for _ in range(2)] == pytest.approx(expected, rel=1e-6)
    base = llama(num_hidden_layers=4, hidden_size=64, intermediate_size=256)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert loaded(**BATCH).loss.item() == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.slow
def test_a_plan_that_puts_their_states_on_ssd_is_refused(tmp_path: Path) -> None:
    with compile_job(model(), SSD, ssd_dirs=[tmp_path]) as job:
        plan = job.plan.model_copy(deep=True)
    stage = next(spec.name for spec in job.folder.interface.stages.values() if spec.staying)
    plan.decisions.ssd.stages[stage] = "states"
    with pytest.raises(PassError, match=f"the states of {stage} on SSD; these stay on its device"):
        penstock.compile(
            model(),
            penstock.Hardware.cpu(1, memory="2MB", dram="200MB", ssd="1GB"),
            example_inputs=BATCH,
            optimizer=ADAMW,
            plan=plan,
            ssd_dirs=[tmp_path],
        )


@pytest.mark.slow
@pytest.mark.parametrize("stays", [[], ["stage1"]], ids=["none", "one"])
def test_a_plan_may_let_adapters_travel(stays: list[str]) -> None:
    """None stays by `staying=false` in the pipeline's text, some by the plan: training is eager's all the same."""
    given = model()
    eager = Eager(given, ADAMW)
    machine = penstock.Hardware.cpu(1, memory="2MB", dram="200MB")
    options: dict[str, Any] = {"example_inputs": BATCH, "optimizer": ADAMW, "micro_batches": MICRO_BATCHES}
    strategy = DRAM if stays else DRAM.replace("schedule-pipeline", "schedule-pipeline{staying=false}")
    job = penstock.compile(given, machine, strategy=strategy, **options)
    if stays:
        assert len(job.plan.decisions.staying) > len(stays)
        homes = {stage: "device" if stage in stays else "dram" for stage in job.plan.decisions.optimizer}
        decisions = job.plan.decisions.model_copy(update={"staying": stays, "optimizer": homes})
        plan = job.plan.model_copy(update={"decisions": decisions})
        job = penstock.compile(given, machine, plan=plan, example_inputs=BATCH, optimizer=ADAMW)
    with job:
        assert [spec.name for spec in job.folder.interface.stages.values() if spec.staying] == stays
        for _ in range(2):
            assert_close({"loss": job.step(BATCH)}, {"loss": eager.step(BATCH)}, 1e-6)
        assert_close(job.state_dict(), eager.model.state_dict(), TOLERANCE)


@pytest.mark.slow
def test_where_adapters_have_no_room_on_the_device_they_travel() -> None:
    """The search tries what lacks the device's memory again with adapters that are fetched with their stage."""

    def stays(memory: str) -> bool:
        machine = penstock.Hardware.cpu(1, memory=memory, dram="200MB")
        job = penstock.compile(
            model(), machine, example_inputs=BATCH, optimizer=ADAMW, micro_batches=MICRO_BATCHES, search_s=6
        )
        return any(spec.staying for spec in job.folder.interface.stages.values())

    assert stays("500kB") and not stays("400kB")
