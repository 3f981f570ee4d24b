"""Workers on this machine: one process per device, the numbers of eager and of the reference, nothing left behind."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import BatchError, CheckpointError, PlanError, WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import PAGE, Program
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.processes.driver import InProcessDriver, cut_waiting
from penstock.runtime.processes.local import LocalWorkers, start_driver, worker_environment
from penstock.runtime.processes.setup import RunSetup
from penstock.runtime.reference.run import Reference
from penstock.runtime.simulate import Span
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.state.tensor_file import Reads
from penstock.tests.ir.program.handmade import in_turns, pipeline
from penstock.tests.ir.program.two_stages import (
    batch_of,
    buffers_of,
    evaluation,
    interface_of,
    models,
    training,
    weights_of,
)
from penstock.tests.runtime.generated_files import write_chain, write_files
from penstock.tests.runtime.processes.test_torchrun import eager

ADAMW = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-2))
HEAD = "from penstock.tests.ir.program.two_stages import First, Second"


@pytest.fixture(scope="module")
def programs():
    """Tied weights, clipping, dropout, BatchNorm, a frozen layer; training and evaluation."""
    interface = interface_of(*models(tied=True), tied=True)
    return [*training(interface, max_norm=0.5), *evaluation(interface)]


@pytest.fixture(scope="module")
def workers(programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorkers]:
    folder = tmp_path_factory.mktemp("files")
    files = write_files(folder, programs, HEAD, {"stage0": "First", "stage1": "Second"})
    setup = RunSetup(files, programs[0].interface, Hardware.cpu(2, memory="8MB"), ADAMW, seed=5, trust=TRUSTED)
    driver = start_driver(setup)
    assert isinstance(driver, LocalWorkers)
    first, second = models(tied=True)
    driver.load_stage("stage0", weights_of(first), buffers_of(first))
    driver.load_stage("stage1", weights_of(second), {})
    yield driver
    ids = driver.process_ids
    driver.close()
    until_s = time.monotonic() + 10  # the process that forked them takes note of their end
    while any(map(is_running, ids)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not any(map(is_running, ids)) and not os.path.exists(driver.scratch)
    with pytest.raises(WorkerError, match="have been stopped"):
        driver.step(batch_of(0))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.multi
def test_workers_do_what_the_reference_does_bit_for_bit(workers, programs) -> None:
    first, second = models(tied=True)
    weights, buffers = weights_of(first, second), buffers_of(first)
    reference = Reference(programs, {"stage0": type(first), "stage1": type(second)}, weights, ADAMW, buffers, seed=5)
    for step in range(3):
        want = reference.step(batch_of(step))
        found = workers.step(batch_of(step))
        assert [v.item() for v in found.values["loss"]] == [v.item() for v in want["results"]["loss"]]
        assert found.report["gradient_norm"] > 0 and set(found.report["peak_bytes"]) == {"cpu0", "cpu1", "dram0"}
    for stage, device in workers.setup.stage_devices.items():
        _, tensors = workers.call("stage_state", device, {"stage": stage, "optimizer": False})
        state = reference.world.stages[stage]
        for name, value in state.masters.items():
            assert torch.equal(tensors[f"weights/{name}"], value), name
        for name, value in state.runner.buffers().items():
            assert torch.equal(tensors[f"buffers/{name}"], value), name
    want, found = reference.evaluate(batch_of(9))["results"], workers.evaluate(batch_of(9)).values
    for name in ("loss", "logits"):
        assert all(torch.equal(a, b) for a, b in zip(found[name], want[name], strict=True))


@pytest.mark.multi
def test_weights_are_sent_one_after_another(workers) -> None:
    """Each is read once, when the one before is gone; one that cannot be read breaks nothing."""
    _, state = workers.call("stage_state", 1, {"stage": "stage1", "optimizer": False})
    values = {name.removeprefix("weights/"): tensor for name, tensor in state.items()}
    sent: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def read(name: str) -> torch.Tensor:
        assert all(tensor() is None for _, tensor in sent)
        if name == spoilt:
            raise CheckpointError(f"{name} has NaN in it")
        found = values[name] * 2
        sent.append((name, weakref.ref(found)))
        return found

    for spoilt in ("", list(values)[-1]):
        sent.clear()
        if spoilt:
            with pytest.raises(CheckpointError, match=r"has NaN in it$"):
                workers.load_stage("stage1", Reads(values, read), {})
        else:
            workers.load_stage("stage1", Reads(values, read), {})
            assert sorted(name for name, _ in sent) == sorted(values) and len(values) > 1
        _, found = workers.call("stage_state", 1, {"stage": "stage1", "optimizer": False})
        assert all(torch.equal(found[f"weights/{name}"], values[name] * 2) for name in values)
    workers.load_stage("stage1", values, {})


@pytest.mark.multi
def test_a_stage_can_be_taken_out_and_put_back(workers) -> None:
    header, tensors = workers.call("stage_state", 1, {"stage": "stage1"})
    counters, _ = workers.call("counters", 1)
    losses = [v.item() for v in workers.step(batch_of(7)).values["loss"]]
    for device in (0, 1):
        workers.call("load_counters", device, counters)
    workers.call("load_stage_state", 1, {"stage": "stage1", **header}, tensors)
    again, back = workers.call("stage_state", 1, {"stage": "stage1"})
    assert again == header and back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert [v.item() for v in workers.step(batch_of(7)).values["loss"]] != losses  # stage 0 has moved on


@pytest.mark.multi
def test_mistakes_leave_the_workers_running(workers) -> None:
    with pytest.raises(BatchError, match="'labels' is missing"):
        workers.step({"ids": batch_of(0)["ids"]})
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        workers.call("read_shard", 0, {"stage": "stage0", "directory": "/nowhere/at/all", "group": {}, "scheduler": {}})
    assert len(workers.step(batch_of(1)).values["loss"]) == 3


@pytest.mark.multi
def test_the_timeline_has_all_devices_and_transfers_without_waiting(workers) -> None:
    workers.step(batch_of(2))
    timeline = workers.timeline()
    assert {span.device for span in timeline.spans} == {0, 1}
    sent = {s.text.partition("tag=")[2]: s for s in timeline.spans if s.op == "send" and s.device == 0}
    received = {s.text.partition("tag=")[2]: s for s in timeline.spans if s.op == "recv" and s.device == 1}
    assert sent.keys() == received.keys() and len(sent) == 3
    assert all(sent[tag].start_s == received[tag].start_s for tag in sent)


def test_waiting_is_cut_from_both_sides_of_a_transfer() -> None:
    spans = [
        Span(0, "send", "send", 'rt.send(h_m0, dst=1, tag="f.m0")', 3.0, 4.0),
        Span(1, "recv", "recv", 'h_m0 = rt.recv("stage0.h", src=0, tag="f.m0")', 0.0, 4.1),
        Span(1, "compute", "add", "rt.add(a, b)", 0.0, 1.0),
    ]
    assert [(s.start_s, s.end_s) for s in cut_waiting(spans)] == [(3.0, 4.0), (3.0, 4.1), (0.0, 1.0)]


def test_one_device_runs_in_this_process(tmp_path: Path) -> None:
    (program,) = pipeline(1, 2, 2, width=16)
    setup = RunSetup(
        write_chain(tmp_path, [program], 16), program.interface, Hardware.cpu(1, memory="8MB"), ADAMW, trust=TRUSTED
    )
    with start_driver(setup) as driver:
        assert isinstance(driver, InProcessDriver)
        for i in range(2):
            driver.load_stage(f"stage{i}", {f"layer{i}.weight": torch.eye(16)}, {})
        result = driver.step({"x": torch.ones(8, 16)})
        assert len(result.values["loss"]) == 2 and result.report["busy_share"]["cpu0"]["compute"] > 0
        assert {s.op for s in driver.timeline().spans} >= {"fetch", "forward", "backward", "offload", "step"}
    with pytest.raises(WorkerError, match="have been stopped"):
        driver.step({"x": torch.ones(8, 16)})


def test_dram_is_shared_out_between_the_devices_of_a_host(tmp_path: Path) -> None:
    programs = pipeline(2, 4, 2, width=16)
    setup = RunSetup(
        write_chain(tmp_path, programs, 16),
        programs[0].interface,
        Hardware.cpu(2, memory="8MB", dram="1MB"),
        trust=TRUSTED,
    )
    whole = setup.hardware.dram_budget_bytes(0)
    per_stage = 16 * 16 * (4 + 8) + PAGE  # weights, optimizer states; gradients in a page of the arena
    assert [setup.dram_budget_bytes(i) for i in range(2)] == [whole - 2 * per_stage] * 2
    idle = [Program(device, programs[0].interface, function="evaluate") for device in range(2)]
    for program in idle:
        program.graph.output({})
    files = write_chain(tmp_path, [*programs, *idle], 16)  # the program that needs most of a device's DRAM counts
    assert replace(setup, files=files).dram_budget_bytes(0) == whole - 2 * per_stage


def test_gpus_of_several_hosts_need_torchrun(tmp_path: Path) -> None:
    programs = pipeline(2, 2, 2, width=16)
    document = Hardware.cpu(2, memory="8MB", hosts=2).model_dump(mode="json")
    document["devices"] = [{**device, "kind": "cuda"} for device in document["devices"]]
    setup = RunSetup(
        write_chain(tmp_path, programs, 16), programs[0].interface, Hardware.from_any(document), ADAMW, trust=TRUSTED
    )
    with pytest.raises(PlanError, match="torchrun --nnodes=2"):
        LocalWorkers(setup)


@pytest.mark.slow
def test_cpu_devices_of_two_hosts_are_all_here_with_the_network_between_them(tmp_path: Path) -> None:
    programs = pipeline(2, 2, 2, width=64, rows=512)
    rate = 2e6
    hardware = Hardware.cpu(2, memory="8MB", hosts=2, network=rate)
    setup = RunSetup(write_chain(tmp_path, programs, 64), programs[0].interface, hardware, ADAMW, trust=TRUSTED)
    with LocalWorkers(setup) as driver:
        for stage in ("stage0", "stage1"):
            driver.load_stage(stage, {f"layer{stage[-1]}.weight": torch.eye(64)}, {})
        batch = {"x": torch.randn(1024, 64)}
        seconds = driver.step(batch).report["seconds"]
    one_way_s = 2 * 512 * 64 * 4 / rate  # of all micro-batches' activations, and of as many gradients back
    assert 1.5 * one_way_s < seconds < 10 * one_way_s


def test_workers_find_what_the_script_finds_and_do_not_spin() -> None:
    environment = worker_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert str(Path(__file__).parents[2]) in environment["PYTHONPATH"].split(os.pathsep)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("link", [None, "50MB/s"])
def test_workers_take_turns_on_their_link(link: str | None, tmp_path: Path) -> None:
    """A server of turns keeps them; on throttled links the one that times transfers does."""
    programs = in_turns(pipeline(2, 4, 2, width=16))
    machine = Hardware.cpu(2, memory="8MB", h2d=link)
    machine = machine if link is None else machine.with_(root_complex_bandwidth=link)
    driver = start_driver(
        RunSetup(write_chain(tmp_path, programs, 16), programs[0].interface, machine, ADAMW, trust=TRUSTED)
    )
    try:
        assert isinstance(driver, LocalWorkers)
        assert (driver.turns is None, driver.link_server is None) == ((True, False) if link else (False, True))
        made, wanted = torch.Generator().manual_seed(0), eager()
        for i in range(4):
            driver.load_stage(f"stage{i}", {f"layer{i}.weight": torch.randn(16, 16, generator=made) / 4}, {})
        for step, losses in enumerate(wanted[0]):
            batch = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}
            assert [loss.item() for loss in driver.step(batch).values["loss"]] == losses
        for i, device in driver.setup.stage_devices.items():
            _, tensors = driver.call("stage_state", device, {"stage": i})
            assert torch.equal(next(iter(tensors.values())), wanted[1][int(i[-1])])
    finally:
        driver.close()
