"""Ways to divide a model and its batch over devices, to be composed pairwise: one table, and every pair a test.

A way says what it adds to a pipeline of passes. `pairs` composes every two of them that can be; each is compiled as a
user's would be, trained, and compared with plain PyTorch over the whole batch: losses, every gradient (through the
weights that SGD with momentum reaches), weights. `test_pairs.py` runs them in one process by the reference runtime, and
some on processes joined by gloo. To extend: a row in `WAYS`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.eager import Eager, module_runner
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.slower import with_slower
from penstock.runtime.model_names import ties_of
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.tests.compiler.fleet_matrix import REFUSALS, SGD, Outcome, distance, in_process, with_counts
from penstock.tests.zoo import gpt2

DEVICES, MICRO_BATCHES, STEPS = 4, 8, 3
# How far weights may end from eager's, as a share of how far eager moved them: the same terms of each gradient are
# added in another order, each addition rounding by 2^-24 of the sum.
TOLERANCE = 1e-5
USUAL_END = "insert-remat, insert-fetch, insert-optimizer"
SHARED_END = "insert-remat, insert-shard{tier=device, hold=false}, insert-two-hop, insert-optimizer"


@dataclass(frozen=True)
class Way:
    """What one way of dividing adds. `mesh`: options of that pass; `graph`: passes before `coarsen`; `schedule` and
    `end`: the passes from the schedule on, in place of the usual ones. `unequal`: the first half of the devices is
    three times as fast as the others. `but`: names of ways with which it cannot be composed, by the nature of things.
    """

    mesh: dict[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    schedule: str = ""
    end: str = ""
    unequal: bool = False
    but: tuple[str, ...] = ()


WAYS: dict[str, Way] = {
    "unequal shares": Way(mesh={"by_speed": "true"}, unequal=True),
    "pipeline": Way(mesh={"depth": 2}, schedule="schedule-1f1b"),
    "shards": Way(mesh={"shards": 2}, end=SHARED_END),
    "dram": Way(end="insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer", but=("shards",)),
    "ssd": Way(
        end="choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer",
        but=("shards", "dram"),
    ),
    "tiles": Way(graph=("tile-sequence{tokens=3}",)),  # the last: no pass over the graph may come after it
}


@dataclass(frozen=True)
class Pair:
    """Two ways together, or one way with itself, which is that way alone."""

    first: str
    second: str

    @property
    def name(self) -> str:
        return self.first if self.first == self.second else f"{self.first} with {self.second}"

    @property
    def ways(self) -> list[Way]:
        return [WAYS[name] for name in dict.fromkeys((self.first, self.second))]

    @property
    def strategy(self) -> str:
        mesh = {key: value for way in self.ways for key, value in way.mesh.items()}
        graph = [text for way in self.ways for text in way.graph]
        schedule = next((way.schedule for way in self.ways if way.schedule), "schedule-pipeline")
        end = next((way.end for way in self.ways if way.end), USUAL_END)
        lanes = [f"mesh{{{', '.join(f'{key}={value}' for key, value in mesh.items())}}}"]
        return ", ".join(
            [*graph, "coarsen", *lanes, f"partition-balanced{{stages={mesh.get('depth', 1) * 2}}}", "map-round-robin",
             schedule, end]
        )  # fmt: skip

    @property
    def hardware(self) -> Hardware:
        hardware = penstock.Hardware.cpu(num_devices=DEVICES, memory="64MB", dram="1GB", ssd="1GB")
        return slower(hardware, DEVICES // 2, 3.0) if any(way.unequal for way in self.ways) else hardware

    def compiled(self) -> penstock.Job:
        model, batch = made()
        return penstock.compile(
            model, self.hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES,
            strategy=self.strategy,
        )  # fmt: skip


def slower(hardware: Hardware, first: int, times: float) -> Hardware:
    """The machine with its devices from number `first` on so many times as slow."""
    return with_slower(hardware, dict.fromkeys(range(first, hardware.num_devices), times))


def pairs() -> Iterator[Pair]:
    """Every two ways that can be composed, and each alone."""
    for first, second in itertools.combinations_with_replacement(WAYS, 2):
        if second not in WAYS[first].but and first not in WAYS[second].but:
            yield Pair(first, second)


def outcome_of(pair: Pair) -> Outcome:
    """How far the reference runtime's run is from eager's."""
    model, batch = made()
    try:
        job = pair.compiled()
    except REFUSALS as error:
        return Outcome(refused=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert bool(job.folder.smaller) == any(way.unequal for way in pair.ways)
    machine, given = in_process(job, model), with_counts(job, batch)
    losses = [float(machine.step(given)["loss"]) for _ in range(STEPS)]
    return compared(losses, machine.weights())


def compared(losses: list[float], weights: dict[str, Tensor]) -> Outcome:
    want_losses, want, start = by_eager()
    ties = ties_of(made()[0])
    found = {ties.get(name, name): weight for name, weight in weights.items()}
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, want_losses, strict=True))
    return Outcome(loss=loss, weights=distance(want, found) / distance(want, start))


@functools.cache
def made() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with tied weights and dropout, and a global batch whose micro-batches count different tokens."""
    parts = [gpt2(0.1, num_layers=4, seed=seed)[1] for seed in range(MICRO_BATCHES)]
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    labels = batch["labels"].clone()
    for row in range(len(labels)):
        labels[row, : row % 5] = -100
    return gpt2(0.1, num_layers=4, seed=0)[0], {**batch, "labels": labels}


@functools.cache
def by_eager() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """All losses, weights after the last and before the first, as plain PyTorch has them on whole batches."""
    model, batch = made()
    mine = copy.deepcopy(model)
    eager = Eager(mine, module_runner(mine, "fp32", draws=MICRO_BATCHES), OptimizerSpec.from_callable(SGD),
                  micro_batches=1, precision="fp32")  # fmt: skip
    losses = [eager.step(batch) for _ in range(STEPS)]
    return losses, {name: p.detach() for name, p in eager.masters.items()}, eager.start
