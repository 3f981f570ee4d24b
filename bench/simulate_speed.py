"""Seconds to simulate, and to verify, one step of about 10,000 ops over 8 devices.

Run: python bench/simulate_speed.py
"""

from __future__ import annotations

import json
import time

from penstock.ir.machine.hardware import Hardware
from penstock.ir.verify import verify
from penstock.runtime.simulate import simulate
from penstock.tests.ir.program.handmade import pipeline

LIMIT_S = 1.0


def main() -> None:
    """Print one JSON row with the best of three runs each, since the machine may be shared."""
    programs = pipeline(8, 48, 24, width=256, rows=64, flops=1e9)
    hardware = Hardware.cpu(num_devices=8, memory="1GB", dram="16GB", h2d="1GB/s", d2h="1GB/s", link="1GB/s")
    row = {
        "bench": "simulate_speed",
        "ops": sum(1 for program in programs for _ in program.ops()),
        "devices": len(programs),
        "simulate_s": round(min(_seconds(lambda: simulate(programs, hardware)) for _ in range(3)), 3),
        "verify_s": round(min(_seconds(lambda: verify(programs, hardware)) for _ in range(3)), 3),
        "limit_s": LIMIT_S,
    }
    print(json.dumps(row))


def _seconds(run) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
