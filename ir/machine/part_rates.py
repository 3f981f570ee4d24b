"""Tables of rates of known GPUs, from public measurements, as plain documents for `RateTable`.

Products are `torch.matmul` of square matrices as contributors to github.com/zzc0721/torch-performance-test-data
measured them; the numbers below are issues there, "database" is its `database.md`. Attention is FlashAttention 2, which
torch's `scaled_dot_product_attention` runs. Bandwidths are copies, from github.com/chsasank/device-benchmarks.

Where a part has no public measurement, a rule derives its figures, and the table's source says so:
- Cards of one chip differ by their number of processors (SMs): a product is cut into tiles, each of which one SM
  computes, so rates are in proportion to SMs.
- Attention and copies reach the same share of the datasheet's peak as on the nearest part that was measured.
- Memory-efficient attention, the kernel for masks, for fp32, and for GPUs before Ampere, which flash attention does not
  support, reaches 0.7 of flash attention's rate forward and 0.5 backward: xformers' kernel beside FlashAttention 2 in
  github.com/Dao-AILab/flash-attention issue 416, heads of 64, 4096 and 8192 keys.

- Products in float8 run at twice the rate of bf16 of the same size, as their peaks are: an RTX 5090 reaches 339 TFLOPS
  at 1024 x 4096 x 4096 and 389 at 4096, rowwise (github.com/pytorch/pytorch pull request 155991).

Rates above the datasheet's peak, which cards reach at higher clocks than its own, count as the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .call_mix import FP8

SIZES = (1024, 2048, 4096, 8192, 10240)  # of square products
LENGTHS = (512, 1024, 2048, 4096, 8192)
EFFICIENT_FORWARD, EFFICIENT_BACKWARD = 0.7, 0.5
AttentionShares = Mapping[int, tuple[Sequence[float], Sequence[float]]]  # head size -> forward and backward by LENGTHS


def _shares(peak: float, by_head: AttentionShares) -> AttentionShares:
    """TFLOPS as shares of a peak."""
    return {
        head: ([rate / peak for rate in forward], [rate / peak for rate in backward])
        for head, (forward, backward) in by_head.items()
    }


_H100_FLASH = _shares(
    989,
    {
        64: ((252.5, 294.8, 308.1, 312.0, 310.2), (198, 238, 264, 279, 287)),
        128: ((309, 350, 362, 368, 370), (214, 260, 291, 310, 318)),
    },
)
_H100_SAID = (
    "attention: FlashAttention 2 on H100 SXM5, from the figures of the FlashAttention-3 paper (2024), forward with "
    "heads of 64 from flash-attention pull request 2688, whose text names no GPU"
)
_GA102_FLASH = _shares(111.1, {64: ((84.08, 81.02, 81.31, 81.69, 81.86), (52.88, 62.54, 70.07, 74.80, 77.42))})
_GA102_SAID = "attention derived: the shares of peak of an RTX A5000 (GA102), gpu-mode/ring-attention issue 10"
# The highest shares that the paper names, 0.73 forward and 0.63 backward, with the H100's curve below them.
_A100_FLASH = {
    head: (
        [0.73 * share / max(_H100_FLASH[128][0]) for share in forward],
        [0.63 * share / max(_H100_FLASH[128][1]) for share in backward],
    )
    for head, (forward, backward) in _H100_FLASH.items()
}
_A100_SAID = (
    "attention derived: at most 73% of peak forward, 63% backward (FlashAttention-2 paper, 2023), by length and head "
    "size as on H100"
)


@dataclass(frozen=True)
class MeasuredPart:
    """TFLOPS of square products of `SIZES` by dtype, the shares of attention, GB/s of a large copy, and sources."""

    products: Mapping[str, Sequence[float]]
    attention: AttentionShares
    copy_gb_s: float
    source: str
    has_flash: bool = True


_V100 = MeasuredPart(
    {"fp32": (10.56, 12.71, 13.85, 14.38, 14.51), "fp16": (57.30, 78.23, 95.73, 97.36, 89.37)},
    _GA102_FLASH, 766, f"products: issue 140 (V100-SXM2-16GB); copies of a V100 32GB; {_GA102_SAID}", has_flash=False,
)  # fmt: skip
_A100_PRODUCTS = {
    "fp32": (8.99, 9.69, 15.52, 19.18, 19.18),
    "fp16": (83.66, 214.73, 258.74, 258.74, 258.74),
    "bf16": (94.89, 138.46, 264.53, 264.53, 264.53),
}
_A100_PRODUCTS_SAID = (
    "products: database, A100 SXM4 80GB (its highest rate, from 4096 on; fp32 from 8192 on), smaller ones issue 108 "
    "(A100-PCIE-40GB)"
)
_H100_PRODUCTS = {
    "fp32": (37.39, 49.58, 51.88, 51.81, 49.61),
    "fp16": (179.13, 645.12, 760.04, 736.19, 668.42),
    "bf16": (176.62, 676.59, 788.72, 797.51, 719.72),
}
_RTX3090_SAID = (
    "products derived: by size as on an RTX 3080 Ti (issue 144), times the highest rates of database, RTX 3090, over "
    "those of the 3080 Ti"
)
_RTX3090_PRODUCTS = {  # the 3080 Ti's, times 24.84 / 25.56, 75.88 / 77.02 and 76.68 / 77.72
    "fp32": tuple(0.9718 * rate for rate in (18.23, 21.64, 25.02, 25.56, 25.05)),
    "fp16": tuple(0.9852 * rate for rate in (56.27, 69.02, 70.68, 70.51, 77.02)),
    "bf16": tuple(0.9866 * rate for rate in (55.14, 69.27, 71.56, 71.35, 77.72)),
}
MEASURED = {
    "rtx2080ti": MeasuredPart(
        {"fp32": (9.70, 10.88, 12.71, 13.04, 12.78), "fp16": (52.26, 58.58, 53.41, 55.58, 53.75)},
        _GA102_FLASH, 0.851 * 616,
        f"products: issue 115 (2080 Ti 22GB); copies derived from a V100's share of peak; {_GA102_SAID}",
        has_flash=False,
    ),
    "rtx3090": MeasuredPart(_RTX3090_PRODUCTS, _GA102_FLASH, 831, f"{_RTX3090_SAID}; {_GA102_SAID}"),
    "rtx3090ti": MeasuredPart(
        {dtype: tuple(84 / 82 * rate for rate in rates) for dtype, rates in _RTX3090_PRODUCTS.items()},
        _GA102_FLASH, 0.888 * 1008,
        f"{_RTX3090_SAID}, times its 84 SMs over 82; copies derived from the 3090's share of peak; {_GA102_SAID}",
    ),
    "rtx4090": MeasuredPart(
        {
            "fp32": (45.89, 53.84, 53.02, 53.41, 51.43), "fp16": (106.10, 159.38, 168.38, 155.50, 156.88),
            "bf16": (126.84, 164.81, 151.50, 160.17, 158.54),
        },
        _GA102_FLASH, 912, f"products: issue 78; {_GA102_SAID}",
    ),
    "rtx5090": MeasuredPart(
        {
            "fp32": (47.76, 69.83, 64.50, 66.91, 65.46), "fp16": (139.18, 173.86, 217.99, 223.98, 220.03),
            "bf16": (93.44, 171.53, 182.19, 234.66, 236.99),
        },
        _GA102_FLASH, 0.905 * 1792,
        f"products: issue 124; copies derived from a 4090's share of peak; {_GA102_SAID}",
    ),
    "rtx4060-laptop": MeasuredPart(
        {
            "fp32": (7.57, 8.39, 8.00, 7.81, 7.79), "fp16": (23.93, 27.56, 28.36, 27.61, 28.18),
            "bf16": (24.12, 28.35, 28.40, 27.71, 27.23),
        },
        _GA102_FLASH, 0.813 * 256,
        f"products: issue 143; copies derived from a 4060 Ti's share of peak; {_GA102_SAID}",
    ),
    "v100-16gb": _V100,
    "v100-32gb": _V100,
    "a100-40gb": MeasuredPart(
        _A100_PRODUCTS, _A100_FLASH, 1490 / 2039 * 1555,
        f"{_A100_PRODUCTS_SAID}; copies derived from the 80 GB card's share of peak; {_A100_SAID}",
    ),
    "a100-80gb": MeasuredPart(_A100_PRODUCTS, _A100_FLASH, 1490, f"{_A100_PRODUCTS_SAID}; {_A100_SAID}"),
    "h100": MeasuredPart(
        _H100_PRODUCTS, _H100_FLASH, 0.815 * 3350,
        f"products: issue 79; copies derived from an H100 PCIe's share of peak; {_H100_SAID}",
    ),
    "h200": MeasuredPart(
        _H100_PRODUCTS, _H100_FLASH, 0.815 * 4800,
        "products: issue 79 (H100; the database has the same highest rates for an H200); copies derived from an H100 "
        f"PCIe's share of peak; {_H100_SAID}",
    ),
}  # fmt: skip


def part_rates(name: str, peak: Mapping[str, float]) -> dict[str, Any]:
    """The table of a part whose datasheet has these peaks, as a document."""
    part = MEASURED[name]
    products = {
        dtype: {size: _flops(rate * 1e12, peak[dtype]) for size, rate in zip(SIZES, rates)}
        for dtype, rates in part.products.items()
    }
    if FP8 in peak:
        products[FP8] = {size: _flops(2 * rate * 1e12, peak[FP8]) for size, rate in zip(SIZES, part.products["bf16"])}
    half = [dtype for dtype in ("fp16", "bf16") if dtype in peak]
    rows = [_attention("flash", half, part, peak["fp16"])] if part.has_flash else []
    rows += [_attention("efficient", half, part, peak["fp16"]), _attention("efficient", ["fp32"], part, peak["fp32"])]
    return {
        "source": f"{part.source}; memory-efficient attention{' and float8' if FP8 in peak else ''} derived",
        "products": products,
        "attention": [row for group in rows for row in group],
        "pointwise": {2**28: round(part.copy_gb_s) * 1e9},
    }


def _attention(backend: str, dtypes: Sequence[str], part: MeasuredPart, peak: float) -> list[dict[str, Any]]:
    factors = (EFFICIENT_FORWARD, EFFICIENT_BACKWARD) if backend == "efficient" else (1.0, 1.0)
    found = []
    for head, curves in part.attention.items():
        forward, backward = (
            {length: _flops(factor * share * peak, peak) for length, share in zip(LENGTHS, shares)}
            for factor, shares in zip(factors, curves)
        )
        row = {"backend": backend, "dtypes": list(dtypes), "head_size": head, "forward": forward, "backward": backward}
        found.append(row)
    return found


def _flops(rate: float, peak: float) -> float:
    """Four digits, which is more than a measurement is worth, and at most the peak."""
    return min(float(f"{rate:.4g}"), peak)
