"""Machines whose CPU and devices share one memory: plans count it once, keep it, and train like eager PyTorch."""

from __future__ import annotations

import pytest

import penstock
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states, zoo_case
from penstock.tests.compiler.reasons import reasons_of

POOL_BYTES = 4_000_000


def machine(memory: str, **changes: str) -> Hardware:
    return Hardware.cpu(1, memory=memory, dram=POOL_BYTES).with_(shared_memory=True, **changes)


@pytest.mark.parametrize(
    ("memory", "strategy", "moves"),
    [
        pytest.param("3.6MB", "mobius", False, marks=pytest.mark.slow),
        ("700kB", "balanced", True),
        pytest.param("3.6MB", "auto", False, marks=pytest.mark.slow),
    ],
)
def test_a_plan_keeps_within_the_pool_and_trains_like_eager(memory: str, strategy: str, moves: bool) -> None:
    """On a device with room nothing is moved that the memory holds already; on a small one, both parts are held."""
    model, batch = zoo_case("gpt2")
    job = penstock.compile(model, machine(memory), example_inputs=batch, optimizer=SGD, strategy=strategy)
    assert bool(job.plan.decisions.fetch) == moves
    own_bytes = job.hardware.devices[0].model_bytes
    assert own_bytes == sum(p.nbytes for p in model.parameters())  # the script's copy is in the same memory
    budgets = [job.hardware.budget_bytes(name) for name in ("cpu0", "dram0")]
    assert sum(budgets) + own_bytes == POOL_BYTES
    eager = Eager(model)
    with job:
        for _ in range(2):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
        peaks = job.last.peak_bytes
        assert_same_states(job, eager, 5e-6)
    assert 0 < peaks["cpu0"] <= budgets[0] and peaks.get("dram0", 0) <= budgets[1]
    assert (peaks.get("dram0", 0) > 0) == moves
    assert "cpu0 and dram0 are one memory of 3.81 MiB, of which plans may use 3.81 MiB in all" in reasons_of(job)


@pytest.mark.slow
def test_what_fits_in_no_part_of_the_pool_is_refused_with_the_pool_and_the_cap() -> None:
    model, batch = zoo_case("gpt2")
    hardware = Hardware.cpu(1, memory="200kB", dram="400kB").with_(shared_memory=True, dram_usable_fraction=0.75)
    with pytest.raises(DoesNotFit, match="cpu0 and dram0 are one memory of 391 KiB, of which plans may use 293 KiB"):
        penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD)
