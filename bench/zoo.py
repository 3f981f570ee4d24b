"""Every trainable class of the installed transformers, tiny: two steps on two devices with two micro-batches against
eager PyTorch. With --others: models of diffusers, timm, torchvision, PyTorch Geometric and torch.nn.

A class is trained in a process of its own kind, which a crash, a hang or too much memory ends; the row says so. Rows
are kept in bench/results/zoo.jsonl (and zoo_others.jsonl), and docs/models.md is made from them. A class that has a
row for this release of its library is left out, so that an interrupted run goes on; families with the fewest rows come
first.

Run: python bench/zoo.py [--others] [--only WORDS] [--again OUTCOME ...] [--page]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from penstock.bench.model_zoo.others import OtherModel, import_vision, other_models
from penstock.bench.model_zoo.page import write_page
from penstock.bench.model_zoo.registry import ModelClass, model_classes
from penstock.bench.peers import rows

RESULTS, OTHERS = rows.RESULTS / "zoo.jsonl", rows.RESULTS / "zoo_others.jsonl"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
# Of processor time, so that a busy machine ends no class; one that hangs takes none, and is ended by the clock.
MOST_PROCESSOR_S, MOST_S, MOST_BYTES, CLASSES_A_PROCESS = 240, 1800, 6 << 30, 40


class Trainer:
    """A process that trains one class after another, and is replaced by another where one ends or hangs it."""

    def __init__(self) -> None:
        self.process: Any = None
        self.channel: Any = None
        self.count = 0

    def row(self, model: ModelClass | OtherModel) -> dict[str, Any]:
        if self.process is None or self.count >= CLASSES_A_PROCESS:
            self.close()
            context = multiprocessing.get_context("spawn")
            self.channel, theirs = context.Pipe()
            self.process = context.Process(target=train_all, args=(theirs,))
            self.process.start()
            theirs.close()
        self.count += 1
        began, computed = time.monotonic(), processor_s(self.process.pid)
        self.channel.send(model)
        while time.monotonic() - began < MOST_S:
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
            if processor_s(self.process.pid) - computed > MOST_PROCESSOR_S:
                self.close()
                return {"outcome": "raw error", "detail": f"not done after {MOST_PROCESSOR_S} s of a processor"}
        self.close()
        return {"outcome": "raw error", "detail": f"not done after {MOST_S} s"}

    def close(self) -> None:
        if self.process is not None:
            self.channel.close()
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        self.process, self.count = None, 0


def processor_s(pid: int) -> float:
    """Seconds of a processor that a process and those below it have taken."""
    process, total = psutil.Process(pid), 0.0
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # one that has ended counts in its parent
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def train_all(channel: Connection) -> None:
    """Answer classes with their rows, until the channel is closed. The row of a class without a loss has no outcome."""
    import torch

    import_vision()  # before transformers, which imports it where it is there
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


def saved_rows(results: Path) -> list[dict[str, Any]]:
    """The last row of every class, by family, kind and name."""
    last = {}
    if results.is_file():
        for line in results.read_text().splitlines():
            row = json.loads(line)
            last[row["family"], row["class"]] = row
    return sorted(last.values(), key=lambda row: (row["family"], row["kind"], row["class"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="expressions, split at commas, found in class, family or kind")
    parser.add_argument("--again", nargs="*", default=[], help="outcomes whose classes are trained again, or all")
    parser.add_argument("--others", action="store_true", help="models that are not of transformers")
    parser.add_argument("--page", action="store_true", help="only write the page from the rows that there are")
    args = parser.parse_args()
    if not args.page:
        train_missing(args.only, args.again, args.others)
    found = {results: saved_rows(results) for results in (RESULTS, OTHERS)}
    for results, kept in found.items():
        results.write_text("".join(json.dumps(row) + "\n" for row in kept))
    PAGE.write_text(write_page(found[RESULTS], sum(1 for _ in model_classes()), found[OTHERS]))


def train_missing(only: str, again: list[str], others: bool) -> None:
    results = OTHERS if others else RESULTS
    saved = {(row["family"], row["class"]): row for row in saved_rows(results)}
    trainer = Trainer()
    models: Iterator[ModelClass | OtherModel] = other_models(only) if others else model_classes(only)
    for model in _take_turns(models, saved):
        before = saved.get((model.family, model.name), {})
        library = {model.library: metadata.version(model.library)}
        if library.items() <= before.items() and before["outcome"] not in again and "all" not in again:
            continue
        facts = {"class": model.name, "family": model.family, "kind": model.kind}
        versions = {"torch": metadata.version("torch"), **library}
        answer = trainer.row(model)
        if "outcome" not in answer:
            continue
        row = rows.round_weights({**facts, **answer, **versions, "date": rows.provenance()["date"]})
        print(row["class"], row["outcome"], row.get("detail", "")[:120].replace("\n", " "), flush=True)
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
    trainer.close()


def _take_turns(models: Iterator[Any], saved: dict[tuple[str, str], Any]) -> list[Any]:
    """One class of each family after the other, those of families without a row first."""
    count, turns = Counter(family for family, _ in saved), list[int]()
    every = list(models)
    for model in every:
        turns.append(count[model.family])
        count[model.family] += 1
    return [every[i] for i in sorted(range(len(every)), key=turns.__getitem__)]


if __name__ == "__main__":
    main()
