"""Every pair of ways to divide a model over devices, on 2 and 4 processes over gloo: how far training is from eager's.

One row a pair: the largest difference of losses, gradients and weights (`tests/compiler/pairs.py` says of what), or the
error; for pairs that are refused, what the refusal says. Run: python bench/equality_matrix.py [--devices 2 4] [--only
WORD ...]
"""

from __future__ import annotations

import argparse
from typing import Any

from penstock.bench.peers import rows
from penstock.errors import PenstockError
from penstock.tests.compiler.pair_ranks import train_on_ranks
from penstock.tests.compiler.pairs import STEPS, TOLERANCE, Pair, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="*", default=[], help="pairs with these words in their names")
    args = parser.parse_args()
    chosen = [pair for pair in pairs() if not args.only or any(word in pair.name for word in args.only)]
    by_name = {pair.name: pair for pair in chosen}

    def save(row: dict[str, Any]) -> None:
        pair = by_name[row["case"]]
        rows.save("equality_matrix", {**row, **describe_kernel(pair)})

    for devices in args.devices:
        train_on_ranks([pair for pair in chosen if not pair.refused], devices, save)
        for pair in chosen:
            if pair.refused and pair.devices == devices:
                save({"case": pair.name, "refused": refusal(pair)})


def describe_kernel(pair: Pair) -> dict[str, Any]:
    return {
        "processes": pair.devices, "model": pair.model, "micro_batches": pair.micro_batches, "steps": STEPS,
        "tolerance": TOLERANCE, "strategy": pair.strategy,
    }  # fmt: skip


def refusal(pair: Pair) -> str:
    try:
        pair.compiled()
    except PenstockError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    main()
