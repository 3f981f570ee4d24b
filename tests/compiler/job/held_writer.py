"""Saves in the background whose writing waits for the test, and what two checkpoints are compared by."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.state import tensor_file
from penstock.runtime.state.manifest import MANIFEST


class HeldWriter:
    """Lets the threads of this process that write files go on once `released` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.released = threading.Event()
        self.error: OSError | None = None
        real = tensor_file._write_all

        def hold(file: Any, data: memoryview) -> None:
            if threading.current_thread().name == "penstock-save":
                assert self.released.wait(60)
                if self.error is not None:
                    raise self.error
            real(file, data)

        monkeypatch.setattr(tensor_file, "_write_all", hold)

    def release_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.released.set).start()


def save_state(directory: Path) -> dict[str, Any]:
    """All that a manifest says but the generators of the script: the sha256 of every tensor, too."""
    found = json.loads((directory / MANIFEST).read_text())
    return {key: found[key] for key in ("tensors", "scalars", "step", "optimizer", "scheduler", "loss_scale", "data")}
