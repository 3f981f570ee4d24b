"""Simulated step times against rehearsed ones, on the machines of the papers.

A rehearsal runs the plan's own processes, threads and messages in real time, with waits for what GPUs and links would
do; what it takes on top is what the processes of this machine take. Two plans a machine: one that swaps its weights
through DRAM, one that keeps them in the GPUs.

Run: python bench/rehearsal.py [--seconds 10] [--runs 2] [--machines mobius-topo4 ...]
"""

from __future__ import annotations

import argparse
import time

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model

TARGET = 0.05
MACHINES = ["mobius-topo4", "mobius-topo2+2", "mobius-topo1+3", "mobius-8gpu", "mobius-v100", "ftpipe-2080ti"]
PLANS = [("weights swapped", "mobius-15b", "mobius"), ("weights resident", "mobius-3b", "gpipe")]
SMALLER = {("mobius-v100", "mobius-15b"): "mobius-8b"}  # the host of mobius-v100 has too little DRAM
ROWS, SEQUENCE, MICRO_BATCHES = 16, 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="what a rehearsal is stretched to (default 10)")
    parser.add_argument("--runs", type=int, default=2, help="the fastest counts (default 2)")
    parser.add_argument("--machines", nargs="*", default=MACHINES)
    args = parser.parse_args()
    errors = [compare(machine, plan, args.seconds, args.runs) for machine in args.machines for plan in PLANS]
    print(f"largest difference {max(abs(error) for error in errors):.1%}, target {TARGET:.0%}")


def compare(machine: str, plan: tuple[str, str, str], seconds: float, runs: int) -> float:
    """Save one row. Returns the rehearsed step time's relative difference from the simulated one."""
    what, name, strategy = plan
    name = SMALLER.get((machine, name), name)
    model = find_model(name)
    job = penstock.compile(
        model.on_meta(), machine, example_inputs=model.batch_spec(ROWS, SEQUENCE), strategy=strategy,
        micro_batches=MICRO_BATCHES, precision="fp16",
    )  # fmt: skip
    simulated_s = job.simulate().from_rest_s
    scale = max(1.0, seconds / simulated_s)
    begin_s = time.perf_counter()
    rehearsed_s = [job.rehearse(scale).step_s for _ in range(runs)]
    row = {
        "machine_described": machine, "model": name, "case": what, "strategy": job.plan.strategy,
        "micro_batches": MICRO_BATCHES, "stages": len(job.plan.decisions.stages),
        "ops": sum(1 for program in job.programs for _ in program.ops()), "time_scale": scale,
        "simulated_s": simulated_s, "rehearsed_s": min(rehearsed_s), "all_rehearsed_s": rehearsed_s,
        "error": min(rehearsed_s) / simulated_s - 1, "target": TARGET,
        "took_s": (time.perf_counter() - begin_s) / runs,
    }  # fmt: skip
    rows.save("rehearsal", row)
    return min(rehearsed_s) / simulated_s - 1


if __name__ == "__main__":
    main()
