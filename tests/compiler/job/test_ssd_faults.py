"""Faults of a model on SSD: noticed and named, nothing hangs or stays behind, and the last checkpoint resumes."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from penstock.compiler.job.job import Job
from penstock.ir.errors import HardwareError, NonFiniteLoss, PlanError, SsdError, WorkerError
from penstock.runtime.measure.detect import ram_bytes
from penstock.runtime.processes.driver import InProcessDriver
from penstock.runtime.processes.local import LocalWorkers
from penstock.runtime.ssd import folder as ssd_folder
from penstock.runtime.ssd.direct_io import Engine
from penstock.runtime.ssd.directory import no_direct
from penstock.runtime.state.weights import LiveWeights
from penstock.tests.compiler.eager_baseline import optimizer_states, zoo_case
from penstock.tests.compiler.job.ssd_jobs import (
    CROSSED,
    assert_same,
    in_dram,
    job_of,
    left_by,
    on_ssd,
    train_steps,
    trained_in_dram,
)
from penstock.tests.runtime.ssd.on_disk import EIO, ENOSPC, Faults, directories
from penstock.tests.shown_elsewhere import slow_rows_but

STOP_S = 20.0  # within which a failure must have stopped everything


def engine_of(job: Job) -> Engine:
    driver = job.driver
    assert isinstance(driver, InProcessDriver)
    folder = driver.session.state.memory.folder
    assert folder is not None
    return folder._home.engine


def children() -> list[psutil.Process]:
    """All but the fork server, which waits for the next job."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in found if "penstock.runtime.forks" not in p.cmdline() or p.ppid() != os.getpid()]


def wait_for_no_children() -> bool:
    deadline = time.monotonic() + STOP_S
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not children()


# --- disks that fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "result", "number", "choice"),
    [
        (True, ENOSPC, 3, {"activations": "to=ssd, share=0.7"}),
        (False, EIO, 7, {}),
        (True, EIO, 2, {"tier": "states"}),
        (False, EIO, 0, {"tier": "states"}),
        (True, ENOSPC, 0, {}),
        (False, EIO, 11, {"activations": "to=ssd, share=0.7"}),
    ],
)
def test_a_disk_that_fails_breaks_the_step_and_the_checkpoint_resumes(
    write: bool, result: int, number: int, choice: dict[str, Any], tmp_path: Path
) -> None:
    (disk,) = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(**choice), [disk])
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = train_steps(job, batch, 1)
        faults = Faults(engine_of(job), write=write, results=[None] * number + [result])
        begin_s = time.monotonic()
        op = r"rt\.write" if write else r"rt\.(read|fetch)"
        with pytest.raises(SsdError, match=rf"(?s)device 0 \(cpu0\), line \d+: `.*{op}.*{disk}") as caught:
            job.step(batch)
            job.sync()  # writes of states may come after the loss
        assert not faults.results and time.monotonic() - begin_s < STOP_S
        assert Path(caught.value.file).parent.parent == disk and caught.value.errno == -result
        for call in (job.step, job.evaluate):
            with pytest.raises(WorkerError, match=r"half a step.*job\.resume"):
                call(batch)
        job.resume(tmp_path / "checkpoint")
        assert len(list(disk.iterdir())) == 1  # the broken run's folder is gone
        assert_same(train_steps(job, batch, 1), wanted)
    assert not list(disk.iterdir())


@pytest.mark.slow
def test_a_disk_that_fails_while_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays, and the job starts once the disk has room again."""
    (disk,) = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(), [disk])
    write, calls = os.pwritev, []

    def full(fd: int, memories: Any, position: int) -> int:
        calls.append(position)
        if len(calls) > 3:  # the first is the folder's probe
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, memories, position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(SsdError, match="No space left"):
            job.step(batch)
    assert not list(disk.iterdir())
    with job:
        assert_same(train_steps(job, batch), trained_in_dram("gpt2"))


@pytest.mark.slow
@pytest.mark.parametrize("write", [False, True])
def test_short_transfers_are_continued(write: bool, tmp_path: Path) -> None:
    job, batch = job_of("gpt2", on_ssd(), directories(tmp_path))
    with job:
        first = train_steps(job, batch, 1)
        results: list[int | None] = [4096, 512, None, 1024, 8192, 512]
        faults = Faults(engine_of(job), write=write, results=results)
        told = [*first[0], *train_steps(job, batch, 1)[0]]
        assert not faults.results
        told += train_steps(job, batch, 1)[0]
        assert_same((told, left_by(job, batch)), trained_in_dram("gpt2"))


def flip_a_bit(disk: Path, part: str) -> Path:
    """In the largest file whose name has `part`, past the page cache's copy of it."""
    path = max(disk.rglob(f"*{part}*"), key=lambda path: path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["all", "states"])
def test_a_flipped_bit_is_detected(tier: str, tmp_path: Path) -> None:
    (disk,) = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(tier=tier), [disk])
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = train_steps(job, batch, 1)
        path = flip_a_bit(disk, "stage")
        with pytest.raises(SsdError, match=r"device 0 \(cpu0\), line \d+: .*rt\.read.*not those that were") as caught:
            job.step(batch)
        assert caught.value.file == str(path) and caught.value.offset_bytes == 0
        job.resume(tmp_path / "checkpoint")
        assert_same(train_steps(job, batch, 1), wanted)
        flip_a_bit(disk, "stage")
        with pytest.raises(SsdError, match="not those that were written"):  # nor does it get into a checkpoint
            job.save(tmp_path / "checkpoint")
        job.resume(tmp_path / "checkpoint")
        assert_same(train_steps(job, batch, 1), wanted)


@pytest.mark.multi
@pytest.mark.slow
def test_a_flipped_bit_in_a_worker(tmp_path: Path) -> None:
    """The error crosses the processes with what it knows; all workers stop."""
    (disk,) = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(stages=CROSSED), [disk], num_devices=2)
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = train_steps(job, batch, 1)
        path = flip_a_bit(disk, "stage")
        with pytest.raises(SsdError, match=r"device [01] \(cpu[01]\), line \d+: .*rt\.read") as caught:
            job.step(batch)
        assert caught.value.file == str(path)
        assert wait_for_no_children()
        with pytest.raises(WorkerError, match=r"job\.resume"):
            job.step(batch)
        job.resume(tmp_path / "checkpoint")
        assert_same(train_steps(job, batch, 1), wanted)
    assert not list(disk.iterdir())


# --- directories and machines


@pytest.mark.slow
def test_two_jobs_share_a_directory(tmp_path: Path) -> None:
    """Each start removes what crashed jobs left, and not what the other uses."""
    disks = directories(tmp_path)
    left, batch = job_of("gpt2", on_ssd(), disks)
    right, _ = job_of("gpt2", on_ssd(tier="states"), disks)
    told: list[list[Any]] = [[], []]
    with left, right:
        for _ in range(3):
            for rows, job in zip(told, (left, right)):
                rows += train_steps(job, batch, 1)[0]
        assert len(list(disks[0].iterdir())) == 2
        assert_same((told[0], left_by(left, batch)), trained_in_dram("gpt2"))
        assert_same((told[1], left_by(right, batch)), trained_in_dram("gpt2"))
    assert not list(disks[0].iterdir())


def no_direct_files(path: Path) -> int:
    raise no_direct(path.parent.parent, os.strerror(errno.EINVAL))


@pytest.mark.parametrize(
    ("place", "said"),
    slow_rows_but(  # test_ssd_folder.py has the others
        [("buffered", "O_DIRECT")],
        [
            ("missing", "does not exist"),
            ("file", "is a file"),
            ("/dev/shm", r"is in memory \(tmpfs\)"),
            ("buffered", "O_DIRECT"),
            ("closed", "cannot be written"),
        ],
    ),
)
def test_directories_that_cannot_be_used(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the weights are looked at."""
    directory = Path(place) if place.startswith("/") else tmp_path / place
    if place == "file":
        directory.write_text("precious")
    elif place in ("buffered", "closed"):
        directory.mkdir()
    if place == "buffered":
        monkeypatch.setattr(ssd_folder, "open_direct", no_direct_files)
    if place == "closed":
        directory.chmod(0o500)
        if os.access(directory, os.W_OK):
            pytest.skip("this user may write everywhere")
    job, batch = job_of("mlp", on_ssd(), [directory])
    monkeypatch.setattr(LiveWeights, "read", lambda self, name: pytest.fail("weights are loaded"))
    with pytest.raises(HardwareError, match=rf"ssd directory {directory}: .*{said}"):
        job.step(batch)
    if place == "buffered":
        assert not list(directory.iterdir())
    job.close()


@pytest.mark.multi
@pytest.mark.slow
def test_workers_without_a_directory_are_gone(tmp_path: Path) -> None:
    job, batch = job_of("gpt2", on_ssd(stages=CROSSED), [tmp_path / "missing"], num_devices=2)
    with pytest.raises(HardwareError, match=r"ssd directory .*missing: does not exist"):
        job.step(batch)
    assert wait_for_no_children()


def test_more_dram_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    (disk,) = directories(tmp_path)
    job, batch = job_of("mlp", on_ssd(), [disk], dram=2 * ram_bytes())
    with pytest.raises(HardwareError, match=r"dram0: the plan may use .*Compile for what is here"):
        job.step(batch)
    assert not list(disk.iterdir())


# --- numbers


def enlarge(output: Any, batch: Any) -> Tensor:
    """A loss whose gradients overflow in fp16 until the loss scale has been halved some times."""
    loss: Tensor = output["loss"] * 96.0
    return loss


@pytest.mark.parametrize(
    ("clip", "norm"),
    [
        ("speculative", 20.0),
        pytest.param("exact", None, marks=pytest.mark.slow),
        pytest.param("exact", 20.0, marks=pytest.mark.slow),
        pytest.param("speculative", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_overflow_in_the_first_step_of_fp16(clip: str, norm: float | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "fp16", "loss_fn": enlarge, "max_grad_norm": norm}
    disks = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(clip=clip), disks, **options)
    with job:
        before = {name: tensor.clone() for name, tensor in job.state_dict().items()}
        job.step(batch)
        assert job.last is not None and job.last.skipped and job.last.loss_scale == 32768.0
        assert not optimizer_states(job)  # as if there had been no step
        assert all(torch.equal(tensor, before[name]) for name, tensor in job.state_dict().items())
    anew, _ = job_of("gpt2", on_ssd(clip=clip), disks, **options)
    with anew:
        told, left = train_steps(anew, batch, 6)
    assert [skipped for *_, skipped in told] == sorted((skipped for *_, skipped in told), reverse=True)
    assert told[0][-1] and not told[-1][-1]
    assert_same((told, left), train_with_nan(options, "gpt2", [batch] * 6, in_dram(), []))


def train_with_nan(options: dict[str, Any], name: str, batches: list[Any], strategy: str, disks: list[Path]) -> Any:
    """The result of `train`, of a step on each of these batches."""
    job, _ = job_of(name, strategy, disks, **options)
    with job:
        told = [train_steps(job, batch, 1)[0][0] for batch in batches]
        return told, left_by(job, batches[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "norm", "choice"),
    [
        ("fp32", 0.5, {"clip": "speculative"}),
        pytest.param("fp16", None, {}, marks=pytest.mark.slow),
        pytest.param("fp32", None, {}, marks=pytest.mark.slow),
        pytest.param("fp32", 0.5, {"clip": "exact"}, marks=pytest.mark.slow),
        pytest.param("bf16", 0.5, {"clip": "speculative", "tier": "states"}, marks=pytest.mark.slow),
        pytest.param("fp16", 0.5, {"clip": "speculative"}, marks=pytest.mark.slow),
        pytest.param("fp16", 0.5, {"clip": "exact", "tier": "states"}, marks=pytest.mark.slow),
    ],
)
def test_gradients_that_are_not_numbers(
    precision: str, norm: float | None, choice: dict[str, Any], tmp_path: Path
) -> None:
    """They end in the weights as without SSD; with a loss scale the step is skipped, as without SSD."""
    options: dict[str, Any] = {"precision": precision, "max_grad_norm": norm, "stop_on_nan": False}
    batch = zoo_case("mlp", dropout=0.1)[1]
    x = batch["x"].clone()
    x[-1, 0] = float("nan")
    batches = [batch, {**batch, "x": x}, batch]
    found = train_with_nan(options, "mlp", batches, on_ssd(**choice), directories(tmp_path))
    assert found[0][1][-1] == (precision == "fp16")
    assert (found[0][2][0] == found[0][2][0]) == (precision == "fp16")  # the third loss is a number again
    assert_same(found, train_with_nan(options, "mlp", batches, in_dram(), []))


def test_a_loss_that_is_not_a_number_stops_the_job(tmp_path: Path) -> None:
    job, batch = job_of("mlp", on_ssd(), directories(tmp_path))
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = train_steps(job, batch, 1)
        with pytest.raises(NonFiniteLoss, match="the loss is nan in step 3"):
            job.step({**batch, "x": batch["x"] * float("nan")})
        job.resume(tmp_path / "checkpoint")
        assert_same(train_steps(job, batch, 1), wanted)


# --- optimizers that look at more than one element


@pytest.mark.slow
def test_adafactor_on_ssd_equals_adafactor(tmp_path: Path) -> None:
    options = {"optimizer": partial(torch.optim.Adafactor, lr=1e-2), "max_grad_norm": 0.5}
    job, batch = job_of("gpt2", on_ssd(clip="speculative"), directories(tmp_path), **options)
    with job:
        assert_same(train_steps(job, batch), trained_in_dram("gpt2", **options))


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="LBFGS"):
        job_of("mlp", on_ssd(), [tmp_path], optimizer=torch.optim.LBFGS)


# --- a worker that is killed


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_killed_worker(seed: int, tmp_path: Path) -> None:
    """At any point of a step, or of the writing of a checkpoint."""
    (disk,) = directories(tmp_path)
    job, batch = job_of("gpt2", on_ssd(stages=CROSSED), [disk], num_devices=2)
    random = torch.Generator().manual_seed(seed)
    after_s, victim = 0.4 * float(torch.rand((), generator=random)), seed % 2
    with job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = train_steps(job, batch, 3)
        driver = job.driver
        assert isinstance(driver, LocalWorkers)
        job.resume(tmp_path / "checkpoint")
        threading.Timer(after_s, os.kill, (driver.process_ids[victim], 9)).start()
        begin_s = time.monotonic()
        with pytest.raises(WorkerError, match=rf"device {victim} .*SIGKILL"):
            while True:
                job.step(batch)
                job.save(tmp_path / "other")
        assert time.monotonic() - begin_s < STOP_S and wait_for_no_children()
        job.resume(tmp_path / "checkpoint")
        assert len(list(disk.iterdir())) == 2  # one folder of each living worker
        assert_same(train_steps(job, batch, 3), wanted)
    assert not list(disk.iterdir())
