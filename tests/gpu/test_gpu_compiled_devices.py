"""Compiled stages on two GPUs, by workers of one process and by ranks of torchrun. Backends as in
`test_gpu_compiled.py`: Inductor's kernels need a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.tests.compiler.job.compiled_devices import ranks, train
from penstock.tests.gpu.rehearsal import exact, on_gpu, only_on_gpu
from penstock.tests.gpu.test_gpu_compiled import BACKENDS

__all__ = ["exact"]  # a fixture
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = [*on_gpu, only_on_gpu, two_gpus, pytest.mark.multi]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["1f1b", "interleaved", "data-parallel"])
def test_workers_on_two_gpus(strategy: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = f"from penstock.runtime.device import state\nstate.BACKEND = {backend!r}\n"
    (tmp_path / "sitecustomize.py").write_text(chosen)
    monkeypatch.syspath_prepend(tmp_path)  # which workers inherit
    apart, _, eager_blocks = train(strategy)
    assert apart.fits("fp32") and eager_blocks == {}, (apart, eager_blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_torchrun_on_two_gpus(backend: str) -> None:
    rows = ranks(backend)
    assert sorted(row["rank"] for row in rows) == [0, 1]
    assert all(row["within"] and row["eager_blocks"] == {} for row in rows), rows
    assert all(row["stats"]["unique_graphs"] == 1 for row in rows), rows
