"""Runs a script with Penstock in the place of accelerate's Accelerator and of the trainers of transformers and TRL.

Run: python -m penstock.integrations.launch [--hardware NAME] [--set KEY=VALUE] SCRIPT [arguments of the script]
or, with the settings of `accelerate config`: accelerate launch -m penstock.integrations.launch SCRIPT ...
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from ..ir.errors import PenstockError, PlanError
from ..runtime.processes.joint_hardware import typed_hardware

ERROR = 2  # exit code
REPLACED = {  # module -> its class -> the class that takes its place
    "accelerate": {"Accelerator": "accelerate:PenstockAccelerator"},
    "transformers": {
        "Trainer": "transformers:PenstockTrainer", "Seq2SeqTrainer": "transformers:PenstockSeq2SeqTrainer",
    },
    "trl": {f"{name}Trainer": f"trl:Penstock{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward")},
    "trl.experimental.cpo": {"CPOTrainer": "trl:PenstockCPOTrainer"},
    "trl.experimental.orpo": {"ORPOTrainer": "trl:PenstockORPOTrainer"},
    "trl.experimental.gkd": {"GKDTrainer": "trl:PenstockGKDTrainer"},
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the script. Exits with 2 for an error that Penstock raises on purpose."""
    parser = argparse.ArgumentParser(prog="python -m penstock.integrations.launch", description=__doc__)
    parser.add_argument("--hardware", default="auto", help="as of `penstock plan`: auto, the default, is this machine")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE",
        help="change a figure of the hardware, such as num_devices=4 or memory=8GB; repeatable",
    )  # fmt: skip
    parser.add_argument("--max-grad-norm", type=float, help="what a loop with an Accelerator clips to")
    parser.add_argument("--compile-options", type=json.loads, default={}, help="for penstock.compile, as JSON")
    parser.add_argument("script", type=Path)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the script")
    given = parser.parse_args(arguments)
    if not given.script.is_file():
        parser.error(f"{given.script}: there is no such script")
    try:
        _run(given)
    except PenstockError as error:
        print("\n".join(error._render_traceback_()), file=sys.stderr)
        if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:  # torchrun ends its own report with it
            Path(path).write_text(json.dumps({"message": str(error), "timestamp": int(time.time())}), "utf-8")
        sys.exit(ERROR)


def _run(given: argparse.Namespace) -> None:
    is_plain = given.hardware == "auto" and not given.set  # then the machine of all ranks, once they have met
    hardware = given.hardware if is_plain else typed_hardware(given.hardware, given.set)
    options = {"hardware": hardware, "compile_options": given.compile_options}
    kinds = replace_classes(given.script.read_text("utf-8"), options, given.max_grad_norm)
    sys.argv = [str(given.script), *given.rest]
    sys.path.insert(0, str(given.script.resolve().parent))
    runpy.run_path(str(given.script), run_name="__main__")
    if not any(kind.was_made for kind in kinds):
        names = ", ".join(sorted(name for classes in REPLACED.values() for name in classes))
        raise PlanError(f"{given.script} ran without Penstock: it made none of {names} by the name that its text has")


def replace_classes(script: str, options: dict[str, Any], max_grad_norm: float | None = None) -> list[Any]:
    """Put Penstock's classes, with these options, in the place of those of the libraries that the script names."""
    found = []
    for module, classes in REPLACED.items():
        if module.partition(".")[0] not in script:
            continue
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue  # the script cannot use it either
        for name, place in classes.items():
            room, _, own = place.partition(":")
            kind = getattr(importlib.import_module(f".{room}", __package__), own)
            more = {"max_grad_norm": max_grad_norm} if name == "Accelerator" else {}
            found.append((library, name, with_options(kind, {**options, **more})))
    for library, name, kind in found:  # after all are made, as TRL's are made of transformers'
        setattr(library, name, kind)
    return [kind for _, _, kind in found]


def with_options(kind: Any, options: dict[str, Any]) -> Any:
    """The class with these arguments where the script gives none."""

    class Launched(kind):
        was_made = False

        def __init__(self, *args: Any, **kwargs: Any):
            Launched.was_made = True
            super().__init__(*args, **{**options, **kwargs})

    Launched.__name__, Launched.__qualname__ = kind.__name__, kind.__qualname__
    return Launched


if __name__ == "__main__":
    main()
