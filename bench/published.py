"""Compares the bound of any step with published runs: none may be faster than what no run undercuts.

`published.tsv` has the runs, each with its source. Those of fp8, those that ran out of memory and those in seconds of
rows whose length is not said cannot be expressed; the others are rows of `results/published.jsonl`: the seconds that
were published for a step, the bound of the device's peak, that of fused kernels, and that of PyTorch's calls, which the
faster runs undercut. Where lengths vary, so that only tokens a second can be compared, a step counts as `MANY` rows of
`SHORT` tokens, of which attention and updates take least. An NF4 base counts as one of bf16, whose arithmetic is the
same. (torchao's script of its ViT rows crops images to 224 x 224.)

Run: python bench/published.py [--only WORD]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch

from penstock.bench.peers import rows
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.compiler.search.bounds import Bound, ideal_bounds, machine_bound
from penstock.compiler.search.candidate import RESERVOIR
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import Precision
from penstock.passes.draft import Options

TABLE = Path(__file__).with_name("published.tsv")
SHORT, MANY = 64, 1024
_MPT = "gpt3-13b:n_layer={},n_embd={},n_head={},vocab_size=50368,n_positions={}"
_LAYERS = "hidden_size={},intermediate_size={},num_hidden_layers={},num_attention_heads={},num_key_value_heads={}"
_QWEN = f"llama-8b:{_LAYERS},vocab_size=152064"
_VIT_GIANT = "hidden_size=1536,num_hidden_layers=40,num_attention_heads=24,intermediate_size=6144,image_size=224"
MODELS = {
    "Llama-3.1-8B": "llama-8b", "Llama3-8B": "llama-8b", "Llama-3.1-70B": "llama-70b", "Llama3-70B": "llama-70b",
    "Llama-3.1-405B": "llama-405b", "Llama-2-7B": "llama2-7b", "GPT 13B 40x5120": "gpt3-13b",
    "GPT 175B 96x12288": "gpt3-175b", "vit_giant_patch14_dinov2": f"vit-base:{_VIT_GIANT},patch_size=14",
    "Llama-3.2-3B": "llama-8b:hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24",
    "Qwen2.5-7B": _QWEN.format(3584, 18944, 28, 28, 4), "Qwen2.5-32B": _QWEN.format(5120, 27648, 64, 40, 8),
    "MPT-3b": _MPT.format(32, 2560, 20, "{}"), "MPT-7b": _MPT.format(32, 4096, 32, "{}"),
    "MPT-13b": _MPT.format(40, 5120, 40, "{}"), "MPT-30b": _MPT.format(48, 7168, 64, "{}"),
    "MPT-70b": _MPT.format(80, 8192, 64, "{}"),
}  # fmt: skip
GPUS: dict[str, tuple[str, dict[str, Any]]] = {  # a preset of eight or of one, and what differs by the datasheet
    "A100 80GB": ("a100-80gb", {}), "a100_80gb": ("a100-80gb", {}), "A100 40GB": ("a100-40gb", {}),
    "a100_40gb": ("a100-40gb", {}), "h100_80gb": ("h100", {}), "RTX 4090 24GB": ("rtx4090", {}),
    "H100 96GB (HBM2e 2.4 TB/s)": ("h100", {"memory_bandwidth": 2.4e12}),
    "A6000 48GB": ("rtx4090", {"rates": None, "peak_flops": {"fp32": 38.7e12, "bf16": 154.8e12}}),
    "RTX 4070 Ti SUPER 16GB": ("rtx4090", {"rates": None, "peak_flops": {"fp32": 44.1e12, "bf16": 88.2e12}}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run that can be expressed. `seconds`: of a step of `batch` rows."""

    model: str
    hardware: str
    changes: tuple[tuple[str, Any], ...]
    batch: int
    sequence: int
    precision: str
    adapter: str | None
    seconds: float


def read() -> list[dict[str, str]]:
    """The published rows as they are."""
    with open(TABLE) as file:
        return list(csv.DictReader(file, delimiter="\t"))


def run_of(row: dict[str, str]) -> Run | None:
    """The run of a published row; None where it cannot be expressed."""
    if row["value"] == "OOM" or row["unit"] == "s/micro-batch" or re.search("fp8|float8", row["precision"]):
        return None
    numbers = [int(word) for word in re.findall(r"\d+", row["batch"])]
    batch = numbers[0] * numbers[1] if re.fullmatch(r"\d+ x \d+", row["batch"]) else numbers[0]
    sequence = int(re.split("x", row["seq"])[0]) if row["seq"][0].isdigit() else SHORT
    batch = MANY if row["seq"].startswith("variable") else batch
    name, changes = GPUS[row["gpu"]]
    count = int(row["n_gpus"])
    hardware = f"{name}x{min(count, 8)}{f':{count // 8}' if count > 8 else ''}"
    if row["ssd"] == "-":  # memories hold all: less would only make the bound higher
        changes = {**changes, "dram": "16TB", "memory": "4TB"}
    else:
        hardware, changes = "fuyou-4090", {"ssds": int(row["ssd"].split()[0]), "memory": "64GB"}
    precision = "fp16" if "fp16" in row["precision"] else "bf16-true"
    if "amp" in row["precision"].lower():
        precision = "bf16"
    adapter = None if row["adapters"] == "none" else f"lora:r=8{',targets=all-linear' * ('all' in row['adapters'])}"
    model = MODELS[row["model"]].format(sequence)
    value, tokens = float(row["value"]), batch * sequence
    seconds = {
        "s/step": value,
        "tokens/s": tokens / value,
        "tokens/s/GPU": tokens / value / count,
        "TFLOPS": 6 * 1e9 * float(row["params"].removesuffix("B")) * tokens / (value * 1e12),
    }[row["unit"]]
    return Run(model, hardware, tuple(changes.items()), batch, sequence, precision, adapter, seconds)


@functools.cache
def graph_of(model: str, sequence: int, precision: str, adapter: str | None) -> OpGraph:
    """The op graph of one row."""
    named = dataclasses.replace(find_model(model, adapter=adapter), padding=False)
    types = Precision.of(precision)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}
    inputs = micro_batch_spec(named.batch_spec(1, sequence), 1)
    autocast = None if types.name.endswith("true") else dtypes[precision]
    return trace(named.on_meta(), inputs, autocast=autocast, device_kind="cuda", param_dtype=dtypes[precision])


def bounds_of(run: Run) -> tuple[Bound, float, float]:
    """The bound of any step, and the seconds of those with fused kernels and with PyTorch's calls."""
    hardware = Hardware.preset(run.hardware, **dict(run.changes))
    options = Options(precision=run.precision, micro_batches=run.batch)
    compiler = CandidateCompiler(graph_of(run.model, run.sequence, run.precision, run.adapter), hardware, options)
    draft = compiler.place(RESERVOIR).draft
    fused_s, bound = ideal_bounds(draft)
    return bound, fused_s, machine_bound(draft).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose text has this")
    args = parser.parse_args()
    beaten = 0
    for row in read():
        run = run_of(row)
        if run is None or args.only not in " ".join(row.values()):
            continue
        bound, fused_s, eager_s = bounds_of(run)
        beaten += run.seconds < bound.seconds
        rows.save("published", {
            **{key: row[key] for key in ("source", "system", "gpu", "n_gpus", "model", "batch", "seq", "adapters")},
            "published_s": run.seconds, "bound_s": bound.seconds, "bound_by": bound.by, "fused_s": fused_s,
            "eager_s": eager_s, "bound_share": bound.seconds / run.seconds, "eager_share": eager_s / run.seconds,
        })  # fmt: skip
    print(f"{beaten} published runs are faster than the bound")


if __name__ == "__main__":
    main()
