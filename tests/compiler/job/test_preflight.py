"""The needs of a run that planning does not have, of the machine it starts on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.compiler.job import preflight as launch
from penstock.compiler.job.preflight import plain_directories, require_machine
from penstock.ir import ops
from penstock.ir.errors import HardwareError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Interface, ParamSpec, Program, StageSpec
from penstock.tests.compiler.eager_baseline import SGD, zoo_case


def reading() -> Program:
    """A program that reads a stage's weights from SSD."""
    spec = StageSpec(
        "stage0", inputs=(), outputs=(), params=(ParamSpec("w", (64, 64), "float32", requires_grad=False),)
    )
    program = Program(0, Interface({"stage0": spec}, {}))
    (weights,) = program.emit(ops.read, "stage0.weights", names=["w_dram"])
    program.emit(ops.free, weights)
    program.returns({})
    return program


def test_a_plan_with_ssds_needs_a_directory_only_when_it_runs(tmp_path: Path) -> None:
    nameless = Hardware.cpu(1, ssd="1GB")
    with pytest.raises(HardwareError, match=r"ssd0, but no directory .*ssd_dirs=\[\"/mnt/nvme0\"\]"):
        require_machine(nameless, [reading()])
    require_machine(nameless, [reading()], [str(tmp_path)])
    require_machine(Hardware.cpu(1, ssd="1GB", ssd_dir=tmp_path), [reading()])
    program = reading()
    for node in list(program.ops())[::-1]:
        program.graph.erase_node(node)
    require_machine(nameless, [program])


@pytest.mark.slow
def test_more_dram_than_the_machine_has_is_refused_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = zoo_case("mlp")
    monkeypatch.setattr(launch, "ram_bytes", lambda: 10 * 10**9)
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "strategy": "balanced"}
    job = penstock.compile(model, Hardware.cpu(1, dram="1TB"), **options)  # planning does not mind
    assert job.simulate().step_s > 0 and job.rehearse().step_s > 0
    with pytest.raises(HardwareError, match=r"dram0: .* 9\.31 GiB in all.*dram=\"8GB\"") as caught:
        job.step(batch)
    nearest = str(caught.value).split('dram="')[1].split('"')[0]
    with penstock.compile(model, Hardware.cpu(1, dram="1TB").with_(dram=nearest), **options) as job:
        job.step(batch)


def test_directories_are_a_list_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plain_directories(None) == [] and plain_directories([tmp_path, "b"]) == [str(tmp_path), str(tmp_path / "b")]
    for wrong in ("/mnt/nvme0", tmp_path, [1], [""]):
        with pytest.raises(PlanError, match=r"ssd_dirs=.*list of directories"):
            plain_directories(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_directories_reach_the_devices_and_the_written_job(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    machine = Hardware.cpu(1, ssd="1GB", ssd_dir=tmp_path / "document")
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "strategy": "balanced"}
    job = penstock.compile(model, machine, ssd_dirs=[tmp_path / "given"], ssd_verify=True, **options)
    written = job.write(tmp_path / "job")
    for each in (job, penstock.load(written, model)):
        told = each._run.setup(written).for_device(0).share
        assert (told.ssd_dirs, told.ssd_verify) == ((str(tmp_path / "given"),), True)
    other = penstock.load(written, model, ssd_dirs=[tmp_path / "other"])
    assert other._run.setup(written).ssd_dirs_of(0) == [str(tmp_path / "other")]
    own = penstock.compile(model, machine, **options)._run.setup(written)
    assert own.for_device(0).share.ssd_dirs == (str(tmp_path / "document"),)
