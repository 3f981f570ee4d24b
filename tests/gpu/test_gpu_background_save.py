"""Saves in the background on a GPU: the copy is whole before the next step changes what it was made of."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.tests.compiler.job.held_writer import HeldWriter, save_state
from penstock.tests.gpu.rehearsal import DROPPING, batches, compile_job, exact, model_of, on_gpu, swapping_job

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu


@pytest.mark.parametrize("make", [compile_job, swapping_job])
def test_the_state_between_two_steps_is_saved(make: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the device and from pinned DRAM: every digest is that of a save at once; a resumed run goes on alike."""
    writer, data = HeldWriter(monkeypatch), batches(DROPPING)
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with make(model_of(DROPPING), data[0], **options) as job:
        job.step(data[0])
        job.step(data[1])
        job.save(tmp_path / "at once")
        for again in range(2):  # the second copy takes the room of the first
            save = job.save(tmp_path / f"behind {again}", wait=False)
            if not again:
                losses = [float(job.step(batch)) for batch in data[:2]]
            writer.released.set()
            save.wait(60)
            writer.released.clear()
            job.save(tmp_path / f"then {again}")
        writer.released.set()
        assert job.step_count == 4
    assert save_state(tmp_path / "behind 0") == save_state(tmp_path / "at once") != save_state(tmp_path / "behind 1")
    assert save_state(tmp_path / "behind 1") == save_state(tmp_path / "then 0")
    with make(model_of(DROPPING), data[0], **options) as job:
        job.resume(tmp_path / "behind 0")
        assert [float(job.step(batch)) for batch in data[:2]] == losses
