"""Under torchrun one rank plans for all: what it finds, or why any rank refuses, is what every rank has.

Here ranks are threads, and what joins them a list that both fill before either reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.job import together
from penstock.compiler.job.together import planned_once
from penstock.ir.errors import DoesNotFit, HardwareError, PassError, PlanError, error_to_data
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.processes.joint_hardware import combine
from penstock.runtime.processes.rows import Member
from penstock.tests.compiler.job.fed_by_rank import Net

MEMBERS = [
    Member(rank, str(rank), str(rank // 2), f"host{rank // 2}", 100 + rank, 0.0, "10.0.0.1") for rank in range(4)
]


class Met:
    """One rank's end of what joins two."""

    def __init__(self, rank: int, rows: dict[int, Any], barrier: threading.Barrier):
        self.rank, self.rows, self.barrier, self.members = rank, rows, barrier, MEMBERS[:2]

    def exchange(self, mine: Any) -> list[Any]:
        self.rows[self.rank] = mine
        self.barrier.wait(60)
        found = [self.rows[0], self.rows[1]]
        self.barrier.wait(60)
        return found

    def leave(self) -> None:
        return


@pytest.fixture
def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Calls a function on two ranks at the same time; gives their results, or what they raised."""
    rows: dict[int, Any] = {}
    barrier, own = threading.Barrier(2), threading.local()
    monkeypatch.setattr(together, "_meet", lambda timeout_s: Met(own.rank, rows, barrier))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)

    def run(call: Callable[[int], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            own.rank = rank
            try:
                return call(rank)
            except penstock.errors.PenstockError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    return run


def test_the_second_rank_carries_out_what_the_first_has_found(on_two_ranks: Any) -> None:
    example = {"x": torch.zeros(8, 4), "y": torch.zeros(8, 1)}
    nets = [Net(), Net()]

    def compile_job(rank: int) -> Any:
        hardware = Hardware.cpu(num_devices=2)
        chosen: Any = {"optimizer": torch.optim.SGD, "search_s": 0.0}
        return penstock.compile(nets[rank], hardware, example_inputs=example, **chosen)

    first, second = on_two_ranks(compile_job)
    assert second.plan.hash == first.plan.hash and second.folder.files == first.folder.files


@pytest.mark.parametrize("at_fault", [0, 1])
@pytest.mark.parametrize(
    "error", [DoesNotFit("cpu0 lacks 3 MiB", memory="cpu0", missing_bytes=3 << 20), PassError("no such option")]
)
def test_why_a_rank_refuses_is_said_on_both(error: Exception, at_fault: int, on_two_ranks: Any) -> None:
    example = {"x": torch.zeros(8, 4), "y": torch.zeros(8, 1)}
    given: dict[str, Any] = {"strategy": "balanced", "micro_batches": 2, "optimizer": torch.optim.SGD}
    plain = penstock.compile.__wrapped__  # type: ignore[attr-defined]
    made = plain(Net(), Hardware.cpu(num_devices=1), example_inputs=example, **given)

    def make(
        model: Any = None,
        hardware: Any = "mobius-topo4",
        plan: Any = None,
        strategy: str = "balanced",
        micro_batches: Any = 2,
        precision: str = "fp32",
        gradient_dtype: str = "fp32",
        boundary_dtype: str = "compute",
        max_grad_norm: Any = None,
        seed: int = 0,
        timeout_s: float = 1.0,
    ) -> Any:
        if (plan is not None) == bool(at_fault):
            raise error
        return made

    found = on_two_ranks(lambda rank: planned_once(make)(Net()))
    assert [type(each) for each in found] == [type(error)] * 2
    assert str(found[0]) == str(found[1]) and str(error) in str(found[0])
    assert ("rank 1 (on host0, process 101)" in str(found[0])) == bool(at_fault)
    assert getattr(found[1], "missing_bytes", None) == getattr(error, "missing_bytes", None)


def test_arguments_that_differ_are_said_before_anything_is_planned(on_two_ranks: Any) -> None:
    def compile_job(rank: int) -> Any:
        return penstock.compile(Net(), Hardware.cpu(), example_inputs={"x": torch.zeros(8, 4)}, seed=rank)

    found = on_two_ranks(compile_job)
    assert all(isinstance(each, PlanError) for each in found) and str(found[0]) == str(found[1])
    assert "seed 1, the others 0" in str(found[0]) and "Nothing was planned" in str(found[0])


# --- hardware="auto"


def test_hosts_are_put_together_in_the_order_of_ranks_and_may_differ() -> None:
    big = Hardware.preset("rtx4090x4-2rc").model_dump(mode="json")
    small = Hardware.preset("rtx3090x2").model_dump(mode="json")
    rows = [{"document": big, "network": 2e9}, None, {"document": small, "network": None}, None]
    found = combine(rows, MEMBERS)
    assert [(d.name, d.host, d.memory_bytes >> 30) for d in found.devices] == [
        ("gpu0", 0, 24), ("gpu1", 0, 24), ("gpu2", 1, 24), ("gpu3", 1, 24),
    ]  # fmt: skip
    assert found.devices[0].peak_flops != found.devices[2].peak_flops
    assert found.network is not None and found.network.bandwidth == 1.25e9  # the slower one of two: it is not known
    three = [MEMBERS[0], *[Member(r, "", "1", "host1", 0, 0.0, "") for r in (1, 2, 3)]]
    with pytest.raises(penstock.errors.HardwareError, match="host1 has 2 GPUs, torchrun has started 3 ranks there"):
        combine([rows[0], rows[2], None, None], three)


def test_a_cpu_is_divided_among_the_ranks_that_run_on_it() -> None:
    document = Hardware.cpu(4, memory="3GB", threads=4).model_dump(mode="json")
    (one,) = {
        (d.memory_bytes, d.threads)
        for d in combine([{"document": document, "network": None}, None], MEMBERS[:2]).devices
    }
    assert one == (6_000_000_000, 8)
    with pytest.raises(HardwareError, match=r"^rank 0 \(on host0, .*\): no disk"):
        combine([{"error": error_to_data(HardwareError("no disk"))}], MEMBERS[:1])
