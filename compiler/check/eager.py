"""Plain PyTorch on one device, as the measure of a plan: same micro-batches, seeds, optimizer, precision.

Two ways to run one micro-batch: the captured op graph node by node (`graph_runner`), or the user's own module called as
it is (`module_runner`). Both draw the random numbers that any plan draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...graph.follow.coupling import scaled_loss
from ...graph.follow.filled import check_filled
from ...graph.follow.rows import MEAN_OVER_ROWS, RowFacts
from ...graph.opgraph import OpGraph
from ...ir.machine.hardware import Hardware
from ...ir.precision import GradientDtype, Precision
from ...ir.program import ParamSpec
from ...passes.rewrite.use_float8 import convert_to_float8
from ...runtime.optimizer.gradients import LossScale
from ...runtime.optimizer.hooks import change_params, run_hooks
from ...runtime.optimizer.rounding import round_into
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.quantised.libraries import float8
from ...runtime.stage.draws import Draws, micro_batch_seed
from ..batches.shape import flatten, micro_batch_spec, program_inputs
from ..capture.guard import LossFn
from ..capture.inputs import floating_as
from ..capture.prologue.prologue import Prologue
from ..job.counts import BatchCounts, LossWeight, part_of
from ..loss import capture
from ..plan import Plan
from .model_draws import ModelDraws, Shapes

RunMicroBatch = Callable[[Any, int, int, int], Tensor]  # (global batch, micro-batch, their number, step) -> loss


class Eager:
    """Trains `model` (which it changes) in this process. `gradients` are those of its first step, in fp32.

    `specs` has the gradient hooks of its parameters, as a copy of a model has none, and what forward does to them.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunMicroBatch,
        optimizer: OptimizerSpec,
        *,
        micro_batches: int,
        precision: str = "fp32",
        gradient_dtype: GradientDtype = "fp32",
        max_grad_norm: float | None = None,
        specs: Sequence[ParamSpec] = (),
        seed: int = 0,
    ):
        self.model, self.run = model, run
        self.micro_batches, self.precision, self.max_grad_norm = micro_batches, Precision.of(precision), max_grad_norm
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = self.params
        low = self.precision.low_dtype
        if low is not None:
            self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.params.items()}
            if self.precision.is_pure:
                for master in self.masters.values():
                    master.data = master.data.to(low).float()
            for param in model.parameters():
                param.data = param.data.to(low) if param.is_floating_point() else param.data
        sums = self.precision.sum_dtype(micro_batches, gradient_dtype)
        for param in self.params.values():
            param.grad_dtype = sums or param.dtype
        self.start = {name: p.detach().clone() for name, p in self.masters.items()}
        self.optimizer = optimizer.build(self.masters)
        self.scheduler = optimizer.build_scheduler(self.optimizer)
        self.specs, self.seed = specs, seed
        self.loss_scale = LossScale() if self.precision.scales_loss else LossScale(1.0)
        self.step_count = 0
        self.gradients: dict[str, Tensor] = {}

    def step(self, batch: Any) -> float:
        """One training step on a global batch; its mean loss over the micro-batches."""
        losses = []
        for tensors in (self.params, self.masters):
            change_params(self.specs, {name: p.data for name, p in tensors.items()})
        for m in range(self.micro_batches):
            loss = self.run(batch, m, self.micro_batches, self.step_count)
            loss.backward(torch.full_like(loss, self.loss_scale.scale / self.micro_batches))
            losses.append(loss.detach().float())
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        run_hooks(self.specs, grads, self.loss_scale.scale)
        finite = not self.precision.scales_loss or all(bool(g.isfinite().all()) for g in grads.values())
        if finite:
            self._update(grads)
        if self.precision.scales_loss:
            self.loss_scale.update(finite)
        for param in self.params.values():
            param.grad = None
        self.step_count += 1
        return float(torch.stack(losses).mean())

    def _update(self, grads: Mapping[str, Tensor]) -> None:
        low = self.precision.low_dtype is not None
        for name, grad in grads.items():
            self.masters[name].grad = grad.float() / self.loss_scale.scale if low else grad
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm)
        if not self.gradients:
            self.gradients = {n: p.grad.detach().clone() for n, p in self.masters.items() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if low:
            for name, param in self.params.items():
                if self.precision.is_pure:
                    round_into(param.data, self.masters[name].data, (self.seed, self.step_count, 0, name))
                    self.masters[name].data.copy_(param.data)
                else:
                    param.data.copy_(self.masters[name].data)


def module_runner(
    model: nn.Module,
    precision: str,
    seed: int = 0,
    loss_fn: LossFn | None = None,
    *,
    draws: int = 1,
    shapes: Shapes | None = None,
) -> RunMicroBatch:
    """A function that calls the module itself. Each batch that it is given is of `draws` micro-batches, which draw what
    they draw in a plan, values of these `shapes`. It raises `NotByRows` where a batch cannot draw so."""
    device = next(model.parameters()).device
    drawn, types = ModelDraws(model, device, shapes), Precision.of(precision)

    def run(batch: Any, micro_batch: int, count: int, step: int) -> Tensor:
        batch = part_of(batch, micro_batch, count)
        first = micro_batch * draws
        seeds = [micro_batch_seed(seed, step, m) for m in range(first, first + draws)]
        with drawn.seed_draws(seeds, batch), types.autocast(device):
            given = floating_as(types.input_dtype, batch)
            output = model(**given) if isinstance(given, Mapping) else model(*given)
            if loss_fn is not None:
                loss: Tensor = loss_fn(output, batch)
            else:
                loss = output if isinstance(output, Tensor) else output["loss"]
            return loss

    return run


def use_torchao_layers(model: nn.Module, plan: Plan, device_kind: str) -> nn.Module:
    """The model, which is changed, with torchao's own layers where the plan multiplies in float8."""
    recipe = Precision.of(plan.precision).float8
    if not recipe:
        return model
    config = dataclasses.replace(float8().Float8LinearConfig.from_recipe_name(recipe), emulate=device_kind == "cpu")
    layers = set(plan.decisions.float8)
    made: nn.Module = float8().convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, path: path in layers
    )
    return made


def graph_runner(
    model: nn.Module,
    plan: Plan,
    hardware: Hardware,
    example: Any,
    seed: int,
    loss_fn: LossFn | None = None,
    loss_weight: LossWeight | None = None,
    rows: RowFacts = MEAN_OVER_ROWS,
    prologue: Prologue | None = None,
) -> tuple[RunMicroBatch, OpGraph]:
    """A function that runs the captured op graph on `model`'s own parameters, and that graph.

    Call this before `model` is cast to a lower precision.
    """
    kind, by_user, precision = hardware.devices[0].kind, loss_weight is not None, Precision.of(plan.precision)
    options: dict[str, Any] = {"loss_fn": loss_fn, "by_user": by_user, "precision": precision, "device_kind": kind}
    if prologue is not None:
        example = prologue.add(example, plan.micro_batches, plan.micro_batches)
        options |= prologue.trace_options(plan.micro_batches)
    graph = capture(model, micro_batch_spec(example, plan.micro_batches), **options)
    check_filled(graph, plan.micro_batches)
    graph = scaled_loss(graph, rows, plan.micro_batches)
    if precision.float8:
        graph = convert_to_float8(graph, plan.decisions.float8, precision.float8, kind == "cpu")
    counter = BatchCounts(graph.loss.rules, graph.loss.counts, graph.loss.divisors, loss_weight=loss_weight)
    names = list(graph.inputs)
    repeated = {name: buffer for name, buffer in model.named_buffers() if name in rows.repeated_buffers}
    first: dict[str, Tensor] = {}  # the values that all micro-batches of a step begin with

    def run(batch: Any, micro_batch: int, count: int, step: int) -> Tensor:
        given, _ = flatten(model, batch if prologue is None else prologue.add(batch, count, count))
        leaves = program_inputs(given)
        leaves |= counter.inputs(counter.count(batch, leaves, count))
        leaves = part_of(leaves, micro_batch, count)
        for name, buffer in repeated.items():
            if micro_batch == 0:
                first[name] = buffer.clone()
            else:
                buffer.copy_(first[name])
        device = next(model.parameters()).device
        draws = Draws("the captured graph", graph.module, device)
        with draws.seed_draws(micro_batch_seed(seed, step, micro_batch)), precision.autocast(device):
            outputs = Seeded(graph.module, draws).run(*(leaves[name] for name in names))
        loss: Tensor = outputs["loss"]
        return loss

    return run, graph


class Seeded(fx.Interpreter):
    """Runs a captured graph; each draw is seeded by its place."""

    def __init__(self, module: fx.GraphModule, draws: Draws):
        super().__init__(module)
        self.draws = draws

    def run_node(self, n: fx.Node) -> Any:
        if n.meta.get("random"):
            self.draws.begin(n.meta["module_path"])
        return super().run_node(n)
