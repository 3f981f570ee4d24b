"""The user's own copy of the model is memory that no plan may use, wherever it lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.own_copy import own_copy_bytes, reserve_copies, reserve_own_copy
from penstock.errors import DoesNotFit, PlanError
from penstock.ir.program import slice_of
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case
from penstock.tests.compiler.reasons import reasons_of

MEMORY = "250kB"


def compile_job(model: nn.Module, batch: Any, dram: str | int, **options: Any) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory=MEMORY, dram=dram)
    return penstock.compile(
        model,
        hardware,
        example_inputs=batch,
        optimizer=SGD,
        micro_batches=MICRO_BATCHES,
        strategy="balanced",
        **options,
    )


def meta_case(name: str) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model, _ = zoo_case(name)
    return model, zoo_case(name)[1]


def dram_need_bytes(job: penstock.Job) -> int:
    assert job.plan.predicted is not None
    return max(job.plan.predicted.peak_bytes["dram0"], job.plan.predicted.loading_bytes["dram0"])


def test_each_storage_counts_once_and_meta_takes_nothing() -> None:
    layer = nn.Linear(10, 10, bias=False)
    whole = torch.zeros(1000)
    model = nn.ModuleDict({"a": layer, "b": layer, "meta": nn.Linear(10, 10, device="meta")})
    layer.register_buffer("part", whole[:10])  # a view keeps all of its storage
    layer.register_buffer("other", whole[10:20])
    assert own_copy_bytes(model) == {"cpu": 400 + 4000}
    assert own_copy_bytes(nn.Linear(10, 10, device="meta")) == {}


@pytest.mark.slow
def test_a_plan_that_fits_beside_nothing_does_not_fit_beside_the_model() -> None:
    meta, batch = meta_case("gpt2")
    alone = compile_job(meta, batch, "10MB")
    need_bytes, model = dram_need_bytes(alone), zoo_case("gpt2")[0]
    own_bytes = own_copy_bytes(model)["cpu"]
    exactly = compile_job(meta, batch, need_bytes)
    assert "own copy" not in reasons_of(exactly)
    with pytest.raises(
        DoesNotFit, match=r"hold your own copy of the model; built on the meta device.*weights="
    ) as miss:
        compile_job(model, batch, need_bytes)
    assert miss.value.memory == "dram0" and miss.value.missing_bytes == own_bytes
    both = compile_job(model, batch, need_bytes + own_bytes)
    assert both.code() == exactly.code()
    assert both.plan.hash == exactly.plan.hash
    assert both.hardware.dram_budget_bytes() == need_bytes
    assert re.search(r"dram0 +your own copy of the model 120 KiB", reasons_of(both))
    found = re.search(r'this hardware with dram="(\w+)"', str(miss.value))
    assert found, miss.value
    assert compile_job(model, batch, found[1]).plan.hash == both.plan.hash  # the advice counts it, too


@pytest.mark.slow
def test_hardware_that_came_out_of_a_job_is_counted_anew() -> None:
    model, batch = zoo_case("mlp")
    job = compile_job(model, batch, "10MB")
    assert job.hardware.hosts[0].model_bytes == own_copy_bytes(model)["cpu"]
    again = penstock.compile(meta_case("mlp")[0], job.hardware, example_inputs=batch, optimizer=SGD, micro_batches=4)
    assert again.hardware == penstock.Hardware.cpu(num_devices=1, memory=MEMORY, dram="10MB")


@pytest.mark.slow
def test_files_that_were_written_for_a_model_on_meta_have_no_room_beside_a_live_one(tmp_path: Path) -> None:
    meta, batch = meta_case("gpt2")
    need_bytes = compile_job(meta, batch, "10MB").plan.predicted.peak_bytes["dram0"]  # type: ignore[union-attr]
    loading = dram_need_bytes(compile_job(meta, batch, "10MB"))
    compile_job(meta, batch, max(need_bytes, loading)).write(tmp_path / "tight")
    compile_job(meta, batch, "10MB").write(tmp_path / "roomy")
    model, _ = zoo_case("gpt2")
    with penstock.load(tmp_path / "roomy", model) as job:
        assert job.hardware.hosts[0].model_bytes == own_copy_bytes(model)["cpu"]
        job.step(batch)
    with pytest.raises(PlanError, match=r"no room beside it; build it on the meta device.*dram0"):
        penstock.load(tmp_path / "tight", model)


@pytest.mark.parametrize(("name", "copies"), [("rtx4090x2", [1]), ("mics-p3dn:2", [8, 8])])
def test_one_process_has_one_copy_and_several_hosts_one_for_each_device(name: str, copies: list[int]) -> None:
    model = nn.Linear(1000, 1000)
    hardware = penstock.Hardware.preset(name)
    found = reserve_own_copy(hardware, model)
    assert [host.model_bytes for host in found.hosts] == [copy * 4_004_000 for copy in copies]
    for host in range(len(copies)):
        assert found.dram_budget_bytes(host) == hardware.dram_budget_bytes(host) - copies[host] * 4_004_000


def test_a_copy_on_a_gpu_takes_of_that_gpu() -> None:
    hardware = penstock.Hardware.preset("rtx4090x2")
    found = reserve_copies(hardware, [{"cuda:1": 10**9, "cpu": 10**6}])
    assert found.budget_bytes("gpu1") == hardware.budget_bytes("gpu1") - 10**9
    assert found.budget_bytes("gpu0") == hardware.budget_bytes("gpu0")
    assert found.dram_budget_bytes() == hardware.dram_budget_bytes() - 10**6


def test_a_lane_has_its_part_of_the_copies() -> None:
    hardware = reserve_own_copy(penstock.Hardware.cpu(num_devices=4, dram="100MB"), nn.Linear(1000, 1000))
    lane = slice_of(hardware, [[0, 1], [2, 3]])
    assert lane.dram_budget_bytes() == hardware.dram_budget_bytes() // 2
    without = penstock.Hardware.cpu(num_devices=4, dram="100MB")
    assert slice_of(without, [[0, 1], [2, 3]]).hosts[0].model_bytes == 0


def test_a_document_keeps_the_copy() -> None:
    hardware = reserve_own_copy(penstock.Hardware.cpu(num_devices=1), nn.Linear(1000, 1000))
    assert "model_bytes: 4.004MB" in hardware.to_yaml() and "own copy of the model" in hardware.describe()
    assert "model_bytes" not in penstock.Hardware.cpu(num_devices=1).to_yaml()
