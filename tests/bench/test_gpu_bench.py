"""The GPU benchmark's sections, on a CPU device: each gives rows, and says what is skipped."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench.peers import (
    exchanges,
    extensions,
    gpu_bounds,
    gpu_cases,
    gpu_comparison,
    gpu_offload,
    gpu_offload_child,
    gpu_reservoir,
    several_gpus,
)
from penstock.bench.peers.gpt import SMALL, Gpt, batch_of, gpt
from penstock.bench.peers.gpu_sections import SECTIONS, share_under
from penstock.bench.peers.gpu_setup import Setup
from penstock.bench.peers.several_ranks import FSDP, PIPELINE, Slice, loss_of
from penstock.ir.errors import WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.simulate import Span, Timeline


@pytest.mark.slow
def test_the_reservoir_compares_plans_and_peers_and_says_what_is_skipped(tmp_path: Path) -> None:
    setup = Setup("cpu", small=True, scratch=tmp_path)
    sides = [gpu_comparison.one_side(setup, side, None) for side in ("penstock", *gpu_comparison.PEERS)]
    rows = list(chain(SECTIONS["reservoir"](setup), *sides))
    assert [row for row in rows if row["ok"] is False] == [] and str(tmp_path) not in json.dumps(rows)
    plans = {row.get("plan") for row in rows if row["figure"] == "step, tokens a second"}
    assert {"auto", "fuyou", "no overlap"} <= plans
    step = next(row for row in rows if row["figure"] == "step over the longest of its parts alone")
    assert step["parts_s"].keys() >= {"computation", "optimizer", "disk"} and step["bound_by"] in step["parts_s"]
    assert {row["precision"] for row in rows if "step_s" in row} == {"bf16", "bf16-true"}
    (largest,) = (row for row in rows if row["figure"].startswith("the largest model"))
    assert largest["measured"] * 1e9 > step["parameters"] and "missing" in largest["why"]
    tried = {row["plan"]: row for row in rows if "peer" in row["figure"]}
    assert tried.keys() == {"fsdp2, all in DRAM", "zero-offload", "zero-infinity"}
    assert tried["fsdp2, all in DRAM"]["losses"][1] < tried["fsdp2, all in DRAM"]["losses"][0]
    if importlib.util.find_spec("deepspeed") is None:
        assert tried["zero-offload"]["measured"] == "No module named 'deepspeed'"


@pytest.mark.slow
def test_the_reservoir_skips_what_there_is_no_time_or_no_disk_for() -> None:
    setup = Setup("cpu", small=True, scratch=Path("/nonexistent"), seconds=0.0)
    rows = [*SECTIONS["reservoir"](setup), *gpu_comparison.one_side(setup, "fsdp2", None)]
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
    monkeypatch.setattr(gpu_bounds, "micro_batch_s", lambda bench, case, layers: 0.5 + 0.25 * layers)
    bench: Any = None
    for case in (*gpu_cases.CASES, *(small.case for small in gpu_cases.SMALL.values())):
        expected = case.micro_batches * (0.5 + 0.25 * case.size.layers)
        assert gpu_bounds.computation_s(bench, case) == pytest.approx(expected)


def test_weights_that_take_no_memory_are_all_there_and_differ() -> None:
    with torch.device("meta"):
        model = Gpt(SMALL)
    gpu_reservoir.give_values(model)
    assert model.head.weight is model.words.weight and not any(p.is_meta for p in model.parameters())
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) < 0.1 * sum(p.nbytes for p in model.parameters())
    lines = model.blocks[0].widen.weight.detach()
    assert len(torch.unique(lines, dim=0)) == len(lines) and 0.01 < float(lines.std()) < 0.03


def test_extensions_that_cannot_be_built_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, folder = Setup("cuda", small=True, scratch=Path("/nonexistent")), Path("/nonexistent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (row,) = gpu_offload.extensions(gpu)
    assert row["measured"] == "No module named 'deepspeed'" and row["ok"] is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    (row,) = gpu_offload.extensions(Setup("cpu", small=True, scratch=folder))
    assert row["ok"] is None and "CPU" in row["measured"]
    monkeypatch.setattr(gpu_offload, "ready_to_build", lambda: None)
    monkeypatch.setattr(extensions.sys, "executable", "/bin/false")
    rows = list(gpu_offload.extensions(gpu))
    assert [row["builder"] for row in rows] == list(extensions.BUILDERS) and all("error" in row for row in rows)


def test_zero_offload_has_no_buckets_larger_than_its_model() -> None:
    settings = {"peer": "zero-offload", "batch": 4, "micro_batches": 2, "lr": 1e-4}
    sizes = [
        gpu_offload_child.configuration(settings, 10, 10, all_params)["zero_optimization"]
        for all_params in (100, 10**10)
    ]
    assert [size["reduce_bucket_size"] for size in sizes] == [100, gpu_offload_child.BUCKET_PARAMS]


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
from pathlib import Path
from penstock.bench.peers.gpu_sections import SECTIONS
from penstock.bench.peers.gpu_setup import Setup
from penstock.bench.peers.several_ranks import FSDP, PIPELINE, Slice, loss_of
for row in SECTIONS["{section}"](Setup("cpu", small=True, scratch=Path("{tmp_path}"))):
    print(row["figure"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "the loss falls" in done.stdout.splitlines(), done.stderr


def test_the_share_of_one_stream_under_another() -> None:
    def span(stream: str, start_s: float, end_s: float) -> Span:
        return Span(0, stream, "fetch", "", start_s, end_s)

    timeline = Timeline.from_spans([span("h2d", 0, 2), span("h2d", 4, 6), span("compute", 1, 5)], ["gpu0"])
    assert share_under(timeline, "h2d", "compute") == pytest.approx(0.5)
    assert share_under(timeline, "d2h", "compute") == 0.0


def test_several_gpus_compare_the_fastest_sides_by_their_slowest_rank(tmp_path: Path) -> None:
    for part in (several_gpus.several, exchanges.exchanges):
        (told,) = part(Setup("cpu", small=True, scratch=tmp_path))
        assert told["measured"] == "this machine has one at most"
    times = {"1f1b": (2.0, 4.0), "mobius": (3.0, 3.0), FSDP: (4.0, 5.0), PIPELINE: (6.0, 6.0)}
    losses = {PIPELINE: (None, 2.0002)}
    sides = {
        name: [
            {"rank": rank, "side": name, "step_s": step_s, "loss": loss, "reserved_gib": rank}
            for rank, (step_s, loss) in enumerate(zip(steps, losses.get(name, (2.0, 2.0))))
        ]
        for name, steps in times.items()
    }  # fmt: skip
    row = several_gpus.summary(sides[PIPELINE][::-1], 2)
    assert row["measured"] == 6.0 and row["loss"] == 2.0002 and row["reserved_gib"] == [0, 1]
    refused = several_gpus.summary([{"rank": 0, "side": "mics", "refused": "no room"}], 2)
    assert refused["measured"] == "no room" and refused["side"] == "mics"
    ratio, apart = several_gpus.comparison({**sides, "mics": [{"refused": "no room"}]}, small=True)
    assert ratio["measured"] == 0.6 and (ratio["plan"], ratio["peer"], ratio["ok"]) == ("mobius", FSDP, True)
    assert apart["measured"] == pytest.approx(1e-4) and len([*several_gpus.comparison(sides, small=False)]) == 1


def test_exchanges_are_beside_what_the_simulator_counts() -> None:
    """By hand, on four GPUs over NVLink: three rounds of a part; by host, a round of a part, then one of two."""
    hardware, num_bytes = Hardware.from_any("a100-80gbx4"), 4 << 20
    rate, latency_s = hardware.hosts[0].nvlink_bandwidth, hardware.hosts[0].nvlink_latency_s
    assert rate is not None
    gather_s = 3 * latency_s + 3 / 4 * num_bytes / rate
    by_host_s = 2 * latency_s + (1 / 4 + 2 / 4) * num_bytes / rate
    wanted = {"gather": gather_s, "reduce-scatter": gather_s, "gather by host": by_host_s}
    for exchange, seconds in wanted.items():
        found = exchanges.predicted_s(exchange, [0, 1, 2, 3], num_bytes, hardware, [0, 0, 1, 1])
        assert found == pytest.approx(seconds), exchange
    counted = exchanges.counted_bytes([0, 1, 2, 3], 1, hardware)  # 32 channels of a group, 16 of messages
    assert {name: num_bytes >> 20 for name, num_bytes in counted.items()} == {
        "first": 2 * (2 + 3 * 16), "message": 16 * 10, "rest": 2 * (2 + 3 * 32), "gather": 32 * 12, "sums": 32 * 12
    }  # fmt: skip
    message_s = exchanges.predicted_s("message", [1, 3], num_bytes, hardware, [])
    assert message_s == pytest.approx(latency_s + num_bytes / rate)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_slices_of_a_pipeline_are_the_model(world: int) -> None:
    model, batch = gpt(SMALL), batch_of(SMALL, 2)
    value = batch["words"]
    for rank in range(world):
        value = Slice(model, rank, world)(value)
    wanted = model(**batch)
    assert torch.equal(value, wanted["logits"]) and torch.equal(loss_of(value, batch["labels"]), wanted["loss"])
