"""Seconds and peak memory of `penstock plan` for models far too big for this machine, with the interpreter's start; and
of `compile` for a model of 4 layers, with its traces and candidates.

Run: python bench/plan_time.py [NOTE]

Each row is the fastest of three runs of the command, each in a process of its own, since the machine may be shared.
`cpu_s` is the process's CPU time, which `seconds` would be on a machine without other work. `exit_code` is 2 for a
model that does not fit, and `said` what the command then printed, without torch's warnings. NOTE goes into the rows
(what else ran meanwhile).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from penstock.bench.peers import rows

RUNS = 3
MOBIUS = ["--hardware", "mobius-topo2+2", "--batch", "4"]
GPT3 = ["--model", "gpt2:n_layer=96,n_embd=12288,n_head=96,n_positions=2048", "--sequence", "2048"]
CASES: list[tuple[str, list[str], float, float, int]] = [  # name, options, limit in seconds, in GB, exit code
    ("gpt3-175b, dram 4TB", [*GPT3, *MOBIUS, "--precision", "fp16", "--set", "dram=4TB"], 20, 1.0, 0),
    ("gpt3-175b, dram 1.5TB", [*GPT3, *MOBIUS, "--precision", "fp16"], 20, 1.0, 2),
    ("t5-11b", ["--model", "t5-11b", "--sequence", "512", "--precision", "fp16", *MOBIUS], 10, 1.0, 0),
]
TOY = "4 layers of 256"


def main() -> None:
    """Save one row per case; exit with code 1 if a limit is missed."""
    if sys.argv[1:] == [TOY]:
        print(json.dumps(plan_toy()), file=sys.stderr)
        return
    met, note = True, {"note": " ".join(sys.argv[1:])} if sys.argv[1:] else {}
    found = min((measure([sys.executable, __file__, TOY]) for _ in range(RUNS)), key=lambda row: row["cpu_s"])
    counted = json.loads(found.pop("said").splitlines()[-1])
    rows.save("plan_time", {"case": TOY, **found, **counted, **note})
    for name, options, limit_s, limit_gb, exit_code in CASES:
        command = [sys.executable, "-m", "penstock.cli.main", "plan", *options]
        row = min((measure(command) for _ in range(RUNS)), key=lambda row: row["seconds"])
        row = {"case": name, **row, "limit_s": limit_s, "limit_gb": limit_gb, **note}
        row["met"] = row["seconds"] <= limit_s and row["peak_rss_gb"] <= limit_gb and row["exit_code"] == exit_code
        met = met and row["met"]
        rows.save("plan_time", row)
    sys.exit(0 if met else 1)


def plan_toy() -> dict[str, Any]:
    """Plan with everything left open, and count."""
    import penstock
    from penstock.bench.peers import models
    from penstock.compiler.capture import trace

    traces, record = [], trace._record

    def count_calls(*args: Any) -> Any:
        traces.append(args)
        return record(*args)

    trace._record = count_calls
    model, batch = models.gpt2(layers=4, vocabulary=1024), models.batch(vocabulary=1024)
    begin_s = time.process_time()
    plan = penstock.compile(model, penstock.Hardware.cpu(2, memory="64MB"), example_inputs=batch).plan
    return {
        "compile_cpu_s": time.process_time() - begin_s,
        "traces": len(traces),
        "candidates": 1 + len(plan.rivals),
        "simulated": 1 + sum(row.step_s is not None and not row.reason.startswith("the same") for row in plan.rivals),
        "step_s": plan.predicted.step_s,
        "passes": plan.passes,
        "micro_batches": plan.micro_batches,
    }


def measure(command: list[str]) -> dict[str, Any]:
    """Run a command and return the figures of its process."""
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "seconds": round(time.perf_counter() - begin_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_rss_gb": round(usage.ru_maxrss * 1024 / 1e9, 3),
        "exit_code": process.returncode,
        "said": "\n".join(line for line in said.strip().splitlines() if "site-packages" not in line),
    }


if __name__ == "__main__":
    main()
