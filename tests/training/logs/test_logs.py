"""Each log is read back as its users read it, from a real run."""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.ir.errors import PlanError
from penstock.tests.training.live.told import OFFER
from penstock.tests.training.logged_run import MICRO_BATCHES, STEPS, TOKENS, compile_job, run
from penstock.training.listener import RunFacts, StepRecord
from penstock.training.logs import find
from penstock.training.logs.find import find_logs
from penstock.training.logs.jsonl import FILE, JsonLog
from penstock.training.logs.scalars import scalars
from penstock.training.logs.tensorboard import TensorBoardLog
from penstock.training.logs.wandb import WandbLog

EXPECTED = {
    "train/loss", "train/learning_rate", "train/gradient_norm", "speed/tokens_per_s", "speed/model_flops_utilisation",
    "speed/step_s", "speed/predicted_step_s", "speed/measured_over_predicted", "peak_bytes/cpu0", "peak_bytes/dram0",
    "moved_bytes/dram0_to_cpu0", "moved_bytes/cpu0_to_dram0", "ssd/written_bytes",
}  # fmt: skip
BLOCK, WHOLE, FIRST, LAST = 32768, 1, 2, 4  # of LevelDB's log format
FACTS = RunFacts("tiny", "out", total_steps=9)


def record(step: int, **more: float) -> StepRecord:
    return StepRecord(step, **{"loss": float(step), "seconds": 0.5, "tokens": 10, **more})  # type: ignore[arg-type]


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def test_jsonl_and_tensorboard_hold_what_the_run_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    noted = run(find_logs(["jsonl", "tensorboard", "jsonl"], tmp_path))
    rows = lines(tmp_path)
    step_rows = [row for row in rows if row["event"] == "step"]
    assert [row["event"] for row in rows] == ["begin", *["step"] * (STEPS - 1), "evaluation", "step", "end"]
    assert rows[0]["name"] == "tiny" and rows[0]["rows_per_step"] == MICRO_BATCHES
    for row, told in zip(step_rows, noted.records, strict=True):
        assert row["loss"] == told.loss and row["learning_rates"] == [1e-3] and row["tokens"] == TOKENS
        assert row["moved_bytes"] == told.moved_bytes and row["peak_bytes"] == told.peak_bytes
        assert row["model_flops_utilisation"] == told.model_flops_utilisation
    assert rows[-2]["step"] == STEPS and rows[-1]["interrupted"] is False

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    assert tags >= EXPECTED | {"evaluation/loss"}
    for tag in tags - {"evaluation/loss"}:
        found = [(event.step, event.value) for event in read.Scalars(tag)]
        assert found == [(told.step, pytest.approx(scalars(told)[tag], rel=1e-6)) for told in noted.records], tag
    (evaluation,) = read.Scalars("evaluation/loss")
    assert (evaluation.step, {"loss": pytest.approx(evaluation.value)}) == noted.evaluations[0]


@pytest.mark.slow
def test_wandb_writes_a_run_while_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    noted = run(find_logs(["wandb"], tmp_path), steps=2)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    rows = read_wandb(file)
    steps = [row for row in rows if "train/loss" in row]
    assert all(row.keys() >= EXPECTED | {"step"} for row in steps)
    assert [(row["step"], row["train/loss"]) for row in steps] == [(r.step, r.loss) for r in noted.records]
    assert [row["step"] for row in rows if "evaluation/loss" in row] == [1]


def test_an_offer_is_in_every_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for log in find_logs(["jsonl", "tensorboard"], tmp_path):
        log.begin(FACTS)
        log.offered(OFFER)
        log.end()
    (row,) = [row for row in lines(tmp_path) if row["event"] == "offer"]
    assert {**row, "event": 0, "time_s": 0} == {**dataclasses.asdict(OFFER), "event": 0, "time_s": 0}
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    figures = {"offer/step_s": 0.2, "offer/offered_step_s": 0.12, "offer/times_as_long/gpu1": 2.5}
    events = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert events == {tag: [(75, pytest.approx(value))] for tag, value in figures.items()}
    log, sent = WandbLog(tmp_path), list[dict[str, float]]()
    log._run = SimpleNamespace(log=sent.append)  # type: ignore[assignment]
    log.write_offer(OFFER)
    assert sent == [{"step": 75, **figures}]


def test_a_resumed_run_goes_on_in_both_files(tmp_path: Path) -> None:
    """TensorBoard forgets the steps that are made again; the lines of all attempts stay in jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        for log in find_logs(["jsonl", "tensorboard"], tmp_path):
            log.begin(RunFacts("tiny", "out", total_steps=4, done_steps=done))
            for step in steps:
                log.step(record(step))
            log.end()
    assert [row["step"] for row in lines(tmp_path) if row["event"] == "step"] == [1, 2, 3, 3, 4]
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_page_names_every_curve_and_its_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "logs.md").read_text()
    told = record(1, gradient_norm=1.0, predicted_s=1.0, model_flops_utilisation=0.5, ssd_wear_share=0.1)
    assert [name for name in scalars(told) if f"`{name}`" not in page] == []
    monkeypatch.chdir(tmp_path)
    job, batch = compile_job()
    exec(page.split("```python\n")[1].split("```")[0], {"job": job, "batches": [batch] * 3})
    assert [row["event"] for row in lines(tmp_path / "out" / "logs")] == ["begin", *["step"] * 3, "end"]


def test_a_torn_line_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    """As a full disk leaves it."""
    (tmp_path / FILE).write_text('{"event": "begin"}\n{"event": "st')
    log = JsonLog(tmp_path)
    log.begin(FACTS)
    log.end()
    rows = (tmp_path / FILE).read_text().splitlines()
    assert rows[1] == '{"event": "st' and [json.loads(row)["event"] for row in rows[2:]] == ["begin", "end"]


def test_a_log_that_cannot_begin_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(PlanError, match=r"the log .*log\.jsonl cannot be written: No space left"):
        JsonLog(tmp_path).begin(FACTS)


def test_each_group_of_parameters_has_a_curve() -> None:
    found = scalars(StepRecord(1, 2.0, 0.5, 10, learning_rates=(0.25, 0.5)))
    assert found["train/learning_rate/group0"] == 0.25 and found["train/learning_rate/group1"] == 0.5
    assert "train/gradient_norm" not in found and "ssd/wear_share" not in found


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    log = JsonLog(tmp_path)
    log.begin(FACTS)
    log.step(record(1, loss=float("nan")))
    log.end(interrupted=True)
    assert [row.get("loss") for row in lines(tmp_path)] == [None] * 3
    assert lines(tmp_path)[-1]["interrupted"] is True


def test_writing_stalls_nobody_and_all_is_written_at_the_end(tmp_path: Path) -> None:
    held, log = threading.Event(), JsonLog(tmp_path)
    write = log.write_step
    log.write_step = lambda found: held.wait(60) and write(found)  # type: ignore[method-assign, func-returns-value]
    log.begin(FACTS)
    for step in range(1, 6):
        log.step(record(step))
    log.evaluated(5, {"loss": 1.0})
    assert [row["event"] for row in lines(tmp_path)] == ["begin"]
    held.set()
    log.end()
    assert [row.get("step") for row in lines(tmp_path)] == [None, 1, 2, 3, 4, 5, 5, None]


@pytest.mark.slow
def test_a_log_that_breaks_is_warned_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    log = JsonLog(tmp_path)

    def full(found: StepRecord) -> None:
        raise OSError(28, "No space left on device")

    log.write_step = full  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"the log jsonl in .* is not written further: OSError: .*No space") as said:
        noted = run([log])
    assert len(noted.records) == STEPS
    assert sum("is not written further" in str(each.message) for each in said) == 1


@pytest.mark.parametrize("kind", [JsonLog, TensorBoardLog])
def test_a_place_that_cannot_be_written_stops_the_run_before_its_first_step(kind: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"the log .*file.* cannot be written"):
        kind(tmp_path / "file" / "logs").begin(FACTS)


def test_unknown_and_missing_loggers_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"--log 'tensorbord': the logs are jsonl, .*; the nearest is tensorboard"):
        find_logs(["jsonl", "tensorbord"], tmp_path)
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    assert len(find_logs(["jsonl"], tmp_path)) == 1
    for name in ("tensorboard", "wandb"):
        with pytest.raises(PlanError, match=rf"pip install 'penstock\[{name}\]'"):
            find_logs([name], tmp_path)


def read_wandb(file: Path) -> list[dict[str, object]]:
    """The rows of history in a file of a run, whose records are framed as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, begun, rows = file.read_bytes(), 7, b"", list[dict[str, object]]()
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # no room for a header: the block is padded
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part, place = data[place + 7 : place + 7 + length], place + 7 + length
        begun = part if kind in (WHOLE, FIRST) else begun + part
        if kind in (WHOLE, LAST):
            found = Record()
            found.ParseFromString(begun)
            items = found.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return [row for row in rows if row]
