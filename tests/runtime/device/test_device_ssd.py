"""One device with a part of the model on SSD: real files, the numbers of eager PyTorch, within the memory planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ir import ops
from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, profile_memory
from penstock.ir.verify import verify
from penstock.runtime.device.session import DeviceSession
from penstock.tests.ir.program.handmade import MAX_NORM, pipeline
from penstock.tests.runtime.device import test_device
from penstock.tests.runtime.device.test_device import MICRO_BATCHES, ROWS, STEPS, WIDTH, batch_of, eager
from penstock.tests.runtime.generated_files import write_chain
from penstock.tests.shown_elsewhere import slow_but

MACHINE = Hardware.cpu(1, memory="8MB", dram="8MB", ssd="64MB")
KINDS: list[dict[str, Any]] = [
    {"ssd": "states"},
    {"ssd": "all"},
    {"ssd": "all", "moved": "ssd"},
    {"moved": "dram"},
    {"ssd": "states", "prefetch": False, "moved": "ssd"},
]


def program_of(**kind: Any) -> Program:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, **kind)
    verify([program], MACHINE)
    return program


def open_session(folder: Path, program: Program, disk: Path, **options: Any) -> DeviceSession:
    (path,) = write_chain(folder, [program], WIDTH)
    return test_device.open_session(path, program, MACHINE, ssd_dirs=(str(disk),), **options)


def run(session: DeviceSession) -> list[float]:
    return [v.item() for step in range(STEPS) for v in session.step(batch_of(step)).values["loss"]]


def assert_weights(session: DeviceSession, wanted: list[torch.Tensor]) -> None:
    for i, want in enumerate(wanted):
        assert torch.equal(session.state.stage_state(f"stage{i}").weights[f"layer{i}.weight"], want)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_eager_bit_for_bit(kind: dict[str, Any], tmp_path: Path) -> None:
    program = program_of(**kind)
    session = open_session(tmp_path, program, tmp_path, ssd_verify=True)
    losses, weights, _ = eager(3)
    assert run(session) == losses
    assert_weights(session, weights)
    session.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_peaks_are_those_that_were_planned(kind: dict[str, Any], tmp_path: Path) -> None:
    program = program_of(**kind)
    session = open_session(tmp_path, program, tmp_path)
    planned = profile_memory(program).peak_bytes
    peaks = session.step(batch_of(0)).report["peak_bytes"]
    assert peaks["dram0"] == planned[ops.DRAM] and peaks.get("ssd0", 0) == planned[ops.SSD]
    session.close()


@pytest.mark.parametrize("ssd", slow_but(["all"], ["", "states", "all"]))
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e-3])
def test_a_speculative_step_is_undone_where_gradients_are_clipped(ssd: str, max_norm: float, tmp_path: Path) -> None:
    """The same bits as with steps that wait for the norm."""
    losses, weights = [], []
    for speculative in (False, True):
        program = program_of(ssd=ssd, clip=True, speculative=speculative)
        for node in program.ops():
            if node.target in (ops.redo, ops.clip):
                node.kwargs = {"max_norm": max_norm}
        session = open_session(tmp_path, program, tmp_path)
        losses.append(run(session))
        weights.append([session.state.stage_state(f"stage{i}").weights[f"layer{i}.weight"].clone() for i in range(3)])
        session.close()
    assert losses[0] == losses[1]
    assert all(torch.equal(exact, undone) for exact, undone in zip(*weights))
    assert (eager(3, max_norm)[2] > max_norm) == (max_norm < MAX_NORM)


def test_a_state_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    program = program_of(ssd="all")
    first = open_session(tmp_path, program, tmp_path)
    first.step(batch_of(0))
    (tmp_path / "2").mkdir()
    second = open_session(tmp_path / "2", program, tmp_path)
    for stage in first.state.stores:
        second.state.load_stage_state(stage, first.state.stage_state(stage))
    second.state.load_counters(first.state.counters())
    for session in (first, second):
        for step in range(1, STEPS):
            session.step(batch_of(step))
        assert_weights(session, eager(3)[1])
        session.close()


def test_files_are_gone_afterwards(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    session = open_session(tmp_path, program_of(ssd="all"), disk)
    session.step(batch_of(0))
    assert [path.stat().st_mode & 0o777 for path in disk.iterdir()] == [0o700]
    session.close()
    assert not list(disk.iterdir())


def test_a_plan_with_ssds_needs_a_directory(tmp_path: Path) -> None:
    program = program_of(ssd="states")
    (path,) = write_chain(tmp_path, [program], WIDTH)
    with pytest.raises(HardwareError, match=r'ssd_dirs=\["/mnt/nvme0"\]'):
        test_device.open_session(path, program, MACHINE)
