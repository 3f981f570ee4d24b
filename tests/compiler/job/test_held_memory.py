"""The sum of a job's processes stays within the plan and what a process takes by itself (docs/promises.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.children import import_environment

SCRIPT_BYTES, WORKER_BYTES = 128 << 20, 256 << 20
REST_BYTES = 32 << 20


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("num_devices", [0, 1, 2], ids=["one on SSD", "one", "two"])
def test_memory_at_load_in_steps_and_in_saves(num_devices: int, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("held_memory.py")), str(num_devices), str(tmp_path)]
    done = subprocess.run(command, env=import_environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if num_devices == 1:  # what reading took went back
        assert found["resting"] <= found["weights"] + REST_BYTES
    workers = num_devices if num_devices > 1 else 0
    most = found["planned"] + SCRIPT_BYTES + workers * WORKER_BYTES
    assert {phase: held for phase, held in found["held"].items() if held > most} == {}
