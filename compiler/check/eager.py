"""Plain PyTorch on one device, as the measure of a plan: same micro-batches, seeds, optimizer, precision.

Two ways to run one micro-batch: the captured op graph node by node, drawing the random numbers that each stage of the
plan draws (`graph_runner`), or the user's own module called as it is (`module_runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...ir.machine.hardware import Hardware
from ...ir.precision import PRECISIONS
from ...ir.program import HookCall, ParamSpec
from ...passes.draft import Draft, Options
from ...passes.graph.coarsen import Coarsen
from ...passes.graph.opgraph import OpGraph
from ...passes.graph.rows.facts import MEAN_OVER_ROWS, RowFacts
from ...runtime.optimizer.gradients import LossScale
from ...runtime.optimizer.hooks import run_hooks
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.stage.runner import micro_batch_seed
from ..capture.guard import LossFn
from ..coupling import scaled_loss
from ..job.batch import flatten, micro_batch_spec
from ..job.counts import BatchCounts, LossWeight, part_of
from ..loss.rules import captured
from ..pipeline import parse_pipeline
from ..plan import Plan

RunMicroBatch = Callable[[Any, int, int, int], Tensor]  # (global batch, micro-batch, their number, step) -> loss


class Eager:
    """Trains `model` (which it changes) in this process. `gradients` are those of its first step, in fp32."""

    def __init__(
        self,
        model: nn.Module,
        run: RunMicroBatch,
        optimizer: OptimizerSpec,
        *,
        micro_batches: int,
        precision: str = "fp32",
        max_grad_norm: float | None = None,
        hooks: Mapping[str, tuple[HookCall, ...]] | None = None,
    ):
        self.model, self.run = model, run
        self.micro_batches, self.precision, self.max_grad_norm = micro_batches, PRECISIONS[precision], max_grad_norm
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = self.params
        low = self.precision.low_dtype
        if low is not None:
            self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.params.items()}
            for param in model.parameters():
                param.data = param.data.to(low) if param.is_floating_point() else param.data
        self.start = {name: p.detach().clone() for name, p in self.masters.items()}
        self.optimizer = optimizer.build(self.masters)
        self.scheduler = optimizer.build_scheduler(self.optimizer)
        # a copy of a model has no hooks
        named = {n: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in self.params.items()}
        self.hooked = [ParamSpec(name, *named[name], hook=hook) for name, hook in (hooks or {}).items()]
        self.loss_scale = LossScale() if self.precision.scales_loss else LossScale(1.0)
        self.step_count = 0
        self.gradients: dict[str, Tensor] = {}

    def step(self, batch: Any) -> float:
        """One training step on a global batch; its mean loss over the micro-batches."""
        losses = []
        for m in range(self.micro_batches):
            loss = self.run(batch, m, self.micro_batches, self.step_count)
            loss.backward(torch.full_like(loss, self.loss_scale.scale / self.micro_batches))
            losses.append(loss.detach().float())
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        run_hooks(self.hooked, grads, self.loss_scale.scale)
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
        for name, grad in grads.items():
            self.masters[name].grad = grad.float() / self.loss_scale.scale if self.precision.has_masters else grad
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm)
        if not self.gradients:
            self.gradients = {n: p.grad.detach().clone() for n, p in self.masters.items() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.precision.has_masters:
            for name, param in self.params.items():
                param.data.copy_(self.masters[name].data)


def module_runner(model: nn.Module, precision: str, loss_fn: LossFn | None = None) -> RunMicroBatch:
    """A function that calls the module itself."""

    def run(batch: Any, micro_batch: int, count: int, step: int) -> Tensor:
        batch = part_of(batch, micro_batch, count)
        with PRECISIONS[precision].autocast(next(model.parameters()).device):
            output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
            if loss_fn is not None:
                loss: Tensor = loss_fn(output, batch)
            else:
                loss = output if isinstance(output, Tensor) else output["loss"]
            return loss

    return run


def graph_runner(
    model: nn.Module,
    plan: Plan,
    hardware: Hardware,
    example: Any,
    seed: int,
    loss_fn: LossFn | None = None,
    loss_weight: LossWeight | None = None,
    rows: RowFacts = MEAN_OVER_ROWS,
) -> tuple[RunMicroBatch, bool]:
    """A function that runs the captured op graph on `model`'s own parameters, and whether it draws random numbers.

    Call this before `model` is cast to a lower precision.
    """
    low = PRECISIONS[plan.precision].low_dtype
    inputs = micro_batch_spec(example, plan.micro_batches)
    kind = hardware.devices[0].kind
    by_user = loss_weight is not None
    graph = captured(model, inputs, loss_fn=loss_fn, by_user=by_user, autocast=low, device_kind=kind)
    graph = scaled_loss(graph, rows, plan.micro_batches)
    counter = BatchCounts(graph.loss.rules, graph.loss.counts, graph.loss.divisors, loss_weight=loss_weight)
    stage_of = stages_of_nodes(graph, plan, hardware)
    names = list(graph.inputs)

    def run(batch: Any, micro_batch: int, count: int, step: int) -> Tensor:
        leaves, _ = flatten(model, batch)
        leaves |= counter.inputs(counter.of(batch, leaves, count), each_own=False)
        leaves = part_of(leaves, micro_batch, count)
        device = next(model.parameters()).device
        seeds = {stage: micro_batch_seed(seed, step, stage, micro_batch) for stage in set(stage_of.values())}
        with PRECISIONS[plan.precision].autocast(device):
            outputs = _Seeded(graph.module, stage_of, seeds, device).run(*(leaves[name] for name in names))
        loss: Tensor = outputs["loss"]
        return loss

    return run, any(node.meta.get("random") for node in graph.nodes)


def stages_of_nodes(graph: OpGraph, plan: Plan, hardware: Hardware) -> dict[fx.Node, str]:
    """The stage that runs each node. Nodes that every stage computes anew have none; they draw no random numbers."""
    draft = Draft(graph, hardware, Options(micro_batches=plan.micro_batches, precision=plan.precision))
    passes = parse_pipeline(plan.passes, hardware.num_devices)
    next(p for p in passes if isinstance(p, Coarsen)).rewrite(draft, plan.decisions.blocks)
    home = {block: f"stage{i}" for i, blocks in enumerate(plan.decisions.stages) for block in blocks}
    return {node: home[block.name] for block in draft.blocks for node in block.nodes}


class _Seeded(fx.Interpreter):
    """Runs a graph; each stage draws from a stream of random numbers of its own."""

    def __init__(
        self,
        module: fx.GraphModule,
        stage_of: Mapping[fx.Node, str],
        seeds: Mapping[str, int],
        device: torch.device,
    ):
        super().__init__(module)
        self.stage_of, self.device = stage_of, device
        self.states = {stage: torch.Generator(device).manual_seed(seed).get_state() for stage, seed in seeds.items()}

    def run_node(self, n: fx.Node) -> Any:
        stage = self.stage_of.get(n) if n.meta.get("random") else None
        if stage is None:
            return super().run_node(n)
        module: Any = torch.cuda if self.device.type == "cuda" else torch
        outside = module.get_rng_state()
        module.set_rng_state(self.states[stage])
        try:
            return super().run_node(n)
        finally:
            self.states[stage] = module.get_rng_state()
            module.set_rng_state(outside)
