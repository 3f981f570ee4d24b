"""Bases in the bits of their files, with LoRA around them: steps are those of eager over the unpacked weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.runtime.quantised import linear_packed
from penstock.tests.compiler.job.quantised.models import SGD, STEPS, batch, eager_losses, trained_params
from penstock.tests.compiler.job.quantised.packed_models import (
    CONFIGS,
    adapt,
    adapters,
    on_meta,
    unpacked,
    write_gpt_oss,
    write_llama,
)
from penstock.tests.shown_elsewhere import slow_but

EQUAL: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}


def compile_job(model: nn.Module, directory: Path, memory: str = "64MB", **options: Any) -> Job:
    machine = penstock.Hardware.cpu(1, memory=memory, dram="1GB", ssd="1GB")
    chosen = {"optimizer": SGD, "micro_batches": 1, "strategy": "mobius", **options}
    return penstock.compile(model, machine, example_inputs=batch(0), weights=directory, **chosen)


def with_adapters(model: nn.Module) -> nn.Module:
    model.load_state_dict(adapters(model), strict=False)
    return model


def train(job: Job, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps from the adapters of `adapters`, and the adapters after them."""
    job.load_state_dict(adapters(model), strict=False)
    losses = [float(job.step(batch(step))) for step in range(STEPS)]
    return losses, {name: t for name, t in job.state_dict().items() if "lora_" in name}


def require_close(own: dict[str, Tensor], theirs: nn.Module) -> None:
    expected = trained_params(theirs)
    assert expected and own.keys() == expected.keys()
    for name, param in expected.items():
        torch.testing.assert_close(own[name], param, **EQUAL, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", slow_but(["fp8", "int4"], CONFIGS))
def test_steps_are_those_of_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    """Swapped from DRAM: packed bytes arrive before forward and again before backward."""
    theirs = with_adapters(adapt(unpacked(tmp_path, write_llama(tmp_path, kind))))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path))
    with compile_job(model, tmp_path, "700kB") as job:
        text = job.folder.files[0]
        assert "rt.fetch(" in text and "functions.linear_packed(" in text
        losses, trained = train(job, model)
        unpacked_bytes = job.driver.session.state.workspaces["compute"].bytes  # type: ignore[attr-defined]
        assert unpacked_bytes == 192 * 64 * 4  # the largest, one after the other
        assert job.last is not None and job.plan.predicted is not None
        assert job.last.moved_bytes["dram0 -> cpu0"] == job.plan.predicted.moved_bytes["cpu0.down"]
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
    packed = [p for p in params if "_proj" in p.name and "lora" not in p.name]
    assert {p.dtype for p in packed} == {"uint8"} and not any(p.requires_grad for p in packed)
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gpt_oss_in_small(tmp_path: Path, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts stay in MXFP4; two of them are unpacked at a time."""
    monkeypatch.setattr(linear_packed, "GROUP_BYTES", 2 * 4 * 64 * 192)
    theirs = with_adapters(adapt(unpacked(tmp_path, write_gpt_oss(tmp_path, layers=3)), ATTENTION))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path), ATTENTION)
    with compile_job(model, tmp_path, "900kB", micro_batches=micro_batches) as job:
        assert "rt.fetch(" in job.folder.files[0]
        losses, trained = train(job, model)
        unpacked_bytes = job.driver.session.state.workspaces["compute"].bytes  # type: ignore[attr-defined]
        assert unpacked_bytes == linear_packed.GROUP_BYTES
        assert job.last is not None and job.plan.predicted is not None
        assert job.last.moved_bytes["dram0 -> cpu0"] == job.plan.predicted.moved_bytes["cpu0.down"]
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
    packed = {p.name.rpartition("experts.")[2]: p.bytes for p in params if "experts" in p.name and p.dtype == "uint8"}
    weights = {"gate_up_proj": 4 * 64 * 192, "down_proj": 4 * 96 * 64}
    assert packed == {
        f"{name}.weight_{part}": count // over
        for name, count in weights.items()
        for part, over in (("blocks", 2), ("scales", 32))
    }
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)
