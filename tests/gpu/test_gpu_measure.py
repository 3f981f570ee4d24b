"""What a GPU machine is measured with: copies that keep links busy while the host computes."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.measure import cuda
from penstock.runtime.measure.cpu import MIB, call_overhead_s
from penstock.tests.gpu.rehearsal import on_gpu, only_on_gpu

pytestmark = [*on_gpu, only_on_gpu]


def test_copies_run_in_both_directions_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "COPY_BYTES", MIB)
    copies = cuda.Copies([0], down=True, up=True)
    (_, here, pinned), (_, also_pinned, also_here) = copies.lanes
    assert here.is_cuda and also_here.is_cuda and pinned.is_pinned() and also_pinned.is_pinned()
    pinned.fill_(3)
    also_here.fill_(4)
    torch.cuda.synchronize(0)
    with copies.busy():
        assert copies.bandwidth(1) > 0
    torch.cuda.synchronize(0)
    assert bool((here == 3).all()) and bool((also_pinned == 4).all())


def test_rates_of_links_are_those_of_each_root_complex() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "COPY_BYTES", MIB)
        rates = cuda.link_rates([[0]])
    assert set(rates) == {"down", "up", "both"} and all(len(row) == 1 and row[0] > 0 for row in rates.values())


def test_a_launch_costs_the_host_something() -> None:
    assert 0 < call_overhead_s(2, "cuda:0") < 0.1


def test_gpus_of_one_name_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def table(device: int, overhead_s: float) -> dict[str, int]:
        timed.append(device)
        return {"from": device}

    monkeypatch.setattr(cuda, "rate_table", table)
    monkeypatch.setattr(cuda, "call_overhead_s", lambda device: 1e-6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "ABA"[device])
    assert [row["rates"]["from"] for row in cuda.measured_tables(3)] == [0, 1, 0] and timed == [0, 1]
