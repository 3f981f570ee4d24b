"""Rows of figures: printed, and appended to bench/results/NAME.jsonl with the date, the machine and the command."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def save(bench: str, row: dict[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Print one row of `bench` and append it to its file, or to `path`. Floats keep four digits."""
    whole = {"bench": bench, **round_weights(row), **provenance()}
    print(json.dumps(whole), flush=True)
    path = path or RESULTS / f"{bench}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(whole) + "\n")
    return whole


def provenance() -> dict[str, Any]:
    """The date, command, machine and load of a row, without names of hosts, users or folders."""
    script = Path(sys.argv[0])
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "command": " ".join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]),
        "machine": machine(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """This machine in one line: processor, cores, memory, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    cpu = found[1].strip() if found else platform.machine()
    ram_gib = psutil.virtual_memory().total / 2**30
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{cpu}, {os.cpu_count()} cores, {ram_gib:.0f} GiB, {software}"


def spread(times_s: list[float]) -> dict[str, float | int]:
    """The median, fastest, slowest and number of repeated measurements."""
    return {
        "median_s": statistics.median(times_s), "min_s": min(times_s), "max_s": max(times_s), "runs": len(times_s)
    }  # fmt: skip


def round_weights(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: round_weights(item) for key, item in value.items()}
    return [round_weights(item) for item in value] if isinstance(value, list) else value
