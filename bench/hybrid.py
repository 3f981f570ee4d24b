"""A stage with its own number of devices, in simulation: VGG-16 as PipeDream trained it, on 4 servers of 4 V100 (16 GB)
joined by 10 Gb/s (its cluster A, whose planner chose 15 devices for the convolutions and one for the large layers).

Run: python bench/hybrid.py [--rows 64] [--micro-batches 60]

Every side is synchronous: a step is one update with the whole batch of `--micro-batches` times `--rows` images; of data
parallelism, with a number of micro-batches that 16 devices can share. PipeDream trained asynchronously, with an update
for each micro-batch, where data parallelism sums all gradients far more often: its gain is another one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench.peers import rows

TIERS = "insert-remat, insert-fetch, insert-optimizer"
SIDES = {
    "hybrid": f"coarsen, partition-pipedream{{replicas=true}}, map-replicas, schedule-1f1b, {TIERS}",
    "data parallelism": f"coarsen, mesh, partition-balanced, map-round-robin, schedule-pipeline, {TIERS}",
    "pipeline": f"coarsen, partition-pipedream, map-round-robin, schedule-1f1b, {TIERS}",
}
WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pooling


class Vgg16(nn.Module):
    """Configuration D of the VGG paper, for 224 x 224 images."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in WIDTHS:
            if width:
                layers.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU()))
                before = width
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.ModuleList(layers)
        self.first, self.second = nn.Linear(512 * 7 * 7, 4096), nn.Linear(4096, 4096)
        self.head = nn.Linear(4096, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = images
        for layer in self.features:
            h = layer(h)
        h = torch.relu(self.second(torch.relu(self.first(h.flatten(1)))))
        return nn.functional.cross_entropy(self.head(h), labels)


def cluster() -> penstock.Hardware:
    """4 servers of 4 V100 under PCIe, 10 Gb/s between servers."""
    document = penstock.Hardware.preset("mics-p3dn:4").model_dump()
    devices = [d for d in document["devices"] if int(d["name"].removeprefix("gpu")) % 8 < 4]
    for number, device in enumerate(devices):
        device |= {"name": f"gpu{number}", "memory_bytes": 16 * 2**30}
    hosts = [{**host, "nvlink_bandwidth": None, "p2p": False} for host in document["hosts"]]
    network = {**document["network"], "bandwidth": 1.25e9}
    changed: dict[str, Any] = {"name": "pipedream-cluster-a", "devices": devices, "hosts": hosts, "network": network}
    return penstock.Hardware.model_validate({**document, **changed})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=60)
    args = parser.parse_args()
    hardware, found = cluster(), dict[str, float]()
    copies: dict[str, list[int]] = {}
    for side, passes in SIDES.items():
        count = args.micro_batches // 16 * 16 if side == "data parallelism" else args.micro_batches
        size = count * args.rows
        images, labels = {"shape": [size, 3, 224, 224], "dtype": "float32"}, {"shape": [size], "dtype": "int64"}
        with torch.device("meta"):
            model = Vgg16()
        job = penstock.compile(
            model, hardware, example_inputs={"images": images, "labels": labels}, strategy=passes, micro_batches=count
        )
        found[side] = size / job.simulate().step_s
        copies = job.plan.decisions.copies or copies
    row = {
        "figure": "simulated", "machine_described": hardware.name, "model": "vgg16", "rows": args.rows,
        "micro_batches": args.micro_batches, "copies": {stage: len(devices) for stage, devices in copies.items()},
        "images_per_s": found, "gain": found["hybrid"] / max(v for side, v in found.items() if side != "hybrid") - 1,
    }  # fmt: skip
    rows.save("hybrid", row)


if __name__ == "__main__":
    main()
