"""Mobius's setup, its pipelines and table 3.

A step is counted as the paper defines it for its partition (eq. 3): from its begin to the end of the last backward.
The whole step, with Adam on the CPU, is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...compiler.strategies import STRATEGIES
from ...graph.blocks import Block
from ...graph.costs.stage_time import block_seconds
from ...ir.machine.hardware import Hardware
from ...ir.units import format_seconds
from ..experiments import Experiments, at_share, said_memory, said_products, said_traffic, sizes_table
from ..lab import SimulatedStep, Workload
from ..report import Finding

FAST, HALF = 12e9, 6.6e9  # bytes/s: "more than 12 GB/s", and half of the 13.1 GB/s of a root complex
SWAPPED = "schedule-pipeline, insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer"
TURNS = ", take-turns{always=true}"  # section 3.3: weights by the turn of their stage
MIP = "partition-mip{deadline_s=4, swap=true, always=true, turns=true}"
FAIR_MIP = MIP.replace(", turns=true", "")
# DeepSpeed's ZeRO-3 with gradients that are all-reduced before they are offloaded (section 3.1, eq. 2).
ZERO3 = STRATEGIES["zero3-offload"].replace("insert-optimizer", "insert-two-hop{every=all-reduce}, insert-optimizer")
GPIPE = "gpipe"
# What the paper's framework reaches on its GPUs is not published. Both are fitted once, to the ends of figure 5's
# range, taken for 15B, the model of its figure 2: 5.1x where four GPUs share a root complex, and 3.8x where two do, as
# the gain grows with contention. `SHARE`: of the rates at which the GPUs' calls were measured. `STAGED`: bytes/s of one
# GPU's messages, which are copied through DRAM without P2P.
SHARE, STAGED = 0.271, 5.25e9
FITTED = {
    "fig5: all models and topologies": "of 15B: the rate at which the framework computes, to the highest; that of "
    "messages between GPUs through DRAM, to the lowest",
}


def mobius(partition: str = MIP, mapping: str = "map-cross", turns: str = TURNS, fetch: str = "swap=true") -> str:
    """The pipeline of Mobius with this partition and mapping; without `turns` links are shared fairly."""
    return f"coarsen, {partition}, {mapping}, {SWAPPED.replace('swap=true', fetch)}{turns}"


def topology(name: str, share: float = SHARE, staged: float | None = STAGED) -> Hardware:
    """A machine whose GPUs compute at `share` of what products of their sizes reach, and send each other at most
    `staged` bytes/s."""
    return at_share(Hardware.preset(f"mobius-topo{name}", staged_bandwidth=staged), share)


def narrow(name: str, **how: Any) -> Hardware:
    """The same with slots of x8, which section 4 names beside 13.1 GB/s, a rate that only x16 has."""
    hardware = topology(name, **how)
    half = hardware.devices[0].h2d_bandwidth / 2
    return hardware.with_(h2d_bandwidth=half, d2h_bandwidth=half)


def rented() -> Hardware:
    """The server with V100s and NVLink, under the same framework."""
    return at_share(Hardware.preset("mobius-v100"), SHARE)


def bound(step: SimulatedStep) -> str:
    """A text that says what a step without its optimizer waits for."""
    assert step.timeline is not None and step.computed_s is not None
    rate, moved = step.hardware.hosts[0].root_complexes[0].bandwidth_down, step.timeline.moved_bytes
    busiest = max(num_bytes for link, num_bytes in moved.items() if link.startswith("rc")) / rate
    return (
        f"{step.computed_s:.2f} s, in which the busiest GPU computes {max(step.compute_s()):.2f} s and the busiest "
        f"root complex moves {busiest:.2f} s one way"
    )


class Mobius(Experiments):
    """Mobius's setup. `models` maps the paper's names to (our name, the micro-batch of table 3)."""

    title = "Mobius (ASPLOS 2023) in simulation"
    left_out = {
        "figure 13": "loss of GPT-2 on WikiText-2: a matter of values, not of time. A plan trains as one device does: "
        "`penstock check` compares losses and weights with plain PyTorch.",
        "figure 16": "the bandwidth of figure 15's transfers; its text gives no number.",
    }
    factors = {
        f"{SHARE:.1%} of the GPUs' rates": "a free number for both systems alike: what their framework reaches of the "
        "rates at which calls were measured. It stands for all that is not known of it, and is fitted to figure 5; the "
        "finding sensitivity has the ratio without it",
        f"{STAGED / 1e9:g} GB/s for a GPU's messages": "a free number for both systems, fitted to figure 5: the copies "
        "through DRAM",
    }
    models: Mapping[str, tuple[str, int]] = {
        "3B": ("mobius-3b", 2), "8B": ("mobius-8b", 2), "15B": ("mobius-15b", 1), "51B": ("mobius-51b", 1)
    }  # fmt: skip
    presets = ("mobius-topo4", "mobius-topo2+2", "mobius-topo1+3", "mobius-topo4+4", "mobius-v100")
    billions: Mapping[str, float] = {"3B": 3, "8B": 8, "15B": 15, "51B": 51}  # parameters according to table 3
    partitioned: Sequence[str] = ("3B", "15B", "51B")  # of figure 9
    mapped: Sequence[str] = ("8B", "15B")  # of figure 10
    micro_batches: Sequence[int] = (1, 2, 4)  # of figures 9 and 10
    scaled = "15B"
    rented: Sequence[str] = ("8B", "15B")
    topologies: Sequence[str] = ("4", "2+2", "1+3")
    scaling: Sequence[str] = ("1+1", "2+1", "2+2", "3+2", "3+3", "4+3", "4+4")

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        work, hardware = self.workload("gpt2:n_layer=4,n_embd=1024,n_head=8,vocab_size=1024", 1, 4), topology("2+2")
        yield "Mobius", work, hardware, mobius("partition-balanced{stages=6}")
        yield "ZeRO-3", work, hardware, ZERO3

    def work(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> Workload:
        name, usual = self.models[model]
        return self.workload(name, micro_batch or usual, hardware.num_devices)

    def mobius(self, model: str, hardware: Hardware, micro_batch: int | None = None, **line: str) -> SimulatedStep:
        return self.lab.trial(self.work(model, hardware, micro_batch), hardware, mobius(**line))

    def zero3(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> SimulatedStep:
        return self.lab.trial(self.work(model, hardware, micro_batch), hardware, ZERO3)

    def rivals(self, model: str, hardware: Hardware) -> tuple[SimulatedStep, SimulatedStep]:
        """Mobius and ZeRO-3 with micro-batches of one row, as section 4.1 has them."""
        return self.mobius(model, hardware, 1), self.zero3(model, hardware, 1)

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the preset and the workload that are simulated."""
        hardware = topology("2+2", share=1.0)
        device, host = hardware.devices[0], hardware.hosts[0]
        blocks = self.blocks(self.work(self.scaled, hardware), hardware)
        return {
            "GPU memory": said_memory(device),
            "GPU time": f"{said_products(device, 'fp16')}; {said_traffic(device)}; together "
            f"{_achieved(blocks, hardware) / 1e12:.0f} TFLOPS over the blocks of {self.scaled}; of "
            f"all that the framework reaches {SHARE:.1%}, on both servers: fitted once, to the 5.1x of figure 5, taken "
            "for 15B on Topo 4",
            "links": f"{device.h2d_bandwidth / 1e9:.1f} GB/s per direction for each GPU and for each root complex, "
            f"shared fairly; {device.link_latency_s * 1e6:.0f} us to begin a transfer; no P2P: from GPU to GPU through "
            f"DRAM, both links at the same time, at most {STAGED / 1e9:g} GB/s a GPU: fitted once, to the 3.8x of "
            "figure 5, taken for 15B on Topo 2+2",
            "priority": "messages and collectives before weights and offloaded gradients; weights by the turn of their "
            "stage (section 3.3); the rest in fair shares",
            "optimizer": f"AdamW on the CPU at {host.optimizer_params_per_s / 1e9:.1f} B parameters/s for the whole "
            f"host ({format_seconds(1e9 / host.optimizer_params_per_s)} for 1e9), once all gradients are "
            "in DRAM and none has overflowed (fp16); the step ends when the last weight is updated",
            "bytes of a parameter": "2 for its weight and 2 for its gradient in fp16 on the GPU; 2 + 4 + 8 in DRAM "
            "(fp16, fp32 master, states)",
            "step": "as eq. 3 defines it: until the last backward has ended. With Adam on the CPU beside it; the paper "
            "does not say whether its steps hold the optimizer",
            "batch": f"as many micro-batches as GPUs, of rows of {self.sequence} tokens; every stage computed again in "
            "backward. One row in figures 5 to 8 (section 4.1), table 3's number for GPipe and figure 12",
            "Mobius": f"`{mobius()}`; stages always come from DRAM, also where all would fit the GPUs",
            "ZeRO-3": f"`{ZERO3}`: each GPU one micro-batch, weights gathered per block forward and backward, "
            "gradients all-reduced (section 3.1), of which each GPU offloads its shard, shards updated on the CPU, "
            "with the same links, rates and accounting",
        }


def _achieved(blocks: Sequence[Block], hardware: Hardware) -> float:
    """FLOP/s of one forward and backward of all blocks on one device."""
    flops = sum(b.cost.forward_flops + b.cost.backward_flops for b in blocks)
    return flops / sum(block_seconds(b, hardware.devices[0], "fp16").both_s for b in blocks)


def table3(paper: Mobius) -> Finding:
    """Table 3: the models."""
    table = sizes_table({model: name for model, (name, _) in paper.models.items()}, paper.billions)
    return Finding(
        "table3",
        "the models",
        "3 B, 8 B, 15 B and 51 B parameters with 64, 40, 40 and 50 layers of 2048, 4096, 5120 and 9216.",
        "every parameter once, the output layer tied to the token embedding, vocabulary 50257.",
        table,
        "the paper's 15B has 12.8 B parameters by its own dimensions (12 x 40 x 5120^2 and the embeddings). Its 80 "
        "heads do not divide 9216; the 51B model here has 72.",
    )
