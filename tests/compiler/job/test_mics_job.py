"""Groups of devices that share the model, on four processes: steps, states, checkpoints, files are eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_same_states, assert_trains_like_eager, zoo_case
from penstock.tests.runtime.ssd.on_disk import directories

# Each device adds up its own micro-batches, then a group, then the replicas: the same terms in another order.
REORDERED = {"fp32": 5e-6, "bf16": 2e-2}
LINE = (
    "coarsen, mesh{{shards={}}}, partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, "
    "insert-shard{{tier={}, hold=false}}, insert-two-hop{}, {}"
)
TIERS = {
    "device": ("device", "insert-optimizer"),
    "dram": ("dram", "overlap-optimizer"),
    "states": ("dram", "insert-ssd{tier=states}, overlap-optimizer{clip=speculative}"),
    "ssd": ("ssd", "insert-ssd, overlap-optimizer"),
}


def compile_job(
    model: Any, batch: Any, tier: str, precision: str = "fp32", sums: str = "", shards: int = 2, hosts: int = 1,
    **options: Any,
) -> penstock.Job:  # fmt: skip
    hardware = penstock.Hardware.cpu(num_devices=4, hosts=hosts, ssd="1GB")
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=4, precision=precision, max_grad_norm=0.5,
        strategy=LINE.format(shards, TIERS[tier][0], sums, TIERS[tier][1]), **options,
    )  # fmt: skip


@pytest.mark.slow
def test_shards_on_four_devices_train_as_eager(tmp_path: Path) -> None:
    """Also a checkpoint, which one device alone goes on from."""
    model, batch = zoo_case("gpt2")
    eager = Eager(model, max_grad_norm=0.5)
    with compile_job(model, batch, "device") as job:
        assert job.plan.decisions.sharding is not None and job.plan.decisions.sums == "two-hop"
        for _ in range(2):
            assert float(job.step(batch)) == pytest.approx(float(eager.step(batch)), rel=1e-6)
            assert job.last.gradient_norm == pytest.approx(eager.gradient_norm, rel=1e-5)
        assert_same_states(job, eager, REORDERED["fp32"])
        job.save(tmp_path / "saved")
        gone_on = float(job.step(batch))
        job.resume(tmp_path / "saved")
        assert float(job.step(batch)) == gone_on == pytest.approx(float(eager.step(batch)), rel=1e-6)
    options = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 4, "max_grad_norm": 0.5}
    with penstock.compile(model, penstock.Hardware.cpu(1), strategy="balanced", **options) as alone:
        alone.resume(tmp_path / "saved")
        assert float(alone.step(batch)) == pytest.approx(gone_on, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "dram"])
def test_a_group_over_two_hosts_trains_as_eager(tier: str) -> None:
    """Four processes gather between hosts and inside them."""
    model, batch = zoo_case("gpt2")
    with compile_job(model, batch, tier, shards=4, hosts=2) as job:
        gathers = [line for line in job.code(0).splitlines() if "rt.all_gather(" in line]
        assert gathers and all("hierarchical=True" in line for line in gathers)
        assert_trains_like_eager(job, batch, REORDERED["fp32"], max_grad_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_layouts_by_name_train_as_eager(strategy: str) -> None:
    """Losses, every gradient and weights, of two micro-batches a device on two processes."""
    model, batch = zoo_case("gpt2")
    hardware, options = penstock.Hardware.cpu(num_devices=2), {"micro_batches": 4, "max_grad_norm": 0.5}
    with penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy=strategy, **options) as job:
        assert_trains_like_eager(job, batch, REORDERED["fp32"], max_grad_norm=0.5)


@pytest.mark.slow
def test_sums_that_every_device_receives_whole() -> None:
    model, batch = zoo_case("gpt2")
    eager = Eager(model, max_grad_norm=0.5)
    with compile_job(model, batch, "device", sums="{every=all-reduce}") as job:
        assert job.plan.decisions.sums == "all-reduce"
        for _ in range(2):
            assert float(job.step(batch)) == pytest.approx(float(eager.step(batch)), rel=1e-6)
        assert_same_states(job, eager, REORDERED["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", list(TIERS))
def test_tiers_and_precisions(tier: str, precision: str, tmp_path: Path) -> None:
    """SSD: shards in files of a real disk, which hold all of it and are gone at the end."""
    model, batch = zoo_case("gpt2")
    disks = directories(tmp_path) if tier in ("states", "ssd") else []
    wanted = []
    one = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 4, "max_grad_norm": 0.5, "precision": precision}
    with penstock.compile(model, penstock.Hardware.cpu(1), strategy="balanced", **one) as alone:
        wanted = [float(alone.step(batch)) for _ in range(3)]
        want = alone.state_dict()
    with compile_job(model, batch, tier, precision, ssd_dirs=[str(d) for d in disks] or None) as job:
        assert [float(job.step(batch)) for _ in range(3)] == pytest.approx(wanted, rel=REORDERED[precision])
        found = job.state_dict()
        for name, weight in want.items():
            assert (found[name].float() - weight.float()).abs().max() <= REORDERED[precision], name
        if disks:
            held = sum(file.stat().st_size for file in disks[0].rglob("*") if file.is_file())
            assert held >= 2 * sum(4 * w.numel() for w in model.parameters())  # momenta of two replicas
            assert job.last.moved_bytes["ssd0 -> dram0"] > 0
    assert not [file for disk in disks for file in disk.rglob("*") if file.is_file()]
