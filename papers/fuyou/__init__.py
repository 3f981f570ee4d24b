"""What a simulation can say of the tables and figures of Fuyou (2024, sections 1 to 5).

Fuyou runs as its paper has it: every block's weights and states on SSD, the CPU's optimizer under the backward,
activations kept, moved or computed again as the planner chooses. Its rivals are programs of ours under the rules that
the paper gives for them, built from the same passes. Findings: `reproduce_fuyou_capacity`, `_speed` and `_tuning`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ir.units import format_seconds
from ..lab import Lab
from ..report import Finding
from .bench import BLOCK_FLOPS, COLOSSAL, FUYOU, ZERO_INFINITY, ZERO_OFFLOAD, Setup, machine
from .capacity import fig4, table2, table4
from .speed import fig1, fig5, fig6, fig7, fig8
from .tuning import fig9, fig10, sensitivity

TITLE = "Fuyou (2024) in simulation"
SIZES = ("13B", "33B", "65B", "135B", "175B", "276B", "412B", "805B")

FULL = Setup(
    {size: f"gpt3-{size.lower()}" for size in SIZES},
    small="13B",
    large="175B",
    larger=("276B", "412B"),
    batches={
        ("13B", "A100"): (8, 16, 32, 64, 80),
        ("13B", "4090"): (8, 16, 32, 64),
        ("175B", "A100"): (8, 16, 32, 64),
        ("175B", "4090"): (8, 16),
    },
    overlapped={"13B": {8: 1.09, 16: 1.25, 32: 1.38, 64: 1.22}, "175B": {8: 1.16, 16: 1.18}},
    pipelined={"A100": {8: 1.66, 16: 1.88, 32: 1.97}, "4090": {8: 1.85, 16: 1.92, 32: 2.28}},
    swapped={32: False, 64: True, 80: True},
    priced={"4090": 16, "A100": 64},
)

FINDINGS: dict[str, Callable[[Lab, Setup], Finding]] = {
    f.__name__: f for f in (table2, table4, fig1, fig4, fig5, fig6, fig7, fig8, fig9, fig10, sensitivity)
}
LEFT_OUT = (
    ("table 1", "which systems have which mechanism: no number."),
    ("figure 2", "a drawing of the three schedules; `penstock simulate --trace` draws ours."),
)


def assumptions(lab: Lab, setup: Setup) -> list[tuple[str, str]]:
    """Out of the preset, so that they say what was simulated."""
    hardware = machine("A100")
    host, ssd = hardware.hosts[0], hardware.hosts[0].ssds[0]
    rates = ", ".join(f"{flops / 1e12:.0f} TFLOPS on {gpu}" for gpu, flops in BLOCK_FLOPS.items())
    memory = ", ".join(
        f"{gpu} {machine(gpu).devices[0].memory_bytes / 2**30:.0f} GiB, {machine(gpu).devices[0].usable_fraction:.0%} "
        "of it usable"
        for gpu in BLOCK_FLOPS
    )
    return [
        ("GPU memory", memory),
        (
            "GPU time",
            f"{rates}, memory traffic included: what the paper calls its peak, which it measures on a transformer "
            "block (87 TFLOPS are 53% of it, 172 are 86%). The last finding shows the preset's own rates",
        ),
        (
            "GPU link",
            f"{hardware.devices[0].h2d_bandwidth / 1e9:.0f} GB/s per direction (PCIe 4 x16 at 83% of its wire rate), "
            "pinned memory everywhere",
        ),
        (
            "SSDs",
            f"{len(host.ssds)} P5510, striped, simplex: {ssd.read_bandwidth / 1e9:.1f} GB/s read and "
            f"{ssd.write_bandwidth / 1e9:.1f} GB/s write each (datasheet), nothing lost in sharing",
        ),
        (
            "optimizer",
            f"AdamW on the CPU at {host.optimizer_params_per_s / 1e9:.1f} B parameters/s "
            f"({format_seconds(1e9 / host.optimizer_params_per_s)} for 1e9): 28 bytes a parameter at 48% of the rate "
            "of 16 channels of DDR4-2933, as for all presets",
        ),
        (
            "precision",
            "bf16 with fp32 masters: bytes and rates of fp16 without its loss scale, whose overflow check the paper "
            "leaves out",
        ),
        (
            "bytes of a parameter",
            "2 for its weight and 2 for its gradient on the GPU; on SSD 2 + 4 + 8 (weight, master, states)",
        ),
        (
            "batch",
            f"one step of so many rows of {setup.sequence} tokens without accumulation; where the GPU does not hold a "
            "block's activations at once, in equal pieces inside each stage, which move no more weights",
        ),
        ("Fuyou", f"`{FUYOU}`"),
        ("ZeRO-Infinity", f"`{ZERO_INFINITY}`. Missing: gradients by way of SSD, pageable memory for checkpoints"),
        ("ZeRO-Offload", f"`{ZERO_OFFLOAD}`. Missing: pageable memory for checkpoints"),
        ("Colossal-AI", f"`{COLOSSAL}`. Missing: its memory manager, of which the paper says nothing"),
        ("prices", "table 5; for Megatron-LM see figure 10"),
    ]
