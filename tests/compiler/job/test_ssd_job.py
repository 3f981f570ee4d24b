"""Jobs that keep their model on SSD, through the public API: everything as in DRAM, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.ssd_jobs import (
    ADAM,
    CROSSED,
    assert_same,
    in_dram,
    job_of,
    left_by,
    on_ssd,
    partly_frozen,
    train_steps,
    trained_in_dram,
)
from penstock.tests.runtime.ssd.on_disk import directories

MAX_NORM = 0.5  # less than every gradient norm here: each step is clipped
KEPT = {"dram": "to=dram, share=0.7", "ssd": "to=ssd, share=0.7"}
FAST: list[tuple[str, str, dict[str, Any]]] = [("gpt2", "fp32", {})]
SLOW = [
    (name, precision, choice)
    for name in ("gpt2", "t5", "wide_resnet")
    for precision in ("fp32", "bf16", "fp16")
    for choice in (
        {},
        {"tier": "states"},
        {"overlap": False},
        {"activations": KEPT["dram"]},
        {"activations": KEPT["ssd"]},
    )
    if (name, precision, choice) not in FAST and (name != "wide_resnet" or precision == "fp32")
]


def test_fuyou_is_what_these_tests_are_about() -> None:
    plain = on_ssd().replace("{clip=auto, overlap=true}", "")
    assert plain == STRATEGIES["fuyou"]


@pytest.mark.parametrize(
    ("name", "precision", "choice"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_equals_the_job_in_dram(name: str, precision: str, choice: dict[str, Any], tmp_path: Path) -> None:
    job, batch = job_of(name, on_ssd(**choice), directories(tmp_path), precision=precision)
    tiers = job.plan.decisions.ssd.stages
    assert set(tiers.values()) == {choice.get("tier", "all")} and len(tiers) > 2
    with job:
        assert_same(train_steps(job, batch), trained_in_dram(name, precision=precision))


@pytest.mark.parametrize(
    ("precision", "choice"),
    [
        pytest.param("fp32", {"clip": "speculative", "tier": "states"}, marks=pytest.mark.slow),
        pytest.param("fp16", {"clip": "speculative"}, marks=pytest.mark.slow),
        pytest.param("bf16", {"clip": "exact"}, marks=pytest.mark.slow),
        pytest.param("bf16", {"clip": "speculative"}, marks=pytest.mark.slow),
        pytest.param("fp32", {"clip": "exact", "overlap": False}, marks=pytest.mark.slow),
        pytest.param("fp16", {"clip": "exact", "tier": "states"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("max_norm", [MAX_NORM, pytest.param(1e4, marks=pytest.mark.slow)])
def test_clipping_equals_the_job_in_dram(
    precision: str, choice: dict[str, Any], max_norm: float, tmp_path: Path
) -> None:
    options = {"precision": precision, "max_grad_norm": max_norm}
    job, batch = job_of("gpt2", on_ssd(**choice), directories(tmp_path), **options)
    assert job.plan.decisions.clipping == choice["clip"]
    with job:
        told, left = train_steps(job, batch)
    assert all((norm > max_norm) == (max_norm == MAX_NORM) for _, norm, _, _ in told)
    assert_same((told, left), trained_in_dram("gpt2", **options))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", ["auto", pytest.param("speculative", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_frozen_parameters_and_stages(precision: str, clip: str, tmp_path: Path) -> None:
    """A frozen weight has no master from which it could be made again when the rest of its stage is written."""
    norm = None if clip == "auto" else MAX_NORM
    options = {"precision": precision, "prepare": partly_frozen, "max_grad_norm": norm}
    job, batch = job_of("gpt2", on_ssd(clip=clip), directories(tmp_path), **options)
    assert "transformer.h.0" in job.code()
    with job:
        assert_same(train_steps(job, batch), trained_in_dram("gpt2", **options))


GROUPS = ({"params": ["*.bias", "*ln_*"], "lr": 0.003, "weight_decay": 0.0},)
SCHEDULE = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (partial(torch.optim.SGD, lr=0.05, momentum=0.9), "fp32"),
        (partial(torch.optim.Adafactor, lr=1e-2), "bf16"),
        (partial(torch.optim.AdamW, lr=1e-2, amsgrad=True), "fp16"),
    ],
)
def test_groups_and_schedule_on_three_disks(optimizer: Any, precision: str, tmp_path: Path) -> None:
    options = {
        "optimizer": optimizer,
        "precision": precision,
        "param_groups": list(GROUPS),
        "lr_scheduler": SCHEDULE,
    }
    reference, batch = job_of("gpt2", in_dram(), **options)
    disks = directories(tmp_path, 3)
    job, _ = job_of("gpt2", on_ssd(), disks, **options)
    with reference, job:
        assert_same(train_steps(job, batch), train_steps(reference, batch))
        assert all(list(disk.rglob("*-stage*")) for disk in disks)
    assert not any(list(disk.iterdir()) for disk in disks)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_checkpoint_goes_from_ssd_to_dram_and_back(precision: str, tmp_path: Path) -> None:
    """And into other stages: what is saved does not know where it lay."""
    options = {"precision": precision, "lr_scheduler": SCHEDULE, "max_grad_norm": MAX_NORM}
    whole, batch = job_of("gpt2", in_dram(), **options)
    with whole:
        wanted = train_steps(whole, batch, 6)
    disks, told = directories(tmp_path), []
    for number, strategy in enumerate((on_ssd(), in_dram(), on_ssd(tier="states", clip="speculative"))):
        job, _ = job_of("gpt2", strategy, disks, **options)
        with job:
            if number:
                job.resume(tmp_path / str(number - 1))
            told += train_steps(job, batch, 2)[0]
            left = left_by(job, batch)
            job.save(tmp_path / str(number))
    assert_same((told, left), wanted)


@pytest.mark.slow
def test_resume_behind_further_steps_brings_back_also_what_was_never_trained(tmp_path: Path) -> None:
    """Also from a checkpoint of the start, in which there are no states yet."""
    job, batch = job_of("gpt2", on_ssd(), directories(tmp_path), precision="bf16")
    with job:
        job.save(tmp_path / "start")
        first = train_steps(job, batch, 2)
        job.save(tmp_path / "later")
        then = train_steps(job, batch, 1)
        job.resume(tmp_path / "later")
        assert_same(train_steps(job, batch, 1), then)
        job.resume(tmp_path / "start")
        assert_same(train_steps(job, batch, 2), first)


@pytest.mark.slow
def test_sync_and_save_pretrained_give_what_was_trained(tmp_path: Path) -> None:
    job, batch = job_of("gpt2", on_ssd(), directories(tmp_path))
    with job:
        job.step(batch)
        weights = {name: tensor.clone() for name, tensor in job.state_dict().items()}
        job.save_pretrained(tmp_path / "saved")
        before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
        job.sync()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights.items())
        job.step(batch)  # the model has copies
    for name, tensor in job.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved and all(torch.equal(tensor, weights[name]) for name, tensor in saved.items())


@pytest.mark.slow
def test_close_leaves_nothing_on_disk_and_another_job_begins_anew(tmp_path: Path) -> None:
    disks = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(), disks)
    first = train_steps(job, batch, 2)
    job.close()
    assert not list(disks[0].iterdir())
    job, batch = job_of("gpt2", on_ssd(), disks)
    assert_same(train_steps(job, batch, 2), first)
    job.close()


@pytest.mark.slow
def test_written_files_run_on_another_disk(tmp_path: Path) -> None:
    first, second = directories(tmp_path, 2)
    job, batch = job_of("gpt2", on_ssd(), [first])
    job.write(tmp_path / "job")
    loaded = penstock.load(tmp_path / "job", zoo_case("gpt2", dropout=0.1)[0], ssd_dirs=[second])
    with loaded:
        loss = float(loaded.step(batch))
        assert not list(first.iterdir()) and list(second.iterdir())
    with job:
        assert float(job.step(batch)) == loss


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "choice"),
    [
        ("gpt2", {"precision": "bf16"}, {}),
        ("gpt2", {}, {"activations": KEPT["ssd"]}),
        ("t5", {"precision": "bf16"}, {"tier": "states"}),
        ("wide_resnet", {}, {"activations": KEPT["dram"]}),
    ],
)
def test_a_pipeline_of_two_devices(name: str, options: dict[str, Any], choice: dict[str, Any], tmp_path: Path) -> None:
    disks, options = directories(tmp_path, 2), {**options, "num_devices": 2}
    job, batch = job_of(name, on_ssd(stages=CROSSED, **choice), disks, **options)
    with job:
        assert_same(train_steps(job, batch), trained_in_dram(name, in_dram(CROSSED), **options))
    assert not any(list(disk.iterdir()) for disk in disks)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("clip", ["exact", "speculative"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_pipeline_that_clips(clip: str, precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_devices": 2, "precision": precision, "max_grad_norm": MAX_NORM}
    job, batch = job_of("gpt2", on_ssd(stages=CROSSED, clip=clip), directories(tmp_path), **options)
    with job:
        assert_same(train_steps(job, batch), trained_in_dram("gpt2", in_dram(CROSSED), **options))


@pytest.mark.multi
@pytest.mark.slow
def test_mobius_ssd_where_dram_is_short(tmp_path: Path) -> None:
    """The strategy as it stands puts on SSD what DRAM does not hold, and trains as where DRAM holds it."""
    found = []
    for dram in ("1GB", "640kB"):
        model, batch = zoo_case("gpt2", dropout=0.1)
        job = penstock.compile(
            model,
            penstock.Hardware.cpu(2, memory="404kB", dram=dram, ssd="2GB"),
            example_inputs=batch,
            optimizer=ADAM,
            micro_batches=4,
            strategy="mobius-ssd",
            ssd_dirs=[tmp_path],
        )
        assert bool(job.plan.decisions.ssd.stages) == (dram != "1GB")
        with job:
            told: list[Any] = [float(job.step(batch)) for _ in range(3)]
            found.append((told, {name: tensor.clone() for name, tensor in job.state_dict().items()}))
    assert_same(*found)
