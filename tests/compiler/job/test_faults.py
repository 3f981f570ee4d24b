"""Bad input and faults through the public API: a clear error, nothing lost, nothing hanging."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    DoesNotFit,
    HardwareError,
    NonFiniteLoss,
    PassError,
    PlanError,
    WorkerError,
)
from penstock.runtime.processes.local import LocalWorkers
from penstock.runtime.stage.runner import StageRunner
from penstock.runtime.state.checkpoint import open_checkpoint
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, assert_close, zoo_case
from penstock.tests.shown_elsewhere import slow_but

STOP_S = 10.0  # within which a failure must have stopped everything


def job_of(name: str, num_devices: int = 1, memory: str = "64MB", **options: Any) -> tuple[Job, Any]:
    model, batch = zoo_case(name)
    link = options.pop("link", None)
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, link=link)
    chosen = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options}
    return penstock.compile(model, hardware, example_inputs=batch, **chosen), batch


# --- hardware


def test_an_unknown_preset_gets_close_names() -> None:
    model, batch = zoo_case("mlp")
    with pytest.raises(HardwareError, match="mobius-topo4"):
        penstock.compile(model, "mobius-tpo4", example_inputs=batch)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: [", "malformed.yaml"),
        ("- 1\n- 2\n", "malformed.yaml"),
        ("dram: 3", "malformed.yaml"),
    ],
)
def test_malformed_yaml(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "malformed.yaml").write_text(text)
    model, batch = zoo_case("mlp")
    with pytest.raises(HardwareError, match=said):
        penstock.compile(model, tmp_path / "malformed.yaml", example_inputs=batch)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("memory_bytes: -1GB", "memory_bytes.*-1GB"),
        ("memory_bytse: 1GB", "memory_bytse.*memory_bytes"),
        ("memory_bytes: 1GX", "memory_bytes.*1GX"),
    ],
)
def test_a_wrong_key_or_size_is_named(edit: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    lines = penstock.Hardware.cpu(num_devices=1, memory="1GB").to_yaml().splitlines()
    found = [line for line in lines if "memory_bytes" in line]
    path.write_text("\n".join(line.split("memory_bytes")[0] + edit if line in found else line for line in lines))
    model, batch = zoo_case("mlp")
    with pytest.raises(HardwareError, match=f"(?s){said}"):
        penstock.compile(model, path, example_inputs=batch)


# --- arguments


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"micro_batches": 3}, PlanError, "micro_batches=3 does not divide the batch of 8; nearest that do: 2, 4"),
        ({"micro_batches": 0}, PlanError, "micro_batches=0"),
        ({"micro_batches": "many"}, PlanError, "micro_batches='many'"),
        ({"precision": "fp4"}, PlanError, "precision='fp4'"),
        ({"max_grad_norm": -1.0}, PlanError, "max_grad_norm=-1.0"),
        ({"max_grad_norm": "1"}, PlanError, "max_grad_norm='1'"),
        ({"strategy": "mobis"}, PassError, "mobius"),
        ({"strategy": None}, PlanError, "strategy=None"),
        ({"seed": 0.5}, PlanError, "seed=0.5"),
        ({"strategy": "coarsen, partition-balance"}, PassError, "partition-balanced"),
        ({"strategy": "partition-balanced, coarsen"}, PassError, "coarsen.*before"),
        ({"optimizer": torch.optim.LBFGS}, PlanError, "LBFGS"),
        ({"optimizer": partial(torch.optim.AdamW, lr=-1.0)}, PlanError, "(?i)learning rate"),
        ({"plan": 3}, PlanError, "plan must be"),
        ({"plan": "nowhere.json"}, PlanError, "nowhere.json"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        job_of("mlp", **options)


def test_no_model_no_batch() -> None:
    with pytest.raises(PlanError, match=r"nn\.Module; found function"):
        penstock.compile(lambda x: x, example_inputs={})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="example_inputs holds no tensor"):
        penstock.compile(nn.Linear(2, 2), "mobius-topo4", example_inputs={"x": 3})
    uneven = {"x": torch.zeros(4, 2), "y": torch.zeros(3, 2)}
    with pytest.raises(PlanError, match=r"'x'.*4, 'y' has 3"):
        penstock.compile(nn.Linear(2, 2), "mobius-topo4", example_inputs=uneven)


def test_labels_missing_and_no_loss() -> None:
    model, batch = zoo_case("gpt2")
    del batch["labels"]
    with pytest.raises(CaptureError, match='Add "labels" to the batch'):
        penstock.compile(model, penstock.Hardware.cpu(), example_inputs=batch, micro_batches=4)
    with pytest.raises(CaptureError, match=r"no loss to train on.*loss_fn"):
        penstock.compile(nn.Linear(2, 2), penstock.Hardware.cpu(), example_inputs=(torch.zeros(4, 2),), micro_batches=4)


def test_a_batch_that_may_or_may_not_be_for_the_loss() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(x) if mask is None else self.layer(x) * mask

    batch = (torch.zeros(4, 2), torch.zeros(4, 2))
    options: dict[str, Any] = {"micro_batches": 4, "loss_fn": lambda output, batch: (output - batch[1]).sum()}
    with pytest.raises(CaptureError, match=r"forward\(x, mask\) needs 1.*pass the batch as a dict"):
        penstock.compile(Masked(), penstock.Hardware.cpu(), example_inputs=batch, **options)


# --- memory


@pytest.mark.parametrize(
    ("name", "machine", "options", "changed"),
    [
        pytest.param("gpt2", {"memory": "100kB"}, {}, {"memory"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"memory": "250kB", "dram": "100kB"}, {}, {"dram"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"memory": "20kB", "dram": "20kB"}, {}, {"memory", "dram"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"memory": "200kB"}, {"micro_batches": 1}, {"micro_batches"}, marks=pytest.mark.slow),
        ("gpt2", {"memory": "250kB", "num_devices": 1}, {"strategy": "gpipe"}, {"strategy"}),
    ],
)
@pytest.mark.slow  # tests/compiler/search/test_nearest.py has a fast one
def test_what_does_not_fit_names_a_change_with_which_it_does(
    name: str, machine: dict[str, Any], options: dict[str, Any], changed: set[str]
) -> None:
    model, batch = zoo_case(name)
    hardware = penstock.Hardware.cpu(**machine)
    options = {"micro_batches": MICRO_BATCHES, "optimizer": SGD, **options}
    with pytest.raises(DoesNotFit, match=r"missing|no contiguous") as caught:
        penstock.compile(model, hardware, example_inputs=batch, **options)
    nearest = caught.value.nearest
    assert set(nearest) == changed
    assert all(str(value) in str(caught.value) for value in nearest.values())
    wider = hardware.with_(**{key: value for key, value in nearest.items() if key in ("memory", "dram")})
    options |= {key: value for key, value in nearest.items() if key in ("micro_batches", "strategy")}
    plan = penstock.compile(model, wider, example_inputs=batch, **options).plan
    assert plan.predicted is not None
    assert all(peak <= plan.predicted.budget_bytes[memory] for memory, peak in plan.predicted.peak_bytes.items())
    if "memory" in changed:  # near: with a tenth less it would not fit
        less = {
            key: int(0.9 * getattr(part, f"{key}_bytes")) for key, part in _size_of(wider).items() if key in changed
        }
        with pytest.raises(DoesNotFit):
            penstock.compile(model, wider.with_(**less), example_inputs=batch, **options)


def _size_of(hardware: penstock.Hardware) -> dict[str, Any]:
    return {"memory": hardware.devices[0], "dram": hardware.hosts[0]}


@pytest.mark.slow
def test_micro_batches_shrink_where_nothing_else_fits() -> None:
    """Left to "auto", sizes that promise less are tried before giving up."""
    model, batch = zoo_case("gpt2")
    many = {key: value.repeat(2, 1) for key, value in batch.items()}
    hardware = penstock.Hardware.cpu(num_devices=1, memory="260kB")
    assert penstock.compile(model, hardware, example_inputs=many, optimizer=SGD).plan.micro_batches > 4


# --- batches


def test_other_batches_than_compiled() -> None:
    job, batch = job_of("gpt2")
    with job:
        expected = job.step(batch)
        for change, said in (
            ({"labels": batch["labels"][:, :4]}, r"'labels'.*\[8, 4\].*compiled for torch.int64\[8, 8\]"),
            ({"input_ids": batch["input_ids"].int()}, r"'input_ids'.*int32"),
            ({"token_type_ids": batch["labels"]}, "token_type_ids, which was not compiled"),
            ({"use_cache": True}, r"'use_cache'.*True, compiled as absent"),
        ):
            with pytest.raises(BatchError, match=said):
                job.step({**batch, **change})
        with pytest.raises(BatchError, match="lacks labels"):
            job.evaluate({key: value for key, value in batch.items() if key != "labels"})
        assert job.step_count == 1
        assert job.step(batch) < expected  # nothing was lost


# --- numbers


@pytest.mark.parametrize("stop", [True, False])
def test_a_loss_that_is_not_a_number(stop: bool, tmp_path: Path) -> None:
    job, batch = job_of("mlp", stop_on_nan=stop)
    broken = {**batch, "x": torch.full_like(batch["x"], float("nan"))}
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = job.step(batch)
        job.resume(tmp_path / "checkpoint")
        if stop:
            with pytest.raises(NonFiniteLoss, match=r"nan in step 2.*stop_on_nan=False"):
                job.step(broken)
            assert job.step(batch) == wanted
        else:
            assert torch.isnan(job.step(broken))
        job.resume(tmp_path / "checkpoint")
        assert job.step(batch) == wanted


def test_an_error_in_backward_names_the_line_and_the_job_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a forward is undone (test_bad_batches.py)."""
    job, batch = job_of("mlp")
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = job.step(batch)
        with monkeypatch.context() as patch:
            patch.setattr(StageRunner, "backward", lambda *args: [][0])
            with pytest.raises(WorkerError, match=r"device 0 \(cpu0\), line \d+.*index out of range") as caught:
                job.step(batch)
        assert caught.value.device == 0 and "rt.backward" in str(caught.value.line)
        for call in (job.step, job.evaluate):
            with pytest.raises(WorkerError, match=r"half a step.*index out of range.*job\.resume"):
                call(batch)
        for read in (job.state_dict, job.sync, partial(job.save, tmp_path / "no"), partial(job.save_pretrained, "no")):
            with pytest.raises(WorkerError, match="half a step"):
                read()
        job.resume(tmp_path / "checkpoint")
        assert job.step(batch) == wanted


# --- processes


def are_gone(process_ids: list[int]) -> bool:
    """Whether none of the processes runs any more (a zombie does not)."""
    for pid in process_ids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def wait_until_gone(process_ids: list[int], timeout_s: float = STOP_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not are_gone(process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return are_gone(process_ids)


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_worker_stops_all_and_the_last_checkpoint_resumes(tmp_path: Path) -> None:
    job, batch = job_of("mlp", num_devices=2, link="1kB/s")  # a step takes seconds, nearly all of it on the link
    with job:
        first = job.step(batch)
        job.save(tmp_path / "checkpoint")
        state = job.state_dict()
        driver = job.driver
        assert isinstance(driver, LocalWorkers)
        pids = driver.process_ids
        assert len(pids) == 2 and not are_gone(pids)
        killed_s: list[float] = []

        def kill() -> None:
            time.sleep(0.3)
            killed_s.append(time.monotonic())
            os.kill(pids[1], signal.SIGKILL)

        threading.Thread(target=kill).start()
        with pytest.raises(WorkerError, match=r"device 1 \(cpu1\).*SIGKILL.*line \d+: `.*`") as caught:
            job.step(batch)
        assert time.monotonic() - killed_s[0] < STOP_S
        assert caught.value.device == 1 and caught.value.line
        assert wait_until_gone(pids)
        with pytest.raises(WorkerError, match=r"job\.resume"):
            job.step(batch)
        job.resume(tmp_path / "checkpoint")
        assert job.step_count == 1
        assert_close(job.state_dict(), state, 0.0)
        assert job.evaluate(batch).loss < first


SCRIPT = """
import functools, sys, threading, time
import torch, penstock
from penstock.tests.compiler.eager_baseline import zoo_case

model, batch = zoo_case("mlp")
hardware = penstock.Hardware.cpu(num_devices=2, memory="1MB", link="1kB/s")
job = penstock.compile(model, hardware, example_inputs=batch, micro_batches=4)
print("workers", *job.driver.process_ids, flush=True)
while True:
    job.step(batch)
"""


@pytest.mark.slow
@pytest.mark.multi
def test_a_second_ctrl_c_ends_the_script_and_its_workers(tmp_path: Path) -> None:
    """A step that takes an hour is not waited for. The script needs no `if __name__ == "__main__"`: workers never run
    it."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        pids = [int(word) for word in process.stdout.readline().split()[1:]]
        assert len(pids) == 2
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        assert process.stderr.readline() == "`step` is finished first; once more breaks it off\n"
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)
        said = process.stderr.read()
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    assert wait_until_gone(pids)


# --- disks


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond this: what a full disk says in the middle of writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_leaves_the_checkpoint_before_and_the_job(tmp_path: Path) -> None:
    job, batch = job_of("gpt2", memory="250kB")
    with job:
        job.step(batch)
        for save in (job.save, job.save_pretrained):
            target = tmp_path / save.__name__
            save(target)
            before = {path.name: path.read_bytes() for path in target.iterdir()}
            job.step(batch)
            with full_disk(4096), pytest.raises(CheckpointError, match=save.__name__):
                save(target)
            assert {path.name: path.read_bytes() for path in target.iterdir()} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["save", "save_pretrained"]  # no half files
        job.step(batch)
        job.resume(tmp_path / "save")
        assert job.step_count == 1


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    job, batch = job_of("mlp")
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("precious")
    with job:
        job.step(batch)
        with pytest.raises(CheckpointError, match="file"):
            job.save(tmp_path / "file" / "checkpoint")
        with pytest.raises(CheckpointError, match=r"thesis\.tex.*Save elsewhere"):
            job.save(tmp_path / "notes")
        job.step(batch)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "precious"


def test_data_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    job, batch = job_of("mlp")
    with job:
        job.step(batch)
        with pytest.raises(CheckpointError, match="loader"):
            job.save(tmp_path / "checkpoint", data={"loader": object()})
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", slow_but(["truncated", "altered"], ["truncated", "altered", "manifest"]))
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    job, batch = job_of("mlp", memory="64MB", strategy="gpipe")
    with job:
        job.step(batch)
        job.save(tmp_path / "good")
        wanted = job.step(batch)
        job.resume(tmp_path / "good")
        bad = job.save(tmp_path / "bad")
        shard = next(bad.glob("*.safetensors"))
        found = shard if damage != "manifest" else bad / "manifest.json"
        content = bytearray(found.read_bytes())
        if damage == "truncated":
            del content[-1:]
        elif damage == "altered":
            content[-1] ^= 1
        else:
            content[content.index(b'"step": 1') + 8] = ord("7")
        found.write_bytes(content)
        with pytest.raises(CheckpointError, match=found.name):
            job.resume(bad)
        if damage == "altered":  # the devices hold a mixture now
            with pytest.raises(WorkerError, match=r"job\.resume"):
                job.step(batch)
        assert open_checkpoint(tmp_path / "good", verify=True).progress.step == 1
        job.resume(tmp_path / "good")
        assert job.step(batch) == wanted
