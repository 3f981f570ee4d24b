"""The models that the reservoir and the comparison with peers train on a GPU, and how they are planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.bench.peers.gpt import XL, Gpt, GptSize
from penstock.bench.peers.gpu_setup import Row
from penstock.compiler.strategies import STRATEGIES

FUYOU = STRATEGIES["fuyou"]
APART = FUYOU.replace("overlap-optimizer", "overlap-optimizer{overlap=false}")
AS_DRAM_LACKS = FUYOU.replace("tier=all", "tier=auto")
SEVEN = GptSize(layers=32, width=4096, heads=32, vocabulary=50304, length=1024)  # 6.7 B parameters
THREE = GptSize(layers=32, width=2560, heads=32, vocabulary=50304, length=1024)  # 2.7 B parameters
TINY = GptSize(layers=6, width=64, heads=2, vocabulary=64, length=16)
LITTLE = GptSize(layers=8, width=256, heads=4, vocabulary=1024, length=64)  # 6.6 M parameters


@dataclass(frozen=True)
class Case:
    """A model and a global batch. `plans` maps names to pipelines; `most` is the share of the remaining time that one
    of them may take."""

    name: str
    size: GptSize
    rows: int
    micro_batches: int
    plans: dict[str, str]
    most: float = 0.5
    precision: str = "bf16"

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in Gpt(self.size).parameters())

    def facts(self) -> Row:
        size = self.size
        return {
            "model": f"gpt {size.layers} x {size.width}, vocabulary {size.vocabulary}, sequence {size.length}",
            "case": self.name, "parameters": self.parameters, "batch": self.rows, "micro_batches": self.micro_batches,
            "precision": self.precision,
        }  # fmt: skip


PLANS = {"fuyou": FUYOU, "no overlap": APART, "auto": "auto"}
CASES = (
    Case("1.5B", XL, 32, 8, PLANS),
    Case("2.7B", THREE, 32, 8, PLANS),
    Case("7B", SEVEN, 16, 8, {"fuyou, on SSD what DRAM lacks": AS_DRAM_LACKS, "auto": "auto"}, most=0.9),
)


@dataclass(frozen=True)
class Rehearsal:
    """The sizes of `--small` on one kind of device. A GPU's memory must hold the workspaces of its libraries, too."""

    case: Case
    memory: str
    dram: str
    ssd_bytes: int


SMALL = {
    "cpu": Rehearsal(Case("small", TINY, 4, 2, PLANS), "24MB", "8MB", 8 * 10**6),
    "cuda": Rehearsal(Case("small", LITTLE, 4, 2, PLANS), "192MB", "64MB", 256 * 10**6),
}
SIDES_PLANS = {name: PLANS[name] for name in ("auto", "fuyou")}  # what is compared with peers: as chosen, and as told
