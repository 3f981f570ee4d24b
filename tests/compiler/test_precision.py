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
from penstock.tests.compiler.plain_precision import Plain, Upcasts, upcasting

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
