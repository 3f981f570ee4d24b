"""Compares the bound of any step with published runs: none may be faster than what no run undercuts.

`published.tsv` has the runs, each with its source. Those of fp8, those that ran out of memory and those in seconds of
rows whose length is not said cannot be compared; the others are rows of `results/published.jsonl`: the seconds that
were published for a step, the bound of the device's peak, that of fused kernels, and that of PyTorch's calls, which the
faster runs undercut. Where lengths vary, so that only tokens a second can be compared, a step counts as `MANY` rows of
`SHORT` tokens, of which attention and updates take least. An NF4 base counts as one of bf16, whose arithmetic is the
same. (torchao's script of its ViT rows crops images to 224 x 224.)

Run: python bench/published.py [--only WORD]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path

import torch

from penstock.bench.peers import rows
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.compiler.search.bounds import Bound, ideal_bounds, machine_bound
from penstock.compiler.search.candidate import RESERVOIR
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import Precision
from penstock.papers.published import FUYOU, PublishedRun, read, run_of
from penstock.passes.draft import Options

TABLE = Path(__file__).with_name("published.tsv")
SHORT, MANY = 64, 1024


def timed_run(row: dict[str, str]) -> PublishedRun | None:
    """The run of a published row; None where it cannot be compared."""
    run = run_of(row, (MANY, SHORT))
    return run if isinstance(run, PublishedRun) and run.seconds is not None else None


@functools.cache
def graph_of(model: str, sequence: int, precision: str, adapter: str | None) -> OpGraph:
    """The op graph of one row."""
    named = dataclasses.replace(find_model(model, adapter=adapter), padding=False)
    types = Precision.of(precision)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}
    inputs = micro_batch_spec(named.batch_spec(1, sequence), 1)
    autocast = None if types.name.endswith("true") else dtypes[precision]
    return trace(named.on_meta(), inputs, autocast=autocast, device_kind="cuda", param_dtype=dtypes[precision])


def bounds_of(run: PublishedRun) -> tuple[Bound, float, float]:
    """The bound of any step, and the seconds of those with fused kernels and with PyTorch's calls."""
    # memories hold all: less would only make the bound higher
    room = {"memory": "64GB"} if run.hardware == FUYOU else {"dram": "16TB", "memory": "4TB"}
    hardware = Hardware.preset(run.hardware, **{**dict(run.changes), **room})
    options = Options(precision=run.precision, micro_batches=run.batch)
    compiler = CandidateCompiler(graph_of(run.model, run.sequence, run.precision, run.adapter), hardware, options)
    draft = compiler.place(RESERVOIR).draft
    fused_s, bound = ideal_bounds(draft)
    return bound, fused_s, machine_bound(draft).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose text has this")
    args = parser.parse_args()
    beaten = 0
    for row in read(TABLE):
        run = timed_run(row)
        if run is None or args.only not in " ".join(row.values()):
            continue
        bound, fused_s, eager_s = bounds_of(run)
        beaten += run.seconds < bound.seconds
        rows.save("published", {
            **{key: row[key] for key in ("source", "system", "gpu", "n_gpus", "model", "batch", "seq", "adapters")},
            "published_s": run.seconds, "bound_s": bound.seconds, "bound_by": bound.by, "fused_s": fused_s,
            "eager_s": eager_s, "bound_share": bound.seconds / run.seconds, "eager_share": eager_s / run.seconds,
        })  # fmt: skip
    print(f"{beaten} published runs are faster than the bound")


if __name__ == "__main__":
    main()
