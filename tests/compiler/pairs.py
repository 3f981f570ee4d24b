"""Ways to divide a model and its batch over devices, to be composed pairwise: one table, and every pair a test.

A way says what it adds to a pipeline of passes. `pairs` composes every two of them, and has each alone, on 2 and on 4
devices. A pair is compiled as a user's would be, trained, and compared with plain PyTorch over the whole batch: losses,
every gradient, weights; or it is in `REFUSED`, with what the error says. `test_pairs.py` runs all in one process by the
reference runtime; `pair_ranks.py` runs them on processes joined by gloo. To extend: a row in `WAYS`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.eager import Eager, module_runner
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.overrides import with_slower
from penstock.runtime.model_names import ties_of
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.state.part_params import PartJoiner
from penstock.tests.compiler.eager_baseline import optimizer_states
from penstock.tests.compiler.fleet_matrix import DEVICE, DRAM, SGD, SSD, TIERS, distance, in_process, with_counts
from penstock.tests.zoo import gpt2, llama, mixtral, qwen3, qwen3_moe

ROWS, STEPS = 8, 2
MOMENTUM = SGD.keywords["momentum"]
# The largest difference of a loss as a share of eager's; of any entry of a parameter's gradients as a share of its
# largest one; of all weights, by 2-norm, as a share of how far eager moved them. The same terms of sums are added in
# another order: over micro-batches, tokens, columns, members. Each addition rounds by 2^-24 (6e-8) of the sum.
TOLERANCE = 1e-5
# A gradient that is zero but for rounding (of the bias of keys, which softmax takes away) is compared with this share
# of the model's largest one.
LEAST_SHARE = 1e-2


@dataclass(frozen=True)
class Way:
    """What one way of dividing adds. `mesh`: options of that pass; `graph`: a pass before `coarsen`, for as many
    members as `{team}` says; `schedule`: the pass in place of `schedule-pipeline`; `tier`: where weights and states
    are. `experts`: the model is a mixture of them. `routes`: members of a team share out its experts; of the team that
    the other way makes, if that divides tokens. `unequal`: the first half of the devices is three times as fast as
    the others. `turns`: fetches have turns on the links that devices of a lane share. `divides`: members of a team that
    do not see all of a value, so that none may draw random numbers."""

    mesh: dict[str, Any] = field(default_factory=dict)
    graph: str = ""
    schedule: str = ""
    tier: str = ""
    experts: bool = False
    routes: bool = False
    unequal: bool = False
    turns: bool = False
    divides: bool = False


WAYS: dict[str, Way] = {
    "layers": Way(graph="split-linear{{parts=2}}"),
    "Ulysses": Way(graph="split-context{{by=heads, team={team}, experts={routes}}}", divides=True),
    "ring": Way(graph="split-context{{by=ring, team={team}, experts={routes}}}", divides=True),
    "routing": Way(graph="split-context{{by=rows, team={team}}}", divides=True, experts=True, routes=True),
    "experts": Way(graph="split-experts{{parts=2}}", experts=True),
    "width": Way(graph="split-width{{team={team}}}", divides=True),  # last: it leaves whole what is in parts
    "tiles": Way(graph="tile-sequence{{tokens=2}}"),
    "unequal shares": Way(mesh={"by_speed": "true"}, unequal=True),
    "pipeline": Way(mesh={"depth": 2}, schedule="schedule-1f1b"),
    "shards": Way(mesh={"shards": 2}),
    "dram": Way(tier=DRAM),
    "ssd": Way(tier=SSD),
    "turns": Way(mesh={"depth": 2}, tier=DRAM, turns=True),
}

# By the names of two ways: what the refusal says.
REFUSED: dict[tuple[str, str], str] = {
    ("Ulysses", "ring"): "'split-context' comes twice",  # members of one team meet in attention in one way
    # A part of a parameter is rows of the model's, or what a member has; no part is both.
    ("routing", "experts"): "has divided experts among 2 members; set its option experts=false",
}
TOO_FEW = r"deep are \d+ devices"  # what refuses a pair that needs more devices than there are


@dataclass(frozen=True)
class Pair:
    """Two ways together, or one way with itself, which is that way alone; on so many devices."""

    first: str
    second: str
    devices: int = 4

    @property
    def name(self) -> str:
        ways = self.first if self.first == self.second else f"{self.first} with {self.second}"
        return f"{ways}, {self.devices} devices"

    @property
    def ways(self) -> list[Way]:
        return [WAYS[name] for name in dict.fromkeys((self.first, self.second))]

    @property
    def divides(self) -> bool:
        return any(way.divides for way in self.ways)

    @property
    def routes(self) -> bool:
        return any(way.routes for way in self.ways)

    @property
    def unequal(self) -> bool:
        return any(way.unequal for way in self.ways)

    @property
    def refused(self) -> str:
        """The text of the refusal; "" where the pair trains."""
        return REFUSED.get((self.first, self.second), "")

    @property
    def least_devices(self) -> int:
        """The number of devices without which there is no pair. Members of a team that hold parts of weights hold one
        shard of them together."""
        holds_parts = "width" in self or self.routes
        shards = self.mesh.get("shards", 1) if holds_parts else 1
        return int(self.beside * shards * self.mesh.get("depth", 1))

    @property
    def beside(self) -> int:
        """The number of lanes that meet in every micro-batch: all alone, else half of four."""
        alone = self.first == self.second
        return self.devices if self.divides and alone else 2 if self.divides or "shards" in self else 1

    def __contains__(self, way: str) -> bool:
        return way in (self.first, self.second)

    @property
    def splits_tokens(self) -> bool:
        return "Ulysses" in self or "ring" in self

    @property
    def mesh(self) -> dict[str, Any]:
        return {key: value for way in self.ways for key, value in way.mesh.items()}

    @property
    def is_one(self) -> bool:
        """Whether the pair differs from each of its ways alone: shares of one lane, or one team, are not unequal."""
        return not self.unequal or self.devices >= 2 * self.beside * self.mesh.get("depth", 1)

    @property
    def micro_batches(self) -> int:
        count = ROWS if self.unequal else ROWS // 2
        return min(count, ROWS // self.beside) if self.routes else count  # members have rows of a micro-batch each

    @property
    def strategy(self) -> str:
        mesh = self.mesh
        made = [way for way in self.ways if way.graph and not (way.routes and self.splits_tokens)]
        graph = [way.graph.format(team=self.beside, routes=str(self.routes).lower()) for way in made]
        schedule = next((way.schedule for way in self.ways if way.schedule), "schedule-pipeline")
        tier = next((way.tier for way in self.ways if way.tier), DEVICE)
        lanes = f"mesh{{{', '.join(f'{key}={value}' for key, value in mesh.items())}}}" if mesh else "mesh"
        cut = f"partition-balanced{{stages={mesh.get('depth', 1) * 2}}}"
        end = TIERS[tier, "shards" in self]
        turns = ["take-turns{always=true}"] if any(way.turns for way in self.ways) else []
        return ", ".join(["drop-masks", *graph, "coarsen", lanes, cut, "map-round-robin", schedule, end, *turns])

    @property
    def hardware(self) -> Hardware:
        hardware = penstock.Hardware.cpu(num_devices=self.devices, memory="64MB", dram="1GB", ssd="1GB")
        return slower(hardware, self.devices // 2, 3.0) if self.unequal else hardware

    @property
    def model(self) -> str:
        """One of five models; of width one with a norm over each head, and one whose head is tied to its embedding."""
        dense, sparse = ("llama", "mixtral") if self.devices == 2 else ("gpt2", "qwen3_moe")
        dense = "qwen3" if dense == "llama" and "width" in self else dense
        return sparse if any(way.experts for way in self.ways) else dense

    def make_case(self) -> tuple[nn.Module, dict[str, Tensor]]:
        return make_case(self.model, self.dropout, self.is_padded)

    @property
    def is_padded(self) -> bool:
        """Whether rows are padded in front, where some queries see no key: of rings, which take such a mask apart."""
        return "ring" in self

    @property
    def dropout(self) -> float:
        return 0.0 if self.divides else 0.1

    def compiled(self, ssd_dir: str | None = None) -> penstock.Job:
        model, batch = self.make_case()
        return penstock.compile(
            model, self.hardware, example_inputs=batch, optimizer=SGD, micro_batches=self.micro_batches,
            strategy=self.strategy, timeout_s=120.0, ssd_dirs=[ssd_dir] if ssd_dir and "ssd" in self else None,
        )  # fmt: skip


def slower(hardware: Hardware, first: int, times: float) -> Hardware:
    """The machine with its devices from number `first` on so many times as slow."""
    return with_slower(hardware, dict.fromkeys(range(first, hardware.num_devices), times))


def pairs(on_too_few: bool = False) -> Iterator[Pair]:
    """Every two ways on 2 and 4 devices, and each alone, if they need no more devices than these; or those that do
    (`on_too_few`). A stage is in one tier."""
    for devices in (2, 4):
        for first, second in itertools.combinations_with_replacement(WAYS, 2):
            pair = Pair(first, second, devices)
            one_tier = first == second or not (WAYS[first].tier and WAYS[second].tier)
            if one_tier and pair.is_one and (pair.least_devices > devices) == on_too_few:
                yield pair


@dataclass(frozen=True)
class Difference:
    """The difference of a run from eager's, each by the measure of `TOLERANCE`; `worst` is the parameter with
    `gradients`."""

    loss: float
    gradients: float
    weights: float
    worst: str = ""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.weights)


def by_reference(pair: Pair) -> Difference:
    """The difference of the reference runtime's run from eager's, in this process."""
    model, batch = pair.make_case()
    job = pair.compiled()
    assert bool(job.folder.smaller) == pair.unequal
    machine, given = in_process(job, model), with_counts(job, batch)
    losses, sums = [], dict[str, Tensor]()
    for _ in range(STEPS):
        losses.append(float(machine.step(given)["loss"]))
        grads = by_own_names(job, machine.stage_grads)
        sums = {name: grad + MOMENTUM * sums.get(name, torch.zeros(())) for name, grad in grads.items()}
    return compare_to(pair, losses, sums, by_own_names(job, machine.stage_weights))


def by_own_names(job: penstock.Job, found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of each stage by the model's own names: parts of parameters are put together."""
    joiner, stages, whole = PartJoiner(), job.folder.interface.stages, dict[str, Tensor]()
    for stage, own in found.items():
        whole |= joiner.add(stages[stage].params, own)
    return whole


def on_processes(pair: Pair, rank: int, ssd_dir: str) -> Difference | None:
    """The same of this rank of torchrun with all others; the first one compares. `ssd_dir`: of files of stages."""
    _, batch = pair.make_case()
    with pair.compiled(ssd_dir) as job:
        losses = [float(job.step(batch)) for _ in range(STEPS)]
        sums = {name: row["momentum_buffer"] for (_, name), row in optimizer_states(job).items()}
        weights = job.state_dict()
    return compare_to(pair, losses, sums, weights) if rank == 0 else None


def compare_to(
    pair: Pair, losses: list[float], sums: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> Difference:
    """`sums`: by parameter, the gradients of all steps as SGD's momentum adds them up."""
    want = by_eager(pair.model, pair.dropout, pair.micro_batches, pair.is_padded)
    ties = ties_of(pair.make_case()[0])
    sums = {ties.get(name, name): value for name, value in sums.items()}
    found = {ties.get(name, name): value for name, value in weights.items()}
    assert sums.keys() == want.sums.keys()
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, want.losses, strict=True))
    least = LEAST_SHARE * max(float(value.abs().max()) for value in want.sums.values())
    each = {
        name: float((sums[name] - value).abs().max()) / max(float(value.abs().max()), least)
        for name, value in want.sums.items()
    }
    worst = max(each, key=lambda name: each[name])
    moved = distance(want.weights, want.start)
    return Difference(loss, each[worst], distance(want.weights, found) / moved, worst)


@dataclass(frozen=True)
class EagerRun:
    losses: list[float]
    sums: dict[str, Tensor]  # by parameter, SGD's momentum after the last step
    weights: dict[str, Tensor]  # after the last step
    start: dict[str, Tensor]


MODELS = {
    "gpt2": partial(gpt2, num_layers=2), "llama": llama, "qwen3": qwen3, "mixtral": mixtral, "qwen3_moe": qwen3_moe
}  # fmt: skip


@functools.cache
def make_case(name: str, dropout: float, is_padded: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and a global batch whose micro-batches count different tokens."""
    parts = [MODELS[name](dropout, seed=seed)[1] for seed in range(ROWS // 2)]
    ids = torch.cat([part["input_ids"] for part in parts])
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : row % 5] = -100
    mask = {"attention_mask": labels.ne(-100).long()} if is_padded else {}
    return MODELS[name](dropout, seed=0)[0], {"input_ids": ids, **mask, "labels": labels}


@functools.cache
def by_eager(name: str, dropout: float, micro_batches: int, is_padded: bool) -> EagerRun:
    """The run of plain PyTorch on whole batches; dropout draws as the same micro-batches draw."""
    model, batch = make_case(name, dropout, is_padded)
    mine = copy.deepcopy(model)
    eager = Eager(mine, module_runner(mine, "fp32", draws=micro_batches), OptimizerSpec.from_callable(SGD),
                  micro_batches=1, precision="fp32")  # fmt: skip
    losses = [eager.step(batch) for _ in range(STEPS)]
    sums = {name: eager.optimizer.state[p]["momentum_buffer"] for name, p in eager.masters.items()}
    return EagerRun(losses, sums, {name: p.detach() for name, p in eager.masters.items()}, eager.start)
