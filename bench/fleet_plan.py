"""Seconds and peak memory of `penstock plan` for 512 GPUs: 64 hosts of 8 A100 of 40 GB, 400 Gb/s between them.

Run: python bench/fleet_plan.py [--strategy auto] [--runs 1]

Devices that do the same are planned once, so the number of hosts should hardly matter: a row for 8 hosts is beside it.
Columns as in `plan_time.py`; `cpu_s` is what to look at on a machine that is shared. Limits: 60 s and 2 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from plan_time import measure

LIMIT_S, LIMIT_GB = 60.0, 2.0
MODELS = (("mics-bert-50b", 512, 8192, 1024), ("gpt3-175b", 2048, 1024, 1024))  # name, sequence, batch, micro-batches
HOSTS = (8, 64)
NAMED = "mics"


def main() -> None:
    """Print one JSON row per model, strategy and number of hosts; exit with code 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="", help="one alone; default: the named strategy and auto")
    parser.add_argument("--runs", type=int, default=1, help="the fastest of N counts")
    args = parser.parse_args()
    met = True
    for model, sequence, batch, micro_batches in MODELS:
        for hosts in HOSTS:
            for strategy in [args.strategy] if args.strategy else [NAMED, "auto"]:
                options = {
                    "--model": model, "--hardware": f"mics-p4d:{hosts}", "--batch": batch, "--sequence": sequence,
                    "--micro-batches": micro_batches, "--precision": "bf16", "--strategy": strategy,
                }  # fmt: skip
                words = [str(word) for pair in options.items() for word in pair]
                command = [sys.executable, "-m", "penstock.cli.main", "plan", *words]
                row = min((measure(command) for _ in range(args.runs)), key=lambda row: row["cpu_s"])
                name = f"{model} on {8 * hosts} GPUs, {strategy}"
                row = {"bench": "fleet_plan", "case": name, **row, "limit_s": LIMIT_S, "limit_gb": LIMIT_GB}
                row["met"] = row["cpu_s"] <= LIMIT_S and row["peak_rss_gb"] <= LIMIT_GB and row["exit_code"] == 0
                met = met and row["met"]
                print(json.dumps(row), flush=True)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
