"""The sequences of Llama-8B that a machine takes by plan, in bf16 with AdamW: one row of full length, no padding.

A row says whether the length fits, the predicted step, and the peaks of a device and of DRAM. Without --strategy the
search chooses. Nothing runs: plans are simulated, with weights, states and what waits in DRAM counted. DeepSpeed's
published lengths for the same model (Bekman et al. 2025, "Arctic Long Sequence Training", abstract) are in the rows
of machines that these were measured on: 500,000 tokens on one H100, 3,700,000 on eight.

Run: python bench/longest_sequence.py --machine rtx4090 --dram 256GB --sequence 131072 196608 [--strategy PASSES]
     python bench/longest_sequence.py --machine h100x8 --strategy team --sequence 3700000 --longest
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.ir.errors import DoesNotFit, PlanError

PUBLISHED = {"h100": 500_000, "h100x1": 500_000, "h100x8": 3_700_000}  # ALST, tokens
STEP = 4096  # lengths are multiples of it
ALONE = (
    "drop-masks, chunk-loss, tile-sequence, coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, "
    "schedule-pipeline, choose-activations{swap=true}, insert-fetch{swap=true}, insert-ssd, overlap-optimizer"
)
TEAM = (
    ALONE.replace("tile-sequence, coarsen", "split-context{team=8}, tile-sequence, coarsen, mesh{shards=8}")
    .replace("choose-activations{swap=true}", "choose-activations")
    .replace("insert-fetch{swap=true}", "insert-shard")
)
RING = TEAM.replace("split-context{team=8}", "split-context{by=ring, team=8}")
STRATEGIES = {"auto": "auto", "alone": ALONE, "team": TEAM, "ring": RING}


def look(name: str, dram: str | None, sequence: int, strategy: str) -> dict[str, Any]:
    """Plan one length on one machine."""
    from penstock.cli.options import machine  # needs typer, which a machine that only runs `ALONE` may lack

    hardware = machine(name, [] if dram is None else [f"dram={dram}"])
    named = find_model(f"llama-8b:max_position_embeddings={sequence}")
    spec = {key: row for key, row in named.batch_spec(1, sequence).items() if key != "attention_mask"}
    row: dict[str, Any] = {"model": "llama-8b", "machine_planned": name, "dram": dram, "sequence": sequence}
    row |= {"precision": "bf16-true", "strategy": strategy, "published_tokens": PUBLISHED.get(name)}
    begin_s = time.process_time()
    try:
        plan = penstock.compile(
            named.on_meta(),
            hardware,
            example_inputs=spec,
            optimizer=partial(torch.optim.AdamW, lr=1e-5),
            strategy=STRATEGIES.get(strategy, strategy),
            precision="bf16-true",
        ).plan
    except (DoesNotFit, PlanError) as error:
        return {**row, "fits": False, "reason": str(error)[:300], "planning_s": time.process_time() - begin_s}
    found = plan.predicted
    assert found is not None
    return {
        **row,
        "fits": True,
        "step_s": found.step_s,
        "tokens_per_s": sequence / found.step_s,
        "device_peak_gib": _peak(found.peak_bytes, "gpu"),
        "dram_peak_gib": _peak(found.peak_bytes, "dram"),
        "ssd_peak_gib": _peak(found.peak_bytes, "ssd"),
        "tiles": dict(list(plan.decisions.tiles.items())[:2]),
        "passes": plan.passes,
        "planning_s": time.process_time() - begin_s,
    }


def _peak(peak_bytes: dict[str, int], kind: str) -> float:
    """GiB of the fullest device, or of the fullest host's DRAM or disks."""
    return max((size for key, size in peak_bytes.items() if key.startswith(kind)), default=0) / 2**30


def longest(first: int, grain: float, fits: Callable[[int], bool]) -> int:
    """The longest length that fits: from one that may, doubled or halved until the end is between two lengths, then
    found within a share `grain` of it. Lengths are multiples of `STEP`; 0 where none fits."""
    low, high = (first, 2 * first) if fits(first) else (first // 2, first)
    while low == first and fits(high):
        low, high, first = high, 2 * high, high
    while low and high <= first and not fits(low):
        low, high = low // 2, low
    while low and high - low > max(STEP, grain * low):
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="rtx4090")
    parser.add_argument("--dram")
    parser.add_argument("--sequence", type=int, nargs="+", default=[131072])
    parser.add_argument("--strategy", default="auto", help="auto, alone, team, ring, or passes as text")
    parser.add_argument("--longest", action="store_true", help="from the first --sequence to the longest that fits")
    parser.add_argument("--grain", type=float, default=1 / 8, help="the share of a length within which it is found")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[int, dict[str, Any]] = {}

    def fits(sequence: int) -> bool:
        found[sequence] = look(options.machine, options.dram, sequence, options.strategy)
        print(found[sequence], flush=True)
        return bool(found[sequence]["fits"])

    if options.longest:
        best = longest(options.sequence[0] // STEP * STEP, options.grain, fits)
        tried = {str(sequence): row["fits"] for sequence, row in found.items()}
        rows.save("longest_sequence", {**found[best or min(found)], "tried": tried}, options.out)
        return
    for sequence in options.sequence:
        fits(sequence)
        rows.save("longest_sequence", found[sequence], options.out)


if __name__ == "__main__":
    main()
