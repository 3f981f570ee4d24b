"""Machines as people type them."""

from __future__ import annotations

import pytest

from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.spelling import preset_of


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx4090", "rtx4090x1"),
        ("4090", "rtx4090x1"),
        ("4090x2", "rtx4090x2"),
        ("2x4090", "rtx4090x2"),
        ("RTX 4090 x 2", "rtx4090x2"),
        ("2 x NVIDIA GeForce RTX 4090", "rtx4090x2"),
        ("rtx4090x4-2rc", "rtx4090x4-2rc"),
        ("4090x4-2rc-pcie3", "rtx4090x4-2rc-pcie3"),
        ("3090ti", "rtx3090tix1"),
        ("3090", "rtx3090x1"),
        ("A100-80GB", "a100-80gbx1"),
        ("a100 80gb x 8", "a100-80gbx8"),
        ("8xH100", "h100x8"),
        ("4060", "rtx4060x1"),
        ("RTX 4080 Laptop", "rtx4080-laptopx1"),
        ("2 x 3090", "rtx3090x2"),
        ("4070 Ti Super", "rtx4070tisuperx1"),
        ("RTX A6000", "rtxa6000x1"),
        ("RTX 6000 Ada", "rtx6000adax1"),
        ("t4", "t4x1"),
        ("a10", "a10x1"),
        ("A100 80GB PCIe", "a100-pcie-80gbx1"),
        ("H100 NVL", "h100-nvlx1"),
        ("4xGB200", "gb200x4"),
        ("MI250X x 8", "mi250xx8"),
        ("DGX Spark", "dgx-spark"),
        ("Strix Halo", "strix-halo"),
        ("Jetson AGX Orin", "jetson-orin"),
        ("thor", "thor-128gbx1"),
        ("7900 XTX", "rx7900xtxx1"),
        ("mobius-topo2+2", "mobius-topo2+2"),
        ("laptop", "laptop-16gb"),
        ("mi300", "mi300xx1"),
        ("2xh100-80gb", "h100x2"),
        ("h200-141gb", "h200x1"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gbx1"),
        ("NVIDIA H100 80GB HBM3", "h100x1"),
        ("4090 + 3090", "rtx4090x1+rtx3090x1"),
        ("RTX 4090 and RTX 3090", "rtx4090x1+rtx3090x1"),
        ("2x4090+3090", "rtx4090x2+rtx3090x1"),
        ("2x A100 80GB", "a100-80gbx2"),
        ("two 3090s", "rtx3090x2"),
        ("one 4090", "rtx4090x1"),
        ("dual 4090", "rtx4090x2"),
        ("8 H100s", "h100x8"),
        ("h100:8", "h100x8"),
        ("rtx_4090", "rtx4090x1"),
        ("DGX H100", "h100x8"),
        ("2x8xH100", "h100x8:2"),
        ("16xH100", "h100x8:2"),
        ("L40S", "l40sx1"),
    ],
)
def test_it_is_understood(typed: str, meant: str) -> None:
    assert preset_of(typed) == meant
    assert Hardware.from_any(typed).name == meant


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("a100", "may be a100-40gbx1 or a100-80gbx1 or a100-pcie-40gbx1 or a100-pcie-80gbx1; say which"),
        ("5060 ti", "may be rtx5060ti-8gbx1 or rtx5060ti-16gbx1; say which"),
        ("2xgh200", "at most 1 GPU$"),
        ("dgx-sparc", "did you mean 'dgx-spark'"),
        ("rtx4085", "no hardware preset 'rtx4085'; did you mean 'rtx4080'"),
        ("2xv100", "may be v100-16gbx2 or v100-32gbx2"),
        ("rtx4090x0", "counts must be 1 to 4096"),
        ("4090x0", "counts must be 1 to 4096"),
        ("h100x12", "at most 8 GPUs"),
        ("dgx a100", "may be a100-40gbx8 or a100-80gbx8; say which"),
        ("M3 Max", "Apple's GPUs run by MPS"),
        ("apple m2", "Apple's GPUs run by MPS"),
        ("TPU v4", "it is no GPU"),
        ("GTX 1080 Ti", "GTX, Titan, Quadro and older cards have no figures here"),
        ("p5.48xlarge", "name the GPUs of the machine that you rent, as `nvidia-smi -L` lists them"),
        ("colab", "name the GPUs of the machine that you rent"),
        ("4090x2 + H100", "has cards for slots, such as 4090 .* 3090, and h100x1 is none; a YAML document"),
        ("2x4x4090", "2 machines of rtx4090x4 have no network that is known"),
        ("laptop-16", "did you mean 'laptop-16gb'"),
        ("rtx9999", "no hardware preset 'rtx9999'"),
        ("a11", r"no hardware preset 'a11'; did you mean 'a10'\? A part"),
        ("rtx4090-48gb", "no hardware preset 'rtx4090-48gb'"),
        ("qq", "no known GPU has a name like it, and `penstock hardware --list` has all. A part"),
        ("zzz", "a number will do, such as 4090x2"),
    ],
)
def test_what_is_none_or_several_is_refused_with_the_nearest(typed: str, said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        preset_of(typed)
