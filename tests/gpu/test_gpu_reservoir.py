"""Weights, optimizer states and activations in DRAM and on SSD, trained on a GPU: the same numbers, pinned memory, and
peaks as predicted."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

import penstock
from penstock.bench.peers import parity
from penstock.compiler.strategies import STRATEGIES
from penstock.ir import ops
from penstock.runtime.device.pacing import Paces
from penstock.runtime.device.session import DeviceSession
from penstock.runtime.device.setup import DeviceSetup
from penstock.runtime.measure.disks import disk_directories
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.state.weights import LiveWeights, stage_buffers, stage_weights
from penstock.runtime.turns import TurnServer
from penstock.tests.gpu.rehearsal import (
    DEVICE,
    DROPPING,
    SETUP,
    batches,
    exact,
    model_of,
    on_gpu,
    only_on_gpu,
    session_of,
    swapping_job,
)
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
FUYOU = STRATEGIES["fuyou"]
CHOSEN = "choose-activations{swap=true, tier=all}"
LINES = {
    "all on SSD": FUYOU,
    "states on SSD": FUYOU.replace("tier=all", "tier=states"),
    "no overlap": FUYOU.replace("overlap-optimizer", "overlap-optimizer{overlap=false}"),
    "activations to DRAM": FUYOU.replace(CHOSEN, "choose-activations{swap=true, tier=all, to=dram, share=0.5}"),
    "activations to SSD": FUYOU.replace(CHOSEN, "choose-activations{swap=true, tier=all, to=ssd, share=0.5}"),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    found = disk_directories([tmp_path])
    if not found:
        pytest.skip("files in the temporary folder are not written past the page cache")
    return found[0]


def compile_job(model: Any, batch: Any, line: str, disk: str, **options: Any) -> penstock.Job:
    ssd = {"size_bytes": "1GB", "read_bandwidth": "1GB/s", "write_bandwidth": "1GB/s"}
    given = {"optimizer": parity.SGD, "micro_batches": parity.MICRO_BATCHES, **options}
    return penstock.compile(
        model, SETUP.hardware("1GB").with_(ssds=[ssd]), example_inputs=batch, strategy=line, ssd_dirs=[disk], **given
    )


CORE = {("all on SSD", "fp16"), ("activations to DRAM", "fp32")}


@pytest.mark.parametrize(("line", "precision"), core_of(CORE, product(LINES, ("fp32", "bf16", "fp16"))))
def test_losses_and_weights_are_eagers(line: str, precision: str, disk: str) -> None:
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision)
    with compile_job(model, data[0], LINES[line], disk, precision=precision) as job:
        decided = job.plan.decisions
        assert set(decided.ssd.stages.values()) == {"states" if line == "states on SSD" else "all"}
        if line.startswith("activations"):
            places = {row.classes_to for row in decided.activations.values() if row.classes}
            assert places == {ops.SSD if line.endswith("SSD") else ops.DRAM}
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart
    assert found.losses[-1] < found.losses[0]


def test_frozen_weights_are_read_in_files_on_the_disk(disk: str, tmp_path: Path) -> None:
    """Into page-locked memory, at places in the file that begin no page."""
    model, data = model_of(), batches()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("1" in name or "weight" not in name)
    save_model(model, str(tmp_path / "model.safetensors"))
    wanted = parity.train_eager(model, data, DEVICE)
    with compile_job(model, data[0], FUYOU, disk, weights=tmp_path) as job:
        found = parity.train_job(job, data)
        taken = sum(path.stat().st_blocks * 512 for path in Path(disk).rglob("*-stage*"))
        frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
        assert taken < sum(path.stat().st_size for path in Path(disk).rglob("*-stage*")) - frozen // 2
    trained = replace(found, weights={name: found.weights[name] for name in wanted.weights})
    assert parity.compare(trained, wanted, parity.start_of(model)).fits("fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_speculative_step_that_is_clipped_leaves_what_an_exact_one_leaves(precision: str, disk: str) -> None:
    model, data, found = model_of(), batches(), {}
    for clip in ("exact", "speculative"):
        line = FUYOU.replace("overlap-optimizer", f"overlap-optimizer{{clip={clip}}}")
        options = {"max_grad_norm": 0.5, "precision": precision, "optimizer": ADAMW}
        with compile_job(model, data[0], line, disk, **options) as job:
            assert job.plan.decisions.clipping == clip
            found[clip] = parity.train_job(job, data)
            assert job.last.gradient_norm is not None and job.last.gradient_norm > 0.5
    apart = parity.compare(found["speculative"], found["exact"], parity.start_of(model))
    assert apart.bitwise, apart
    wanted = parity.train_eager(model, data, DEVICE, precision, optimizer=ADAMW, max_grad_norm=0.5)
    assert parity.compare(found["exact"], wanted, parity.start_of(model)).loss <= 5e-3


@pytest.mark.parametrize("to", ["dram", "ssd"])
def test_dropout_is_drawn_again_where_only_classes_are_kept(to: str, disk: str) -> None:
    """What is kept in classes and moved changes nothing: nor do the random numbers of what is computed again."""
    model, data, found = model_of(DROPPING), batches(DROPPING), {}
    for name, options in {"computed again": "to=none", "moved": f"to={to}, share=1.0"}.items():
        line = FUYOU.replace(CHOSEN, f"choose-activations{{swap=true, tier=all, {options}}}")
        with compile_job(model, data[0], line, disk) as job:
            assert any(row.classes for row in job.plan.decisions.activations.values()) == (name == "moved")
            found[name] = parity.train_job(job, data)
    assert found["moved"].losses == found["computed again"].losses
    assert parity.compare(found["moved"], found["computed again"], parity.start_of(model)).bitwise


def test_a_norm_over_resident_and_swapped_stages_is_eagers(disk: str) -> None:
    """Some gradients lie on the GPU and some in DRAM when they are clipped."""
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, max_grad_norm=0.5)
    line = FUYOU.replace(CHOSEN, "insert-remat{always=true}").replace("insert-ssd{tier=all}, ", "")
    plan = compile_job(model, data[0], line, disk, max_grad_norm=0.5).plan.model_dump(mode="json")
    stays = list(plan["decisions"]["fetch"])[2]
    del plan["decisions"]["fetch"][stays]
    plan["decisions"]["optimizer"][stays] = ops.DEVICE
    changed = penstock.Plan.model_validate(plan)
    job = compile_job(model, data[0], changed.strategy, disk, max_grad_norm=0.5, plan=changed)
    assert set(job.plan.decisions.optimizer.values()) == {ops.DEVICE, ops.DRAM}
    with job:
        found = parity.train_job(job, data)
    assert parity.compare(found, wanted, parity.start_of(model)).fits("fp32")


@pytest.mark.parametrize("line", LINES)
def test_memory_in_dram_is_page_locked_and_peaks_are_predicted(line: str, disk: str) -> None:
    model, data = model_of(), batches(count=1)
    with compile_job(model, data[0], LINES[line], disk, precision="bf16") as job:
        for _ in range(2):
            job.step(data[0])
        arena = session_of(job).state.memory.dram_arena.flat
        assert arena.numel() > 0 and arena.device.type == "cpu" and arena.data_ptr() % 4096 == 0
        assert arena.is_pinned() == SETUP.on_gpu
        for memory, peak in job.last.peak_bytes.items():
            assert job.plan.predicted.peak_bytes[memory] == pytest.approx(peak, rel=0.05), memory


@only_on_gpu
def test_a_checkpoint_of_what_lies_on_ssd_goes_on_with_the_same_bits(disk: str, tmp_path: Path) -> None:
    model, data = model_of(), batches()
    with compile_job(model, data[0], FUYOU, disk, precision="bf16", optimizer=ADAMW) as job:
        job.step(data[0])
        job.save(tmp_path / "saved")
        wanted = [float(job.step(batch)) for batch in data[1:]]
    with compile_job(model, data[0], FUYOU, disk, precision="bf16", optimizer=ADAMW) as job:
        job.resume(tmp_path / "saved")
        assert [float(job.step(batch)) for batch in data[1:]] == wanted


@only_on_gpu
def test_weights_that_come_in_chunks_by_turns_are_the_same(tmp_path: Path) -> None:
    """With one GPU every turn is granted at once: what is checked is the copying by a thread, on its own stream."""
    model, data = model_of(), batches()
    with swapping_job(model, data[0]) as job:
        wanted = parity.train_job(job, data).losses
        given = [job._inputs.for_call("step", batch) for batch in data]  # with what its losses are divided by
    interface, source = job.folder.interface, LiveWeights(model)
    path = job.write(tmp_path / "files") / "device0.py"
    fetch, in_turn = r'rt\.fetch\("stage(\d+)\.weights"([^)]*)\)', r'rt.fetch("stage\1.weights"\2, link_turn=\1)'
    text, number = re.subn(fetch, in_turn, path.read_text())
    assert number > 1
    path.write_text(text)
    server = TurnServer(str(tmp_path / "turns"))
    optimizer, paces = OptimizerSpec.from_callable(parity.SGD), Paces(turns=server.address)
    setup = DeviceSetup(0, path, interface, job.hardware, optimizer, paces=paces)
    session = DeviceSession(setup, setup.open_file())
    session.pacing.chunk_bytes, session.pacing.hand_over_bytes = 4096, 1024
    try:
        for name, spec in interface.stages.items():
            session.state.load_stage(name, stage_weights(source, spec, own=False), stage_buffers(source, spec))
        losses = [float(torch.stack(session.step(batch).values["loss"]).mean()) for batch in given]
    finally:
        session.close()
        server.close()
    assert losses == pytest.approx(wanted, rel=1e-6)
