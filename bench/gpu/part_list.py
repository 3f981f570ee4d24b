"""The parts of the calls of `bench/gpu_first.py`, in order, and how one is run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock.bench.gpu.ledger import Ledger, Part, Row

SIDES = {
    "24GB": {"penstock": 60, "fsdp2": 60, "zero-offload": 55, "zero-infinity": 55},
    "whole card": {"penstock": 60, "fsdp2": 60, "zero-offload": 50, "zero-infinity": 50},
}
EXTENSIONS = Part(5, "extensions", 90)
MACHINE = Part(1, "machine", 30)  # rows of the call itself
HARDWARE = Part(1, "hardware", 100)
PROBED = {"context": 40, "pinning": 70, "copies": 40, "host": 60, "adam": 130, "nccl": 50}
TESTS = Part(2, "tests", 400, tries=6)  # each goes on where the last stopped
PARITY = Part(2, "parity", 130)
EXCHANGES = Part(6, "exchanges", 110)
SEVERAL = Part(6, "several", 430)
SPEED = {"step-time": 90, "accounting": 90, "swapping": 90, "large-model": 120, "long-sequence": 150}
# The limits of a call's parts add up to what is left of it after its start (calls.py).
PARTS = (
    *(Part(1, name, limit_s) for name, limit_s in PROBED.items()),
    HARDWARE,  # after the context, which wants the first look at an untouched GPU
    TESTS,
    PARITY,
    *(Part(3, name, limit_s) for name, limit_s in SPEED.items()),
    Part(4, "reservoir", 540),
    EXTENSIONS,  # which DeepSpeed's parts need
    *(Part(5, f"{side}, {size}", limit_s) for size, sides in SIDES.items() for side, limit_s in sides.items()),
    EXCHANGES,
    SEVERAL,
)
DOCUMENT = "hardware document"  # the figure whose value is the measured hardware's file


def rows_of(part: Part, args: argparse.Namespace, ledger: Ledger) -> Iterator[Row]:
    """Run a part in this process: its rows, as they come; tests write theirs themselves."""
    from penstock.bench.peers.gpu_setup import Setup

    setup = Setup(args.device, args.small, args.scratch, args.seconds)
    if part == TESTS:
        from penstock.bench.gpu import device_tests

        device_tests.run(ledger.rows(part.name), lambda row: ledger.write(part, row), setup)
        return
    if part.call > PARITY.call and part != EXTENSIONS:
        yield from _hardware(setup, ledger)
    yield from _runner(part, ledger)(setup)


def _runner(part: Part, ledger: Ledger) -> Callable[[Any], Iterator[Row]]:
    side, _, size = part.name.partition(", ")
    if size:
        from penstock.bench.peers.gpu_comparison import one_side

        ours = ledger.rows(f"penstock, {size}")
        return partial(one_side, side=side, memory=None if size == "whole card" else size, ours=ours)
    if part.name in PROBED:
        return getattr(importlib.import_module("penstock.bench.gpu.probe"), part.name)  # type: ignore[no-any-return]
    if part == EXCHANGES:
        from penstock.bench.peers.exchanges import exchanges

        return exchanges
    if part == SEVERAL:
        from penstock.bench.peers.several_gpus import several

        return several
    if part == EXTENSIONS:
        from penstock.bench.peers.gpu_offload import extensions

        return extensions
    from penstock.bench.peers.gpu_sections import SECTIONS

    return SECTIONS["machine" if part is HARDWARE else part.name]


def _hardware(setup: Any, ledger: Ledger) -> Iterator[Row]:
    """Put the file that the part `hardware` has measured where all sections look for it. If it failed, put what needs
    no measuring, and say so: rates are then those of datasheets, or guesses."""
    import penstock
    from penstock.bench.peers.gpu_setup import note_call

    path = setup.scratch / "hardware.yaml"
    found = [row["measured"] for row in ledger.rows(HARDWARE.name) if row["figure"] == DOCUMENT]
    if found:
        path.write_text(found[-1])
    elif setup.on_gpu:
        penstock.Hardware.detect().save(path)
        yield note_call("the machine is not measured", f"the part {HARDWARE.name} did not end well")
