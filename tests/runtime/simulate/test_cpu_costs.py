"""CPU devices share the cores of their host; GPUs do not."""

from __future__ import annotations

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.links import Link
from penstock.runtime.simulate import simulate
from penstock.runtime.simulate.sharing import fair_rates
from penstock.tests.ir.program.handmade import pipeline

COMPUTING = {"width": 8, "rows": 4, "flops": 80e9}  # a second a forward on one core, hardly anything to move


def machine(num_devices: int, cores: int, threads: int = 1) -> Hardware:
    document = Hardware.cpu(num_devices, memory="1GB", threads=threads).model_dump(mode="json")
    document["hosts"][0]["cpu_cores"] = cores
    return Hardware.model_validate(document)


def step_s(num_devices: int, hardware: Hardware, micro_batches: int = 8, **options: object) -> float:
    programs = pipeline(num_devices, num_devices, micro_batches, **{**COMPUTING, **options})  # type: ignore[arg-type]
    return simulate(programs, hardware).step_s


def test_enough_cores_change_nothing() -> None:
    assert step_s(4, machine(4, 4)) == pytest.approx(step_s(4, machine(4, 64)), rel=1e-3)


def test_four_devices_on_two_cores() -> None:
    """Eight micro-batches of a forward and a backward with rematerialisation: 4 s each, on four devices."""
    work_s = 4 * 8 * 4.0
    wide, narrow = step_s(4, machine(4, 4)), step_s(4, machine(4, 2))
    assert wide == pytest.approx(work_s / 4 + 3 * 4.0, rel=0.02)  # with filling and draining
    assert work_s / 2 <= narrow <= work_s / 2 + 2 * 4.0
    assert step_s(4, machine(4, 1)) == pytest.approx(work_s, rel=0.02)


def test_no_device_takes_more_than_its_threads() -> None:
    one = step_s(1, machine(1, 1))
    assert step_s(1, machine(1, 8)) == pytest.approx(one, rel=1e-3)
    assert step_s(2, machine(2, 2, threads=2)) > 1.3 * step_s(2, machine(2, 4, threads=2))


@pytest.mark.slow
def test_copies_take_cores_too() -> None:
    """Fetches overlap with computation only where a core is left for them."""
    options = {"width": 20_000, "rows": 4, "flops": 8e9}  # 1.5 GiB a stage: 0.16 s of copying
    alone, beside = (
        simulate(pipeline(1, 4, 2, **options), machine(1, cores).with_(memory="8GB", dram="64GB"))  # type: ignore[arg-type]
        for cores in (1, 2)
    )
    assert alone.step_s > 1.03 * beside.step_s
    throttled = Hardware.cpu(1, memory="8GB", dram="64GB", h2d="10GB/s")  # one core, and transfers that sleep
    assert simulate(pipeline(1, 4, 2, **options), throttled).step_s < 0.99 * alone.step_s  # type: ignore[arg-type]


def test_messages_take_two_cores() -> None:
    """What is sent while both devices compute slows them down."""
    sizes = {"width": 8, "rows": 1 << 22, "flops": 8e9, "fetched": False}  # 128 MiB a message
    assert step_s(2, machine(2, 2), **sizes) > 1.05 * step_s(2, machine(2, 4), **sizes)


def test_gpus_do_not_share_the_cores_of_their_host() -> None:
    hardware = Hardware.preset("mobius-topo2+2")
    few = hardware.model_dump(mode="json")
    few["hosts"][0]["cpu_cores"] = 1
    programs = pipeline(4, 8, 4, width=4000, rows=500, flops=1e12, clip=True)
    assert simulate(programs, hardware).step_s == simulate(programs, Hardware.model_validate(few)).step_s


def test_shares_by_weight() -> None:
    """A copy at 10 bytes/s a core against two computations: a third of two cores each."""
    links = {
        "cores": Link("cores", "", "", 2.0, 0.0),
        "copy": Link("copy", "", "", 20.0, 0.0, simplex="cores", weight=10.0),
    }
    compute, other, copy = fair_rates([("cores",), ("cores",), ("copy",)], links)
    assert (compute, other, copy) == pytest.approx((2 / 3, 2 / 3, 20 / 3))
