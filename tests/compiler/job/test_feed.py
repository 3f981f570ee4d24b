"""Ranks that read just their part of each batch train as one process does that reads all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compiler.batches.shape import BatchShape
from penstock.compiler.job.feed import PART, WHOLE, Feed
from penstock.ir.errors import BatchError, CheckpointError, PlanError
from penstock.ir.program import Interface
from penstock.runtime.processes.local import worker_environment
from penstock.tests.compiler.job import fed_by_rank as fed_by_parts
from penstock.tests.compiler.job.fed_by_rank import BATCH, Net, Samples, compile_job, train


def torchrun(ranks: int, folder: Path, steps: int, *words: str) -> list[dict[str, Any]]:
    """The findings of each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(fed_by_parts.__file__)), str(folder), str(steps), *words]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.multi
def test_parts_train_as_whole_batches_and_go_on_elsewhere_at_the_right_sample(tmp_path: Path) -> None:
    first, second = torchrun(2, tmp_path, 4, "uneven", "early", "save", "again")
    for found in first, second:
        assert found["losses"] == found["again"] == first["losses"]
        assert found["weights"] == found["weights again"] == first["weights"]
    samples, rest = Samples(), Samples()
    with compile_job(1, "balanced") as job:
        losses = train(job, samples, 4) + train(job, samples, 2, start=5 * BATCH)  # the refused batch counts
        assert first["losses"] == pytest.approx(losses[:4], rel=1e-5)
        assert job.resume(tmp_path / "saved")["note"] == "of the script"
        assert train(job, rest, 2) == pytest.approx(losses[4:], rel=1e-5)
    assert rest.read == samples.read[4 * BATCH :]
    for rank, found in enumerate((first, second)):
        assert found["rows"] == [4 * rank, 4 * rank + 4]
        batches = [samples.read[BATCH * step : BATCH * (step + 1)] for step in range(4)]
        assert found["read"] == [sample for batch in batches for sample in batch[4 * rank : 4 * rank + 4]]
    assert first["uneven"] == second["uneven"]
    assert "rank 1: batch['x'] is torch.float32[3, 4], compiled for torch.float32[8, 4]" in first["uneven"]
    assert "allowed are 8 rows, or the 4 of this rank's lane" in first["uneven"]
    assert first["early"] == second["early"]
    assert "different calls: `step` on rank 0, `save` on rank 1." in first["early"]
    assert first["evaluated"] == second["evaluated"]


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_go_on_where_four_stood(tmp_path: Path) -> None:
    samples = Samples()
    with compile_job(1, "balanced") as job:
        losses = train(job, samples, 7)
    begun = torchrun(4, tmp_path, 4, "save")
    gone_on = torchrun(2, tmp_path, 3, "resume")
    assert [*begun[0]["losses"], *gone_on[0]["losses"]] == pytest.approx(losses, rel=1e-5)
    read = [rank["read"] for rank in (*begun, *gone_on)]
    each = [BATCH // 4] * 4 + [BATCH // 2] * 2
    assert [row[:size] for row, size in zip(read[:4], each)] == [samples.read[2 * i : 2 * i + 2] for i in range(4)]
    position = 4 * BATCH
    assert [row[:4] for row in read[4:]] == [samples.read[position + 4 * i : position + 4 * i + 4] for i in range(2)]
    everything = [sample for row in read for sample in row]
    assert sorted(everything) == sorted(samples.read)


@pytest.mark.slow
@pytest.mark.multi
def test_a_middle_stage_reads_nothing_and_a_lane_its_half(tmp_path: Path) -> None:
    samples = Samples()
    with compile_job(1, "balanced") as job:
        losses = train(job, samples, 4)
    first, middle, last = torchrun(3, tmp_path, 4, "pipeline")
    assert [rank["inputs"] for rank in (first, middle, last)] == [["x"], [], ["y"]]
    assert middle["read"] == [] and first["read"] == last["read"] == samples.read
    assert first["losses"] == middle["losses"] == last["losses"] == pytest.approx(losses, rel=1e-5)
    ranks = torchrun(4, tmp_path, 4, "hybrid")  # two pipelines of two: both ends of each read the same half
    assert sorted(rank["inputs"] for rank in ranks) == [["x"], ["x"], ["y"], ["y"]]
    for rank in ranks:
        rows = range(*rank["rows"])
        assert rank["read"] == [sample for i, sample in enumerate(samples.read) if i % BATCH in rows]
        assert len(rows) == 4 and rank["losses"] == pytest.approx(losses, rel=1e-5)


# --- what one process can show


def feed_of(device: int | None, lanes: int = 2) -> Feed:
    shape = BatchShape.from_inputs(Net(), {"x": torch.zeros(8, 4), "y": torch.zeros(8, 1)})
    interface = Interface({}, {}, num_devices=2, lanes=tuple((2 * i, 2 * i + 1) for i in range(lanes)))
    return Feed(Net(), shape, interface, device)


def batch_of(rows: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, {"x": 4, "y": 1}[name]) for name in names or ("x", "y")}


def test_a_rank_takes_its_part_the_whole_or_nothing_as_it_loads() -> None:
    assert [feed_of(device).rows for device in range(4)] == [range(4), range(4), range(4, 8), range(4, 8)]
    assert feed_of(None).rows == range(8)
    feed = feed_of(2)
    assert feed.read("step", batch_of(4), ["x"])[1] == PART
    assert feed.read("step", batch_of(4, "x"), ["x"])[0].keys() == {"x"}  # the last stage alone loads y
    assert feed.read("step", batch_of(8), ["x"])[1] == WHOLE
    assert feed.read("step", None, [])[1] == ""
    for batch, said in (
        (None, "batch is None, but x are loaded here"),
        (batch_of(4, "y"), "batch lacks x; it has y"),
        (
            batch_of(3),
            r"\[3, 4\], compiled for torch.float32\[8, 4\]; allowed are 8 rows, or the 4 of this rank's lane",
        ),
        ({"x": torch.zeros(4, 4), "y": torch.zeros(8, 1)}, r"'x'\] is torch.float32\[4, 4\], compiled for .*8, 4"),
        (batch_of(4) | {"z": torch.zeros(4)}, "z, which was not compiled"),
    ):
        with pytest.raises(BatchError, match=said):
            feed.read("step", batch, ["x"])


def test_a_script_that_drives_all_lanes_takes_whole_batches() -> None:
    with pytest.raises(BatchError, match=r"allowed are 8 rows\. .*DataLoader\(drop_last=True\).*job\.sampler"):
        feed_of(None).read("step", batch_of(4), ())
    with pytest.raises(BatchError, match="batch is None, but x, y are loaded here"):
        feed_of(None).read("step", None, ())


def test_a_short_last_batch_is_not_taken_for_a_part() -> None:
    feed = feed_of(0)
    _, kind = feed.read("step", batch_of(8), ["x"])
    feed.keep_to("step", kind)
    with pytest.raises(BatchError, match=r"4 rows, a part .* until now it was the whole batch.* filled up to 8 rows"):
        feed.read("step", batch_of(4), ["x"])
    assert feed.read("evaluate", batch_of(4), ["x"])[1] == PART
    feed.forget()
    assert feed.read("step", batch_of(4), ["x"])[1] == PART


def test_a_resumed_position_is_for_the_data_that_was_trained_on() -> None:
    feed = feed_of(0)
    data = Samples()
    sampler = feed.sample(data, True, 0, "carry", None)
    feed.advance()
    saved = feed.state({"note": 1})
    assert saved["sampler"]["position"] == sampler.position == 8 and saved["note"] == 1
    other = feed_of(2)
    other.load(saved)
    with pytest.raises(CheckpointError, match="num_samples=23, this one has 5"):
        other.sample(range(5), True, 0, "carry", None)
    assert other.sample(data, True, 0, "carry", None).position == 8
    assert other.sample(data, True, 0, "carry", 16).position == 16
    other.advance()
    assert other.sample(range(5), True, 0, "carry", None).position == 0  # a later stage, on other data


def test_where_a_sampler_may_begin() -> None:
    with pytest.raises(PlanError, match="start=-1; it is a number of samples, 0 or more"):
        feed_of(0).sample(Samples(), True, 0, "carry", -1)


def test_a_data_set_without_a_length() -> None:
    with pytest.raises(PlanError, match="a generator, which has no length"):
        feed_of(0).sample((i for i in range(3)), True, 0, "carry", None)  # type: ignore[arg-type]


def test_a_rank_outside_the_plan() -> None:
    with pytest.raises(PlanError, match="this is rank 4, the plan has 4 devices"):
        _ = feed_of(4).rows
