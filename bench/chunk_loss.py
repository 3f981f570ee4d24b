"""Peak of tensors and time of a step with whole logits and with a chunked loss, in one run: a vocabulary of 131072.

The model is an embedding, one layer and a head, in one stage on the CPU. The peak is what a stage's forward and
backward add to its weights, as each tensor is made and freed, beside what the plan says of it. Times alternate between
the two plans; each row has the median.

Run: python bench/chunk_loss.py [--tokens N] [--width N] [--precision NAME ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.bench.peers import rows
from penstock.compiler.loss import capture
from penstock.ir.precision import Precision
from penstock.passes.draft import Draft
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.tests.passes.running import all_passes, apply, draft_of
from penstock.tests.passes.stage_runs import Peak, stages_of

CLASSES, TURNS = 131072, 3


class Reader(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(CLASSES, width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.layer(self.embedding(ids))))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Side:
    """One of the two plans: its stage on real weights."""

    def __init__(self, draft: Draft, batch: dict[str, Tensor], precision: str):
        ((self.spec, self.runner, self.inputs),) = stages_of(draft, batch, precision)
        self.grads: dict[str, Tensor] | None = None
        self.turn()  # from now on gradients add up, as from a step's second micro-batch on

    def turn(self) -> None:
        _, kept = self.runner.forward(self.inputs, 0)
        self.grads = self.runner.backward(kept, self.inputs, [1.0], self.grads, 0)[1]

    def seconds(self) -> float:
        begin_s = time.perf_counter()
        self.turn()
        return time.perf_counter() - begin_s

    def peak_bytes(self) -> int:
        """The most bytes of new tensors at once in a forward and its backward."""
        with Peak() as peak:
            self.turn()
        return peak.most

    @property
    def predicted_bytes(self) -> int:
        """The same by the plan, in forward or in backward."""
        out_bytes = sum(out.bytes for out in self.spec.outputs)
        workspace_bytes = max(self.spec.forward_workspace_bytes + out_bytes, self.spec.backward_workspace_bytes)
        return self.spec.kept_bytes + workspace_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunk", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--precision", nargs="*", default=["fp32", "bf16-mixed", "bf16-true"])
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/chunk_loss.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for precision in args.precision:
        for chunk in args.chunk:
            rows.save("chunk_loss", row_of(precision, args.tokens, args.width, chunk), args.out)


def row_of(precision: str, tokens: int, width: int, chunk: int) -> dict[str, Any]:
    ids = torch.randint(0, CLASSES, (4, tokens // 4), generator=torch.Generator().manual_seed(0))
    batch = {"ids": ids, "labels": ids}
    known = Precision.of(precision)
    graph = capture(Reader(width), batch, precision=known)
    given = {**batch, **{name: torch.full((1,), float(tokens)) for name in graph.inputs if name not in batch}}
    machine = penstock.Hardware.cpu(num_devices=1, memory="16GB")
    drafts = [
        apply(draft_of(graph, machine, precision=precision), *first, *all_passes(1)[:4])
        for first in ([], [ChunkLoss(chunk)])
    ]
    whole, chunked = (Side(draft, given, precision) for draft in drafts)
    peaks = [side.peak_bytes() for side in (whole, chunked)]
    times = [[side.seconds() for side in (whole, chunked)] for _ in range(TURNS)]
    whole_s, chunked_s = (statistics.median(row[i] for row in times) for i in range(2))
    predicted = [side.predicted_bytes for side in (whole, chunked)]
    return {
        "precision": precision, "tokens": tokens, "width": width, "classes": CLASSES, "tokens_of_chunk": chunk,
        "whole_peak_bytes": peaks[0], "whole_predicted_bytes": predicted[0],
        "chunked_peak_bytes": peaks[1], "chunked_predicted_bytes": predicted[1],
        "times_less_memory": peaks[0] / peaks[1],
        "error": max(abs(a / b - 1) for a, b in zip(predicted, peaks)),
        "whole_s": whole_s, "chunked_s": chunked_s, "times_as_long": chunked_s / whole_s,
    }  # fmt: skip


if __name__ == "__main__":
    main()
