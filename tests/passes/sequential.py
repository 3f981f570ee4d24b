"""Asynchronous training as a loop in plain PyTorch: one mini-batch after the other, micro-batch by micro-batch. Each
stage keeps all versions of its weights, of which it takes the version that a stage of a pipeline of that depth would
find."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ir.precision import PRECISIONS, Precision
from penstock.ir.program import StageSpec
from penstock.passes.draft import Draft
from penstock.runtime.stage.draws import Draws, micro_batch_seed
from penstock.tests.passes.running import SEED, Batch, generate_stages

FP32 = torch.float32
INITIAL_SCALE = 65536.0  # of the loss in fp16; halved where gradients overflow
Version = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]  # weights, and the optimizer's states of each


@dataclass
class OneStage:
    """A stage's module, its optimizer, and the versions 0, 1, ... of both in the current step."""

    spec: StageSpec
    device: int
    module: nn.Module
    names: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    depth: int = 0  # the number of stages after it
    delay: int = 0  # the number of micro-batches whose updates a forward's weights lack
    shared: frozenset[str] = frozenset()  # parameters that other stages have, too
    shared_delay: int = 0  # the same for shared parameters
    lag: int = 0  # the same for a backward's weights, of parameters whose updates wait for other stages
    late: frozenset[str] = frozenset()  # these parameters: the shared ones, or all where a norm is waited for
    versions: list[Version] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # learning rates, one for each version
    scratch: nn.Module | None = None
    precision: Precision = PRECISIONS["fp32"]
    masters: dict[str, nn.Parameter] = field(default_factory=dict)  # fp32, of which `names` are copies

    def keep_version(self) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                self.names[name].copy_(master)
        full = {**self.names, **self.masters}
        weights = {name: p.detach().clone() for name, p in full.items()}
        states = {} if self.optimizer is None else self.optimizer.state
        self.rates.append(0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"]))
        self.versions.append((weights, {n: copy.deepcopy(dict(states.get(p, {}))) for n, p in full.items()}))

    def run(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor], Any, Any]:
        """The outputs with their autograd graph, the leaves of it, and the parameters that get gradients."""
        self.scratch = copy.deepcopy(self.module)
        params = parameters_of(self.scratch, self.spec)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights[name])
        leaves = [x.detach().requires_grad_(i.requires_grad) for x, i in zip(inputs, self.spec.inputs)]
        device = torch.device("cpu")
        with Draws(self.spec.name, self.scratch, device).seed_draws(seed), self.precision.autocast(device):
            outputs = self.scratch(*leaves)
        return list(outputs[: len(self.spec.outputs)]), leaves, params


def parameters_of(module: nn.Module, spec: StageSpec) -> dict[str, nn.Parameter]:
    """The module's parameters, each once, under the name that the plan has for it."""
    wanted = {p.name for p in spec.params}
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if name in wanted}


class Sequential:
    """Trains the stages of a draft, whose programs say how many micro-batches a mini-batch has, and whose options what
    is clipped. `weights`: "current", "stash" or "predict". `whole`: a stage that shares a parameter updates its others
    with it."""

    def __init__(
        self,
        draft: Draft,
        weights: str,
        optimizer: Callable[..., Any],
        schedule: Callable[..., Any] | None = None,
        whole: bool = False,
    ):
        self.mode, self.step_number, self.whole = weights, 0, whole
        interface = draft.programs[0].interface
        self.accumulate, self.lanes = interface.accumulate, max(1, len(interface.lanes))
        self.precision = Precision.of(draft.options.precision)
        self.max_norm, self.squares = draft.options.max_grad_norm, list[float]()
        self.scales, self.overflows, self.known = [INITIAL_SCALE], 0, 1
        if self.precision.scales_loss and self.max_norm is None:
            self.max_norm = math.inf
        held = {**draft.graph.parameters(), **draft.graph.buffers(), **draft.graph.constants}
        kinds, ties = generate_stages(draft), draft.graph.ties()
        self.stages = [
            self._stage(s.spec, d, kinds, held, optimizer, schedule, self.precision)
            for s, d in zip(draft.stages, draft.devices)
        ]
        self.maker = {o.name: s for s in self.stages for o in s.spec.outputs}
        self.sharing: dict[str, list[tuple[OneStage, str]]] = defaultdict(list)
        for stage in self.stages:
            for param in stage.spec.params:
                if param.requires_grad:
                    self.sharing[ties.get(param.name, param.name)].append((stage, param.name))
        self.sharing = {name: rows for name, rows in self.sharing.items() if len(rows) > 1}
        self._delays()

    @staticmethod
    def _stage(
        spec: StageSpec, device: int, kinds: Any, held: Any, optimizer: Any, schedule: Any, precision: Precision
    ) -> OneStage:
        module = kinds[spec.name]()
        names = parameters_of(module, spec)
        with torch.no_grad():
            for name, tensor in [*names.items(), *module.named_buffers()]:
                tensor.copy_(held[name])
        for param in spec.params:
            names[param.name].requires_grad_(param.requires_grad)
        masters = {
            name: nn.Parameter(held[name].detach().float().clone())
            for name, p in names.items()
            if p.requires_grad and precision.has_masters
        }
        trained = [masters.get(name, p) for name, p in names.items() if p.requires_grad]
        made = optimizer(trained) if trained else None
        found = OneStage(spec, device, module, names, made, schedule(made) if schedule and made else None)
        found.precision, found.masters = precision, masters
        return found

    def readers(self, stage: OneStage) -> list[OneStage]:
        outputs = {o.name for o in stage.spec.outputs}
        return [s for s in self.stages if outputs & {i.name for i in s.spec.inputs}]

    def _delays(self) -> None:
        depth: dict[str, int] = {}
        for stage in reversed(self.stages):
            depth[stage.spec.name] = max((1 + depth[r.spec.name] for r in self.readers(stage)), default=0)
        tied = {stage.spec.name for rows in self.sharing.values() for stage, _ in rows}
        for stage in self.stages:
            stage.depth = stage.delay = depth[stage.spec.name]
            stage.shared = frozenset(name for rows in self.sharing.values() for s, name in rows if s is stage)
            stage.shared_delay = max((depth[name] for name in tied), default=0) if stage.shared else 0
            stage.late = stage.shared
            if self.whole and stage.shared:
                stage.delay, stage.late = stage.shared_delay, frozenset(stage.names)
            if self.max_norm is not None:
                trained = [s for s in self.stages if s.optimizer is not None]
                stage.delay = stage.shared_delay = max(depth[s.spec.name] for s in trained)
                stage.late = frozenset(stage.names)
            stage.lag = max(0, stage.shared_delay - stage.depth)

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The losses of the micro-batches. With lanes, these come one lane after the other, and those of a mini-batch
        are in each."""
        for stage in self.stages:
            stage.versions.clear()
            stage.rates.clear()
            stage.keep_version()
        each = len(batches) // self.lanes
        losses: dict[int, Tensor] = {}
        self.known = len(self.scales)  # those of earlier calls are known from its beginning
        for first in range(0, each, self.accumulate):
            rows = [range(lane * each + first, lane * each + first + self.accumulate) for lane in range(self.lanes)]
            losses |= self.mini_batch([[(m, m % each, batches[m]) for m in row] for row in rows])
        self.step_number += 1
        return [losses[m] for m in range(len(batches))]

    def mini_batch(self, lanes: Sequence[Sequence[tuple[int, int, Batch]]]) -> dict[int, Tensor]:
        """Train on one: of each lane, the numbers of its micro-batches in the batch and in the lane, and these."""
        losses: dict[int, Tensor] = {}
        begun = len(self.scales) - self.known  # mini-batches of this call before this one
        lag = -(-max(s.shared_delay for s in self.stages) // self.accumulate)
        self.scale = self.scales[self.known - 1 + max(0, begun - lag)] if self.precision.scales_loss else 1.0
        grads: dict[str, dict[str, Tensor]] = {stage.spec.name: {} for stage in self.stages}
        for rows in lanes:
            own: dict[str, dict[str, Tensor]] = {stage.spec.name: {} for stage in self.stages}
            for number, m, batch in rows:
                losses[number], found = self.micro_batch(number, m, batch)
                _add_to(own, found)
            _add_to(grads, own)
        self.share(grads)
        counts = self.clip(grads)
        for stage in self.stages:
            self.update(stage, grads[stage.spec.name] if counts else None)
        if self.precision.scales_loss:
            self.overflows += not counts
            self.scales.append(self.scales[-1] if counts else self.scales[-1] / 2)
        return losses

    def micro_batch(self, number: int, m: int, batch: Batch) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        values, runs = dict(batch), {}
        for stage in self.stages:
            inputs = [values[i.name] for i in stage.spec.inputs]
            runs[stage.spec.name] = stage.run(self.forward_weights(stage, m), inputs, self.seed(number))
            values |= {o.name: y.detach() for o, y in zip(stage.spec.outputs, runs[stage.spec.name][0])}
        grads: dict[str, dict[str, Tensor]] = {}
        found: dict[tuple[str, str], Tensor] = {}  # value, and the stage that its gradient comes from
        for stage in reversed(self.stages):
            outputs, leaves, params = runs[stage.spec.name]
            if stage.depth:
                inputs = [values[i.name] for i in stage.spec.inputs]
                outputs, leaves, params = stage.run(self.backward_weights(stage, m), inputs, self.seed(number))
            given = [self.gradient(stage, o, found) for o in stage.spec.outputs]
            pairs = [(y, g) for y, g in zip(outputs, given) if g is not None]
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            found |= {(i.name, stage.spec.name): x.grad for i, x in zip(stage.spec.inputs, leaves) if i.requires_grad}
            grads[stage.spec.name] = {name: p.grad for name, p in params.items() if p.grad is not None}
        loss = next(s.spec.loss for s in self.stages if s.spec.loss)
        return values[loss], grads

    def seed(self, m: int) -> int:
        return micro_batch_seed(SEED, self.step_number, m)

    def forward_weights(self, stage: OneStage, m: int) -> Mapping[str, Tensor]:
        found = {}
        for name in stage.names:
            version = self.version(m - (stage.shared_delay if name in stage.shared else stage.delay))
            weights, states = stage.versions[version]
            found[name] = weights[name]
            missing = m // self.accumulate - version
            if self.mode == "predict" and stage.optimizer is not None and missing:
                group, rate = stage.optimizer.param_groups[0], stage.rates[version]
                found[name] = predict_weight(weights[name], states[name], group, rate, missing)
        return found

    def backward_weights(self, stage: OneStage, m: int) -> Mapping[str, Tensor]:
        if self.mode == "stash":
            return self.forward_weights(stage, m)
        versions = {name: self.version(m - stage.lag * (name in stage.late)) for name in stage.names}
        return {name: stage.versions[version][0][name] for name, version in versions.items()}

    def version(self, micro_batch: int) -> int:
        """The number of updates that are made before the first micro-batch that waits for this one."""
        return max(0, micro_batch // self.accumulate)

    def gradient(self, stage: OneStage, out: Any, found: Mapping[tuple[str, str], Tensor]) -> Tensor | None:
        """The gradient of an output: first the sum over readers on its own device, then that of each other device."""
        if not out.requires_grad:
            return None
        if out.name == stage.spec.loss:
            share = self.scale / (self.accumulate * self.lanes)
            return torch.full(out.shape, share, dtype=getattr(torch, out.dtype))
        readers = [s for s in self.stages if (out.name, s.spec.name) in found]
        devices = dict.fromkeys([stage.device, *(s.device for s in readers)])
        sums = []
        for device in devices:
            own = [found[out.name, s.spec.name] for s in reversed(readers) if s.device == device]
            if own:
                sums.append(add_parts(own))
        return add_parts(sums)

    def share(self, grads: dict[str, dict[str, Tensor]]) -> None:
        for rows in self.sharing.values():
            devices = dict.fromkeys(stage.device for stage, _ in rows)
            parts = [[grads[s.spec.name][n] for s, n in rows if s.device == d] for d in devices]
            total = add_parts([add_parts(part) for part in parts])
            for stage, name in rows:
                grads[stage.spec.name][name] = total

    def clip(self, grads: dict[str, dict[str, Tensor]]) -> bool:
        """Divide by the loss scale, and by norm / max_norm where that exceeds 1: squares are added up in fp64, device
        by device. Returns whether the mini-batch counts: its norm is finite, or the loss is not scaled."""
        if self.max_norm is None:
            return True
        total = torch.zeros((), dtype=torch.float64)
        for device in sorted({stage.device for stage in self.stages}):
            own = [s for s in self.stages if s.device == device]
            counted = [(s, p.name) for s in own for p in s.spec.params if p.owner and p.name in grads[s.spec.name]]
            norms = [torch.linalg.vector_norm(grads[s.spec.name][name], dtype=FP32).double() for s, name in counted]
            total = total + (torch.stack(norms).square().sum() if norms else 0.0)
        self.squares.append(float(total))
        factor = (self.max_norm / (total.sqrt() / self.scale + 1e-6)).clamp(max=1.0) / self.scale
        for rows in grads.values():
            for name, grad in rows.items():
                rows[name] = grad.to(FP32) * factor.to(FP32)
        return not self.precision.scales_loss or math.isfinite(float(total))

    @staticmethod
    def update(stage: OneStage, grads: Mapping[str, Tensor] | None) -> None:
        """None: neither optimizer nor schedule takes this step."""
        if stage.optimizer is not None and grads is not None:
            for name, param in stage.names.items():
                found = grads.get(name)
                stage.masters.get(name, param).grad = found if found is None or not stage.masters else found.float()
            stage.optimizer.step()
            if stage.scheduler is not None:
                stage.scheduler.step()
        stage.keep_version()


def _add_to(totals: dict[str, dict[str, Tensor]], more: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Add gradients, by stage and parameter, to earlier ones."""
    for stage, rows in more.items():
        for name, grad in rows.items():
            totals[stage][name] = totals[stage][name] + grad if name in totals[stage] else grad


def add_parts(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def predict_weight(
    weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], lr: float, updates: int
) -> Tensor:
    """The weight after `updates` more updates by SGD with momentum, or by AdamW."""
    if not state:
        return weight
    if "momentum_buffer" in state:
        return weight - lr * state["momentum_buffer"] * updates
    (beta1, beta2), steps = group["betas"], float(state["step"])
    size = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**steps) + group["eps"]
    update = state["exp_avg"] / size * (lr / (1 - beta1**steps))
    return weight - update.add(weight, alpha=lr * group["weight_decay"]) * updates
