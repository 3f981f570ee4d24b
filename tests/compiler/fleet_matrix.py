"""Every synchronous way to train a small model on four devices, by name: layouts, schedules, tiers, precisions.

A combination is compiled as a user's would be, so every pass may refuse it, and the verifier checks the others. These
are trained by the reference runtime: all devices in this process, the generated stages, the bound programs. The result
is compared with the user's own module under plain PyTorch with the same micro-batches and the same dropout.
"""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.eager import Eager, module_runner
from penstock.compiler.folder import COUNTS_FILE
from penstock.compiler.job.counts import BatchCounts
from penstock.ir.errors import DoesNotFit, PassError
from penstock.passes.table import PASSES
from penstock.runtime.device.file import open_directory
from penstock.runtime.model_names import ties_of
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.reference.run import Reference
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.state.weights import LiveWeights, stage_buffers, stage_weights
from penstock.tests.zoo import gpt2, t5

DEVICES, MICRO_BATCHES, STEPS = 4, 4, 5
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)  # the distance of weights compares the gradients of all steps
MODELS = {"gpt2": partial(gpt2, 0.1, num_layers=4), "t5": partial(t5, 0.1)}
REFUSALS = (PassError, DoesNotFit)  # no VerifyError: a pass may not write what the verifier refuses

# How far weights may end from eager's, by 2-norm, as a share of how far eager moved them. fp32: the same terms of a
# gradient are added in another order, each addition rounding by 2^-24 of the sum. bf16: both sides round each value to
# 8 bits, 2^-9, and sums of micro-batches in another order round to the neighbour.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}

# By tier, and whether there are shards: the passes that keep the stages' weights and states in the tier.
DEVICE, DRAM, SSD = "device", "dram", "ssd"
TIERS = {
    (DEVICE, False): "insert-remat, insert-fetch, insert-optimizer",
    (DRAM, False): "insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer",
    (SSD, False): (
        "choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer"
    ),
    (DEVICE, True): "insert-remat, insert-shard{tier=device, hold=false}, insert-two-hop, insert-optimizer",
    (DRAM, True): "insert-remat{always=true}, insert-shard{tier=dram}, insert-optimizer",
    (SSD, True): "insert-remat{always=true}, insert-shard{tier=ssd}, insert-two-hop, insert-ssd, overlap-optimizer",
}
SPLITS = "schedule-zero-bubble"  # it splits backwards, which choose-activations takes whole


@dataclass(frozen=True)
class Combination:
    """`depth` devices of a pipeline, each shared by `shards`; the rest of the devices are replicas."""

    model: str
    depth: int
    shards: int
    schedule: str
    tier: str
    precision: str

    @property
    def replicas(self) -> int:
        return DEVICES // (self.depth * self.shards)

    @property
    def name(self) -> str:
        layout = f"pipeline {self.depth} x shards {self.shards} x replicas {self.replicas}"
        return f"{self.model}, {layout}, {self.schedule}, {self.tier}, {self.precision}"

    @property
    def strategy(self) -> str:
        stages = 2 * self.depth if self.depth < DEVICES else self.depth
        tiers = TIERS[self.tier, self.shards > 1]
        if self.schedule == SPLITS:
            tiers = tiers.replace("choose-activations{swap=true, tier=all}", "insert-remat")
        return (
            f"coarsen, mesh{{shards={self.shards}, depth={self.depth}}}, partition-balanced{{stages={stages}}}, "
            f"map-round-robin, {self.schedule}, {tiers}"
        )


def combinations() -> Iterator[Combination]:
    """All combinations, with every pass that makes a schedule except the asynchronous one."""
    schedules = [name for name, kind in PASSES.items() if kind.fields()[0] == "schedule" and name != "schedule-async"]
    layouts = [(d, p) for d in (1, 2, 4) for p in (1, 2, 4) if d * p <= DEVICES]
    every = itertools.product(MODELS, layouts, schedules, (DEVICE, DRAM, SSD), TOLERANCE)
    for model, (depth, shards), schedule, tier, precision in every:
        if (tier, shards > 1) in TIERS:
            yield Combination(model, depth, shards, schedule, tier, precision)


@dataclass(frozen=True)
class Outcome:
    """`refused`: the error that refused to compile; without one, how far `loss` and `weights` are from eager's."""

    refused: str = ""
    loss: float = 0.0
    weights: float = 0.0

    def is_eagers(self, precision: str) -> bool:
        return max(self.loss, self.weights) <= TOLERANCE[precision]


def outcome_of(case: Combination) -> Outcome:
    model, batch = make(case.model)
    try:
        job = compile_job(case)
    except REFUSALS as error:
        return Outcome(refused=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    machine = in_process(job, model)
    given = with_counts(job, batch)
    losses = [float(machine.step(given)["loss"]) for _ in range(STEPS)]
    want_losses, want, start = by_eager(case.model, case.precision)
    ties = ties_of(model)
    found = {ties.get(name, name): weight for name, weight in machine.weights().items()}
    assert found.keys() == want.keys()
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, want_losses, strict=True))
    return Outcome(loss=loss, weights=distance(found, want) / distance(want, start))


def compile_job(case: Combination) -> penstock.Job:
    model, batch = make(case.model)
    hardware = penstock.Hardware.cpu(num_devices=DEVICES, memory="64MB", dram="1GB", ssd="1GB")
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy=case.strategy,
        precision=case.precision,
    )  # fmt: skip


@functools.cache
def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a global batch of different micro-batches; neither is changed."""
    parts = [MODELS[name](seed=seed)[1] for seed in range(MICRO_BATCHES)]
    return MODELS[name](seed=0)[0], {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def in_process(job: penstock.Job, model: nn.Module, seed: int = 0, optimizer: Any = SGD) -> Reference:
    """The job's programs and generated stages with the model's weights."""
    source, interface = LiveWeights(model), job.folder.interface
    weights = {name: param.detach() for name, param in model.named_parameters()}  # of which members take their parts
    weights |= {name: w for spec in interface.stages.values() for name, w in stage_weights(source, spec).items()}
    buffers = {name: b for spec in interface.stages.values() for name, b in stage_buffers(source, spec).items()}
    with tempfile.TemporaryDirectory() as folder:
        files = open_directory(job.write(folder), interface, trust=TRUSTED)
        stages = {name: kind for file in files for name, kind in file.stages.items()}
    spec = OptimizerSpec.from_callable(optimizer)
    return Reference(job.programs, stages, weights, spec, buffers, precision=job.plan.precision, seed=seed)


def with_counts(job: penstock.Job, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with what the job counts over all of it."""
    with tempfile.TemporaryDirectory() as folder:
        counter = BatchCounts.from_file(job.folder.settings, job.write(folder) / COUNTS_FILE, {}, TRUSTED)
    counts = counter.count(batch, batch, job.folder.interface.total_micro_batches)
    return batch | counter.inputs(counts)


@functools.cache
def by_eager(name: str, precision: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """All losses, weights after the last and before the first, as plain PyTorch has them on whole batches."""
    model, batch = make(name)
    mine = copy.deepcopy(model)
    spec = OptimizerSpec.from_callable(SGD)
    eager = Eager(mine, module_runner(mine, precision, draws=MICRO_BATCHES), spec, micro_batches=1, precision=precision)
    losses = [eager.step(batch) for _ in range(STEPS)]
    return losses, {n: p.detach() for n, p in eager.masters.items()}, eager.start


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """2-norm of the difference over all tensors of `left`."""
    squares = [(value.double() - right[name].double()).square().sum() for name, value in left.items()]
    return float(torch.stack(squares).sum().sqrt())
