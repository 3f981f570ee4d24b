"""The memory that plans take of a card they fill: bytes accounted, and allocated, reserved and retried by torch.

Each plan's rows are made as long as the budget of a card of 8, 12 or 24 GB has room for. Run it under the emulated
device (tests/fakecuda), whose allocator is torch's own: nothing is computed and no memory is touched, so that cards may
be larger than this machine's DRAM. Each plan runs in a process of its own.

Run: fakecuda-run python bench/cards.py [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.card_cases import CARDS, CASES, SMALL_CASES, fullest
from penstock.ir.program import pooled_bytes

LIMIT_S = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="this plan alone")
    parser.add_argument("--here", action="store_true", help="in this process, on GPUs as they are")
    args = parser.parse_args()
    names = [args.only] if args.only else list(CASES)
    for name in names:
        if args.here:
            print(json.dumps(measured_blocks(name)), flush=True)
        else:
            rows.save("cards", run(name))


def run(name: str, **settings: str) -> dict[str, Any]:
    """The row of one plan, from a process that sees the card. `settings`: more of the emulator's."""
    case = {**CASES, **SMALL_CASES}[name]
    environment = {**os.environ, **CARDS[case.card].environment(case.num_devices), **case.environment, **settings}
    command = [sys.executable, __file__, "--here", "--only", name]
    row = {"plan": name, "card": case.card, "seed": environment.get("FAKECUDA_SEED", "0"), "ok": False}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        sys.stderr.write((error.stderr or b"").decode())  # with what its threads wait for
        return {**row, "error": f"not done after {LIMIT_S} s"}
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        sys.stderr.write(done.stderr)
        return {**row, "error": (re.findall(r"^[\w.]+: .*", done.stderr, re.MULTILINE) or ["none told"])[-1]}
    return {**row, **found[-1]}


def measured_blocks(name: str) -> dict[str, Any]:
    case = {**CASES, **SMALL_CASES}[name]
    with tempfile.TemporaryDirectory() as directory:
        job, length = case.fill(case.hardware(directory))
        batch = case.batch(length)
        with job:
            for _ in range(case.steps):
                job.step(batch)
            devices = {device.name: figures(job, place, device) for place, device in enumerate(job.hardware.devices)}
            return {
                "plan": name, "card": case.card, "precision": case.precision, "micro_batches": case.micro_batches,
                "length": length, "steps": case.steps, "filled": fullest(job), "mib": devices,
                "retries": sum(d["retries"] for d in devices.values()),
                "reserved_over_budget": max(d["reserved"] / d["budget"] for d in devices.values()),
                "ok": all(not d["retries"] and d["reserved"] <= d["most"] for d in devices.values()),
            }  # fmt: skip


def most_bytes(device: Any) -> int:
    """The most bytes of the allocator: the budget, and the parts of the reserve that go through it. A part of a larger
    GPU's memory has no reserve."""
    if device.reserve is None:
        return int(device.memory_bytes)
    return int(device.budget_bytes + device.reserve.libraries_bytes + device.reserve.gaps_bytes)


def figures(job: penstock.Job, place: int, device: Any) -> dict[str, int]:
    """MiB of one device. `pooled`: the peaks of its streams together, whenever each is reached."""
    assert job.last is not None
    program = job.programs[place % len(job.programs)]  # lanes have one program for several devices
    allocator, mib = job.last.allocator[device.name], 2**20
    return {
        "card": device.memory_bytes // mib,
        "budget": device.budget_bytes // mib,
        "most": most_bytes(device) // mib,
        "accounted": job.last.peak_bytes[device.name] // mib,
        "pooled": pooled_bytes(program) // mib,
        "allocated": allocator["allocated_bytes"] // mib,
        "reserved": allocator["reserved_bytes"] // mib,
        "retries": allocator["retries"],
    }


if __name__ == "__main__":
    main()
