"""Records of steps: what they hold of a real run, and how work and wear are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.ir.machine.hardware import Hardware
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, zoo_case
from penstock.tests.compiler.job.ssd_jobs import job_of, on_ssd
from penstock.tests.training.logged_run import ADAMW, STEPS, TOKENS, compile_job, run
from penstock.training.records import StepRecords, peak_flops, step_flops


def test_each_step_is_told_once_in_order_with_what_it_did() -> None:
    noted = run([])
    (facts,) = noted.runs
    assert (facts.total_steps, facts.done_steps, facts.rows_per_step) == (STEPS, 0, MICRO_BATCHES)
    assert facts.config["lr"] == 1e-3 and facts.limit_bytes["cpu0"] == 250_000
    assert [record.step for record in noted.records] == list(range(1, STEPS + 1))
    assert noted.records[-1].loss < noted.records[0].loss
    for record in noted.records:
        assert record.tokens == TOKENS and record.tokens_per_s == TOKENS / record.seconds
        assert record.learning_rates == (1e-3,) and record.gradient_norm is not None
        assert record.predicted_s == facts.predicted_s and record.peak_bytes["cpu0"] <= 250_000
        assert record.moved_bytes["dram0 -> cpu0"] > 0
        assert record.ssd_written_bytes == 0 and record.ssd_wear_share is None
    assert [step for step, _ in noted.evaluations] == [STEPS - 1] and noted.ends == [False]


@pytest.mark.slow
def test_the_models_work_counts_whatever_the_plan_computes_again() -> None:
    """By hand: a matrix of n weights costs 2 n FLOPs a token forward and twice that backward."""
    model, batch = zoo_case("gpt2")
    tokens = batch["input_ids"].numel()
    stages = "coarsen, partition-balanced{stages=2}, map-round-robin, schedule-pipeline"
    kept, _ = compile_job(memory="64MB", strategy=f"{stages}, insert-remat, insert-fetch, insert-optimizer")
    again, _ = compile_job(
        memory="64MB", strategy=f"{stages}, insert-remat{{always=true}}, insert-fetch, insert-optimizer"
    )
    assert again.plan.decisions.rematerialise and not kept.plan.decisions.rematerialise
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n)
    found = step_flops(kept)
    assert found is not None and step_flops(again) == pytest.approx(found, rel=1e-12)
    assert 6 * matrices * tokens <= found < 1.5 * 6 * matrices * tokens  # the rest is attention


@pytest.mark.slow
def test_utilisation_is_work_over_time_and_peak() -> None:
    job, batch = compile_job()
    (device,) = job.hardware.devices
    assert peak_flops(job) == device.peak_flops["fp32"]
    records = StepRecords(job)
    with job:
        job.step(batch)
        records.count_step(TOKENS)
        (record,) = records.take()
    assert record.model_flops_utilisation is not None and 0 < record.model_flops_utilisation < 1
    work = record.model_flops_utilisation * record.seconds * device.peak_flops["fp32"]
    assert work == pytest.approx(step_flops(job), rel=1e-9)


@pytest.mark.slow
def test_the_peak_is_of_all_devices_in_the_precisions_arithmetic() -> None:
    model, batch = zoo_case("gpt2")
    machine = penstock.Hardware.cpu(num_devices=2, memory="64MB")
    low = penstock.compile(
        model, machine, example_inputs=batch, optimizer=ADAMW, micro_batches=2, precision="bf16-mixed", strategy="gpipe"
    )
    assert peak_flops(low) == 2 * machine.devices[0].peak_flops["bf16"]


@pytest.mark.slow
def test_bytes_to_ssd_add_up_and_wear_the_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    job, batch = job_of("gpt2", on_ssd(), [tmp_path / "disk"])
    lives = 10**9
    records = StepRecords(job)
    records.load({"0": 1000})
    (host,) = job.hardware.hosts
    worn = host.model_copy(update={"ssds": [host.ssds[0].model_copy(update={"endurance_bytes": lives})]})
    with job:
        for _ in range(3):
            job.step(batch)
            records.count_step(TOKENS)
        _ = job.last
        first, second, third = records.take()
        assert first.ssd_wear_share is None  # nobody knows the life of this disk
        written = [sum(n for route, n in r.moved_bytes.items() if route.endswith("-> ssd0")) for r in (second, third)]
        assert min(written) > 0 and third.ssd_written_bytes - second.ssd_written_bytes == written[1]
        assert first.ssd_written_bytes > 1000 and records.state() == {"0": third.ssd_written_bytes}
        job.hardware = job.hardware.model_copy(update={"hosts": [worn]})
        job.step(batch)
        records.count_step(TOKENS)
        _ = job.last
        (fourth,) = records.take()
    assert fourth.ssd_wear_share == pytest.approx(fourth.ssd_written_bytes / lives)


def test_a_hosts_disks_last_as_long_as_the_weakest() -> None:
    from penstock.compiler.report.wear import endurance_of

    assert endurance_of(Hardware.preset("fuyou-4090").hosts[0]) == 12 * 7008 * 10**12
    assert endurance_of(Hardware.cpu().hosts[0]) is None
