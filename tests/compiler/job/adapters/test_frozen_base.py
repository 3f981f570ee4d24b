"""The costs of a frozen base, counted in the printed programs: its own bytes and no more, as seldom as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import penstock
from penstock.compiler.job.job import Job
from penstock.ir import ops
from penstock.ir.program import Interface, ParamSpec, StageSpec
from penstock.tests.compiler.job.adapters.adapted_models import BATCH, compile_job, llama, lora

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LAYERS = 4


def calls(job: Job, kind: Any) -> Iterator[fx.Node]:
    for program in job.programs:
        for node in program.ops():
            if node.target is kind:
                yield node


def stage_of(node: fx.Node) -> str:
    return str(node.args[0]).partition(".")[0]


def move(job: Job, kind: Any) -> int:
    return sum(node.meta["type"].bytes for node in calls(job, kind))


def swapping_job(model: Any, memory: str = "160kB") -> Job:
    """Four stages, of which one or two fit, so that a backward fetches its stage again."""
    stages = "coarsen, partition-balanced{stages=4}, map-cross, schedule-pipeline"
    tail = "insert-remat, insert-fetch{swap=true}, insert-optimizer"
    return compile_job(model, strategy=f"{stages}, {tail}", optimizer=ADAMW, memory=memory)


@pytest.mark.slow
def test_optimizer_states_and_gradients_are_those_of_the_adapters() -> None:
    model = lora(llama(num_hidden_layers=LAYERS))
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    job = compile_job(model, optimizer=ADAMW, precision="bf16-mixed", strategy="balanced")
    specs = job.folder.interface.stages.values()
    assert sum(spec.trained_params for spec in specs) == adapters
    assert sum(job.folder.interface.master_bytes(spec) for spec in specs) in (0, 4 * adapters)
    assert sum(job.folder.interface.state_bytes(spec) for spec in specs) == 8 * adapters  # two in fp32
    last = [node for node in calls(job, ops.backward)][-1]
    assert job.folder.interface.grad_bytes(stage_of(last)) == 4 * adapters


@pytest.mark.slow
def test_resident_adapters_and_their_states_stay_on_the_device() -> None:
    job = compile_job(lora(llama(num_hidden_layers=1)), optimizer=ADAMW)
    assert set(job.plan.decisions.optimizer.values()) == {"device"}
    assert not list(calls(job, ops.fetch)) and not list(calls(job, ops.offload))
    with job:
        job.step(BATCH)
        job.step(BATCH)
        found = job.last
    assert found is not None
    inputs = sum(t.numel() * t.itemsize for t in BATCH.values()) + 4 * 4  # and each micro-batch's share in the loss
    assert found.moved_bytes == {"dram0 -> cpu0": inputs}


@pytest.mark.slow
def test_of_a_swapped_base_with_large_adapters_only_their_gradients_leave_the_device() -> None:
    """Too large to stay on the device, they travel with their stages."""
    model = lora(llama(num_hidden_layers=LAYERS))
    adapters = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    job, full = swapping_job(model), swapping_job(llama(num_hidden_layers=LAYERS), "300kB")
    assert move(job, ops.offload) == adapters
    assert move(full, ops.offload) >= 20 * adapters
    with job:
        job.step(BATCH)
        job.step(BATCH)
        found, told = job.last, job.simulate()
    assert found is not None and found.moved_bytes["cpu0 -> dram0"] == adapters
    assert found.moved_bytes["dram0 -> cpu0"] == told.moved_bytes["cpu0.down"]
    assert found.moved_bytes["cpu0 -> dram0"] == told.moved_bytes["cpu0.up"]


@pytest.mark.slow
def test_stages_below_the_first_adapter_are_fetched_once_and_have_no_backward() -> None:
    model = lora(llama(num_hidden_layers=LAYERS), layers_to_transform=[LAYERS - 1])
    job = swapping_job(model)
    stages = list(job.folder.interface.stages)
    assert len(stages) == LAYERS
    fetched = Counter(stage_of(node) for node in calls(job, ops.fetch))
    parts = Counter(stage_of(node) for node in calls(job, ops.fetch) if "params" in node.kwargs)
    backward = {stage_of(node) for node in calls(job, ops.backward)}
    first = next(i for i, spec in enumerate(job.folder.interface.stages.values()) if spec.trained_params)
    assert first >= LAYERS - 2  # the partitioner cuts by time, not by layers
    assert {stage: fetched[stage] - parts[stage] for stage in stages[:first]} == dict.fromkeys(stages[:first], 1)
    assert backward == set(stages[first:])
    assert {stage_of(node) for node in calls(job, ops.step)} == {stages[first]}
    everywhere = swapping_job(lora(llama(num_hidden_layers=LAYERS)))
    assert move(everywhere, ops.fetch) > 1.5 * move(job, ops.fetch)


@pytest.mark.slow
def test_frozen_stages_on_ssd_are_never_read_for_a_step_nor_written(tmp_path: Path) -> None:
    model = lora(llama(num_hidden_layers=LAYERS), r=16, layers_to_transform=[LAYERS - 1])
    machine = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="200MB", ssd="2GB")
    job = penstock.compile(
        model, machine, example_inputs=BATCH, optimizer=ADAMW, micro_batches=4, strategy="fuyou", ssd_dirs=[tmp_path]
    )
    trained = {spec.name for spec in job.folder.interface.stages.values() if spec.trained_params}
    assert len(trained) < len(job.folder.interface.stages)
    for_steps = {stage_of(node) for node in calls(job, ops.read) if not str(node.args[0]).endswith(".weights")}
    written = {str(node.kwargs["to"]).partition(".")[0] for node in calls(job, ops.write)}
    assert written == for_steps == trained


@pytest.mark.parametrize(
    ("precision", "clip"),
    [("fp32", 0.5), *(pytest.param(*of, marks=pytest.mark.slow) for of in (("fp32", None), ("bf16-mixed", 0.5)))],
)
@pytest.mark.slow
def test_of_a_base_on_ssd_only_pages_with_adapters_are_read_for_a_step_and_written(
    precision: str, clip: float | None, tmp_path: Path
) -> None:
    """Also where an update may be undone, so that each file has two slots: frozen weights lie in both."""

    def make(**options: Any) -> Job:
        machine = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="200MB", ssd="2GB")
        model = lora(llama(hidden_size=64, intermediate_size=256), r=48, target_modules=["q_proj"])
        return penstock.compile(
            model, machine, example_inputs=BATCH, optimizer=ADAMW, micro_batches=4, precision=precision,
            max_grad_norm=clip, **options,
        )  # fmt: skip

    def train(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
        return [float(job.step(BATCH)) for _ in range(3)], job.state_dict()

    with make(strategy="fuyou", ssd_dirs=[tmp_path], ssd_verify=True) as job:
        assert "all" in job.plan.decisions.ssd.stages.values()
        losses, weights = train(job)
        assert job.last is not None
        moved_bytes, told = job.last.moved_bytes, job.simulate()
        updated = {stage_of(node) for node in calls(job, ops.step)}
        specs = [job.folder.interface.stages[name] for name in updated]
        whole_bytes = sum(map(job.folder.interface.all_bytes, specs))
        frozen_bytes = sum(param.bytes for spec in specs for param in spec.params if not param.requires_grad)
        written = {stage: job.folder.interface.update_ranges(job.folder.interface.stages[stage]) for stage in updated}
    size = sum(end - begin for ranges in written.values() for begin, end in ranges)
    assert moved_bytes["dram0 -> ssd0"] == size < whole_bytes - 0.9 * frozen_bytes
    assert {moved for link, moved in told.moved_bytes.items() if "ssd" in link} >= {size}
    stages = "drop-masks, chunk-loss, coarsen, partition-min-stage{inputs_leave=true}, map-round-robin"
    tail = "schedule-pipeline, insert-remat, insert-fetch{swap=true}, insert-optimizer"
    with make(strategy=f"{stages}, {tail}") as other:
        expected, held = train(other)
    assert losses == expected
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())


def test_pages_with_anything_trained_are_joined() -> None:
    rows = [("a", 1024, False), ("b", 8, True), ("c", 4096, False), ("d", 8, True), ("e", 8, True), ("f", 4096, False)]
    params = tuple(ParamSpec(name, (size,), "float32", trained) for name, size, trained in rows)
    spec = StageSpec("stage0", (), (), params)
    interface = Interface({"stage0": spec}, {}, state_bytes_per_param=8.0)
    weights = interface.all_bytes(spec) - interface.states_bytes(spec)
    # "b" begins at byte 4096, "d" at 4608 + 16384, and "e" 512 after it.
    assert interface.update_ranges(spec) == ((4096, 8192), (20480, 24576), (weights, interface.all_bytes(spec)))
    whole = replace(spec, params=tuple(replace(param, requires_grad=True) for param in params))
    assert interface.update_ranges(whole) == ((0, interface.all_bytes(whole)),)
