"""The sum of a job's processes stays within the plan and what they held when they had started (docs/promises.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.children import import_environment
from penstock.tests.compiler.job.held_memory import CASES

# For each device: free blocks between those in use, up to `TRIM_BYTES` and a sixteenth before they go back, and the
# buffers of messages.
REST_BYTES = 32 << 20


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("case", CASES)
def test_memory_at_load_in_steps_and_in_saves(case: str, tmp_path: Path) -> None:
    if CASES[case].is_nf4:
        pytest.importorskip("bitsandbytes")
    command = [sys.executable, str(Path(__file__).with_name("held_memory.py")), case, str(tmp_path)]
    done = subprocess.run(command, env=import_environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rest = CASES[case].devices * REST_BYTES
    assert found["resting"] <= found["weights"] + rest  # what reading took went back
    most = found["planned"] + rest
    assert {phase: held for phase, held in found["held"].items() if held > most} == {}
