"""The GPU benchmark's own code, on a CPU device: every section gives rows, none is lost when one fails or hangs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench import gpu
from penstock.bench.peers import gpu_reservoir
from penstock.bench.peers.gpt import SMALL, Gpt
from penstock.bench.peers.gpu_sections import SECTIONS, under
from penstock.bench.peers.gpu_setup import Setup
from penstock.ir.errors import WorkerError
from penstock.runtime.simulate import Span, Timeline

FIELDS = {"bench", "section", "figure", "measured", "target", "ok", "date", "command", "device", "torch", "cuda"}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_section_runs_and_its_rows_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """But those that have tests of their own; what depends on the clock of a shared machine may miss its target."""
    threads = torch.get_num_threads()
    sections = [name for name in SECTIONS if name not in ("parity", "reservoir")]
    out = tmp_path / "rows.jsonl"
    gpu.main(["--device", "cpu", "--small", "--out", str(out), *(f"--section={name}" for name in sections)])
    rows = rows_of(out)
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == rows
    assert {row["section"] for row in rows} == set(sections)
    assert all(row.keys() >= FIELDS for row in rows)
    exact = [row for row in rows if row["ok"] is not None and "step" not in row["figure"]]
    assert len(exact) > 10 and [row for row in exact if not row["ok"]] == []
    assert str(tmp_path) not in out.read_text()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_reservoir_compares_plans_and_peers_and_says_what_is_skipped(tmp_path: Path) -> None:
    setup = Setup("cpu", small=True, scratch=tmp_path)
    rows = list(SECTIONS["reservoir"][0](setup))
    assert [row for row in rows if row["ok"] is False] == [] and str(tmp_path) not in json.dumps(rows)
    plans = {row.get("plan") for row in rows if row["figure"] == "step, tokens a second"}
    assert {"auto", "fuyou", "no overlap"} <= plans
    step = next(row for row in rows if row["figure"] == "step over the longest of its parts alone")
    assert step["parts_s"].keys() >= {"computation", "optimizer", "disk"} and step["bound_by"] in step["parts_s"]
    (largest,) = (row for row in rows if row["figure"].startswith("the largest model"))
    assert largest["measured"] * 1e9 > step["parameters"] and "missing" in largest["why"]
    tried = {row["plan"]: row for row in rows if "peer" in row["figure"]}
    assert tried.keys() == {"fsdp2, all in DRAM", "zero-offload", "zero-infinity"}
    assert tried["fsdp2, all in DRAM"]["losses"][1] < tried["fsdp2, all in DRAM"]["losses"][0]
    if importlib.util.find_spec("deepspeed") is None:
        assert tried["zero-offload"]["measured"] == "No module named 'deepspeed'"


def test_the_reservoir_skips_what_there_is_no_time_or_no_disk_for() -> None:
    rows = list(SECTIONS["reservoir"][0](Setup("cpu", small=True, scratch=Path("/nonexistent"), seconds=0.0)))
    figures = [row["figure"] for row in rows]
    assert "plans have DRAM only" in figures and "a plan is skipped" in figures and "a peer is skipped" in figures
    assert "step, tokens a second" not in figures


def test_a_plan_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        yield {"figure": "first"}
        raise WorkerError("half a step")

    monkeypatch.setattr(gpu_reservoir, "measure_plan", failing)
    nothing: Any = None
    first, failure = gpu_reservoir.run_plan(nothing, nothing, nothing, {"plan": "fuyou"}, {})
    assert first == {"figure": "first"}
    assert (failure["ok"], failure["plan"], failure["error"]) == (False, "fuyou", "WorkerError: half a step")


def test_computation_of_many_layers_is_a_line_through_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reservoir, "micro_batch_s", lambda bench, case, layers: 0.5 + 0.25 * layers)
    bench: Any = None
    for case in (*gpu_reservoir.CASES, *gpu_reservoir.SMALL_CASES):
        expected = case.micro_batches * (0.5 + 0.25 * case.size.layers)
        assert gpu_reservoir.computation_s(bench, case) == pytest.approx(expected)


def test_weights_that_take_no_memory_are_all_there_and_differ() -> None:
    with torch.device("meta"):
        model = Gpt(SMALL)
    gpu_reservoir.give_values(model)
    assert model.head.weight is model.words.weight and not any(p.is_meta for p in model.parameters())
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) < 0.1 * sum(p.nbytes for p in model.parameters())
    lines = model.blocks[0].widen.weight.detach()
    assert len(torch.unique(lines, dim=0)) == len(lines) and 0.01 < float(lines.std()) < 0.03


def test_what_a_section_raises_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(setup: Any) -> Any:
        yield {"figure": "first", "measured": 1, "target": None, "ok": None}
        raise ValueError("no second figure")

    monkeypatch.setitem(SECTIONS, "machine", (broken, 10))
    out = tmp_path / "rows.jsonl"
    assert gpu.main(["--device", "cpu", "--small", "--out", str(out), "--section", "machine"]) == 1
    first, failure, _ = rows_of(out)
    assert first["figure"] == "first" and first["ok"] is None
    assert failure["ok"] is False and failure["measured"] == "ValueError: no second figure"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('{\"ok\": true}', flush=True); import time; time.sleep(60)", "took more than 2 s"),
        ("print('{\"ok\": true}', flush=True); import os; os.abort()", "ended with exit code -6"),
    ],
)
def test_a_child_that_hangs_or_dies_keeps_its_rows(code: str, reason: str) -> None:
    rows = list(gpu.run_child([sys.executable, "-c", code], "parity", 2.0))
    assert rows[0] == {"ok": True} and rows[1]["measured"] == reason and rows[1]["ok"] is False


def test_nothing_starts_when_the_time_is_over() -> None:
    (row,) = gpu.run_child([sys.executable, "-c", "raise SystemExit"], "parity", 1.0)
    assert row["ok"] is False and row["measured"] == "no time was left for it"


def test_a_clone_of_any_name_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    gpu.make_importable()
    assert (Path(sys.path[0]) / "penstock" / "ir" / "ops" / "table.py").is_file()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [sys.path[0], "elsewhere"]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["large-model", "reservoir"])
def test_what_is_optional_is_not_needed(section: str, tmp_path: Path) -> None:
    """A machine with a GPU need not have the packages of the command line, of Hugging Face, of NVML, of solvers."""
    absent = ["transformers", "rich", "typer", "pynvml", "expecttest", "hypothesis", "pytest"]
    absent += ["mip", "highspy", "pymetis", "liburing", "deepspeed"]
    code = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
from penstock.bench import gpu
sys.exit(gpu.main(["--device", "cpu", "--small", "--section", "{section}", "--scratch", "{tmp_path}"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    figures = [json.loads(line)["figure"] for line in done.stdout.splitlines()]
    assert "the loss falls" in figures and "the section runs" not in figures, done.stderr


def test_the_share_of_one_stream_under_another() -> None:
    def span(stream: str, start_s: float, end_s: float) -> Span:
        return Span(0, stream, "fetch", "", start_s, end_s)

    timeline = Timeline.from_spans([span("h2d", 0, 2), span("h2d", 4, 6), span("compute", 1, 5)], ["gpu0"])
    assert under(timeline, "h2d", "compute") == pytest.approx(0.5)
    assert under(timeline, "d2h", "compute") == 0.0
