"""Training that goes on with the ranks that are left: an ordinary loop that saves, and resumes where one has saved.

    python examples/finetune_elastic.py
    torchrun --nproc-per-node=4 examples/finetune_elastic.py
    torchrun --nnodes=2:4 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST0:29400 \
        examples/finetune_elastic.py --out /shared/elastic

On every start `hardware="auto"` is what all hosts have now, and the plan is made for that; the checkpoint may come from
any other number of ranks. A small network learns to tell the next byte of Penstock's own documents.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import penstock

ROOT = Path(__file__).resolve().parents[1]
CONTEXT, WIDTH, BATCH, MICRO_BATCHES = 16, 64, 24, 12


class NextByte(nn.Module):
    """Logits of the byte after `context`; the loss where `target` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        sizes = [CONTEXT * 16, *[WIDTH] * 6]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(sizes)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, context: Tensor, target: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x), target)


class Windows(Dataset[dict[str, Tensor]]):
    """Every place of a text: the bytes before it and the byte there."""

    def __init__(self, text: bytes, num_samples: int):
        self.text, self.num_samples = torch.tensor(list(text)), num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"context": self.text[index : index + CONTEXT], "target": self.text[index + CONTEXT]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "elastic", help="a directory that all hosts share")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent rank counts as lost")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = Windows((ROOT / "docs" / "architecture.md").read_bytes(), num_samples=options.steps * BATCH)
    example = {"context": torch.zeros(BATCH, CONTEXT, dtype=torch.long), "target": torch.zeros(BATCH, dtype=torch.long)}
    job = penstock.compile(
        NextByte(),
        "auto",
        example_inputs=example,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        micro_batches=MICRO_BATCHES,
        strategy="gpipe",
        timeout_s=options.timeout,
    )
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    with job:
        sampler = job.sampler(data)
        job.resume(options.out / "checkpoint", missing_ok=True)
        for batch in DataLoader(data, batch_sampler=sampler):
            loss = job.step(batch)
            if rank == "0":
                print(f"step {job.step_count} of {options.steps} on {ranks} ranks: loss {loss:.6f}, ", end="")
                print(f"samples up to {sampler.position}", flush=True)
            if job.step_count % options.save_every == 0 or job.step_count == options.steps:
                job.save(options.out / "checkpoint")


if __name__ == "__main__":
    main()
