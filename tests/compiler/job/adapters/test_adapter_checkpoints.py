"""Checkpoints of adapters hold what is trained, and go on with the base that it was trained on, and with no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import penstock
from penstock.errors import CheckpointError, PlanError
from penstock.runtime.state.checkpoint import open_checkpoint
from penstock.tests.compiler.eager_baseline import optimizer_states
from penstock.tests.compiler.job.adapters.adapted_models import BATCH, compile_job, llama, lora
from penstock.tests.compiler.job.quantised import models as quantised
from penstock.tests.runtime.state.test_pretrained import on_meta

STEPS = 2


def went_on(model: Any, directory: Path, **options: Any) -> tuple[list[float], dict[str, Tensor], dict[Any, Any]]:
    """Losses after `resume`, then weights and optimizer states."""
    with compile_job(model, **options) as job:
        job.resume(directory)
        losses = [float(job.step(BATCH)) for _ in range(STEPS)]
        return losses, job.state_dict(), optimizer_states(job)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Tensor]]:
    """A checkpoint after two steps, which tests only read, and what the run did afterwards."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    with compile_job(lora(llama(), modules_to_save=["lm_head"])) as job:
        for _ in range(STEPS):
            job.step(BATCH)
        job.save(directory)
        losses = [float(job.step(BATCH)) for _ in range(STEPS)]
        return directory, losses, job.state_dict()


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_and_their_states_only(saved: Any) -> None:
    directory, _, _ = saved
    model = lora(llama(), modules_to_save=["lm_head"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = tensors_in(directory)
    assert {key.removeprefix("weights/") for key in found if key.startswith("weights/")} == trained
    states = {key.partition("/")[2] for key in found if key.startswith("optimizer")}
    assert states == trained
    base = open_checkpoint(directory).base
    assert base is not None and base.name == "llama"


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"strategy": "mobius", "memory": "150kB"}],
    ids=["resident", "swapped"],
)
def test_a_run_goes_on_bit_for_bit_whatever_the_plan(options: dict[str, Any], saved: Any) -> None:
    directory, losses, weights = saved
    found, state, _ = went_on(lora(llama(), modules_to_save=["lm_head"]), directory, **options)
    assert found == losses
    for name, tensor in state.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gpipe", "zero3-offload"])
def test_a_run_goes_on_on_two_devices(strategy: str, saved: Any) -> None:
    directory, losses, _ = saved
    found, _, _ = went_on(lora(llama(), modules_to_save=["lm_head"]), directory, strategy=strategy, num_devices=2)
    assert found == pytest.approx(losses, abs=1e-6)


@pytest.mark.slow
def test_a_job_that_runs_already_goes_back(saved: Any) -> None:
    directory, losses, _ = saved
    with compile_job(lora(llama(), modules_to_save=["lm_head"])) as job:
        for _ in range(3):
            job.step(BATCH)
        job.resume(directory)
        assert [float(job.step(BATCH)) for _ in range(STEPS)] == losses


@pytest.mark.slow
def test_the_base_may_come_from_files(saved: Any, tmp_path: Path) -> None:
    directory, losses, _ = saved
    llama().save_pretrained(tmp_path / "base", max_shard_size="20kB")
    model = lora(on_meta(llama), modules_to_save=["lm_head"])
    found, _, _ = went_on(model, directory, weights=tmp_path / "base")
    assert found == losses


@pytest.mark.filterwarnings("ignore:.*absent and start")
@pytest.mark.slow
def test_another_base_is_refused_and_both_are_named(saved: Any, tmp_path: Path) -> None:
    directory, _, _ = saved
    other = llama()
    other.model.layers[1].mlp.down_proj.weight.data[16] += 1e-3
    other.save_pretrained(tmp_path / "other")
    digest = open_checkpoint(directory).base.digest[:12]
    for make, more in (
        (lambda: lora(other, modules_to_save=["lm_head"]), {}),
        (lambda: lora(on_meta(llama), modules_to_save=["lm_head"]), {"weights": tmp_path / "other"}),
    ):
        with compile_job(make(), **more) as job, pytest.raises(CheckpointError) as caught:
            job.resume(directory)
        said = str(caught.value)
        assert digest in said and (str(tmp_path / "other") in said if more else said.count("llama (") == 2), said
        assert "Compile with the base" in said


@pytest.mark.slow
def test_a_base_on_meta_without_files_is_refused(saved: Any) -> None:
    directory, _, _ = saved
    job = compile_job(lora(on_meta(llama), modules_to_save=["lm_head"]))
    with pytest.raises(PlanError, match="weights=DIRECTORY"):
        job.resume(directory)


@pytest.mark.slow
def test_a_job_whose_weights_are_all_trained_keeps_full_checkpoints(tmp_path: Path) -> None:
    with compile_job(llama(num_hidden_layers=1)) as job:
        job.step(BATCH)
        job.save(tmp_path / "checkpoint")
        names = set(job.state_dict())
    assert open_checkpoint(tmp_path / "checkpoint").base is None
    found = tensors_in(tmp_path / "checkpoint")
    assert {key.removeprefix("weights/") for key in found if key.startswith("weights/")} == names
    assert "base" not in json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())


@pytest.mark.slow
def test_a_full_checkpoint_of_a_frozen_base_is_read_and_its_base_kept(tmp_path: Path) -> None:
    """As jobs wrote it before: what it holds counts, and later checkpoints hold it, too."""

    def old(model: Any, directory: Path) -> tuple[Any, list[float]]:
        job = compile_job(model)
        job.step(BATCH)
        job._run.base = None
        job.save(directory)
        return job, [float(job.step(BATCH)) for _ in range(STEPS)]

    job, losses = old(lora(llama()), tmp_path / "old")
    job.close()
    assert open_checkpoint(tmp_path / "old").base is None
    other = llama()
    other.model.norm.weight.data.add_(1.0)
    with compile_job(lora(other)) as job:
        job.resume(tmp_path / "old")
        job.save(tmp_path / "new")
        assert [float(job.step(BATCH)) for _ in range(STEPS)] == losses
    assert open_checkpoint(tmp_path / "new").base is None


@pytest.mark.slow
def test_a_truncated_adapter_file_is_refused(saved: Any, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved[0], tmp_path / "checkpoint"))
    file = next(iter(directory.glob("*.safetensors")))
    file.write_bytes(file.read_bytes()[:-5])
    with (
        compile_job(lora(llama(), modules_to_save=["lm_head"])) as job,
        pytest.raises(CheckpointError, match=file.name),
    ):
        job.resume(directory)


@pytest.mark.slow
def test_a_quantised_base_is_the_same_loaded_and_packed_while_it_is_read(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    whole = quantised.write_whole(tmp_path / "whole")

    def job_of(model: Any, **more: Any) -> Any:
        machine = penstock.Hardware.cpu(num_devices=1)
        return penstock.compile(
            model, machine, example_inputs=quantised.batch(0), optimizer=quantised.SGD, micro_batches=2, **more
        )

    with job_of(quantised.adapt(quantised.load_model(whole, "nf4"))) as job:
        job.step(quantised.batch(0))
        job.save(tmp_path / "checkpoint")
        expected = float(job.step(quantised.batch(1)))
    assert all("lora_" in key for key in tensors_in(tmp_path / "checkpoint") if not key.startswith("buffers"))
    with job_of(quantised.adapt(quantised.on_meta(whole, "nf4")), weights=whole) as job:
        job.resume(tmp_path / "checkpoint")
        assert float(job.step(quantised.batch(1))) == expected
    other = job_of(quantised.adapt(quantised.load_model(whole, "fp4")))
    with pytest.raises(CheckpointError, match="Compile with the base"):
        other.resume(tmp_path / "checkpoint")
