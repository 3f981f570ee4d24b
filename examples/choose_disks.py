"""Choose disks for a model: the predicted step, and how long the disks last, for several numbers of SSDs.

Run: python examples/choose_disks.py --model gpt3-13b --hardware rtx4090x1 --dram 128GB
Plans only: no GPU, no disk and no weights are needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import penstock
from penstock.compiler.models.named import find_model
from penstock.compiler.report.wear import wear_of
from penstock.errors import DoesNotFit
from penstock.ir.units import format_bytes, format_seconds


def main(arguments: Sequence[str] | None = None) -> Table:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt3-13b")
    parser.add_argument("--hardware", default="rtx4090x1")
    parser.add_argument("--dram", default="128GB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--ssds", type=int, nargs="+", default=[0, 1, 2, 4])
    args = parser.parse_args(arguments)
    named = find_model(args.model)
    table = Table(
        "SSDs",
        "step",
        "tokens/s",
        "written a step",
        "written a day",
        "they last",
        title=f"{args.model} on {args.hardware}",
    )
    for count in args.ssds:
        hardware = penstock.Hardware.preset(args.hardware, dram=args.dram, ssds=count)
        table.add_row(str(count), *row_of(named, hardware, args))
    Console().print(table)
    return table


def row_of(named, hardware: penstock.Hardware, args: argparse.Namespace) -> list[str]:
    try:
        job = penstock.compile(
            named.on_meta(),
            hardware,
            example_inputs=named.batch_spec(args.batch, args.sequence),
            optimizer=partial(torch.optim.AdamW, lr=1e-5),
            precision="bf16",
        )
    except DoesNotFit as error:
        return ["does not fit", f"{format_bytes(error.missing_bytes)} of {error.memory} missing", "", "", ""]
    predicted = job.plan.predicted
    assert predicted is not None
    rate = f"{args.batch * args.sequence / predicted.step_s:.0f}"
    worn = wear_of(predicted, hardware)
    if not worn:
        return [format_seconds(predicted.step_s), rate, "nothing", "", ""]
    days = "not known" if worn[0].days is None else f"{worn[0].days:.0f} days"
    written = format_bytes(worn[0].written_bytes), format_bytes(round(worn[0].bytes_per_day))
    return [format_seconds(predicted.step_s), rate, *written, days]


if __name__ == "__main__":
    main()
