"""TableTiming a table of rates: what is timed, and that the result is a table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock import Hardware
from penstock.ir import units
from penstock.ir.machine.rates import RateTable, curve_reader
from penstock.runtime.measure import detect, table
from penstock.runtime.measure.detect import _four_digits
from penstock.runtime.measure.table import (
    LONGEST_S,
    ROUNDING,
    TableTiming,
    attention_rows,
    measured_table,
    plausible,
    product_curve,
)

CALL_S = 1e-6


def measure_time(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def timing(time_of: Callable[[Callable[[], object]], float] = measure_time, **more: Any) -> TableTiming:
    figures: dict[str, Any] = {
        "sizes": (8, 16, 32), "lengths": (8, 16), "head_sizes": (8, 16), "heads": 2, "tokens": 16,
        "tensor_bytes": (4096, 8192),
    }  # fmt: skip
    return TableTiming(torch.device("cpu"), time_of, CALL_S, **(figures | more))


def test_what_is_measured_is_a_table() -> None:
    found = json.loads(json.dumps(measured_table(timing(), ("fp32", "bf16"), ("flash", "efficient"))))
    rates = RateTable.model_validate({"source": "this test", **found})
    assert [size for size, _ in rates.products["fp32"]] == [8, 16, 32]
    assert [(row.backend, row.dtypes, row.head_size) for row in rates.attention] == [
        ("flash", (dtype,), size) for dtype in ("fp32", "bf16") for size in (8, 16)
    ]  # a CPU has no other kernel
    assert rates.pointwise is not None and len(rates.pointwise) == 2


def test_a_rate_is_that_of_the_time_without_the_calls_own() -> None:
    curve = product_curve(timing(lambda work: 5 * CALL_S), torch.float32)
    assert curve[8] == pytest.approx(2 * 8**3 / (4 * CALL_S))
    assert product_curve(timing(lambda work: CALL_S), torch.float32)[8] == pytest.approx(2 * 8**3 / (CALL_S / 2))


def test_sizes_after_one_that_takes_long_are_left_out() -> None:
    assert list(product_curve(timing(lambda work: 1.0), torch.float32)) == [8]


def test_a_slow_device_times_attention_on_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first length, too, takes no longer than the longest that counts; the rate is the same."""
    flops_per_s, took_s = 1e7, list[float]()

    def attend(timing: TableTiming, backend: str, query: Tensor, *_: Tensor) -> tuple[float, float]:
        rows, heads, length, head_size = query.shape
        took_s.append(4.0 * rows * heads * length**2 * head_size / flops_per_s)
        return took_s[-1], 2.5 * took_s[-1]

    monkeypatch.setattr(table, "_attention_s", attend)
    found = list(attention_rows(timing(lengths=(128, 512), tokens=1 << 14), "flash", "fp32"))
    assert [row["head_size"] for row in found] == [8, 16] and len(took_s) == 4  # one row, then as many as fit
    assert all(list(row["forward"].values()) == [pytest.approx(flops_per_s)] for row in found)
    assert max(took_s) <= max(LONGEST_S, *took_s[::2])


def test_a_disturbed_time_cannot_make_a_larger_call_faster() -> None:
    assert plausible({2: 10.0, 4: 1000.0, 8: 90.0}, 3.0) == {2: 10.0, 4: pytest.approx(80.0, rel=ROUNDING), 8: 90.0}


@given(st.floats(1.0, 9.9999), st.sampled_from([1.0, 2.0, 3.0]))
def test_calls_that_take_equally_long_can_be_read_from_a_document_of_four_digits(rate: float, power: float) -> None:
    found = plausible({size: rate * 1e12 * size**power for size in (1, 2, 4, 8)}, power)
    read = curve_reader(units.FLOPS, power)
    assert read({size: _four_digits(str(value)) for size, value in found.items()})


def test_equal_devices_share_the_mean_of_their_reports() -> None:
    first = {"rate": 1.0, "source": "a", "curve": {"8": 2.0, "16": 4.0}, "rows": [{"head": 8, "rate": 3.0}]}
    second = {"rate": 3.0, "source": "a", "curve": {"8": 4.0}, "rows": [{"head": 8, "rate": 5.0}]}
    assert detect.mean_of([first, second]) == {
        "rate": 2.0, "source": "a", "curve": {"8": 3.0}, "rows": [{"head": 8, "rate": 4.0}]
    }  # fmt: skip


def report(speed: float) -> dict[str, Any]:
    """The report that a child process prints about a CPU device."""
    curve = {"128": 4e10 * speed, "512": 5e10 * speed}
    row = {"backend": "flash", "dtypes": ["fp32"], "head_size": 64, "forward": curve, "backward": curve}
    return {
        "rates": {"products": {"fp32": curve}, "attention": [row], "pointwise": {"100": 1e9, "1000": 2e9 * speed}},
        "copy": 5e9, "copy_latency_s": 1e-5, "op_overhead_s": 5e-6, "adamw": 1e9, "disks": [], "disk_shares": None,
    }  # fmt: skip


def test_cpu_devices_are_timed_together_and_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device then takes the rates of all cores, without being measured again."""
    runs: list[tuple[int, int]] = []

    def children(module: str, arguments: list[list[str]], threads: int) -> list[dict[str, Any]]:
        runs.append((len(arguments), threads))
        assert [each[1:4] for each in arguments] == [["2", "1", "2"]] * 2  # ranks, threads of each, cores
        return [report(0.9 + 0.2 * rank) | {"all_cores": report(1.5)} for rank in range(len(arguments))]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(detect, "usable_cores", lambda: 2)
    monkeypatch.setattr(detect, "disk_directories", lambda: [])
    monkeypatch.setattr(detect, "run_children", children)
    both = Hardware.detect(measure=True)
    one = both.with_(num_devices=1)
    assert runs == [(2, 1)]
    assert [device.threads for device in both.devices] == [1, 1] and one.devices[0].threads == 2
    assert [device.achieved_flops("fp32") for device in both.devices] == pytest.approx([4.5e10, 5.5e10])
    assert one.devices[0].achieved_flops("fp32") == pytest.approx(7.5e10)
    two = one.with_(num_devices=2)
    assert [device.achieved_flops("fp32") for device in two.devices] == pytest.approx([5e10, 5e10])
    assert [device.threads for device in two.devices] == [1, 1]
    assert Hardware.model_validate_json(both.model_dump_json()) == both
