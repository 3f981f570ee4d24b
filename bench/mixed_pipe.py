"""Mixed-pipe against contiguous stages on FTPipe's models and machines, planned and simulated: no GPU is needed.

Run: python bench/mixed_pipe.py [--only balance|granularity|memory]

balance      T5-3B on 8 GPUs of 11 GB: seconds of a step, Mixed-pipe against equal contiguous stages, one a GPU (the
             paper's Seq-pipe) and several a GPU.
granularity  T5-11B cut to 1 + 1 layers on 2 GPUs: seconds of the slowest device per micro-batch, operators or layers.
memory       T5-11B on 4 GPUs of 32 GB: with which micro-batches everything stays on the GPUs.

All in fp32 with questions of 512 tokens and answers of 4, as the paper's data have them, and Adafactor, with which the
paper trains T5: its states are counted as none (rows and columns, below 0.1% of the weights). Fill and drain, not the
paper's asynchronous schedule. `search_cpu_s` is the CPU time of partitioning alone, without tracing and coarsening.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.bench.peers import rows
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition import Partition, contiguous
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition_mixed.graph import NANO, block_graph
from penstock.passes.partition_mixed.memory import Footprints
from penstock.passes.partition_mixed.partition_mixed import PartitionMixed
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate

QUESTION, ANSWER = 512, 4
STATES = 0.0  # Adafactor's
SMALL_T5_11B = "t5-11b:num_layers=1,num_decoder_layers=1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["balance", "granularity", "memory"])
    args = parser.parse_args()
    for name, bench in (("balance", balance), ("granularity", granularity), ("memory", memory)):
        if args.only in (None, name):
            for row in bench():
                rows.save("mixed_pipe", {"case": name, **row})


def balance() -> Iterator[dict[str, Any]]:
    """A batch of 20 rows in micro-batches of 4 (the paper's for BoolQ), and one with twice the micro-batches."""
    hardware = Hardware.preset("ftpipe-2080ti")
    for micro_batches in (5, 10):
        layers = make_draft("t5-3b", hardware, "layer", 4, micro_batches)
        operators = make_draft("t5-3b", hardware, "operator", 4, micro_batches, layers)
        found = [
            simulate_plan(layers, PartitionBalanced(stages=n), f"contiguous, {n} stages") for n in (8, 16, 32, 40, 53)
        ]
        seq_s, best_s = found[0]["step_s"], min(row["step_s"] for row in found)
        found.append(simulate_plan(layers, PartitionMixed(), "mixed, layers"))
        found.append(simulate_plan(operators, PartitionMixed(), "mixed, operators"))
        for row in found:
            yield {
                "micro_batches": micro_batches, **row, "over_one_stage_per_gpu": seq_s / row["step_s"],
                "over_best_contiguous": best_s / row["step_s"], "paper": "1.08 to 1.2 over one stage per GPU",
            }  # fmt: skip


def granularity() -> Iterator[dict[str, Any]]:
    """The paper reports a 45% better min-max stage time."""
    for name in ("ftpipe-2080ti", "mics-p3dn:1"):
        hardware = Hardware.preset(name).with_(num_devices=2)
        found = {}
        for level in ("layer", "operator"):
            draft = make_draft(SMALL_T5_11B, hardware, level, 4, 16)
            begin_s = time.process_time()
            decision = PartitionMixed().plan(draft)
            search_s = time.process_time() - begin_s
            found[level] = slowest_s(draft, decision)
            yield {
                "hardware": name, "level": level, "blocks": len(draft.blocks), "stages": len(decision["stages"]),
                "slowest_device_s": found[level], "search_cpu_s": search_s, "note": draft.notes["partition-mixed"],
                "less_than_layers": 1 - found[level] / found["layer"],
                "rate_over_layers": found["layer"] / found[level],
                "paper": "45% better",
            }  # fmt: skip


def memory() -> Iterator[dict[str, Any]]:
    """Mixed-pipe, and one contiguous stage per GPU cut by memory (`ByMemory`) or by time alone (`ByTime`). A plan fits
    if its programs keep everything on the GPUs, without swapping."""
    hardware = Hardware.preset("mics-p3dn:1").with_(num_devices=4)
    for size in (1, 2, 4, 8, 16):
        draft = make_draft("t5-11b", hardware, "layer", size, 4)
        plans = {"mixed": PartitionMixed(), "contiguous": ByMemory(), "equal time": ByTime()}
        for what, partition in plans.items():
            try:
                row = simulate_plan(draft, partition, what)
            except VerifyError as error:  # memories are so tight that devices wait for each other for ever
                row = {"plan": what, "fits": False, "swapped": None, "note": str(error).split("\n")[0]}
            yield {
                "micro_batch": size, "micro_batches": 4, **row, "fits": row["fits"] and not row["swapped"],
                "paper": "Mixed-pipe fits, Seq-pipe does not",
            }  # fmt: skip


@dataclass(frozen=True)
class ByMemory(Partition):
    """One contiguous stage per device, cut so that the fullest device has the most room left."""

    name: ClassVar[str] = "contiguous-by-memory"

    def plan(self, draft: Draft) -> dict[str, Any]:
        memory = Footprints(draft, block_graph(draft.blocks, draft.lane_hardware, "fp32"))
        count, devices = len(draft.blocks), draft.lane_hardware.num_devices

        @functools.cache
        def need(begin: int, end: int) -> int:
            return memory.resident_bytes([memory.stage(range(begin, end))])

        worst = {0: (0, [0])}  # end of the last stage -> the largest need, and the cuts
        for left in reversed(range(devices)):
            ends = range(1, count - left + 1) if left else [count]
            worst = {
                end: min((max(most, need(a, end)), [*cuts, end]) for a, (most, cuts) in worst.items() if a < end)
                for end in ends
                if end > min(worst)
            }  # fmt: skip
        return contiguous(draft, worst[count][1])


@dataclass(frozen=True)
class ByTime(Partition):
    """One contiguous stage per device, of equal time."""

    name: ClassVar[str] = "contiguous-by-time"

    def plan(self, draft: Draft) -> dict[str, Any]:
        loads = block_graph(draft.blocks, draft.lane_hardware, "fp32").load_ns[0]
        devices = draft.lane_hardware.num_devices
        passed = list(itertools.accumulate(loads))
        cuts = [
            min(range(len(passed)), key=lambda i: abs(passed[i] - passed[-1] * k / devices)) + 1
            for k in range(1, devices)
        ]
        return contiguous(draft, [0, *cuts, len(passed)])


def make_draft(
    name: str, hardware: Hardware, level: str, micro_batch: int, micro_batches: int, like: Draft | None = None
) -> Draft:
    """A draft with blocks. If `like` is given, its graph is used instead of a new trace."""
    options = Options(micro_batches=micro_batches, state_bytes_per_param=STATES)
    if like is None:
        ids = {"shape": [micro_batch, QUESTION], "dtype": "int64"}
        labels = {"shape": [micro_batch, ANSWER], "dtype": "int64"}
        batch = {"input_ids": ids, "attention_mask": ids, "labels": labels}
        graph = trace(find_model(name).on_meta(), batch, device_kind="cuda")
    else:
        graph = like.graph
    draft = Draft(graph, hardware, options)
    coarsen = Coarsen(level=level)
    coarsen.rewrite(draft, coarsen.plan(draft))
    return draft


def simulate_plan(base: Draft, partition: Partition, what: str) -> dict[str, Any]:
    """Make and simulate a plan, and return its row."""
    draft = Draft(base.graph, base.machine, base.options, blocks=base.blocks)
    begin_s = time.process_time()
    decision = partition.plan(draft)
    search_s = time.process_time() - begin_s
    partition.rewrite(draft, decision)
    decisions = {}
    for p in (MapRoundRobin(), SchedulePipeline(), InsertRemat(), InsertFetch(), InsertOptimizer()):
        decisions[p.name] = p.plan(draft)
        p.rewrite(draft, decisions[p.name])
    timeline = simulate(draft.programs, draft.lane_hardware, precision="fp32")
    peaks = [timeline.peak_bytes[device.name] for device in draft.lane_hardware.devices]
    return {
        "plan": what, "stages": len(draft.stages), "step_s": timeline.step_s, "search_cpu_s": search_s,
        "blocks": len(draft.blocks), "swapped": len(decisions["insert-fetch"]),
        "rematerialised": len(decisions["insert-remat"]), "peak_gib": max(peaks) / 2**30,
        "least_peak_gib": min(peaks) / 2**30, "fits": all(
            peak <= device.budget_bytes for peak, device in zip(peaks, draft.lane_hardware.devices)
        ), "note": draft.notes.get(partition.name, ""),
    }  # fmt: skip


def slowest_s(draft: Draft, decision: dict[str, Any]) -> float:
    """Seconds of forward, rematerialisation and backward of one micro-batch on the busiest device."""
    place = {block.name: i for i, block in enumerate(draft.blocks)}
    members: dict[int, list[int]] = {}
    for stage, device in zip(decision["stages"], decision["planned_for"]):
        members.setdefault(device, []).extend(place[name] for name in stage)
    graph = block_graph(draft.blocks, draft.lane_hardware, draft.options.precision)
    return max(sum(graph.load_ns[device][i] for i in own) / NANO for device, own in members.items())


if __name__ == "__main__":
    main()
