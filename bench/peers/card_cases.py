"""Plans for whole cards: the cards, and models whose batch is as long as a plan of one kind has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import penstock
from penstock.bench.peers.gpt import Gpt, GptSize, batch_of
from penstock.bench.peers.gpu_reservoir import give_values
from penstock.compiler import api
from penstock.compiler.plan import Decisions
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import DoesNotFit, PassError

GIB, MIB = 2**30, 2**20
STEP = 16  # lengths of rows are multiples of it
SGD = partial(torch.optim.SGD, lr=1e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class Card:
    """A GPU to emulate."""

    memory_bytes: int
    name: str

    def environment(self, num_devices: int) -> dict[str, str]:
        """Settings of the emulator (tests/fakecuda/README.md). What is not torch's takes as much as the stated reserve:
        the context and a display, and messages, for which a device here makes at most four communicators."""
        return {
            "FAKECUDA_DEVICES": str(num_devices), "FAKECUDA_MEMORY": str(self.memory_bytes),
            "FAKECUDA_NAME": self.name, "FAKECUDA_CONTEXT": str(1024 * MIB),
            "FAKECUDA_NCCL_MB": "64", "FAKECUDA_COMPUTE": "0", "FAKECUDA_NOCOPY": "1", "FAKECUDA_POISON": "0",
            "FAKECUDA_HANG_S": "60",
        }  # fmt: skip


CARDS = {
    "4GB": Card(4 * GIB, "NVIDIA GeForce GTX 1650"),
    "8GB": Card(8 * GIB, "NVIDIA GeForce RTX 4060 Laptop GPU"),
    "12GB": Card(12 * GIB, "NVIDIA GeForce RTX 3060"),
    "24GB": Card(24 * GIB, "NVIDIA GeForce RTX 4090"),
}


def gpt_of(size: GptSize) -> nn.Module:
    with torch.device("meta"):
        return Gpt(size)


def resident(decisions: Decisions) -> bool:
    return not decisions.fetch and not decisions.rematerialise


def fetching(decisions: Decisions) -> bool:
    return bool(decisions.fetch)


def recomputing(decisions: Decisions) -> bool:
    return bool(decisions.rematerialise)


@dataclass(frozen=True)
class Case:
    """A kind of plan. `rows`: of the global batch; their length, tried from `start` on, fills the card. `kind` says
    whether a plan is of it."""

    card: str
    size: GptSize
    rows: int
    micro_batches: int
    strategy: str
    kind: Callable[[Decisions], bool] = resident
    num_devices: int = 1
    precision: str = "fp32"
    optimizer: Any = ADAMW
    dram: str = "6GB"
    files: bool = False
    steps: int = 3
    start: int = 1024
    environment: Mapping[str, str] = field(default_factory=dict)
    nvlink_bandwidth: float | None = None

    def hardware(self, ssd_dir: str) -> penstock.Hardware:
        """This machine's GPUs; of larger ones than the card, as much as it has."""
        ssds: Any = 0
        if self.files:
            ssds = [{"size_bytes": 8 * 10**9, "read_bandwidth": 1e9, "write_bandwidth": 1e9, "directory": ssd_dir}]
        found = penstock.Hardware.detect().with_(num_devices=self.num_devices, dram=self.dram, ssds=ssds)
        if self.nvlink_bandwidth is not None:  # which the emulator has not
            found = found.with_(nvlink_bandwidth=self.nvlink_bandwidth)
        memory_bytes = CARDS[self.card].memory_bytes
        larger = all(device.memory_bytes > memory_bytes for device in found.devices)
        return found.with_(memory=memory_bytes) if larger else found

    def job(self, hardware: penstock.Hardware, length: int) -> penstock.Job | None:
        """The plan for rows of this length; None where there is none of this kind."""
        size = GptSize(**{**vars(self.size), "length": length})
        model, shape = gpt_of(size), {"shape": [self.rows, length], "dtype": "int64"}
        try:
            with mock.patch.object(api, "with_nearest", lambda miss, *_: miss):  # it looks for long, and nobody asks
                job = penstock.compile(
                    model, hardware, example_inputs={"words": shape, "labels": shape}, optimizer=self.optimizer,
                    strategy=self.strategy, micro_batches=self.micro_batches, precision=self.precision,
                    stop_on_nan=False,
                )  # fmt: skip
        except (DoesNotFit, PassError):
            return None
        if not self.kind(job.plan.decisions):
            return None
        give_values(model)
        return job

    def fill(self, hardware: penstock.Hardware) -> tuple[penstock.Job, int]:
        """The plan for the longest rows of this kind that was found, and their length: it fills 97 per cent of the
        budget, or rows that are longer by `STEP` or a fiftieth have none."""
        found: list[tuple[int, penstock.Job]] = []
        length, over = self.start, 0  # `over`: a length without a plan
        while True:
            job = self.job(hardware, length)
            if job is None:
                over = length
            else:
                found.append((length, job))
            assert over != STEP, "the shortest rows have no such plan"
            longest = found[-1][0] if found else 0
            if found and (fullest(found[-1][1]) > 0.97 or 0 < over - longest <= max(STEP, longest // 50)):
                return found[-1][1], longest
            length = secant(found) if found else 0
            if over and not longest < length < over:
                length = (longest + over) // 2
            length = max(length // STEP * STEP, longest + STEP)

    def batch(self, length: int) -> dict[str, torch.Tensor]:
        return batch_of(GptSize(**{**vars(self.size), "length": length}), self.rows)


def fullest(job: penstock.Job) -> float:
    """The share of its budget that the fullest GPU uses."""
    predicted = job.plan.predicted
    assert predicted is not None
    return max(predicted.peak_bytes[d.name] / predicted.budget_bytes[d.name] for d in job.hardware.devices)


def secant(found: list[tuple[int, penstock.Job]]) -> int:
    """The length that would fill the budget if memory grew as between the last two, or from nothing; at most double."""
    (a, x), (b, y) = [(0, 0.0), *((length, fullest(job)) for length, job in found)][-2:]
    return min(2 * b, int(b + (0.985 - y) * (b - a) / (y - x))) if y > x else 2 * b


SIZE = GptSize(layers=12, width=1024, heads=16, vocabulary=16384, length=64)  # 168 M parameters
WIDE = GptSize(layers=24, width=1280, heads=20, vocabulary=32768, length=64)  # 515 M
LEAN = GptSize(layers=12, width=768, heads=12, vocabulary=8192, length=64)  # 91 M
SMALL = GptSize(layers=4, width=512, heads=8, vocabulary=4096, length=64)  # 15 M, planned in a second


BALANCED = STRATEGIES["balanced"]


def with_stages(strategy: str, stages: int) -> str:
    return strategy.replace("partition-balanced", f"partition-balanced{{stages={stages}}}")


RECOMPUTED = BALANCED.replace("insert-remat", "insert-remat{always=true}")
FETCHED = with_stages(BALANCED, 6).replace("insert-fetch", "insert-fetch{swap=true}")
OFFLOADED = (
    "drop-masks, chunk-loss, coarsen, partition-min-stage, map-round-robin, schedule-pipeline, "
    "choose-activations{tier=none, to=dram, share=0.05}, insert-fetch, insert-optimizer"
)
SLOW = {"FAKECUDA_KERNEL_US": "1000", "FAKECUDA_DELAY_US": "2000"}
MATH = {"FAKECUDA_ATTENTION": "math"}
# As NCCL takes over NVLink by its source: 396 MiB by three communicators at rest, of 16, 16 and 32 channels.
NCCL = {"FAKECUDA_NCCL_MB": "132", "FAKECUDA_NCCL_CHANNELS": "32", "FAKECUDA_NCCL_BUFFERS": "1"}

CASES: dict[str, Case] = {
    "resident, states": Case("8GB", GptSize(18, 1280, 20, 32768, 64), 1, 1, with_stages(BALANCED, 1)),
    "resident, activations": Case("8GB", LEAN, 8, 1, with_stages(BALANCED, 1), optimizer=SGD),
    "resident, 4 micro-batches": Case("12GB", SIZE, 8, 4, with_stages(BALANCED, 2)),
    "resident, bf16-mixed": Case("12GB", SIZE, 8, 2, with_stages(BALANCED, 1), precision="bf16-mixed"),
    "resident, bf16-true": Case("24GB", WIDE, 8, 2, with_stages(BALANCED, 1), precision="bf16-true"),
    "resident, dropout, untied": Case(
        "8GB", GptSize(12, 768, 12, 8192, 64, dropout=0.1, tied=False), 8, 2, with_stages(BALANCED, 3)
    ),
    "resident, math attention": Case("8GB", LEAN, 4, 2, with_stages(BALANCED, 1), environment=MATH),
    "large vocabulary": Case(
        "12GB", GptSize(6, 768, 12, 131072, 64), 8, 2, with_stages(BALANCED, 1),
        precision="bf16-mixed",
    ),
    "whole logits": Case(
        "12GB", GptSize(6, 768, 12, 131072, 64), 8, 2, with_stages(BALANCED, 1).replace("chunk-loss, ", ""),
        precision="bf16-mixed",
    ),
    "recomputed": Case("24GB", WIDE, 16, 2, with_stages(RECOMPUTED, 12), recomputing),
    "fetched from DRAM": Case("8GB", LEAN, 8, 2, FETCHED, fetching, optimizer=SGD),
    "fetched from DRAM, bf16-true": Case(
        "24GB", SIZE, 16, 4, FETCHED, fetching, precision="bf16-true", optimizer=SGD
    ),
    "fetched from DRAM, dropout": Case(
        "12GB", GptSize(12, 768, 12, 8192, 64, dropout=0.1), 8, 4, FETCHED, fetching, optimizer=SGD, start=2384
    ),
    "states on SSD": Case(
        "8GB", LEAN, 4, 2, STRATEGIES["fuyou"], lambda decisions: bool(decisions.ssd and decisions.ssd.stages),
        files=True,
    ),
    "activations to DRAM": Case("8GB", LEAN, 4, 2, OFFLOADED, lambda decisions: bool(decisions.activations)),
    "gpipe": Case("24GB", SIZE, 8, 4, STRATEGIES["gpipe"], num_devices=2),
    "1f1b": Case("8GB", SIZE, 16, 8, STRATEGIES["1f1b"], num_devices=2),
    "interleaved": Case("8GB", SIZE, 16, 8, STRATEGIES["interleaved"], num_devices=2),
    "interleaved, bf16-true": Case(
        "24GB", SIZE, 16, 8, STRATEGIES["interleaved"], num_devices=2, precision="bf16-true"
    ),
    # What once waited for ever: both hosts in the allocator, for the memory of a message that each had still to send.
    "interleaved, 1 ms a kernel": Case(
        "8GB", LEAN, 16, 8, STRATEGIES["interleaved"], num_devices=2, steps=10, environment=SLOW
    ),
    "zero-bubble": Case("12GB", SIZE, 16, 8, STRATEGIES["zero-bubble"], num_devices=2),
    "looped": Case("12GB", SIZE, 8, 4, STRATEGIES["looped-bfs"], num_devices=2),
    "mobius": Case(
        "8GB", LEAN, 8, 4, STRATEGIES["mobius"].replace("insert-fetch", "insert-fetch{swap=true}"), fetching,
        num_devices=2, optimizer=SGD,
    ),
    "mics": Case("12GB", SIZE, 8, 2, STRATEGIES["mics"], lambda _: True, num_devices=2),
    "zero3-offload": Case("8GB", LEAN, 8, 2, STRATEGIES["zero3-offload"], lambda _: True, num_devices=2, optimizer=SGD),
    "data-parallel": Case("12GB", SIZE, 8, 2, STRATEGIES["data-parallel"], num_devices=2),
}  # fmt: skip

# For tests.
SMALL_CASES: dict[str, Case] = {
    "small, whole logits": Case(
        "4GB", GptSize(2, 256, 4, 65536, 64), 4, 2, with_stages(BALANCED, 1).replace("chunk-loss, ", ""),
    ),
    "small, 1f1b": Case("4GB", SMALL, 8, 4, STRATEGIES["1f1b"], num_devices=2, start=8592),
    "small, 1f1b, NVLink": Case(
        "4GB", SMALL, 8, 4, STRATEGIES["1f1b"], num_devices=2, start=6096, environment=NCCL, nvlink_bandwidth=100e9
    ),
    "small, zero-bubble": Case("4GB", SMALL, 8, 4, STRATEGIES["zero-bubble"], num_devices=2, start=4624),
    "small, mobius": Case(
        "4GB", SMALL, 8, 4, STRATEGIES["mobius"].replace("insert-fetch", "insert-fetch{swap=true}"), fetching,
        num_devices=2, optimizer=SGD, start=8640,
    ),
    "small, interleaved, 1 ms a kernel": Case(
        "4GB", SMALL, 8, 4, STRATEGIES["interleaved"], num_devices=2, steps=4, start=7072, environment=SLOW
    ),
}  # fmt: skip
