"""Every optimizer through whole jobs: bytes of its states predicted against found, and losses of 200 steps on English
text against the same classes in eager PyTorch, with states on the device and on a disk.

The model is a GPT-2 of 2 layers without shared weights, so that both sides do the same additions in the same order, and
nothing may differ. Found are the bytes of the tensors that the devices hold after a step; numbers, such as the count of
steps, and tables that all parameters of an optimizer share count on neither side. torchao compiles its steps; here both
sides step the same code as it is written, since compiling takes longer than the 200 steps, unless --compiled says so.

Run: python bench/optimizers.py [--steps N] [--only NAME ...] [--directory DIR] [--compiled] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import torchao.optim
from torch import Tensor, nn

import penstock
from penstock.bench.loss_curve import MICRO_BATCHES, batches
from penstock.bench.peers import models, rows
from penstock.bench.peers.eager import Eager
from penstock.compiler.job.state import whole_state
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec

LAYERS, WIDTH = 2, 64
PLACES = {"device": "gpipe", "ssd": "fuyou"}
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "torch AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "torch Adam, amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "torch NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "torch RAdam": partial(torch.optim.RAdam, lr=1e-3),
    "torch Adamax": partial(torch.optim.Adamax, lr=1e-3),
    "torch Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "torch Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "torch ASGD": partial(torch.optim.ASGD, lr=0.1),
    "torch RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "torch Rprop": partial(torch.optim.Rprop, lr=1e-4),
    "torch SGD, momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "torch Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "bitsandbytes AdamW8bit": partial(bitsandbytes.optim.AdamW8bit, lr=1e-3),
    "bitsandbytes SGD8bit": partial(bitsandbytes.optim.SGD8bit, lr=0.05, momentum=0.9),
    "bitsandbytes Lion8bit": partial(bitsandbytes.optim.Lion8bit, lr=1e-4),
    "torchao AdamW8bit": partial(torchao.optim.AdamW8bit, lr=1e-3),
    "torchao AdamW4bit": partial(torchao.optim.AdamW4bit, lr=1e-3),
    "torchao AdamWFp8": partial(torchao.optim.AdamWFp8, lr=1e-3),
}
MUON = "torch Muon for matrices, AdamW for the rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=[*OPTIMIZERS, MUON])
    parser.add_argument("--directory", help="on the disk to use; default: the temporary folder")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/optimizers.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.compiler.set_stance("default" if args.compiled else "force_eager"):
        for name in args.only:
            wanted, eager = eager_losses(name, args.steps)
            for place in PLACES:
                with tempfile.TemporaryDirectory(prefix="optimizers-", dir=args.directory) as folder:
                    row = compare(name, place, folder, wanted, eager)
                rows.save("optimizers", {**row, "compiled": args.compiled}, args.out)


def model() -> nn.Module:
    return models.gpt2(layers=LAYERS, width=WIDTH, tied=False, vocabulary=256)


def choose_optimizer(name: str, made: nn.Module) -> tuple[Make, list[Mapping[str, Any]] | None]:
    """The optimizer and the groups that `compile` gets."""
    if name != MUON:
        return OPTIMIZERS[name], None
    matrices = penstock.hidden_matrices(made)
    return OPTIMIZERS["torch AdamW"], [{"params": matrices, "optimizer": partial(torch.optim.Muon, lr=0.02)}]


def eager_losses(name: str, steps: int) -> tuple[list[float], nn.Module]:
    """The losses of a loop in plain PyTorch, with the classes themselves."""
    made = model()
    optimizer, groups = choose_optimizer(name, made)
    params = {n: p for n, p in made.named_parameters() if p.requires_grad}
    steppers = []
    for group in groups or []:
        steppers.append(group["optimizer"]([params.pop(n) for n in group["params"]]))
    fused = (
        {"fused": True} if OptimizerSpec.from_callable(optimizer).build([torch.zeros(1)]).defaults.get("fused") else {}
    )
    steppers.append(optimizer(list(params.values()), **fused))  # where the class has fused kernels, a job uses them
    eager = Eager(made, MICRO_BATCHES, 0.0)
    eager.optimizer = _Together(steppers)  # type: ignore[assignment]
    return [eager.step(batch) for batch in batches(steps)], made


class _Together:
    """Several optimizers, stepped one after the other."""

    def __init__(self, members: list[torch.optim.Optimizer]):
        self.members = members

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)


def compare(name: str, place: str, folder: str, wanted: list[float], eager: nn.Module) -> dict[str, Any]:
    """Train the job; the row has its state bytes, and the largest differences of a loss, and of a weight at the end."""
    made, text = model(), batches(len(wanted))
    optimizer, groups = choose_optimizer(name, made)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="1GB", ssd="1GB")
    job = penstock.compile(
        made, hardware, ssd_dirs=[folder], example_inputs=text[0], optimizer=optimizer, param_groups=groups,
        strategy=PLACES[place], micro_batches=MICRO_BATCHES,
    )  # fmt: skip
    with job:
        found = [float(job.step(batch)) for batch in text]
        interface = job.folder.interface
        predicted = sum(interface.state_bytes(spec) for spec in interface.stages.values())
        states = {k: v for spec in interface.stages.values() for k, v in _states(job, spec).items()}
        weights = job.state_dict()
    spec = OptimizerSpec.from_callable(optimizer, model=made, param_groups=groups)
    apart = max(float((weights[n] - p.detach()).abs().max()) for n, p in eager.named_parameters())
    trained = sum(p.numel() for p in made.parameters())
    held = held_bytes(spec, states, made)
    return {
        "optimizer": name, "states": place, "model": f"gpt2 {LAYERS} x {WIDTH}", "parameters": trained,
        "predicted_state_bytes": predicted, "found_state_bytes": held, "ratio": held / predicted,
        "state_bytes_per_parameter": held / trained, "steps": len(found),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(found, wanted)),
        "steps_with_equal_loss": sum(a == b for a, b in zip(found, wanted)),
        "largest_weight_difference": apart, "first_loss": found[0], "last_loss": found[-1], "target": 0.0,
    }  # fmt: skip


def _states(job: penstock.Job, spec: Any) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = whole_state(job.driver, spec).optimizer["states"]  # type: ignore[index]
    return states


def held_bytes(spec: OptimizerSpec, states: Mapping[str, Mapping[str, Tensor]], made: nn.Module) -> int:
    """Bytes of the tensors that there are, without numbers and what all parameters share."""
    params = dict(made.named_parameters())
    shared = {n: spec.state_row(n, tuple(params[n].shape), params[n].dtype).shared for n in states}
    return sum(t.nbytes for n, row in states.items() for key, t in row.items() if t.dim() and key not in shared[n])


if __name__ == "__main__":
    main()
