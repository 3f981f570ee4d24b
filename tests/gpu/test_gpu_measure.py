"""The measures of a GPU machine: copies that keep links busy while the host computes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from packaging.version import Version

from penstock.ir.machine.host import CommunicatorMemory
from penstock.ir.machine.presets import CUBLAS_PAIRS, cublas_bytes
from penstock.runtime.measure import cuda, detect
from penstock.runtime.measure.cpu import MIB, call_overhead_s
from penstock.tests.gpu.rehearsal import on_gpu, only_on_gpu

EMULATED = "FAKECUDA_TORCH" in os.environ
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


@pytest.mark.multi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_communicators_are_weighed_in_a_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FAKECUDA_DEVICES": "2", "FAKECUDA_NCCL_BUFFERS": "1", "FAKECUDA_NCCL_MB": "8"}.items():
        monkeypatch.setenv(name, value)
    found = CommunicatorMemory(**detect._communicator_memory(2, 2))
    if EMULATED:  # two channels, of 2 MiB at a sender and 10 MiB at a receiver; no library
        wanted = {"rest_bytes": 8, "sender_bytes": 4, "receiver_bytes": 20, "group_bytes": 12}
        assert found == CommunicatorMemory(**{name: mib * MIB for name, mib in wanted.items()})
    assert found.rest_bytes > 0 and found.sender_bytes <= found.receiver_bytes


def test_work_that_takes_longer_than_its_slice_runs_twice() -> None:
    flat, done = torch.ones(8, device="cuda"), list[None]()

    def work() -> None:
        flat.add_(1)
        done.append(None)

    assert cuda.mean_s(work, 0, slice_s=1e-9) > 0 and len(done) == 2
    done.clear()
    assert cuda.mean_s(work, 0, slice_s=1e-2) > 0 and len(done) > 1 + cuda.WARM_RUNS


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


def test_the_reserve_holds_cublas_workspaces_of_forward_and_backward() -> None:
    """One at once or, before torch 2.15, one for each of the threads of forward and backward, which products leave."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    found_bytes = cuda.measured_reserves(1)[0]["libraries_bytes"]
    each_bytes = cublas_bytes(torch.cuda.get_device_capability(0))
    gives_back = Version(torch.__version__).release >= (2, 15)
    assert found_bytes == (1 if gives_back else CUBLAS_PAIRS) * each_bytes


def test_a_machine_of_eight_gpus_is_measured_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that each figure is given, and the runs before it of work that takes as long as any may: kernels of
    one GPU, as all eight have one name, and copies of each. Context, disks and the host's optimizer have 20 s."""
    budgets_s: list[float] = []

    def budgeted(work: Callable[[], object], device: int, slice_s: float = cuda.KERNELS_S) -> float:
        budgets_s.append(slice_s)
        return 1e-6

    def count_calls(work: Callable[[], object], device: int, repeats: int = 50) -> float:
        budgets_s.append(repeats * 1e-3)
        return 1e-6

    monkeypatch.setattr(cuda, "mean_s", budgeted)
    monkeypatch.setattr(cuda, "alone_s", count_calls)
    # An emulated GPU makes the scores of long rows whole: more than a machine has.
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda query, key, value: query * 1.0)
    monkeypatch.setattr(cuda, "COPY_BYTES", MIB)
    cuda.rate_table(0, 1e-6)
    kernels_s, num_sizes = sum(budgets_s), len(budgets_s)
    assert num_sizes > 50 and all(budget_s == cuda.SIZE_S for budget_s in budgets_s)
    longest_s = (3 + 1) * 0.01 * num_sizes  # runs before those that count; few sizes take 10 ms
    budgets_s.clear()
    cuda.measure_device(0)
    copies_s = 8 * sum(budgets_s)
    links_s = 3 * 8 * 6 * 256 * MIB / 12e9  # eight GPUs on one slot of generation 3: down, up, both
    assert kernels_s + longest_s + copies_s + links_s + 20.0 <= 60.0
