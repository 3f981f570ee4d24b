"""Models that take LoRA on one and on two cards of 24 GB with 64 GB of DRAM, on a base of bf16 and of NF4.

Simulated on descriptions of machines; nothing runs. Each row is a plan that is proven to fit, with its bounds: the
least of any plan with the same micro-batches (computation, or bytes from SSDs), and the busiest link of this plan.

Run: python bench/adapter_plans.py [--only llama-8b] [--search-s N]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.ir.errors import DoesNotFit

MODELS = ("llama-8b", "llama-70b", "llama-405b")
MACHINES = ("rtx4090x1", "rtx4090x2")
BATCH, SEQUENCE, ADAPTER = 4, 1024, "lora:r=16"
DRAM = "64GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--search-s", type=float, default=8.0)
    args = parser.parse_args()
    for name in MODELS:
        for base in ("bf16", "nf4") if args.only in (None, name) else ():
            for machine in MACHINES:
                rows.save("adapter_plans", plan_for(name, base, machine, args.search_s))


def plan_for(name: str, base: str, machine: str, search_s: float) -> dict[str, Any]:
    """The row of one plan, or why there is none."""
    named = find_model(name, adapter=ADAPTER, base=base)
    hardware = penstock.Hardware.preset(machine).with_(dram=DRAM)
    where = {
        "model": name, "base": base, "hardware": f"{machine}, {DRAM} of DRAM", "batch": BATCH, "sequence": SEQUENCE,
        "adapter": ADAPTER,
    }  # fmt: skip
    begin_s = time.process_time()
    try:
        job = penstock.compile(
            named.on_meta(),
            hardware,
            example_inputs=named.batch_spec(BATCH, SEQUENCE),
            precision="bf16-true",
            search_s=search_s,
        )
    except DoesNotFit as error:
        return {**where, "fits": False, "reason": " ".join(str(error).split())[:400]}
    found = job.plan.predicted
    assert found is not None
    return {
        **where,
        "fits": True,
        "step_s": found.step_s,
        "tokens_per_s": BATCH * SEQUENCE / found.step_s,
        "bound_s": found.eager_bound_s,
        "bound_by": found.eager_bound_by,
        "bottleneck": found.bottleneck,
        "micro_batches": job.plan.micro_batches,
        "stages": len(job.plan.decisions.stages),
        "peak_gib": {memory: peak / 2**30 for memory, peak in found.peak_bytes.items()},
        "moved_gib": {link: moved / 2**30 for link, moved in found.moved_bytes.items()},
        "planned_cpu_s": time.process_time() - begin_s,
    }


if __name__ == "__main__":
    main()
