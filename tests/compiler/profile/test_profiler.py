"""Profiling: each distinct block once, from the cache where it is there, on devices that are here, and what it does to
a plan. What runs in child processes is replaced by made-up times, except in one test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.main import main
from penstock.compiler.capture.trace import trace
from penstock.compiler.profile import profile
from penstock.compiler.profile.cache import ProfileCache
from penstock.graph.blocks import Block
from penstock.graph.opgraph import OpGraph
from penstock.graph.profile import BlockSample, distinct
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir.errors import DoesNotFit, HardwareError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.compiler.eager_baseline import SGD, zoo_case
from penstock.tests.passes.running import apply, draft_of, trace_case

HERE = Hardware.cpu(num_devices=2)


class Runs:
    """Takes the place of what measures; remembers what it was asked for."""

    def __init__(self, *seconds: float):
        self.seconds = TurnSeconds(*(seconds or (0.01, 0.02, 0.03)))
        self.asked: list[tuple[str, list[str]]] = []  # device's title, blocks

    def __call__(
        self, part: profile.DeviceKind, wanted: Sequence[BlockSample], precision: str, expected_s: float
    ) -> dict[str, TurnSeconds]:
        assert expected_s > 0
        self.asked.append((part.title, [sample.stage.blocks[0] for sample in wanted]))
        return {sample.hash: self.seconds for sample in wanted}


@pytest.fixture
def gpt2() -> tuple[OpGraph, list[Block]]:
    graph, _ = trace_case("gpt2")
    return graph, apply(draft_of(graph), Coarsen()).blocks


def test_each_hash_is_run_once_and_never_again(gpt2: tuple[OpGraph, list[Block]], tmp_path: Path) -> None:
    graph, blocks = gpt2
    runs = Runs()
    profiler = profile.Profiler(ProfileCache(tmp_path), "fp32", runs)
    found = profiler(graph, blocks, HERE)
    ((title, names),) = runs.asked
    assert names == [block.name for block in distinct(blocks).values()] and "transformer.h.1" not in names
    assert title.endswith("1 threads, " + f"{profile.usable_cores()} cores, 2 devices at once")
    assert all(block.seconds == {"cpu0": runs.seconds, "cpu1": runs.seconds} for block in found)
    assert profiler(graph, blocks, HERE) == found
    again = profile.Profiler(ProfileCache(tmp_path), "fp32", runs)
    assert again(graph, blocks, HERE) == found
    assert len(runs.asked) == 1


@pytest.mark.parametrize("change", ["precision", "torch", "devices", "threads", "shape"])
def test_what_was_measured_of_something_else_is_not_used(
    gpt2: tuple[OpGraph, list[Block]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    graph, blocks = gpt2
    runs = Runs()
    profile.Profiler(ProfileCache(tmp_path), "fp32", runs)(graph, blocks, HERE)
    precision, hardware = "fp32", HERE
    if change == "precision":
        precision = "bf16"
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.0.0")
    elif change == "devices":
        hardware = Hardware.cpu(num_devices=1)
    elif change == "threads":
        monkeypatch.setattr(profile, "usable_cores", lambda: 64)
        hardware = Hardware.cpu(num_devices=2, threads=2)
    else:
        model, batch = zoo_case("gpt2")
        graph = trace(model, {name: value[:, :8] for name, value in batch.items()})
        blocks = apply(draft_of(graph), Coarsen()).blocks
    profile.Profiler(ProfileCache(tmp_path), precision, runs)(graph, blocks, hardware)
    assert [len(names) for _, names in runs.asked] == [len(distinct(blocks))] * 2


def test_only_what_is_missing_is_run(gpt2: tuple[OpGraph, list[Block]], tmp_path: Path) -> None:
    graph, blocks = gpt2
    runs, cache = Runs(), ProfileCache(tmp_path)
    profiler = profile.Profiler(cache, "fp32", runs)
    profiler(graph, blocks, HERE)
    (gone,) = [path for path in tmp_path.iterdir() if path.name.startswith(blocks[2].hash)]
    gone.write_text("{")
    with pytest.warns(UserWarning, match="is damaged"):
        profiler(graph, blocks, HERE)
    assert runs.asked[1][1] == ["transformer.h.0"]
    entry = json.loads(gone.read_text())
    entry["seconds"]["forward_s"] = float("nan")
    gone.write_text(json.dumps(entry))
    with pytest.raises(PlanError, match=f"forward_s of .*{gone.name} is nan"):
        profiler(graph, blocks, HERE)
    assert len(runs.asked) == 2


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_a_measurement_that_is_no_time_is_refused_and_not_kept(
    gpt2: tuple[OpGraph, list[Block]], tmp_path: Path, value: float
) -> None:
    profiler = profile.Profiler(ProfileCache(tmp_path), "fp32", Runs(1.0, value, 1.0))
    with pytest.raises(PlanError, match=r"rematerialise_s of block 'transformer.wte'"):
        profiler(*gpt2, HERE)
    assert not list(tmp_path.iterdir())


def test_a_block_that_was_not_measured_is_named(gpt2: tuple[OpGraph, list[Block]], tmp_path: Path) -> None:
    profiler = profile.Profiler(ProfileCache(tmp_path), "fp32", lambda *_: {})
    with pytest.raises(PlanError, match=r"block 'transformer.wte' .* was not measured on"):
        profiler(*gpt2, HERE)


# --- which devices are here


def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str, gib: float = 24.0) -> None:
    parts = [SimpleNamespace(name=name, total_memory=int(gib * 2**30)) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(parts))
    monkeypatch.setattr(torch.cuda, "get_device_properties", parts.__getitem__)


def test_devices_of_one_kind_are_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090")
    (part,) = profile.parts_here(Hardware.preset("rtx3090x2"))
    assert (part.kind, part.number, part.together) == ("cuda", 0, 1)
    assert [device.name for device in part.devices] == ["gpu0", "gpu1"]
    assert part.title == "NVIDIA GeForce RTX 3090, 24.0 GiB"


@pytest.mark.parametrize(
    ("here", "gib", "wanted", "said"),
    [
        ((), 24.0, "rtx3090x2", "gpu0 of rtx3090x2 is a GPU; here is .* no GPU"),
        (
            ("NVIDIA GeForce RTX 3090",),
            24.0,
            "rtx3090x2",
            "gpu1 of rtx3090x2 is a GPU; here is NVIDIA GeForce RTX 3090",
        ),
        (("NVIDIA GeForce RTX 4090",) * 2, 24.0, "rtx3090x2", "gpu0 of rtx3090x2 is a GPU with 0.4 times the rate"),
        (("NVIDIA H200",) * 2, 141.0, "rtx3090x2", r"gpu0 of rtx3090x2 is a GPU with 24.0 GiB; here is NVIDIA H200"),
        (("Tesla V100-SXM2-32GB",) * 99, 32.0, "mics-p3dn:2", "gpu8 of mics-p3dn:2 is on host 1"),
    ],
)
def test_devices_that_are_not_here_raise(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], gib: float, wanted: str, said: str
) -> None:
    if here:
        gpus(monkeypatch, *here, gib=gib)
    else:
        no_gpus(monkeypatch)
    with pytest.raises(HardwareError, match=said):
        profile.parts_here(Hardware.preset(wanted))


def test_more_threads_than_cores_raise() -> None:
    with pytest.raises(HardwareError, match=r"cpu0 of .* computes on 4096 threads; here is .* cores"):
        profile.parts_here(Hardware.cpu(threads=4096))


def test_the_name_of_a_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: Some CPU\n\ncpu family\t: 25\n")
    assert profile.cpu_model(cpuinfo) == "Some CPU family 25 model 1"
    assert profile.cpu_model(tmp_path / "none")


# --- plans


def test_other_machines_take_the_times_of_their_twins_here(gpt2: tuple[OpGraph, list[Block]], tmp_path: Path) -> None:
    runs = Runs()
    profiler = profile.Profiler(ProfileCache(tmp_path), "fp32", runs)
    what_if = profile.for_machines_like(profiler, HERE)
    for more in ({"num_devices": 3}, {"memory": "1GB", "h2d": "1GB/s"}):
        machine = Hardware.cpu(**more)
        found = what_if(*gpt2, machine)
        names = {device.name: runs.seconds for device in machine.devices}
        assert all(block.seconds == names for block in found)
    assert len(runs.asked) == 1
    with pytest.raises(HardwareError, match="computes as cpu0 does; leave profile out"):
        what_if(*gpt2, Hardware.cpu(num_devices=2).with_(op_overhead_s=1e-3))


@pytest.mark.slow
def test_what_nearly_fits_is_found_by_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "run_on_this_machine", Runs(1.0, 1.0, 1.0))
    model, batch = zoo_case("gpt2")
    with pytest.raises(DoesNotFit, match=r"Tried, and fits: .* s a step") as miss:
        penstock.compile(
            model, Hardware.cpu(memory="40kB"), example_inputs=batch, optimizer=SGD, micro_batches=4, profile=tmp_path
        )
    assert miss.value.nearest["memory"]


@pytest.mark.slow
def test_a_plan_predicts_by_the_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = zoo_case("gpt2")

    def step_s(directory: Path | None, *seconds: float) -> float:
        if seconds:
            monkeypatch.setattr(profile, "run_on_this_machine", Runs(*seconds))
        job = penstock.compile(
            model, Hardware.cpu(num_devices=1), example_inputs=batch, optimizer=SGD, micro_batches=4, profile=directory
        )
        measured = "times of blocks were measured on cpu0"
        assert (job.plan.notes.get("coarsen") == measured) == (directory is not None)
        again = penstock.compile(
            model, Hardware.cpu(num_devices=1), example_inputs=batch, optimizer=SGD, plan=job.plan, profile=directory
        )
        assert again.simulate().step_s == job.simulate().step_s == job.plan.predicted.step_s  # type: ignore[union-attr]
        return job.simulate().step_s

    blocks = 6
    usual_s, slower_s, faster_s = (
        step_s(None),
        step_s(tmp_path / "slow", 0.1, 0.1, 0.2),
        step_s(tmp_path / "fast", 1e-6, 1e-6, 2e-6),
    )
    assert faster_s < usual_s < slower_s
    assert slower_s - faster_s == pytest.approx(4 * blocks * 0.3, rel=1e-3)
    monkeypatch.setattr(profile, "run_on_this_machine", Runs(9.0, 9.0, 9.0))
    assert step_s(tmp_path / "slow") == slower_s  # from the cache


def test_absent_hardware_raises_instead_of_planning_by_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_gpus(monkeypatch)
    model, batch = zoo_case("mlp")
    with pytest.raises(HardwareError, match="gpu0 of rtx3090x2 is a GPU"):
        penstock.compile(model, "rtx3090x2", example_inputs=batch, profile=tmp_path)


@pytest.mark.parametrize("wrong", [1.5, "file", ["x"]])
def test_profile_is_a_directory_or_true(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model, batch = zoo_case("mlp")
    given = tmp_path / wrong if wrong == "file" else wrong
    with pytest.raises(PlanError, match="profile="):
        penstock.compile(model, HERE, example_inputs=batch, profile=given)


# --- for real


@pytest.mark.slow
@pytest.mark.multi
def test_command_line_measures_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = "gpt2:n_layer=2,n_embd=32,n_head=4,vocab_size=96,n_positions=64"
    words = [
        "--model",
        model,
        "--hardware",
        "cpu",
        "--batch",
        "4",
        "--sequence",
        "16",
        "--profile-cache",
        str(tmp_path),
    ]

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *words])
        said = capsys.readouterr()
        assert ended.value.code in (0, None), said.err
        return said.out

    report = json.loads(run("profile", "--json"))
    ((title, rows),) = report["devices"].items()
    assert title.endswith("2 devices at once") and report["micro_batches"] == 2
    assert [(row["block"], row["count"]) for row in rows][2] == ("transformer.h.0", 2)
    names = ("forward_s", "rematerialise_s", "backward_s")
    assert all(0 < row[name] < 10 for row in rows for name in names)
    monkeypatch.setattr(profile, "run_on_this_machine", None)  # from here on everything is in the cache
    assert "transformer.h.0" in run("profile")
    gpipe = ("--micro-batches", "2", "--strategy", "gpipe", "--no-alternatives")
    plan = json.loads(run("plan", "--profile", "--json", *gpipe))
    assert plan["notes"]["coarsen"] == "times of blocks were measured on cpu0, cpu1"
