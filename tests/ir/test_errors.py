"""An error crosses to another process as plain data, and is there what it was."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.ir import units
from penstock.ir.errors import (
    DoesNotFit,
    PenstockError,
    SsdError,
    VerifyError,
    WorkerError,
    error_from_data,
    error_to_data,
)


def cross(error: BaseException, prefix: str = "") -> PenstockError:
    return error_from_data(json.loads(json.dumps(error_to_data(error))), "device 1 (cpu1)", 1, prefix)


@pytest.mark.parametrize(
    "error",
    [
        DoesNotFit("cpu0 lacks 3 MiB", memory="cpu0", missing_bytes=3 << 20, nearest={"micro_batches": 4}),
        VerifyError("line 7 frees nothing", device=1, line=7),
        SsdError("no room", file="/mnt/a", offset_bytes=4096, errno=28),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_ours_keeps_its_type_and_what_it_knows(error: PenstockError) -> None:
    found = cross(error)
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    assert str(cross(error, "rank 1: ")) == f"rank 1: {error}"


def test_a_workers_error_has_its_traceback_as_remote() -> None:
    found = cross(WorkerError("device 1 failed", device=1, line="rt.free(x)"))
    assert isinstance(found, WorkerError) and str(found) == "device 1 failed"
    assert (found.device, found.line, found.remote) == (1, "rt.free(x)", "")


def test_what_is_none_of_ours_says_whose_it_is() -> None:
    try:
        raise ValueError("no such value")
    except ValueError as error:
        found = cross(error, "rank 1: ")
    assert isinstance(found, WorkerError)
    assert str(found) == "device 1 (cpu1): ValueError: rank 1: no such value"
    assert "Traceback" in found.remote and found.device == 1


def test_a_notebook_shows_the_users_lines_and_the_message() -> None:
    """IPython asks an exception for `_render_traceback_` and prints the lines that it returns."""
    try:
        _raise_from_within()
    except PenstockError as error:
        lines = error._render_traceback_()
    text = "\n".join(lines)
    assert "in _raise_from_within" in text and "test_errors.py" in text
    assert "units.py" not in text
    assert lines[-2:] == ["penstock.ir.errors.WorkerError: device 1 failed", "  in line 7"]
    assert all("\n" not in line for line in lines)


def _raise_from_within() -> None:
    namespace: dict[str, Any] = {}
    code = "def fail(error):\n    raise error\n"
    exec(compile(code, units.__file__, "exec"), namespace)  # a frame of the package itself
    namespace["fail"](WorkerError("device 1 failed\n  in line 7"))


def test_a_plain_interpreter_shows_what_it_always_does() -> None:
    code = "from penstock.errors import PlanError\nraise PlanError('no such plan')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert run.stderr.splitlines()[-1] == "penstock.ir.errors.PlanError: no such plan"
