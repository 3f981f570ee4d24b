"""Penstock and its peers on one GPU: the same model, batch, precision and memory, each side in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.bench.peers.gpu_bounds import Bench, bench_of, computation_s, seconds_alone
from penstock.bench.peers.gpu_cases import CASES, SIDES_PLANS, SMALL, Case
from penstock.bench.peers.gpu_offload import NoTime, Unavailable, peers
from penstock.bench.peers.gpu_reservoir import ROUNDS, STEP, describe_kernel, run_case
from penstock.bench.peers.gpu_setup import Row, Setup, holds, note_call
from penstock.runtime.measure.detect import ram_bytes

PEERS = {"fsdp2": "fsdp2, all in DRAM", "zero-offload": "zero-offload", "zero-infinity": "zero-infinity"}
PEER_SHARE = 0.8  # of the time that is left: then its bound is measured
PEER_STATE_BYTES = 24  # per parameter, of the peer that needs most DRAM: fp32 weights, gradients, moments; copies


def one_side(setup: Setup, side: str, memory: str | None, ours: Sequence[Row] = ()) -> Iterator[Row]:
    """Run one side of the comparison, with `memory` of the GPU or all: "penstock", or a name of `PEERS`, which is
    compared with the fastest step in `ours`, rows of the first. All sides compute in bf16 and keep fp32 masters."""
    bench = bench_of(setup, memory)
    if setup.small:
        case = SMALL[setup.device].case
    elif memory is not None or ram_bytes() < PEER_STATE_BYTES * CASES[1].parameters:
        case = CASES[0]
    else:
        case = CASES[1]
    case = replace(case, precision="bf16-true", most=0.9, plans=SIDES_PLANS)
    if side == "penstock":
        yield from describe_kernel(bench)
        yield from run_case(bench, case)
    else:
        yield from run_peer(bench, case, PEERS[side], ours)


def run_peer(bench: Bench, case: Case, name: str, ours: Sequence[Row] = ()) -> Iterator[Row]:
    """Run a peer on the same model, batch and device memory: one step to warm up, `ROUNDS` more, and one in which it
    counts the bytes that it moves. Its step is compared with the longest of its own parts alone, and with ours."""
    memory_bytes = bench.hardware.devices[0].memory_bytes if bench.setup.on_gpu else None
    start = peers(bench.setup.device, memory_bytes, bench.directory)[name]
    what = {**case.facts(), "plan": name, "device_bytes": memory_bytes}
    try:
        with start(case.size, case.rows, case.micro_batches, PEER_SHARE * bench.left_s) as peer:
            first = peer.step()
            times_s, last = [], first
            for _ in range(ROUNDS):
                begin_s = time.perf_counter()
                last = peer.step()
                times_s.append(time.perf_counter() - begin_s)
            moved = peer.moved_bytes()
    except (Unavailable, NoTime) as error:
        again = {"error": str(error)} if isinstance(error, NoTime) else {}
        yield note_call("a peer is skipped", str(error), **again, **what)
        return
    except RuntimeError as error:  # with the end of the peer's output
        yield holds("the peer runs", False, error=str(error), **what)
        return
    step_s = statistics.median(times_s)
    what |= {"step_s": step_s, "facts": peer.facts, "peak_rss_bytes": peer.peak_bytes, "losses": [first, last]}
    yield note_call("step of a peer, tokens a second", case.rows * case.size.length / step_s, **what)
    yield from compare_with_ours(step_s, ours, what)
    alone = seconds_alone(bench, moved, computation_s(bench, case), case.parameters)
    bound_by = max(alone, key=lambda part: alone[part])
    more = {"parts_s": alone, "bound_by": bound_by, "moved_bytes": moved, **what}
    yield note_call("step of a peer over the longest of its parts alone", step_s / alone[bound_by], **more)


def compare_with_ours(step_s: float, ours: Sequence[Row], what: Row) -> Iterator[Row]:
    """A peer's step over the fastest of ours with the same model and batch, if there is one."""
    same = ("model", "batch", "micro_batches", "precision")
    found = [row for row in ours if row["figure"] == STEP and all(row[key] == what[key] for key in same)]
    if found:
        best = min(found, key=lambda row: float(row["step_s"]))
        ratio = step_s / best["step_s"]
        yield note_call("step of a peer over ours", ratio, our_step_s=best["step_s"], our_plan=best["plan"], **what)
