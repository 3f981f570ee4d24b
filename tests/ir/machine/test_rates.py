"""Tables of rates: interpolation, times of mixes of calls, documents with tables, and what is said of wrong ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.errors import HardwareError
from penstock.ir.machine.call_mix import (
    EFFICIENT,
    FLASH,
    NO_CALLS,
    AttentionCall,
    CallMix,
    PointwiseCall,
    Product,
    both,
    merge_mixes,
)
from penstock.ir.machine.gpu_parts import PARTS
from penstock.ir.machine.hardware import Device, Hardware
from penstock.ir.machine.part_rates import MEASURED
from penstock.ir.machine.presets import gpu
from penstock.ir.machine.rates import SLOWEST, RateTable, interpolate

ROWS: list[dict[str, Any]] = [
    {
        "backend": "flash", "dtypes": ["bf16", "fp16"], "head_size": size,
        "forward": {512: f"{forward}TFLOPS", 8192: f"{2 * forward}TFLOPS"},
        "backward": {512: f"{forward / 2}TFLOPS", 8192: f"{forward}TFLOPS"},
    }
    for size, forward in ((64, 30), (128, 45))
]  # fmt: skip
TABLE: dict[str, Any] = {
    "source": "made up",
    "products": {"bf16": {512: "20TFLOPS", 1024: "60TFLOPS", 4096: "90TFLOPS"}},
    "attention": ROWS,
    "pointwise": {"1000000": "100GB/s", "100000000": "800GB/s"},
}  # fmt: skip


def machine(rates: Any = TABLE, **changes: Any) -> Hardware:
    base = Hardware.preset("rtx4090x2", peak_flops={"fp32": 50e12, "bf16": 100e12}, achieved_fraction=0.9)
    return base.with_(rates=rates, **changes)


def device(rates: Any = TABLE, **changes: Any) -> Device:
    return machine(rates, **changes).devices[0]


def product(m: int, n: int, k: int, dtype: str = "bf16") -> CallMix:
    row = Product(dtype, m, n, k)
    return CallMix((row,), traffic_bytes=row.bytes)


def seconds(mix: CallMix, on: Device) -> float:
    """Without the overhead of launches."""
    return on.compute_s(mix.flops, mix.traffic_bytes, "bf16", 0, mix)


# -- curves ------------------------------------------------------------------------------------------------------------

SIZES = st.floats(1.0, 1e6)


@st.composite
def curves(draw: st.DrawFn, steepest: float = 3.0) -> tuple[tuple[float, float], ...]:
    """Curves as a document may have them: no rate grows faster than the work."""
    sizes = sorted(draw(st.lists(st.integers(1, 10**5), min_size=1, max_size=6, unique=True)))
    rates = [draw(st.floats(1e9, 1e12))]
    for before, after in pairwise(sizes):
        rates.append(rates[-1] * (after / before) ** draw(st.floats(-2.0, steepest)))
    return tuple((float(size), rate) for size, rate in zip(sizes, rates, strict=True))


@given(curves(), SIZES, SIZES)
def test_a_larger_product_never_takes_less_time(curve: tuple[tuple[float, float], ...], a: float, b: float) -> None:
    small, large = sorted((a, b))
    took = [size**3 / interpolate(curve, size, SLOWEST) for size in (small, large)]
    assert took[0] <= took[1] * (1 + 1e-6)


@given(curves(), SIZES)
def test_no_rate_is_above_the_highest(curve: tuple[tuple[float, float], ...], size: float) -> None:
    highest = max(rate for _, rate in curve)
    assert 0 < interpolate(curve, size, SLOWEST) <= highest * (1 + 1e-6)
    inside = [rate for _, rate in curve]
    if curve[0][0] <= size <= curve[-1][0]:
        assert interpolate(curve, size) >= min(inside) * (1 - 1e-6)


@given(curves())
def test_the_sizes_of_a_table_have_its_rates(curve: tuple[tuple[float, float], ...]) -> None:
    for size, rate in curve:
        assert interpolate(curve, size, SLOWEST) == pytest.approx(rate)
    assert interpolate(curve, curve[-1][0] * 10) == curve[-1][1]


def test_between_two_sizes_the_line_is_straight_in_logarithms() -> None:
    curve = ((100.0, 10.0), (10_000.0, 1000.0))
    assert interpolate(curve, 1000.0) == pytest.approx(100.0)
    assert interpolate(curve, 10.0, SLOWEST) == pytest.approx(1.0)
    flat = ((100.0, 10.0), (10_000.0, 10.0))
    assert interpolate(flat, 50.0, SLOWEST) == pytest.approx(5.0)  # in proportion to the size, at least


# -- times of calls ----------------------------------------------------------------------------------------------------


def test_small_products_take_longer_per_flop() -> None:
    took = {
        size: seconds(product(size, size, size), device()) / (2 * size**3) for size in (256, 512, 1024, 4096, 16384)
    }
    assert took[256] > took[512] > took[1024] > took[4096] == took[16384]
    assert took[512] == pytest.approx(1 / 20e12) and took[4096] == pytest.approx(1 / 90e12)


@given(*3 * [st.integers(1, 1 << 17)])
def test_a_product_is_never_faster_than_peak_or_memory(m: int, n: int, k: int) -> None:
    here, mix = device(), product(m, n, k)
    assert seconds(mix, here) >= mix.flops / here.peak_flops["bf16"]
    assert seconds(mix, here) >= mix.traffic_bytes / here.memory_bandwidth * (1 - 1e-9)


def test_a_product_with_one_row_takes_what_its_matrix_takes_to_read() -> None:
    thin = product(1, 8192, 8192)
    assert seconds(thin, device()) == pytest.approx(thin.traffic_bytes / device().memory_bandwidth)


def attention(keys: int, size: int, **more: Any) -> CallMix:
    row = AttentionCall(FLASH, "bf16", 32, keys, keys, size, **more)
    return CallMix(attention=(row,), traffic_bytes=row.bytes)


def test_attention_takes_what_its_length_and_heads_take() -> None:
    rate = {
        (keys, size): attention(keys, size).flops / seconds(attention(keys, size), device())
        for keys in (512, 2048, 8192)
        for size in (64, 96, 128)
    }
    assert rate[512, 64] == pytest.approx(30e12) and rate[8192, 128] == pytest.approx(90e12)
    assert rate[2048, 64] == pytest.approx(30e12 * 2**0.5)
    assert rate[512, 64] < rate[512, 96] < rate[512, 128]
    whole, half = (seconds(attention(8192, 64, causal=causal), device()) for causal in (False, True))
    assert half == pytest.approx(whole / 2)
    assert seconds(attention(8192, 64, backward=True), device()) == pytest.approx(5 * whole)  # 2.5 FLOPs at half a rate


def test_another_backend_takes_its_own_rates_if_there_are_any() -> None:
    row = AttentionCall(EFFICIENT, "bf16", 32, 512, 512, 64)
    mix = CallMix(attention=(row,))
    assert mix.flops / seconds(mix, device()) == pytest.approx(30e12)  # none: those of flash
    slower = {**ROWS[0], "backend": EFFICIENT, "forward": {512: "10TFLOPS"}}
    own = device({**TABLE, "attention": [*ROWS, slower]})
    assert mix.flops / seconds(mix, own) == pytest.approx(10e12)


def test_calls_that_read_and_write_take_their_bytes() -> None:
    few, many = (CallMix(pointwise=(PointwiseCall(size),), traffic_bytes=size) for size in (10**6, 10**9))
    assert seconds(few, device()) == pytest.approx(1e6 / 100e9)
    assert seconds(many, device()) == pytest.approx(1e9 / 800e9)


def test_a_part_of_a_computation_runs_at_the_rates_of_the_whole() -> None:
    mix = both(product(1024, 1024, 1024), CallMix(pointwise=(PointwiseCall(10**6),), traffic_bytes=1e6))
    whole = device().compute_s(mix.flops, mix.traffic_bytes, "bf16", 3, mix)
    part = device().compute_s(mix.flops / 4, mix.traffic_bytes / 4, "bf16", 3, mix)
    launches_s = 3 * device().op_overhead_s
    assert part - launches_s == pytest.approx((whole - launches_s) / 4)


def test_without_a_table_or_without_calls_constant_rates_hold() -> None:
    plain, mix = device(None), product(512, 512, 512)
    assert plain.compute_s(1e12, 1e9, "bf16", 5, mix) == plain.compute_s(1e12, 1e9, "bf16", 5)
    assert device().compute_s(1e12, 1e9, "bf16", 5) == plain.compute_s(1e12, 1e9, "bf16", 5)
    assert device().compute_s(0.0, 1e9, "bf16", 5, NO_CALLS) == plain.compute_s(0.0, 1e9, "bf16", 5)


def test_what_a_table_leaves_out_runs_at_constant_rates() -> None:
    only = device({"source": "made up", "pointwise": {1: "500GB/s"}})
    mix = both(product(512, 512, 512, "fp32"), attention(512, 64))
    flops_s = [row.flops / only.achieved_flops(row.dtype) for row in (*mix.products, *mix.attention)]
    assert seconds(mix, only) == pytest.approx(sum(flops_s) + mix.traffic_bytes / only.memory_bandwidth)
    odd = CallMix((Product("", 512, 512, 512),), other_flops=1e9)  # fp64, and a convolution
    assert seconds(odd, device()) > 1e9 / device().achieved_flops("bf16")


def test_mixes_of_equal_blocks_share_rows() -> None:
    block = both(product(512, 512, 512), attention(512, 64))
    stage = merge_mixes([block, block, product(512, 512, 512)])
    assert [row.count for row in stage.products] == [3] and [row.count for row in stage.attention] == [2]
    assert stage.flops == 2 * block.flops + product(512, 512, 512).flops
    assert stage.traffic_bytes == 2 * block.traffic_bytes + product(512, 512, 512).traffic_bytes


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_table_survives_a_file_and_is_written_once_for_equal_devices(tmp_path: Path) -> None:
    here = machine()
    here.save(tmp_path / "machine.yaml")
    assert Hardware.load(tmp_path / "machine.yaml") == here
    text = (tmp_path / "machine.yaml").read_text()
    assert text.count("1024: 60TFLOPS") == 1
    assert Hardware.model_validate_json(here.model_dump_json()) == here
    assert "products in bf16 20.0 TFLOPS at 512 to 90.0 TFLOPS at 4096" in here.describe()


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({}, r"rates\.source: missing"),
        ({"source": "x", "products": {"bf16": {}}}, "rates.products.bf16: found {}, allowed: a mapping from sizes to"),
        ({"source": "x", "products": {"bf16": {0: 1e9}}}, "allowed: sizes and rates above 0"),
        ({"source": "x", "products": {"bf16": {64: -1}}}, "allowed: sizes and rates above 0; at 64 the rate is -1"),
        ({"source": "x", "products": {"bf16": {64: "1GB"}}}, "unknown unit 'GB'"),
        ({"source": "x", "products": {"bf16": {"64x": 1e9}}}, "allowed: sizes that are numbers, found '64x'"),
        ({"source": "x", "products": {"fp4": {64: 1e9}}}, "fp4.*'fp32', 'bf16', 'fp16' or 'fp8'"),
        ({"source": "x", "products": {"bf16": {64: 1e9, 128: 9e9}}}, "no larger call that takes less time"),
        ({"source": "x", "pointwise": {64: "1GB/s", 128: "3GB/s"}}, "no larger call that takes less time"),
        ({"source": "x", "products": {"bf16": {64: "101TFLOPS"}}}, r"devices\[0\].rates: found 1.01e\+14 FLOP/s"),
        ({"source": "x", "product": {}}, "unknown key; did you mean 'products'"),
        ({"source": "x", "attention": 2 * ROWS[:1]}, "one row of attention per backend"),
        ({"source": "x", "attention": [{"backend": "math"}]}, "'flash' or 'efficient'"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_its_key(rates: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        machine(rates)


def test_a_new_constant_rate_takes_the_place_of_its_part_of_the_table() -> None:
    constant = machine().with_(achieved_fraction=0.5).devices[0].rates
    assert constant is not None and not constant.products and not constant.attention and constant.pointwise
    assert machine().with_(memory_bandwidth="1TB/s").devices[0].rates.pointwise is None  # type: ignore[union-attr]
    assert machine().with_(achieved_fraction=0.5, memory_bandwidth="1TB/s").devices[0].rates is None


def test_a_device_twice_as_fast_has_a_table_twice_as_fast() -> None:
    mix = both(product(700, 512, 900), attention(512, 64))
    here = device()
    assert here.rates is not None
    fast = here.model_copy(
        update={
            "rates": here.rates.scaled(2.0), "memory_bandwidth": 2 * here.memory_bandwidth,
            "peak_flops": {dtype: 2 * rate for dtype, rate in here.peak_flops.items()},
        }
    )  # fmt: skip
    assert seconds(mix, fast) == pytest.approx(seconds(mix, here) / 2)


# -- known parts -------------------------------------------------------------------------------------------------------


def test_every_measured_part_has_a_table_with_its_sources() -> None:
    """In its own dtypes, at most its peak, and slower for small products. Others say that they have none."""
    assert MEASURED.keys() < PARTS.keys()
    for name in PARTS.keys() - MEASURED.keys():
        assert gpu(name, 0)["rates"] is None and "no table of rates" in PARTS[name].source
    for name, part in ((name, PARTS[name]) for name in MEASURED):
        document = gpu(name, 0)
        table = RateTable.model_validate(document["rates"])
        assert set(table.products) == set(document["peak_flops"]) and "derived" in table.source
        assert ("bf16" in table.products) == part.bf16
        assert all(curve[0][1] < max(rate for _, rate in curve) for curve in table.products.values())
        Hardware.model_validate({**machine(None).model_dump(), "devices": [document]})  # no rate is above the peak


def test_a_v100s_table_is_near_what_deepbench_measured() -> None:
    """Products of at least 512 rows, fp16, TFLOPS: DeepBench_NV_V100.xlsx. The table is from another source."""
    v100 = Hardware.preset("mobius-v100").with_(rates=RateTable.model_validate(gpu("v100-16gb", 0)["rates"])).devices[0]
    for m, n, k, measured in (
        (1760, 7000, 1760, 89.4), (2048, 7000, 2048, 98.0), (4096, 7000, 4096, 112.3), (7680, 5481, 2560, 108.6),
        (5124, 9124, 1760, 94.4), (6144, 24000, 2048, 106.2), (1024, 700, 512, 40.8),
    ):  # fmt: skip
        row = Product("fp16", m, n, k)
        mix = CallMix((row,), traffic_bytes=row.bytes)
        reached = mix.flops / v100.compute_s(mix.flops, mix.traffic_bytes, "fp16", 0, mix)
        assert 0.8 < reached / (measured * 1e12) < 1.1, (m, n, k)


def test_the_papers_machines_have_the_tables_of_their_gpus() -> None:
    for name, part in (
        ("mobius-topo2+2", "rtx3090ti"), ("mobius-v100", "v100-16gb"), ("fuyou-a100", "a100-80gb"),
        ("ftpipe-2080ti", "rtx2080ti"), ("mics-p4d:2", "a100-40gb"),
    ):  # fmt: skip
        (table,) = {device.rates for device in Hardware.preset(name).devices}
        assert table == RateTable.model_validate(gpu(part, 0)["rates"])
    assert Hardware.preset("mobius-topo4", rates=None).devices[3].rates is None


# -- threads -----------------------------------------------------------------------------------------------------------


def measured_host() -> Hardware:
    """Four cores as two devices, measured with one, two and four threads."""
    rates = [
        {
            "threads": threads, "peak_flops": {"fp32": 1e11 * speed}, "memory_bandwidth": 1e10 * speed,
            "h2d_bandwidth": 5e9, "d2h_bandwidth": 5e9, "link_latency_s": 1e-5, "op_overhead_s": 4e-6,
            "rates": {"source": "made up", "products": {"fp32": {64: 1e10, 512: 1e11 * speed}}},
        }
        for threads, speed in ((1, 0.5), (2, 1.0), (4, 1.6))
    ]  # fmt: skip
    document = Hardware.cpu(2, threads=2).model_dump()
    document["hosts"][0] |= {"cpu_rates": rates, "cpu_cores": 4}
    document["devices"] = [device | rates[1] | {"achieved_fraction": 1.0} for device in document["devices"]]
    return Hardware.model_validate(document)


@pytest.mark.parametrize(("count", "threads", "peak"), [(1, 4, 1.6e11), (2, 2, 1e11), (4, 1, 0.5e11), (8, 1, 0.5e11)])
def test_devices_have_the_rates_of_the_threads_that_they_get(count: int, threads: int, peak: float) -> None:
    changed = measured_host().with_(num_devices=count)
    assert changed.num_devices == count
    for each in changed.devices:
        assert (each.threads, each.peak_flops["fp32"]) == (threads, peak)
        assert each.rates is not None and each.rates.highest("fp32") == peak
        assert each.memory_bandwidth == pytest.approx(peak / 10)


def test_threads_that_were_not_measured_scale_the_nearest_rates() -> None:
    three = measured_host().with_(num_devices=1, threads=3).devices[0]
    assert three.threads == 3 and three.peak_flops["fp32"] == pytest.approx(0.75 * 1.6e11)


def test_figures_that_are_given_beside_the_number_of_devices_stand() -> None:
    one = measured_host().with_(num_devices=1, memory_bandwidth="7GB/s", achieved_fraction=0.5).devices[0]
    assert (one.memory_bandwidth, one.threads, one.rates) == (7e9, 4, None)
    assert one.achieved_flops("fp32") == pytest.approx(0.8e11)


def test_a_measured_host_survives_a_file(tmp_path: Path) -> None:
    measured_host().save(tmp_path / "machine.yaml")
    assert Hardware.load(tmp_path / "machine.yaml") == measured_host()


def test_without_measured_rates_another_number_of_devices_changes_no_threads() -> None:
    plain = Hardware.cpu(2, threads=2).with_(num_devices=1)
    assert plain.devices[0] == Hardware.cpu(2, threads=2).devices[0]
