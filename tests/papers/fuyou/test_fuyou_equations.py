"""Fuyou's equations on numbers that are worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.papers.fuyou.equations import (
    Load,
    Rates,
    Swappable,
    apart_s,
    best,
    curve,
    most_swapped_bytes,
    serial,
    step,
)

RATES = Rates(link=10, read=20, write=5, flops=100, params_per_s=4)
LAYERS = (Swappable(20, 50), Swappable(10, 100), Swappable(10, 50))
LOAD = Load(params=8, forward_flops=400, boundary_bytes=10, swappable=LAYERS)
FAST_DISKS = replace(RATES, read=2000, write=500)


def test_a_step_without_swapping() -> None:
    found = step(RATES, LOAD)
    assert found.forward_s == pytest.approx({"computation": 4, "GPU link": 1.6, "SSD": 0.8 + 2})
    assert found.backward_s == pytest.approx(
        {"computation": 8 + 4, "CPU optimizer": 2, "GPU link": 2.6, "SSD": 122 / 20 + 112 / 5}
    )
    assert (found.step_s, found.bound) == (pytest.approx(4 + 28.5), "SSD")


def test_what_is_swapped_is_moved_and_not_computed_again() -> None:
    found = step(RATES, LOAD, LAYERS[:2])
    assert found.forward_s == pytest.approx({"computation": 4, "GPU link": 4, "SSD": 0.8 + 8})
    assert found.backward_s["computation"] == pytest.approx(8 + 2.5)
    assert found.backward_s["GPU link"] == pytest.approx(5.6)
    assert found.backward_s["SSD"] == pytest.approx(152 / 20 + 112 / 5)
    assert (found.swapped_bytes, found.coefficient) == (40, pytest.approx(30 / 40))


def test_layers_are_swapped_by_benefit() -> None:
    assert [found.swapped_bytes for found in curve(RATES, LOAD)] == [10, 20, 30, 50]


def test_nothing_is_swapped_where_disks_are_the_bound() -> None:
    assert most_swapped_bytes(RATES, LOAD) == LOAD.boundary_bytes
    assert best(RATES, LOAD).coefficient == 0


def test_where_computation_is_the_bound_as_much_as_pays() -> None:
    """Equation 9 hides 12 s - 2.6 s behind links of 10 bytes/s, more than all layers take."""
    assert most_swapped_bytes(FAST_DISKS, LOAD) == pytest.approx(94)
    found = best(FAST_DISKS, LOAD)
    assert found.coefficient == 0.5  # with all of them forward would wait 5 s for the link
    assert found.step_s == min(other.step_s for other in curve(FAST_DISKS, LOAD)) == pytest.approx(4 + 10.5)


def test_equation_11_bounds_the_swap() -> None:
    """A link so slow that it hides one layer besides the checkpoints."""
    slow = replace(FAST_DISKS, link=4.25)
    assert most_swapped_bytes(slow, LOAD) == pytest.approx((12 - 26 / 4.25) * 4.25)
    assert best(slow, LOAD).swapped_bytes == 20


def test_nothing_overlaps() -> None:
    moved = (3 * 16 + 20) / 10 + 32 / 20
    states = 16 / 5 + 112 / 20 + 112 / 5
    assert serial(RATES, LOAD, pageable=10).step_s == pytest.approx(moved + 16 + 2 + states)
    assert serial(RATES, LOAD, pageable=2).moved_s == pytest.approx(moved + 16 / 5 + 20 / 2 - 20 / 10)
    assert serial(RATES, LOAD, 10, on_ssd=False).step_s == pytest.approx((3 * 16 + 20) / 10 + 16 + 2)


def test_rates_of_a_machine() -> None:
    found = Rates.of(Hardware.preset("fuyou-a100", ssds=6), "bf16")
    share = 0.39 ** (math.log(6) / math.log(12))  # of what six disks read and write one by one
    assert (found.link, found.read, found.write) == pytest.approx((26e9, share * 39e9, share * 20.4e9))
    assert found.flops == pytest.approx(0.65 * 312e12)


def test_backward_and_optimizer_one_behind_the_other() -> None:
    """Gradients are written and read once more."""
    backward_s = max(12.0, 2.6, (16 + 10) / 20 + 16 / 5)
    assert apart_s(RATES, LOAD) == pytest.approx(4 + backward_s + 112 / 20 + 112 / 5)
