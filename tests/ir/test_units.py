"""Amounts with units: what is read, what is refused, and that writing and reading agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import units
from penstock.ir.errors import HardwareError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GB", 24_000_000_000),
        ("24 GiB", 24 * 2**30),
        ("22.5GiB", 24_159_191_040),
        ("1.5TB", 1_500_000_000_000),
        ("64MB", 64_000_000),
        (" 1kB ", 1000),
        ("1e3B", 1000),
        ("12", 12),
        (7, 7),
        (7.6, 8),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [("13.1GB/s", 13.1e9), ("13.1 GB/s", 13.1e9), ("100Gb/s", 12.5e9), ("100Gbps", 12.5e9), ("8Gbit/s", 1e9), (5, 5.0)],
)
def test_rates_tell_bits_from_bytes(text: object, rate: float) -> None:
    assert units.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["142TFLOPS", "142 TFLOP/s", "142TFLOPs", "142e12", 142e12])
def test_compute_rates(text: object) -> None:
    assert units.parse_flops(text) == 142e12


def test_times() -> None:
    assert [units.parse_seconds(text) for text in ("10us", "3ms", "2s", 0.5)] == [1e-5, 3e-3, 2.0, 0.5]


@pytest.mark.parametrize("bad", ["", "GB", "24 gigs", "1..2GB", "24GB/s", "ten", None, True, [], float("nan")])
def test_refused_sizes_show_the_value_and_an_example(bad: object) -> None:
    with pytest.raises(HardwareError, match="24GB"):
        units.BYTES.parse(bad)


def test_numbers_beyond_floats_are_refused() -> None:
    with pytest.raises(HardwareError, match="too large"):
        units.parse_rate("1e400GB/s")


def test_wrong_case_is_answered_with_the_right_one() -> None:
    with pytest.raises(HardwareError, match=r"'gb' in '24gb' \(did you mean 'GB'\?\)"):
        units.parse_bytes("24gb")


@given(st.integers(1, 2**60))
def test_a_spelled_size_reads_back_exactly(num_bytes: int) -> None:
    assert units.parse_bytes(units.spell_bytes(num_bytes)) == num_bytes


@given(st.sampled_from([units.RATE, units.FLOPS, units.SECONDS]), st.floats(1e-9, 1e18, allow_nan=False))
def test_a_spelled_amount_reads_back_exactly(quantity: units.Quantity, value: float) -> None:
    assert quantity.parse(quantity.spell(value)) == value


@given(st.integers(1, 99_999), st.sampled_from(sorted(units.RATE.units)))
def test_a_number_scales_with_its_unit(number: int, unit: str) -> None:
    assert units.parse_rate(f"{number}{unit}") == pytest.approx(number * float(units.RATE.units[unit]), rel=1e-12)


@given(st.floats(1, 1e15, allow_nan=False))
def test_formatted_sizes_are_within_half_a_percent(num_bytes: float) -> None:
    assert units.parse_bytes(units.format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5e-3, abs=1)


def test_short_spellings_and_formats() -> None:
    assert [units.spell_bytes(n) for n in (24 * 2**30, 1_500_000_000_000, 1234567)] == ["24GiB", "1.5TB", "1234.567kB"]
    assert units.RATE.spell(13.1e9) == "13.1GB/s"
    assert (units.format_bytes(24 * 2**30), units.format_bytes(0)) == ("24.0 GiB", "0.00 B")
    assert (units.format_rate(13.1e9), units.format_seconds(0.0412), units.format_flops(142e12)) == (
        "13.1 GB/s",
        "41.2 ms",
        "142 TFLOPS",
    )
