"""Bubbles and memory of every synchronous schedule, in the simulator: a GPT-2 in 8 stages, or one a device, on 4 GPUs.

Run: python bench/bubbles.py [--model gpt2-medium:n_layer=28] [--hardware a100-80gbx4] [--micro-batches M]
[--sequence N]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

import penstock
from penstock.bench.peers import rows
from penstock.ir import ops

SCHEDULES = (
    ("gpipe", 1, "schedule-pipeline"), ("1f1b", 1, "schedule-1f1b"), ("zero-bubble", 1, "schedule-zero-bubble"),
    ("looped-bfs", 2, "schedule-pipeline"), ("1f1b, two stages a device", 2, "schedule-1f1b"),
    ("interleaved", 2, "schedule-interleaved"), ("zero-bubble, two stages a device", 2, "schedule-zero-bubble"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium:n_layer=28")
    parser.add_argument("--hardware", default="a100-80gbx4")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    args = parser.parse_args()
    hardware = penstock.Hardware.preset(args.hardware)
    model, batch = make(args.model, args.micro_batches, args.sequence)
    print(f"{'schedule':34} {'step':>9} {'bubble':>7}  GiB per device")
    for name, each, schedule in SCHEDULES:
        stages = each * hardware.num_devices
        line = (
            f"coarsen, partition-balanced{{stages={stages}}}, map-round-robin, {schedule}, insert-remat, insert-fetch"
        )
        options = {"micro_batches": args.micro_batches, "precision": "fp16"}
        job = penstock.compile(
            model, hardware, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=1e-4),
            strategy=f"{line}, insert-optimizer", **options,
        )  # fmt: skip
        timeline = job.simulate()
        computing = [s for s in timeline.spans if s.stream == ops.COMPUTE and s.op != "step"]
        ends_s = max(s.end_s for s in computing)
        bubble = 1 - sum(s.end_s - s.start_s for s in computing) / (ends_s * hardware.num_devices)
        peaks = [timeline.peak_bytes[device.name] / 2**30 for device in hardware.devices]
        print(f"{name:34} {timeline.step_s * 1e3:6.1f} ms {bubble:7.1%}  {' '.join(f'{gib:.2f}' for gib in peaks)}")
        row = {"schedule": name, "step_s": timeline.step_s, "bubble": bubble, "peak_gib": peaks}
        rows.save("bubbles", {"model": args.model, "hardware": args.hardware, "stages": stages, **options, **row})


def make(name: str, micro_batches: int, sequence: int) -> tuple[nn.Module, dict[str, dict[str, object]]]:
    """A model without weights, and the shapes of a batch with one sequence per micro-batch."""
    from penstock.compiler.models.named import find_model

    model = find_model(name, dropout=False).on_meta()
    shape = {"shape": [micro_batches, sequence], "dtype": "int64"}
    return model, {"input_ids": shape, "labels": shape}


if __name__ == "__main__":
    main()
