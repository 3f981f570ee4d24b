"""What a simulation can say of the tables and figures of MiCS (VLDB 2022, sections 2 to 5).

MiCS runs as its paper has it: shards on the GPUs, each layer gathered for each micro-batch forward and backward and
computed again, sums scattered inside the group with every micro-batch and added up over the groups once a step. Its
rival, DeepSpeed's ZeRO-3, is the same program with one group of all GPUs and plain gathers. Findings:
`reproduce_mics_scale` and `reproduce_mics_parts`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..lab import Lab
from ..report import Finding
from ..wide_resnet import NamedWideResNet
from .bench import A100, FEW, MICS, OURS, V100, ZERO3, ZERO3_LATE, Model, Setup, hardware
from .parts import fig2, fig11c, fig12, fig13, fig14, fig15, traffic
from .scale import fig7, fig8, fig9, fig10, huge, scaling

TITLE = "MiCS (VLDB 2022) in simulation"
_ROBERTA = "hidden_size=5120,intermediate_size=20480,num_hidden_layers=62,num_attention_heads=40"
_GPT2 = "n_embd=5120,n_layer=62,n_head=40,vocab_size=50265"
_100B = "hidden_size=10240,intermediate_size=40960,num_hidden_layers=80,num_attention_heads=80"

FULL = Setup(
    models={
        "BERT 10B": Model("mics-bert-10b", 8),
        "BERT 15B": Model("mics-bert-15b", 16),
        "BERT 20B": Model("mics-bert-20b", 16),
        "BERT 50B": Model("mics-bert-50b", 64),
        "RoBERTa 20B": Model(f"roberta-large:{_ROBERTA}", 16),
        "GPT2 20B": Model(f"gpt2-xl:{_GPT2}", 16),
        "WideResNet 3B": Model("wide-resnet-3b", 8, micro_batches=1, precision="fp32"),
        "52B": Model("mics-bert-50b:num_hidden_layers=64", 64, 16, 4),
        "100B": Model(f"mics-bert-50b:{_100B}", 128, 8, 8),
    },
    strong={
        "BERT 10B": (2, 4, 8, 16),
        "BERT 15B": (2, 4, 8, 16),
        "BERT 20B": (2, 4, 8, 16),
        "BERT 50B": (8, 16),
        "RoBERTa 20B": (2, 16),
        "GPT2 20B": (2, 16),
    },
    fast={"BERT 15B": (2, 4, 8), "BERT 20B": (2, 4, 8)},
    small="BERT 10B",
    two_hosts="BERT 15B",
    hosts=(2, 4, 8, 16),
    groups=(8, 16, 32, 64),
    grouped=8,
    image="WideResNet 3B",
    huge={"52B": (16,), "100B": (16, 64)},
    scaled="BERT 10B",
    known={"wide-resnet-3b": NamedWideResNet((6, 8, 46, 6), 8)},
)

FINDINGS: dict[str, Callable[[Lab, Setup], Finding]] = {
    f.__name__: f for f in (fig2, traffic, fig7, fig8, fig9, fig10, fig11c, huge, fig12, fig13, fig14, fig15, scaling)
}
LEFT_OUT = (
    ("figures 1, 3 to 6", "drawings of the mechanisms: groups, hierarchical gathers, sums in two hops."),
    ("figure 7, ZeRO-2", "whole weights on every GPU; the paper finds it out of memory in most settings."),
    ("figures 11a, 11b, table 2", "against Megatron-LM-3D, whose tensor parallelism these programs do not have."),
    ("figure 16", "the loss of a run on real GPUs; here tests compare sharded steps with eager PyTorch's."),
)


def assumptions(lab: Lab, setup: Setup) -> list[tuple[str, str]]:
    """Out of the presets, so that they say what was simulated."""
    old, new = hardware(V100, 2), hardware(A100, 2)

    def gpu(machine: object, half: str) -> str:
        device, host = machine.devices[0], machine.hosts[0]  # type: ignore[attr-defined]
        return (
            f"{half}: {device.peak_flops['fp16'] / 1e12:.0f} TFLOPS of fp16 at {device.achieved_fraction['fp16']:.0%} "
            f"in large products, {device.memory_bandwidth / 1e9:.0f} GB/s of memory, "
            f"{device.op_overhead_s * 1e6:.0f} us a torch call, NVLink {host.nvlink_bandwidth / 1e9:.0f} GB/s a GPU "
            "and direction"
        )

    assert old.network is not None and new.network is not None
    hop_s = old.network.latency_s + 2 * old.devices[0].link_latency_s
    return [
        ("GPUs", f"{gpu(old, 'p3dn, V100')}; {gpu(new, 'p4d, A100')}"),
        (
            "network",
            f"{old.network.bandwidth / 1e9:g} and {new.network.bandwidth / 1e9:g} GB/s a host and direction: the whole "
            "wire rate (100 and 400 Gb/s), nothing lost to protocol or to other tenants",
        ),
        (
            "collectives",
            "rings host by host, one for each PCIe switch between hosts, so that each network card carries (n-1)/n of "
            "the value once; a sum that all get is a scatter and a gather",
        ),
        (
            "latency",
            f"a ring of n has n-1 rounds (section 2.3, footnote 1) of {hop_s * 1e6:.0f} us between hosts: "
            f"{old.network.latency_s * 1e6:.0f} us of network and {old.devices[0].link_latency_s * 1e6:.0f} us of PCIe "
            f"on either side, assumed; {old.hosts[0].nvlink_latency_s * 1e6:.0f} us inside a host. All parameters of a "
            "layer go in one call",
        ),
        (
            "memory",
            f"{old.devices[0].memory_bytes / 2**30:.0f} and {new.devices[0].memory_bytes / 2**30:.0f} GiB, "
            f"{old.devices[0].usable_fraction:.0%} of it usable; 2 + 2 + 12 bytes a parameter over the group",
        ),
        (
            "models",
            "table 1 as encoders with a classifier, without the output layer over the vocabulary; BERT 50B with 64 "
            "heads, as 40 do not divide 8192. The paper does not describe 52B and 100B: 64 layers of 8192 and 80 of "
            "10240 here",
        ),
        (
            "batch",
            f"{setup.batch} rows of 512 in micro-batches of 8 a GPU; of those, {FEW} are simulated, and each further "
            "one takes as long as the second began behind the first",
        ),
        ("TFLOPS", "the paper's formula, which counts recomputation: 96 T l L h^2 (1 + l / 6h + V / 16Lh)"),
        (MICS.name, f"`{MICS.line(8)}`"),
        (ZERO3.name, f"the same with all GPUs in one group and plain gathers: `{ZERO3.line(128)}`"),
        (
            ZERO3_LATE.name,
            "the same, each layer gathered when it is due. DeepSpeed 0.5.6 fetches ahead, but by section 4 makes its "
            "streams wait for each other where it need not: it should lie between the two",
        ),
        (OURS.name, f"what MiCS's passes choose when they may choose more: `{OURS.line(8)}`"),
    ]
