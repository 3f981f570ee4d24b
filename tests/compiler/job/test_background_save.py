"""`job.save(directory, wait=False)`: what was between two steps is saved, while the next steps change everything."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.compiler.job.background import BackgroundSave
from penstock.compiler.job.job import Job
from penstock.ir import ops
from penstock.ir.errors import CheckpointError, NoRoomForCopy, WorkerError
from penstock.runtime.processes.local import LocalWorkers
from penstock.runtime.state import checkpoint
from penstock.runtime.state.checkpoint import find_latest, open_checkpoint
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job import ssd_jobs
from penstock.tests.compiler.job.agents import agents
from penstock.tests.compiler.job.held_writer import HeldWriter, save_state
from penstock.tests.compiler.job.test_job_state import FOUR, TWO, batches, job_of
from penstock.tests.runtime.ssd.on_disk import directories
from penstock.tests.shown_elsewhere import slow_but


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWriter]:
    found = HeldWriter(monkeypatch)
    yield found
    found.released.set()


PLACES: dict[str, dict[str, Any]] = {
    "device": {"strategy": FOUR},
    "dram": {"strategy": FOUR, "memory": "250kB"},
    "bf16": {"strategy": FOUR, "precision": "bf16-true"},
    "fp16": {"strategy": FOUR, "precision": "fp16"},
    "two workers": {"strategy": TWO, "num_devices": 2},
    "shards": {"strategy": "mics", "num_devices": 2},
}


@pytest.mark.parametrize("place", slow_but(("device",), list(PLACES)))
def test_the_state_between_two_steps_is_saved(place: str, tmp_path: Path, writer: HeldWriter) -> None:
    """Three steps are made before a byte is written (by workers: while they write); the checkpoint has every digest of
    one that was saved at once, and a run that resumes from it goes on as this one did."""
    model, _ = zoo_case("gpt2", dropout=0.1)
    data = batches("gpt2", 5)
    job = job_of(model, data[0], **PLACES[place])
    with job:
        for batch in data[:2]:
            job.step(batch)
        job.save(tmp_path / "at once", data={"next": 2})
        save = job.save(tmp_path / "behind", data={"next": 2}, wait=False)
        assert isinstance(save, BackgroundSave)
        losses = [job.step(batch) for batch in data[2:]]
        if "num_devices" not in PLACES[place]:
            assert not save.done and find_latest(tmp_path) == tmp_path / "at once"
            with pytest.raises(TimeoutError, match="it goes on"):
                save.wait(0.01)
        writer.released.set()
        assert save.wait(60) == tmp_path / "behind" and save.done and 0 < save.longest_stall_s < 10
        wanted = job.state_dict()
    assert save_state(tmp_path / "behind") == save_state(tmp_path / "at once")
    with job:  # a new run
        assert job.resume(tmp_path / "behind") == {"next": 2} and job.step_count == 2
        assert [job.step(batch) for batch in data[2:]] == losses
        assert all((tensor == wanted[name]).all() for name, tensor in job.state_dict().items())


def on_disks(tmp_path: Path, **choice: Any) -> tuple[Job, Any]:
    (folder := tmp_path / f"disks of {len(list(tmp_path.iterdir()))}").mkdir()
    return ssd_jobs.job_of("gpt2", ssd_jobs.on_ssd(**choice), directories(folder), max_grad_norm=0.5)


CHOICES = {"all": {}, "states": {"tier": "states"}, "speculative": {"clip": "speculative"}}


@pytest.mark.slow
@pytest.mark.parametrize("choice", list(CHOICES))
def test_states_on_ssd_are_read_before_a_step_replaces_them(choice: str, tmp_path: Path, writer: HeldWriter) -> None:
    """There is no copy of them: the writer holds a step's updates up."""
    job, batch = on_disks(tmp_path, **CHOICES[choice])
    with job:
        for _ in range(2):
            job.step(batch)
        job.save(tmp_path / "at once")
        save = job.save(tmp_path / "behind", wait=False)
        writer.release_in(0.4)
        job.step(batch)
        assert job.last is not None  # its updates are over
        assert writer.released.is_set()
        job.step(batch)
        save.wait(60)
        assert save.longest_stall_s > 0.1
        wanted = ssd_jobs.left_by(job, batch)
    assert save_state(tmp_path / "behind") == save_state(tmp_path / "at once")
    with job:  # a new run
        job.resume(tmp_path / "behind")
        for _ in range(2):
            job.step(batch)
        assert all((tensor == wanted[name]).all() for name, tensor in ssd_jobs.left_by(job, batch).items())


@pytest.mark.slow
def test_tensors_larger_than_a_piece_are_read_from_ssd_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.stage.saver.PIECE_BYTES", 8192)
    job, batch = on_disks(tmp_path)
    with job:
        job.step(batch)
        job.save(tmp_path / "at once")
        job.save(tmp_path / "behind", wait=False).wait()
    assert save_state(tmp_path / "behind") == save_state(tmp_path / "at once")


@pytest.mark.slow
def test_a_second_save_waits_for_the_first(tmp_path: Path, writer: HeldWriter) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.step(batch)
        first = job.save(tmp_path / "c", wait=False)
        job.step(batch)
        writer.release_in(0.2)
        second = job.save(tmp_path / "c", wait=False)
        assert first.done and open_checkpoint(tmp_path / "c").progress.step == 1
        second.wait()
        assert open_checkpoint(tmp_path / "c", verify=True).progress.step == 2
        job.save(tmp_path / "c", wait=False)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]  # `close` has waited for the last one


def test_leaving_by_an_exception_leaves_a_whole_checkpoint(tmp_path: Path, writer: HeldWriter) -> None:
    model, batch = zoo_case("mlp")
    with pytest.raises(ValueError, match="no such column"), job_of(model, batch) as job:
        job.step(batch)
        job.save(tmp_path / "c", wait=False)
        writer.release_in(0.2)
        raise ValueError("no such column")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert open_checkpoint(tmp_path / "c", verify=True).progress.step == 1


def test_a_failed_save_does_not_hide_what_ended_a_script(tmp_path: Path, writer: HeldWriter) -> None:
    model, batch = zoo_case("mlp")
    writer.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    writer.released.set()
    warned, raised = pytest.warns(UserWarning, match=r"untouched.*the disk is full"), pytest.raises(ValueError)
    with warned, raised, job_of(model, batch) as job:
        job.save(tmp_path / "c", wait=False)
        raise ValueError("no such column")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", slow_but(["step", "close"], ["step", "save", "close", "resume", "wait"]))
def test_a_full_disk_is_told_by_the_next_call(call: str, tmp_path: Path, writer: HeldWriter) -> None:
    model, batch = zoo_case("mlp")
    job = job_of(model, batch)
    with job:
        job.step(batch)
        job.save(tmp_path / "c")
        writer.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save = job.save(tmp_path / "c", wait=False)
        job.step(batch)
        writer.released.set()
        while not save.done:
            time.sleep(0.01)
        calls = {
            "step": lambda: job.step(batch),
            "save": lambda: job.save(tmp_path / "c"),
            "resume": lambda: job.resume(tmp_path / "c"),
            "close": job.close,
            "wait": save.wait,
        }
        with pytest.raises(CheckpointError, match=r"what was saved there before is untouched.*the disk is full"):
            calls[call]()
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert open_checkpoint(tmp_path / "c", verify=True).progress.step == 1
        writer.error = None
        if call != "close":  # it is told once, and training goes on
            assert job.step_count == 2
            job.step(batch)
            job.save(tmp_path / "c", wait=False).wait()
            assert open_checkpoint(tmp_path / "c").progress.step == 3


def test_an_unwritable_place_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        with pytest.raises(CheckpointError, match="is a file"):
            job.save(tmp_path / "file", wait=False)
        job.step(batch)


def test_a_publishing_that_fails_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.save(tmp_path / "c", wait=False).wait()
        job.step(batch)
        monkeypatch.setattr(checkpoint, "commit", full)
        with pytest.raises(CheckpointError, match=r"OSError: .*Input/output"):
            job.save(tmp_path / "c", wait=False).wait()
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.slow
@pytest.mark.multi
def test_a_worker_that_is_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is a pipe that nobody reads, so that it is at work for sure."""
    request = BackgroundSave._request

    def with_a_pipe(save: BackgroundSave, interface: Any, stages: list[str]) -> Any:
        for stage in stages if save._driver.setup.stage_devices[stages[0]] == 1 else ():
            os.mkfifo(save._temporary / f"{stage}.safetensors")
        return request(save, interface, stages)

    model, batch = zoo_case("gpt2")
    job = job_of(model, batch, strategy=TWO, num_devices=2)
    job.step(batch)
    job.save(tmp_path / "c")
    assert isinstance(job.driver, LocalWorkers)
    monkeypatch.setattr(BackgroundSave, "_request", with_a_pipe)
    save = job.save(tmp_path / "c", wait=False)
    job.step(batch)
    assert not save.done
    os.kill(job.driver.process_ids[1], signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"untouched. device 1 \(cpu1\): its worker is gone"):
        save.wait(60)
    with pytest.raises(WorkerError):
        job.step(batch)
    job.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c"] and find_latest(tmp_path) == tmp_path / "c"
    assert open_checkpoint(tmp_path / "c", verify=True).progress.step == 1


@pytest.mark.slow
def test_a_copy_without_room_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    with job_of(model, batch, memory="64MB") as job:
        job.step(batch)
        setup = job.driver.setup
        asked = {"stages": list(setup.stage_devices), "with_frozen": True}
        needs, _ = job.driver.call("need_of_save", 0, asked)
        need = sum(row["bytes"] for row in needs["needs"].values())
        assert 0 < need < setup.free_dram_bytes(0)
        object.__setattr__(setup, "free_dram_bytes", lambda host: need - 1000)
        with pytest.raises(NoRoomForCopy, match=r"1000 bytes are missing.*wait=True") as caught:
            job.save(tmp_path / "c", wait=False)
        assert caught.value.missing_bytes == 1000 and not list(tmp_path.iterdir())
        job.save(tmp_path / "c")
        object.__setattr__(setup, "free_dram_bytes", lambda host: need)
        job.save(tmp_path / "c", wait=False).wait()
        account = job.driver.session.state.memory.accounts[ops.DRAM]  # type: ignore[attr-defined]
        assert account.live["all steps' copy to save"] == need
        job.step(batch)
        assert job.last is not None and job.last.peak_bytes["dram0"] >= need


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("strategy", ["gpipe", "mics"])
def test_ranks_save_in_the_background(strategy: str, tmp_path: Path) -> None:
    """Each rank writes its part, the first publishes; a failure of it is raised by all at the same step."""
    script = Path(__file__).with_name("background_save_rank.py")
    with agents(tmp_path, str(tmp_path), strategy, script=script) as run:
        assert run.wait(120) == [0], run.output()
        results = run.results()
    errors = [result.pop("error") for result in results.values()]
    assert len(results) == 2 and results[0] == results[1]
    found = results[0]
    assert found["sharded"] == (strategy == "mics")
    assert found["waited"] == str(tmp_path / "saved" / "behind") and found["data"] == {"next": 2}
    assert found["same tensors"] and found["same losses"] and found["kept"] == 2 and found["last"] == 0
    assert all("what was saved there before is untouched" in error for error in errors) and found["step"] >= 6
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["at once", "behind", "last"]
