"""Every trainable class of the installed transformers, tiny: two steps on two devices with two micro-batches against
eager PyTorch.

A class is trained in a process of its own kind, which a crash, a hang or too much memory ends; the row says so. Rows
are kept in bench/results/zoo.jsonl, and docs/models.md is made from them. A class that has a row for this release of
transformers is left out, so that an interrupted run goes on.

Run: python bench/zoo.py [--only WORDS] [--again OUTCOME ...] [--page]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from penstock.bench.model_zoo.page import write_page
from penstock.bench.model_zoo.registry import ModelClass, model_classes
from penstock.bench.peers import rows

RESULTS = rows.RESULTS / "zoo.jsonl"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TIMEOUT_S, MOST_BYTES, CLASSES_A_PROCESS = 240, 6 << 30, 40


class Trainer:
    """A process that trains one class after another, and is replaced by another where one ends or hangs it."""

    def __init__(self) -> None:
        self.process: Any = None
        self.channel: Any = None
        self.count = 0

    def row(self, model: ModelClass) -> dict[str, Any]:
        if self.process is None or self.count >= CLASSES_A_PROCESS:
            self.close()
            context = multiprocessing.get_context("spawn")
            self.channel, theirs = context.Pipe()
            self.process = context.Process(target=train_all, args=(theirs,))
            self.process.start()
            theirs.close()
        self.count += 1
        began = time.monotonic()
        self.channel.send(model)
        while time.monotonic() - began < TIMEOUT_S:
            if self.channel.poll(0.5):
                try:
                    return dict(self.channel.recv())
                except EOFError:
                    self.process.join()
                    code = self.process.exitcode
                    self.close()
                    return {"outcome": "raw error", "detail": f"the process ended with exit code {code}"}
            used = psutil.Process(self.process.pid).memory_info().rss
            if used > MOST_BYTES:
                self.close()
                return {"outcome": "raw error", "detail": f"more than {MOST_BYTES >> 30} GiB of memory"}
        self.close()
        return {"outcome": "raw error", "detail": f"not done after {TIMEOUT_S} s"}

    def close(self) -> None:
        if self.process is not None:
            self.channel.close()
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        self.process, self.count = None, 0


def train_all(channel: Connection) -> None:
    """Answer classes with their rows, until the channel is closed. The row of a class without a loss has no outcome."""
    import torch
    import transformers

    from penstock.bench.model_zoo.compare import compare

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        try:
            model = channel.recv()
        except EOFError:
            return
        began = time.monotonic()
        row = compare(model) if model.has_loss else {}
        channel.send({**row, "seconds": time.monotonic() - began})


def saved_rows() -> Iterator[dict[str, Any]]:
    """The last row of every class, in the order of their first ones."""
    last = {}
    if RESULTS.is_file():
        for line in RESULTS.read_text().splitlines():
            row = json.loads(line)
            last[row["class"]] = {**row}
    yield from last.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="expressions, split at commas, found in class, family or kind")
    parser.add_argument("--again", nargs="*", default=[], help="outcomes whose classes are trained again, or all")
    parser.add_argument("--page", action="store_true", help="only write the page from the rows that there are")
    args = parser.parse_args()
    if not args.page:
        train_missing(args.only, args.again)
    kept = sorted(saved_rows(), key=lambda row: (row["family"], row["kind"], row["class"]))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in kept))
    PAGE.write_text(write_page(kept, sum(1 for _ in model_classes())))


def train_missing(only: str, again: list[str]) -> None:
    import torch
    import transformers

    outcomes = {row["class"]: row["outcome"] for row in saved_rows() if row["transformers"] == transformers.__version__}
    trainer = Trainer()
    for model in model_classes(only):
        if model.name in outcomes and outcomes[model.name] not in again and "all" not in again:
            continue
        facts = {"class": model.name, "family": model.family, "kind": model.kind}
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        answer = trainer.row(model)
        if "outcome" not in answer:
            continue
        row = rows.round_weights({**facts, **answer, **versions, "date": rows.provenance()["date"]})
        print(row["class"], row["outcome"], row.get("detail", "")[:120].replace("\n", " "), flush=True)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(row) + "\n")
    trainer.close()


if __name__ == "__main__":
    main()
