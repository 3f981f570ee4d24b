"""Rehearsals: real processes, threads and messages for machines that are not here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.ir.errors import BudgetExceeded, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program
from penstock.runtime.processes.rehearse import RehearsingWorkers, rehearse
from penstock.runtime.processes.setup import RunSetup
from penstock.runtime.simulate import Timeline, simulate
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.generated_files import write_chain

WIDTH = 30_000  # 3.4 GiB of weights a stage: more than this machine has for all of them
STEP_S = 1.5  # what a rehearsal is stretched to
TOPOLOGIES = ["mobius-topo4", "mobius-topo2+2", "mobius-topo1+3"]


def setup_for(programs: Sequence[Program], hardware: Hardware, folder: Path) -> RunSetup:
    folder.mkdir(exist_ok=True)
    return RunSetup(write_chain(folder, programs, WIDTH), programs[0].interface, hardware, trust=TRUSTED)


@dataclass
class Found:
    """Some rehearsals of one plan, and what its workers held meanwhile."""

    hardware: Hardware
    programs: Sequence[Program]
    runs: list[Timeline]
    anonymous_bytes: list[int]
    process_ids: list[int]


@pytest.fixture(scope="module")
def swapping() -> list[Program]:
    """Eight stages on four devices, all swapped, gradients clipped over all devices."""
    return pipeline(4, 8, 4, width=WIDTH, rows=2000, flops=1e12, clip=True)


@pytest.fixture(scope="module")
def found(swapping: list[Program], tmp_path_factory: pytest.TempPathFactory) -> Found:
    hardware = Hardware.preset("mobius-topo2+2")
    setup = setup_for(swapping, hardware, tmp_path_factory.mktemp("swapping"))
    workers = RehearsingWorkers(setup, STEP_S / simulate(swapping, hardware).step_s)
    with workers:
        runs = [workers.rehearse() for _ in range(3)]
        held = [status_bytes(pid, "RssAnon") for pid in workers.process_ids]
    return Found(hardware, swapping, runs, held, workers.process_ids)


def status_bytes(pid: int, row: str) -> int:
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition(f"{row}:")[2].split()[0])


@pytest.mark.slow
def test_agrees_with_the_simulation(found: Found) -> None:
    """The least disturbed of them."""
    simulated_s = simulate(found.programs, found.hardware).step_s
    assert min(run.step_s for run in found.runs) == pytest.approx(simulated_s, rel=0.05)


@pytest.mark.slow
def test_what_shares_a_root_complex_waits(found: Found) -> None:
    """Op by op, not only at the end."""
    simulated = simulate(found.programs, found.hardware)
    expected = {(s.device, s.text): s.end_s for s in simulated.spans}
    best = min(found.runs, key=lambda run: run.step_s)
    assert len(best.spans) == len(expected)
    late_s = sorted(s.end_s - expected[s.device, s.text] for s in best.spans)
    assert late_s[len(late_s) // 2] == pytest.approx(0, abs=0.05 * simulated.step_s)
    alone = simulate(found.programs, found.hardware.with_(root_complex_bandwidth="1TB/s"))
    assert alone.step_s < 0.9 * simulated.step_s  # else this plan would show nothing


@pytest.mark.slow
def test_memory_is_accounted_for_and_not_held(found: Found) -> None:
    assert found.runs[0].peak_bytes == simulate(found.programs, found.hardware).peak_bytes
    assert max(found.anonymous_bytes) < 500e6
    assert not any(Path(f"/proc/{pid}").exists() for pid in found.process_ids)


@pytest.mark.slow
def test_a_memory_that_is_too_small(swapping: list[Program], tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded, match="gpu"):
        rehearse(setup_for(swapping, Hardware.preset("mobius-topo2+2", memory="4GB"), tmp_path), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOPOLOGIES, "mobius-8gpu", "mobius-v100", "ftpipe-2080ti"])
@pytest.mark.parametrize("fetched", [True, False])
def test_agrees_on_the_machines_of_the_papers(name: str, fetched: bool, tmp_path: Path) -> None:
    hardware = Hardware.preset(name)
    count = hardware.num_devices
    programs = pipeline(count, (2 if fetched else 1) * count, 4, width=12_000, rows=2000, flops=1e12, fetched=fetched)
    setup = RunSetup(write_chain(tmp_path, programs, 12_000), programs[0].interface, hardware, trust=TRUSTED)
    simulated_s = simulate(programs, hardware).step_s
    found_s = min(rehearse(setup, 6.0 / simulated_s).step_s for _ in range(2))
    assert found_s == pytest.approx(simulated_s, rel=0.05)


@pytest.mark.slow
def test_devices_of_several_hosts(tmp_path: Path) -> None:
    """Their processes are all here, the network is in between."""
    one = json.loads(Hardware.preset("mobius-topo4").with_(num_devices=1).model_dump_json())
    device = {**one["devices"][0], "name": "far", "host": 1}
    two = {**one, "hosts": one["hosts"] * 2, "devices": [*one["devices"], device]}
    hardware = Hardware.model_validate({**two, "network": {"bandwidth": "1GB/s"}})
    programs = pipeline(2, 2, 2, width=WIDTH, rows=2000, flops=1e12, fetched=False)
    setup = setup_for(programs, hardware, tmp_path)
    simulated_s = simulate(programs, hardware).step_s
    assert rehearse(setup, STEP_S / simulated_s).step_s == pytest.approx(simulated_s, rel=0.05)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), "2"])
def test_a_scale_that_is_none(scale: object, swapping: list[Program], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="time_scale"):
        rehearse(setup_for(swapping, Hardware.preset("mobius-topo2+2"), tmp_path), scale)  # type: ignore[arg-type]
