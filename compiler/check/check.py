"""The parity harness: the same steps by a plan and by plain PyTorch, and the largest difference between them.

It compares the loss of every step, every gradient of the first step (after clipping), and every weight at the end.
Plain PyTorch runs the captured op graph on one device, and the user's own module on whole batches, each in the modes
(`training`) that the model is in. Both draw the random numbers that any plan draws, so that dropout agrees.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ...ir.machine.hardware import Hardware
from ...ir.precision import PRECISIONS
from ...ir.program import whole_params
from ...runtime.model_names import ties_of
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.processes.commands import split
from ...runtime.state.part_params import PartJoiner
from ...runtime.torch_names import tree_map
from ..batches.shape import flatten
from ..capture.guard import LossFn
from ..folder import Folder
from ..job.job import Job
from ..stale import unmark
from .eager import Eager, graph_runner, module_runner, use_torchao_layers
from .model_draws import NotByRows, shapes_of_draws

# Relative differences that are allowed, as a plan adds the same terms as eager, partly in another order: of the loss,
# of all gradients by 2-norm, of all weights by 1-norm, relative to how far they moved. Adam turns rounding noise in a
# gradient that is zero by symmetry (a key's bias) into a full step, which a maximum would show and a mean does not.
LOW_LIMITS = (1e-2, 5e-2, 2e-1)  # of numbers with 8 bits or more, which a sum in another order rounds otherwise
LIMITS = {name: (1e-5, 1e-4, 2e-2) if name == "fp32" else LOW_LIMITS for name in PRECISIONS}
GRADIENT_PROBE = OptimizerSpec("torch.optim:SGD", {"lr": 0.0, "momentum": 0.5})  # its first momentum is the gradient


@dataclass(frozen=True)
class Difference:
    """The largest difference of one kind of number; `where` is the step or parameter that has it."""

    what: str  # "loss", "gradient", "weight"
    against: str  # "captured graph" or "model itself"
    largest: float
    where: str
    relative: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.relative <= self.limit


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. `skipped`: why the model itself was not compared, if it was not."""

    differences: list[Difference]
    losses: list[float]  # of the plan
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        return all(difference.passed for difference in self.differences)


@dataclass
class _Run:
    """One side: losses of all steps, gradients of the first step, weights before (eager only) and after all steps."""

    losses: list[float]
    gradients: dict[str, Tensor]
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def check(job: Job, model: nn.Module, batches: Sequence[Any], loss_fn: LossFn | None = None) -> CheckReport:
    """Train on `batches` by the job's programs and by plain PyTorch, from the same weights.

    job: a fresh job of a model with the weights of `model`; it is closed after its steps. model: not on the meta
        device; it is not changed. Where the job has a `loss_weight`, the model itself is not compared.

    Raises `PlanError` for batches of different sizes, or in lists: plain PyTorch is compared with for one.
    """
    _require_one_size(model, batches)
    planned = _run_plan(job, batches)
    ours = copy.deepcopy(model)
    settings = job.folder.settings
    prologue = None if job.replanner is None else job.replanner.prologue
    run, graph = graph_runner(
        ours, job.plan, job.hardware, batches[0], settings.seed, loss_fn, job.loss_weight, settings.rows, prologue
    )
    precision = job.plan.precision
    by_graph = _run_eager(job, ours, run, batches, job.plan.micro_batches)
    differences = list(_compare("captured graph", planned, by_graph, precision))
    if job.loss_weight is not None:
        skipped = "loss_weight weighs micro-batches: there is no loss of the whole batch to compare with"
        return CheckReport(differences, planned.losses, skipped)
    kind = job.hardware.devices[0].kind
    theirs = use_torchao_layers(copy.deepcopy(model).to(torch.device(kind)), job.plan, kind)
    draws, shapes = job.plan.micro_batches, shapes_of_draws(graph)
    whole = module_runner(theirs, precision, settings.seed, loss_fn, draws=draws, shapes=shapes)
    try:
        by_module = _run_eager(job, theirs, whole, batches, 1)
    except NotByRows as error:
        return CheckReport(differences, planned.losses, f"{error}; check it with micro_batches=1")
    return CheckReport([*differences, *_compare("model itself", planned, by_module, precision)], planned.losses)


def _require_one_size(model: nn.Module, batches: Sequence[Any]) -> None:
    for number, batch in enumerate(batches):
        if isinstance(batch, list) and any(isinstance(each, (Mapping, tuple, list)) for each in batch):
            raise PlanError(f"check: batch {number} is a list of micro-batches; hand over whole batches")
        shapes, first = ({n: tuple(t.shape) for n, t in flatten(model, b)[0].items()} for b in (batch, batches[0]))
        name = next((name for name in first if shapes.get(name) != first[name]), None)
        if name is not None:
            raise PlanError(
                f"check: {name!r} is {list(first[name])} in the first batch, and {list(shapes.get(name, ()))} in batch "
                f"{number}; check each size with a job of its own"
            )


def _run_plan(job: Job, batches: Sequence[Any]) -> _Run:
    probe = gradient_job(job)
    try:
        probe.step(batches[0])
        gradients = dict(_momenta(probe))
    finally:
        probe.close()
    try:
        losses = [float(job.step(batch)) for batch in batches]
        state, params = job.state_dict(), job.model.named_parameters()
        trained = {n: state[n].float().clone() for n, p in params if p.requires_grad and n in state}
        return _Run(losses, gradients, {}, trained)
    finally:
        job.close()
        unmark(job.model)  # it is compared as it was before training


def gradient_job(job: Job) -> Job:
    """The same programs with an optimizer that keeps each gradient and changes no weight."""
    folder, interface = job.folder, job.folder.interface
    short = any(interface.state_bytes(spec) < 4 * spec.trained_params for spec in interface.stages.values())
    changed = Folder(
        folder.plan,
        _roomier(job.hardware) if short else job.hardware,
        dataclasses.replace(interface, state_bytes_per_param=max(4.0, interface.state_bytes_per_param), states={}),
        folder.settings.model_copy(update={"optimizer": GRADIENT_PROBE.to_json()}),
        folder.files,
        folder.smaller,
        folder.counts,
        folder.constants,
    )
    return Job(
        job.model, changed, job.programs, ties=ties_of(job.model), loss_weight=job.loss_weight, trust=job.trust,
        replanner=job.replanner,
    )  # fmt: skip


def _roomier(hardware: Hardware) -> Hardware:
    """The hardware with twice of every memory: a plan for an optimizer without states has no room for the probe's."""
    devices = [d.model_copy(update={"memory_bytes": 2 * d.memory_bytes}) for d in hardware.devices]
    hosts = [h.model_copy(update={"dram_bytes": 2 * h.dram_bytes}) for h in hardware.hosts]
    return hardware.model_copy(update={"devices": devices, "hosts": hosts})


def _momenta(job: Job) -> Iterator[tuple[str, Tensor]]:
    ties, parts = ties_of(job.model), PartJoiner()
    for stage, device in job.driver.setup.stage_devices.items():
        _, tensors = job.driver.call("stage_state", device, {"stage": stage, "optimizer": True})
        found = {}
        for key, tensor in split(tensors).get("states", {}).items():
            name, _, state = key.rpartition("/")
            if state == "momentum_buffer":
                found[name] = tensor.float()
        for name, tensor in parts.add(job.folder.interface.stages[stage].params, found).items():
            yield ties.get(name, name), tensor


def _run_eager(job: Job, model: nn.Module, run: Any, batches: Sequence[Any], micro_batches: int) -> _Run:
    device = torch.device(job.hardware.devices[0].kind)
    ties, stages = ties_of(job.model), job.folder.interface.stages.values()
    params = whole_params(param for spec in stages for param in spec.params if param.owner)
    eager = Eager(
        model.to(device),
        run,
        OptimizerSpec.from_json(job.folder.settings.optimizer),
        micro_batches=micro_batches,
        precision=job.plan.precision,
        gradient_dtype=job.plan.gradient_dtype,
        seed=job.folder.settings.seed,
        max_grad_norm=job.plan.max_grad_norm,
        specs=[dataclasses.replace(p, name=ties.get(p.name, p.name)) for p in params],
    )
    losses = [eager.step(tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)) for batch in batches]
    end = {name: p.detach() for name, p in eager.masters.items()}
    return _Run(losses, *({n: t.float().cpu() for n, t in row.items()} for row in (eager.gradients, eager.start, end)))


def _compare(against: str, plan: _Run, eager: _Run, precision: str) -> Iterator[Difference]:
    """Largest differences of losses, gradients and weights."""
    loss_limit, gradient_limit, weight_limit = LIMITS[precision]
    steps = [abs(a - b) for a, b in zip(plan.losses, eager.losses, strict=True)]
    worst = max(range(len(steps)), key=steps.__getitem__)
    relative = max(step / max(abs(loss), 1e-30) for step, loss in zip(steps, eager.losses))
    yield Difference("loss", against, steps[worst], f"step {worst + 1}", relative, loss_limit)
    largest, where = _largest(plan.gradients, eager.gradients)
    off = _norm(plan.gradients[n] - g for n, g in eager.gradients.items())
    share = off / max(_norm(eager.gradients.values()), 1e-30)
    yield Difference("gradient", against, largest, where, share, gradient_limit)
    largest, where = _largest(plan.end, eager.end)
    moved = sum(float((eager.end[n] - w).abs().sum()) for n, w in eager.start.items())
    apart = sum(float((plan.end[n] - w).abs().sum()) for n, w in eager.end.items())
    yield Difference("weight", against, largest, where, apart / max(moved, 1e-30), weight_limit)


def _largest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of one number, and the parameter that has it."""
    rows = [(float((found[name] - value).abs().max()), name) for name, value in wanted.items() if value.numel()]
    return max(rows, default=(0.0, "none"))


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())
