"""Compares `compile`'s choice with every rival partitioner and mapping, in the simulator: models times machines.

A row per model and machine: the chosen plan, its step, the fastest rivals and how much slower they are; or which
memory is too small. In every row `faster_rivals` must be empty; `not_judged` are the partitioners and mappings that
were neither simulated nor excluded by a bound or by memory before the search's time was over.

Run: python bench/rivals.py [--models NAME ...] [--machines PRESET ...]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import penstock
from penstock.bench.models import WideResNet
from penstock.bench.peers import rows
from penstock.compiler.batches.shape import BatchShape, micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.compiler.search.attempts import SEARCH_S, SearchResult, Trace, Wishes
from penstock.compiler.search.prediction import make_plan
from penstock.compiler.search.search import search
from penstock.graph.opgraph import OpGraph
from penstock.passes.draft import Options
from penstock.passes.table import PASSES

MODELS = {  # global batch, sequence
    "mobius-3b": (16, 512), "mobius-8b": (16, 512), "mobius-15b": (8, 512), "mobius-51b": (8, 512), "t5-3b": (16, 512),
    "t5-11b": (16, 512), "bert-large": (32, 512), "llama-8b": (8, 2048), "vit-g": (32, 0), "wide-resnet-3b": (32, 0),
}  # fmt: skip
MACHINES = (
    "mobius-topo2+2", "mobius-8gpu", "ftpipe-2080ti", "mobius-v100", "fuyou-4090", "mobius-topo1+3", "mobius-topo4",
    "h100x8", "rtx4090x4-2rc", "fuyou-a100", "rtx5090x2", "laptop-16gb", "mics-p3dn:2", "mics-p4d:2",
)  # fmt: skip
PRECISION = "fp16"  # which all of these machines have
NAMED = 3  # the number of rivals that a row names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--search-s", type=float, default=SEARCH_S, help="computation that one search may take")
    args = parser.parse_args()
    beaten = 0
    traced = functools.cache(model_of)
    for machine in args.machines:
        for name in args.models:
            capture, size, options = traced(name)
            beaten += not compare(name, machine, capture, Wishes(None, None, size, options, search_s=args.search_s))
    print(f"{beaten} of {len(args.models) * len(args.machines)} choices were beaten by a rival")


def model_of(name: str) -> tuple[Trace, int, Options]:
    """A function from the number of micro-batches to the model's op graph, the size of the batch, and all plans'
    options."""
    batch, sequence = MODELS[name]
    if name == "wide-resnet-3b":
        with torch.device("meta"):
            model: Any = WideResNet()
        image = {"shape": [batch, 3, 224, 224], "dtype": "float32"}
        spec: dict[str, Any] = {"pixel_values": image, "labels": {"shape": [batch], "dtype": "int64"}}
    else:
        named = find_model(name)
        model, spec = named.on_meta(), named.batch_spec(batch, sequence or 1)

    @functools.cache
    def capture(count: int) -> OpGraph:
        inputs = micro_batch_spec(spec, count)
        return trace(model, inputs, autocast=torch.float16, device_kind="cuda", param_dtype=torch.float16)

    return capture, BatchShape.from_inputs(model, spec).size, Options(precision=PRECISION)


def compare(name: str, machine: str, capture: Callable[[int], OpGraph], wishes: Wishes) -> bool:
    """Save one row. Returns whether no rival was faster."""
    row: dict[str, Any] = {"model": name, "hardware": machine, "batch": wishes.batch_size}
    began_s = time.process_time()
    try:
        found = search(capture, penstock.Hardware.preset(machine), wishes)
    except penstock.errors.DoesNotFit as error:
        row |= {"fits": False, "why": str(error).partition(". ")[0][:200], "memory": error.memory}
        found = None
    if found is not None:
        row |= figures(found)
    rows.save("rivals", {**row, "search_cpu_s": time.process_time() - began_s})
    return not row.get("faster_rivals")


def figures(found: SearchResult) -> dict[str, Any]:
    plan = make_plan(found, "", "auto")
    step_s = plan.predicted.step_s
    slower = sorted((r for r in plan.rivals if r.step_s is not None), key=lambda r: r.step_s)
    judged = " ".join([plan.passes, *(r.passes for r in plan.rivals if not r.reason.startswith("not tried"))])
    wanted = [n for n, kind in PASSES.items() if kind.fields()[0] in ("stages", "devices")]
    return {
        "fits": True, "chosen": found.best.name, "stages": len(plan.decisions.stages), "step_s": step_s,
        "bottleneck": plan.predicted.bottleneck, "rivals_simulated": len(slower), "rivals": len(plan.rivals),
        "nearest": {r.name: r.step_s / step_s for r in slower[:NAMED]},
        "faster_rivals": [r.name for r in slower if r.step_s < step_s * (1 - 1e-9)],
        "not_judged": [n for n in wanted if n not in judged],
    }  # fmt: skip


if __name__ == "__main__":
    main()
