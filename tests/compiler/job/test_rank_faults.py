"""Faults of ranks under torchrun: every rank ends with one readable error, and the job goes on from its checkpoint."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import penstock
from penstock.bench.hosts import two_hosts, why_not
from penstock.runtime.processes.local import worker_environment
from penstock.tests.compiler.job.agents import LOOPBACK, SCRIPT, agents, end_all, free_port, is_gone
from penstock.tests.compiler.job.faulty_rank import MICRO_BATCHES, Slow, batch_of, loss_of

pytestmark = pytest.mark.multi
ELASTIC = Path(__file__).resolve().parents[3] / "examples" / "finetune_elastic.py"
SILENT_S = 8.0  # what ranks are told to wait for each other
SEARCH_S = 10.0  # and this for who is to blame, and to end
BUSY = 3.0  # on a machine that does other things, everything takes longer


def whole_run(folder: Path, ranks: int = 2) -> list[float]:
    """The losses of a run without a fault."""
    with agents(folder, per_node=ranks) as running:
        assert running.wait(200) == [0], running.output()
        found = running.results()
    assert len({str(row["losses"]) for row in found.values()}) == 1
    return list(found[0]["losses"])


def resume(folder: Path, ranks: int) -> list[float]:
    """The losses after the checkpoint, on plain links again."""
    with agents(folder, "--resume", per_node=ranks) as running:
        assert running.wait(200) == [0], running.output()
        return list(running.results()[0]["losses"])


def errors_of(found: dict[int, dict[str, Any]], ranks: Iterable[int]) -> set[str]:
    """The errors of the ranks, each once; all of them must have one."""
    return {str(found[rank]["error"]) for rank in ranks}


@pytest.mark.slow
def test_a_killed_rank_of_another_host_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    """Two agents, as on two hosts. The rank that is left resumes alone, on a plan for one."""
    words = ["kill", "1", "--hosts", "2", "--slow", "--timeout", "60"]
    with agents(tmp_path, *words, nodes=2, per_node=1) as running:
        running.await_file("reached1")
        reached_s = time.time()
        assert 0 not in running.wait(60)
        assert time.time() - reached_s < BUSY * SEARCH_S  # it does not wait for its patience to end
        (error,) = errors_of(running.results(), [0])
        assert is_gone(running.pid(0))
    assert "rank 1 (on " in error and ("has ended" in error or "no sign of life" in error), error
    job = penstock.compile(
        Slow(), penstock.Hardware.cpu(num_devices=1), example_inputs=(batch_of(0),), loss_fn=loss_of,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), micro_batches=MICRO_BATCHES, strategy="balanced",
    )  # fmt: skip
    with job:
        assert job.resume(tmp_path / "checkpoint") == {"next": 2}
        again = job.step((batch_of(2),)).item()
    assert again == running.results()[0]["losses"][2]  # the step that was not saved


@pytest.mark.slow
def test_ranks_that_bring_something_else_are_named_on_all_before_anything_runs(tmp_path: Path) -> None:
    with agents(tmp_path, "versions", "1", per_node=2) as running:
        assert 0 not in running.wait(120)
        found = running.results()
    (error,) = errors_of(found, range(2))
    assert "rank 1" in error or "rank 0" in error
    assert "torch 2.13.9" in error and "python 3.10.1" in error and "Nothing has run" in error
    assert [row["losses"] for row in found.values()] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("optimizer", r"rank 2 \(on .*\) has optimizer .*0\.2, .*the others .*0\.1"),
        ("precision", r"precision bf16, the others fp32"),
        ("seed", r"rank 2 \(on .*\) has seed 1, the others 0"),
        ("edited", r"program of device2\.py"),
        ("versions", r"rank 2 \(on .*\) has python 3\.10\.1, the others"),
    ],
)
def test_what_differs_is_said_on_every_rank(fault: str, said: str, tmp_path: Path) -> None:
    with agents(tmp_path, fault, "2", per_node=3) as running:
        assert 0 not in running.wait(150)
        found = running.results()
    (error,) = errors_of(found, range(3))
    assert re.search(said, error), error
    assert [row["losses"] for row in found.values()] == [[]] * 3


@pytest.mark.slow
def test_ranks_must_be_as_many_and_stand_where_the_plan_has_devices(tmp_path: Path) -> None:
    with agents(tmp_path / "more", "--devices", "3", per_node=2) as running:
        assert 0 not in running.wait(120)
        assert errors_of(running.results(), range(2)) == {
            "torchrun has started 2 processes, the plan has 3 devices; use --nproc-per-node so that there are 3 in all"
        }
    with agents(tmp_path / "uneven", "--hosts", "2", nodes=2, per_node=[3, 1]) as running:
        assert 0 not in running.wait(200)
        (error,) = errors_of(running.results(), range(4))
    assert "the plan has 2 devices on each of 2 hosts, torchrun has started" in error and "Nothing has run" in error


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_within_the_timeout(tmp_path: Path) -> None:
    with agents(tmp_path, "stop", "1", "--slow", "--timeout", str(SILENT_S), per_node=3) as running:
        running.await_file("reached1")
        reached_s = time.time()
        running.await_file("rank0.json", BUSY * (SILENT_S + SEARCH_S))
        running.await_file("rank2.json", BUSY * (SILENT_S + SEARCH_S))
        assert time.time() - reached_s > SILENT_S
        (error,) = errors_of(running.results(), [0, 2])
        assert "is stopped (SIGSTOP)" in error and "rank 1 (on " in error and "line " in error
        running.wait(90)  # torchrun kills what does not answer after half a minute
        assert all(is_gone(running.pid(rank)) for rank in range(3))
    assert resume(tmp_path, 2) == whole_run(tmp_path / "whole")[2:]


@pytest.mark.slow
def test_a_lost_host_ends_the_others_and_the_job_goes_on(tmp_path: Path) -> None:
    words = ["none", "--hosts", "2", "--slow", "--timeout", str(SILENT_S)]
    with agents(tmp_path, *words, nodes=2, per_node=2) as running:
        running.await_file("reached3")
        nodes = {int(psutil.Process(running.pid(rank)).ppid()): rank for rank in range(4)}
        lost = next(p for p in running.processes if p.pid in nodes and nodes[p.pid] > 1)
        end_all(lost)
        running.await_file("rank0.json", BUSY * (SILENT_S + SEARCH_S))
        running.await_file("rank1.json", BUSY * (SILENT_S + SEARCH_S))
        (error,) = errors_of(running.results(), [0, 1])
        assert "rank 2 (on " in error and "rank 3 (on " in error and "the host, or the network to it, is gone" in error
    assert resume(tmp_path, 2) == whole_run(tmp_path / "whole")[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("disk", "rank 1 (on .*): .*stage1.*cannot be written (File too large)"),
        ("uneven", "rank 1: .*torch.float32[13, 64].*No rank has run `step`"),
        ("raise", "rank 1 (on .*) has left: its script raised ValueError: no such column"),
    ],
)
def test_one_ranks_own_error_is_everybodys_and_the_checkpoint_stays(fault: str, said: str, tmp_path: Path) -> None:
    with agents(tmp_path, fault, "1", "--timeout", "60", per_node=3) as running:
        assert 0 not in running.wait(150)
        found = running.results()
    ranks = [0, 2] if fault == "raise" else [0, 1, 2]
    (error,) = errors_of(found, ranks)
    pattern = re.escape(said).replace(re.escape(".*"), ".*")
    assert re.search(pattern, error), error
    assert max(row["seconds"] for row in found.values()) < 60
    assert resume(tmp_path, 2) == whole_run(tmp_path / "whole")[2:]


@pytest.mark.slow
def test_a_full_ssd_of_one_rank_is_said_on_all(tmp_path: Path) -> None:
    """The room for what lies on SSD is taken before the first step."""
    with agents(tmp_path, "ssd", "1", "--ssd", "--timeout", "60", per_node=2) as running:
        assert 0 not in running.wait(200)
        found = running.results()
    (error,) = errors_of(found, range(2))
    assert "rank 1 (on " in error and "ssd" in error, error
    assert found[0]["type"] == found[1]["type"] == "DoesNotFit" and found[0]["losses"] == []
    assert not [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    """Ranks started by hand: the first one makes the store."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(taken.getsockname()[1])}
        command = [sys.executable, str(SCRIPT), str(tmp_path), "--timeout", "5"]
        done = subprocess.run(command, env={**worker_environment(1), **by_hand}, capture_output=True, timeout=100)
    assert done.returncode == 1
    assert "choose another MASTER_PORT" in json.loads((tmp_path / "rank0.json").read_text())["error"]


@pytest.mark.slow
def test_ranks_started_by_hand_run_written_files_and_one_that_does_not_come_is_named(tmp_path: Path) -> None:
    environment = {**worker_environment(1), "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "loaded", "--timeout"]
    both = [subprocess.Popen([*command, "60"], env={**environment, "RANK": rank}) for rank in "01"]
    assert [process.wait(100) for process in both] == [0, 0]
    loaded = [json.loads((tmp_path / f"rank{rank}.json").read_text())["losses"] for rank in (0, 1)]
    assert loaded == [whole_run(tmp_path / "whole")] * 2
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run([*command, "3"], env={**environment, "RANK": "0"}, capture_output=True, timeout=100)
    assert done.returncode == 1
    error = json.loads((tmp_path / "rank0.json").read_text())["error"]
    assert "has waited 3 s" in error and "for 2 ranks: rank 1 did not come" in error


@pytest.mark.slow
def test_a_slow_rank_is_named_on_all(tmp_path: Path) -> None:
    with agents(tmp_path, "slowed", "1", per_node=3) as running:
        assert running.wait(200) == [0], running.output()[-4000:]
        found = [row["stragglers"] for row in running.results().values()]
    assert found == [found[0]] * 3
    assert found[0][0].startswith("cpu1 took ") and "held up the step by" in found[0][0]


# --- other numbers of ranks


@pytest.mark.slow
def test_training_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Of four agents one is lost with its rank; torchrun starts the others' ranks again, which go on from what was
    saved. No sample is left out or comes twice, and the losses are those of a run that nothing has interrupted."""
    words = ["--out", str(tmp_path / "out"), "--steps", "30", "--timeout", "20"]
    options = ["--nnodes=2:4", "--max-restarts=3"]
    with agents(tmp_path, *words, nodes=4, per_node=1, script=ELASTIC, options=options) as running:
        deadline_s = time.monotonic() + 240
        while "step 12 of 30 on 4 ranks" not in running.output():
            assert time.monotonic() < deadline_s, running.output()[-4000:]
            time.sleep(0.02)
        end_all(running.processes.pop(2))
        assert running.wait(280) == [0, 0, 0], running.output()[-4000:]
        rows = steps_of(running.output())
    whole = subprocess.run(
        [sys.executable, str(ELASTIC), "--out", str(tmp_path / "whole"), "--steps", "30"],
        env=worker_environment(1), capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    expected = {step: (loss, position) for step, _, loss, position in steps_of(whole.stdout)}
    last_on_four = max(step for step, ranks, _, _ in rows if ranks == 4)
    again = [step for step, ranks, _, _ in rows if ranks == 3]
    assert again == list(range(again[0], 31))  # each once, up to the end
    assert (again[0] - 1) % 5 == 0 and again[0] <= last_on_four + 1  # from a checkpoint
    for step, _, loss, position in rows:
        assert position == 24 * step == expected[step][1]
        assert loss == pytest.approx(expected[step][0], rel=2e-4)


def steps_of(text: str) -> list[tuple[int, int, float, int]]:
    """Step, ranks, loss and position of each line that tells of a step."""
    found = re.findall(r"step (\d+) of \d+ on (\d+) ranks: loss ([\d.]+), samples up to (\d+)", text)
    return [(int(step), int(ranks), float(loss), int(position)) for step, ranks, loss, position in found]


# --- two hosts


needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "two hosts can be made here")


@pytest.mark.slow
@needs_hosts
def test_two_hosts_train_over_the_link_between_them(tmp_path: Path) -> None:
    with two_hosts(rate_bytes_s=10e6) as hosts:
        with agents(tmp_path, "none", "--hosts", "2", nodes=2, per_node=2, hosts=hosts) as running:
            assert running.wait(240) == [0, 0], running.output()
            found = running.results()
        sent_bytes = hosts.sent_bytes()
    messages_bytes = 6 * 16 * 64 * 4  # of the one boundary between the hosts, in six steps
    assert min(sent_bytes) > messages_bytes
    assert found[3]["losses"] == pytest.approx(whole_run(tmp_path / "whole"), rel=1e-5)
    after = [{key: row[key] for key in ("evaluated", "outputs", "weights", "synced")} for row in found.values()]
    assert after == [after[0]] * 4 and after[0]["synced"]
    assert [16, 64] in after[0]["outputs"].values()  # the outputs of the whole batch, on ranks without the last stage
    assert list((tmp_path / "model").glob("*.safetensors"))


@pytest.mark.slow
@needs_hosts
def test_a_cut_network_ends_the_ranks_of_both_sides(tmp_path: Path) -> None:
    words = ["none", "--hosts", "2", "--slow", "--timeout", str(SILENT_S)]
    with two_hosts() as hosts, agents(tmp_path, *words, nodes=2, per_node=2, hosts=hosts) as running:
        running.await_file("reached0", 200)
        hosts.cut()
        for rank in range(4):
            running.await_file(f"rank{rank}.json", BUSY * (2 * SILENT_S + SEARCH_S))
        found = running.results()
        deadline_s = time.time() + 10
        while not all(is_gone(running.pid(rank)) for rank in range(4)):
            assert time.time() < deadline_s
            time.sleep(0.1)
        hosts.join()
    near = errors_of(found, [0, 1])
    assert len(near) == 1 and "the host, or the network to it, is gone" in near.pop()
    for error in errors_of(found, [2, 3]):
        assert "the host of rank 0, or the network to it, is gone" in error or "no sign of life" in error, error
    assert resume(tmp_path, 2) == whole_run(tmp_path / "whole")[2:]
