"""Two savers of one name: one at a time, and what another process is at work on stays."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import CheckpointError
from penstock.ir.program import ParamSpec, StageSpec
from penstock.runtime.state import checkpoint, durable
from penstock.runtime.state.checkpoint import RunPosition, open_checkpoint

FILES = 5


def save(directory: Path, step: int, pause_s: float = 0.0) -> None:
    """A checkpoint of several files that all tell its step."""
    temporary, shards = checkpoint.begin(directory), []
    try:
        for i in range(FILES):
            spec = StageSpec(f"stage{i}", (), (), (ParamSpec(f"p{i}", (64,), "float32", False),))
            weights = {f"p{i}": torch.full((64,), float(step))}
            shards.append(checkpoint.write_shard(temporary, spec, weights, {}, {}))
            time.sleep(pause_s)
        checkpoint.commit(temporary, directory, shards, RunPosition(step=step))
    except BaseException:
        checkpoint.abort(temporary)
        raise


def require_whole(directory: Path) -> None:
    """All files of the checkpoint are of one save."""
    found = open_checkpoint(directory, verify=True)
    tensors = dict(found.weights())
    assert len(tensors) == FILES
    assert all(bool((tensor == found.progress.step).all()) for tensor in tensors.values())


def work(who: int, directory: Path) -> None:
    draws, count = random.Random(who * os.getpid()), 0
    while True:
        count += 1
        try:
            save(directory, 1000 * who + count, draws.random() * 0.002)
        except CheckpointError as error:
            assert "one save at a time" in str(error)
            time.sleep(draws.random() * 0.005)


def test_a_second_save_of_a_name_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    first = durable.begin(tmp_path / "c")
    with pytest.raises(CheckpointError, match=rf"c: one save at a time.*process {os.getpid()} on .* does so now"):
        durable.begin(tmp_path / "c")
    assert first.exists() and durable.begin(tmp_path / "other").exists()
    durable.abort(first)
    save(tmp_path / "c", 2)
    assert open_checkpoint(tmp_path / "c").progress.step == 2
    assert not list(tmp_path.glob(".c.*"))


def test_files_that_are_gone_before_the_commit_publish_nothing(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    temporary = checkpoint.begin(tmp_path / "c")
    spec = StageSpec("stage0", (), (), (ParamSpec("p0", (4,), "float32", False),))
    shard = checkpoint.write_shard(temporary, spec, {"p0": torch.ones(4)}, {}, {})
    (temporary / shard.file).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.commit(temporary, tmp_path / "c", [shard], RunPosition(step=2))
    checkpoint.abort(temporary)
    require_whole(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.multi
def test_five_hundred_rounds_of_two_savers_with_kills(tmp_path: Path) -> None:
    """One of two savers is killed in each round, the other stopped, wherever both are: the checkpoint is whole."""
    directory, draws = tmp_path / "c", random.Random(0)
    context = multiprocessing.get_context("fork")  # a start takes no time
    save(directory, 1)

    def start(who: int) -> ForkProcess:
        process = context.Process(target=work, args=(who, directory))
        process.start()
        return process

    savers, steps = [start(1), start(2)], set[int]()
    try:
        for _ in range(500):
            time.sleep(0.02 + draws.random() * 0.03)
            which = draws.randrange(2)
            other = savers[1 - which].pid or 0
            os.kill(savers[which].pid or 0, signal.SIGKILL)
            savers[which].join()
            os.kill(other, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(other, os.WUNTRACED)[1])
            require_whole(directory)
            steps.add(open_checkpoint(directory).progress.step)
            os.kill(other, signal.SIGCONT)
            savers[which] = start(which + 1)
    finally:
        for saver in savers:
            saver.kill()
            saver.join()
    require_whole(directory)
    assert len(steps) > 20 and {step // 1000 > 1 for step in steps} == {False, True}  # both have saved
    save(directory, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
