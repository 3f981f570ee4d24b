"""Deaths of workers and of the script: a clear error in time, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import VerifyError, WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.processes.local import LocalWorkers, worker_environment
from penstock.runtime.processes.setup import RunSetup
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.generated_files import write_chain

pytestmark = pytest.mark.multi
WIDTH = 16
BATCH = {"x": torch.ones(8, WIDTH)}
SLOW_SCRIPT = f"""
import sys
from pathlib import Path

import torch

from penstock.runtime.processes.setup import RunSetup
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.processes.local import LocalWorkers
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.runtime.generated_files import write_chain
from penstock.tests.ir.program.handmade import pipeline

programs = pipeline(1, 2, 2, width={WIDTH})
for node in programs[0].ops():
    if node.target.name == "step":
        programs[0].graph.erase_node(node)
files = write_chain(Path(sys.argv[1]), programs, {WIDTH}, seconds=60.0)
driver = LocalWorkers(RunSetup(files, programs[0].interface, Hardware.cpu(1, memory="8MB"), trust=TRUSTED))
print(driver.process_ids[0], driver.scratch, flush=True)
driver.step({{"x": torch.ones(8, {WIDTH})}})
"""


def workers_of(folder: Path, seconds: float = 0.0, failing: str = "", timeout_s: float = 600.0) -> LocalWorkers:
    programs = pipeline(2, 2, 2, width=WIDTH)
    folder.mkdir(exist_ok=True)
    files = write_chain(folder, programs, WIDTH, seconds, failing)
    adamw = OptimizerSpec.from_callable(torch.optim.AdamW)
    hardware = Hardware.cpu(2, memory="8MB")
    driver = LocalWorkers(RunSetup(files, programs[0].interface, hardware, adamw, timeout_s=timeout_s, trust=TRUSTED))
    for i in range(2):
        driver.load_stage(f"stage{i}", {f"layer{i}.weight": torch.eye(WIDTH)}, {})
    return driver


def is_running(pid: int) -> bool:
    """Whether the process exists and is no mere entry that its parent has not collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_killed_worker_is_named_with_its_line_and_all_others_stop(tmp_path: Path) -> None:
    driver = workers_of(tmp_path, seconds=30.0)
    ids, board = driver.process_ids, driver.workers[0].board
    lines = (tmp_path / "device0.py").read_text().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if "rt.forward(" in text)
    killed_at: list[float] = []

    def kill() -> None:
        assert eventually(lambda: number in board)  # device 0 computes, device 1 waits for it
        killed_at.append(time.monotonic())
        os.kill(ids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError) as caught:
        driver.step(BATCH)
    killer.join()
    assert time.monotonic() - killed_at[0] < 10
    message = str(caught.value)
    assert caught.value.device == 0 and "device 0 (cpu0)" in message and "SIGKILL" in message
    assert f"line {number}: `y0_m0, = rt.forward(" in message and "micro-batch 0" in message
    assert caught.value.line is not None and caught.value.line.startswith("y0_m0, = rt.forward(")
    assert not any(is_running(pid) for pid in ids) and not os.path.exists(driver.scratch)
    with pytest.raises(WorkerError, match="have been stopped"):
        driver.step(BATCH)


@pytest.mark.parametrize(
    ("stopped", "call"),
    [
        (0, "step"),
        *(
            pytest.param(device, call, marks=pytest.mark.slow)
            for device, call in ((1, "step"), (0, "state"), (1, "load"))
        ),
    ],
)
@pytest.mark.slow
def test_a_stopped_worker_is_named_after_the_timeout(stopped: int, call: str, tmp_path: Path) -> None:
    """Not the healthy one, which waits for it; nor does a message that is larger than the channel wait for ever."""
    driver = workers_of(tmp_path, timeout_s=1.5)
    ids = driver.process_ids
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: driver.step(BATCH),
        "state": lambda: driver.call("stage_state", stopped, {"stage": f"stage{stopped}"}),
        "load": lambda: driver.call("load_stage", stopped, {"stage": "stage1"}, {"weights/x": torch.zeros(1 << 20)}),
    }
    if call != "load":
        calls[call]()
    os.kill(ids[stopped], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"device {stopped} \(cpu{stopped}\): .* is stopped \(SIGSTOP\)") as caught:
        calls[call]()
    assert caught.value.device == stopped
    assert not any(is_running(pid) for pid in ids) and not os.path.exists(driver.scratch)


@pytest.mark.slow
def test_a_step_may_last_longer_than_the_timeout_but_no_instruction(tmp_path: Path) -> None:
    with workers_of(tmp_path / "short", seconds=0.6, timeout_s=1.5) as driver:
        begin_s = time.monotonic()
        driver.step(BATCH)
        assert time.monotonic() - begin_s > 2
    driver = workers_of(tmp_path / "long", seconds=30.0, timeout_s=1.5)
    with pytest.raises(WorkerError, match=r"no sign of life for 1\.5 s; .*larger timeout_s; it was at line") as caught:
        driver.step(BATCH)
    assert caught.value.device == 0 and caught.value.line is not None and "rt.forward(" in caught.value.line


@pytest.mark.slow
def test_an_exception_in_a_worker_comes_back_with_its_place_and_traceback(tmp_path: Path) -> None:
    driver = workers_of(tmp_path, failing="stage0")  # its third forward is the first rematerialisation
    ids = driver.process_ids
    with pytest.raises(WorkerError, match=r"device 0 \(cpu0\), line \d+: `.*ValueError: no third time") as caught:
        driver.step(BATCH)
    assert caught.value.device == 0 and "micro-batch 0" in str(caught.value)
    assert 'raise ValueError("no third time")' in caught.value.remote and "device0.py" in caught.value.remote
    assert caught.value.line is not None and "rt.backward(" in caught.value.line
    assert not any(is_running(pid) for pid in ids)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    programs = pipeline(1, 2, 2, width=WIDTH)
    files = write_chain(tmp_path, programs, WIDTH)
    files[0].write_text("import penstock_has_no_such_module\n\n" + files[0].read_text())
    with pytest.raises(VerifyError, match=r"device0\.py:1: .*No module named 'penstock_has_no_such_module'"):
        LocalWorkers(RunSetup(files, programs[0].interface, Hardware.cpu(1, memory="8MB"), trust=TRUSTED))


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=["ctrl-c", "kill -9"]
)
@pytest.mark.slow
def test_workers_end_with_their_driver(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C stops them and passes on; even a driver that is killed leaves none behind."""
    script = subprocess.Popen(
        [sys.executable, "-c", SLOW_SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=worker_environment(1),
    )
    try:
        assert script.stdout is not None and script.stderr is not None
        pid_text, scratch = script.stdout.readline().split()
        worker = int(pid_text)
        board = Path(scratch, "board0")
        assert is_running(worker) and eventually(lambda: any(board.read_bytes()))
        os.killpg(script.pid, how)  # as a terminal does: to the whole foreground group
        _, errors = script.communicate(timeout=10)
        assert eventually(lambda: not is_running(worker)) and eventually(lambda: not os.path.exists(scratch))
        if how == signal.SIGINT:
            assert errors.rstrip().endswith("KeyboardInterrupt")
    finally:
        script.kill()
        script.communicate()
