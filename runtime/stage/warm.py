"""Runs each stage of a device once on zeros, before any message is under way, and keeps no memory.

CUDA loads a kernel at its first launch, and a block is compiled at its first call. Either may wait for all that the
device has been given, also for a message, which another device may send only after one that this launch holds up.
Loading all kernels at the start (`CUDA_MODULE_LOADING=EAGER`) would take some hundred MiB of each GPU for kernels that
no stage needs, and leave out what libraries compile or open at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...ir import ops
from ...ir.program import Program, StageSpec
from ..accelerator import give_back
from ..functions.document_borders import trial
from ..optimizer.gradients import Grads, clip_factor, speculative_factor, sum_of_squares
from ..optimizer.spec import OptimizerSpec
from ..optimizer.stage_optimizer import StageOptimizer
from ..torch_names import CHECKS
from .arena import Arena, weights_layout
from .runner import StageRunner
from .store import StageStore

SIZE = 16  # at most, of each dimension of the parameters that an optimizer is warmed up on


def warm_up(
    stores: Mapping[str, StageStore],
    build: Callable[[str], nn.Module],
    arena: Arena,
    programs: Collection[Program],
    precision: str,
    optimizer: OptimizerSpec | None,
) -> None:
    """Launch the kernels of the stages, of what adds up and clips gradients, and of the optimizers on the device, on
    the calling thread and its current stream. `build` makes a stage's module; `arena` is the device's. Weights that are
    yet to be loaded, and the arena, are zeros after it."""
    arena.flat.zero_()
    for name, store in stores.items():
        if store.home.weights == ops.DEVICE:
            store.flat.zero_()
        for weight in store.staying.values():
            weight.zero_()
        compiler = None if store.runner.compiled is None else store.runner.compiled.backend
        runner = StageRunner(store.spec, build(name), arena.device, precision, store.runner.weights_move, compiler)
        if runner.buffers():
            runner.load_buffers({b.name: _zeros(b, arena.device) for b in store.spec.buffers})
        runner.bind(_weights(store, arena))
        with suppress(torch.linalg.LinAlgError):  # zeros may be singular
            _use(store.spec, _run(runner, _modes(programs, name), arena.device))
        runner.release()
        del runner
        if optimizer is not None and store.home.states == ops.DEVICE and store.optimizer is not None:
            _step(store, optimizer)
    give_back(arena.device)


def _weights(store: StageStore, arena: Arena) -> dict[str, Tensor]:
    if store.home.weights == ops.DEVICE and store.flat_stage is None:
        return dict(store.weights)
    layout = weights_layout(store.spec) if store.flat_stage is None else store.flat_stage.whole
    return {**layout.views(arena.range(0, layout.total_bytes)), **store.staying}


def _modes(programs: Collection[Program], stage: str) -> dict[str, Any]:
    """The modes in which the programs run a stage: per op the `keep` of its forward, else True."""
    found: dict[str, Any] = {}
    for program in programs:
        for node in program.ops():
            if node.args and node.args[0] == stage and node.target in (ops.forward, ops.backward_input, ops.evaluate):
                found[str(getattr(node.target, "__name__", node.target))] = node.kwargs.get("keep", True)
    return found


def _run(runner: StageRunner, modes: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Two micro-batches, so that gradients are also added; returns them."""
    grads: dict[str, Tensor] | None = None
    inputs = [_zeros(spec, device) for spec in runner.spec.inputs]
    douts = [1.0] * len(runner.spec.outputs)
    with trial(), _Unchecked() if runner.compiled is None else nullcontext():  # a block is compiled for its modes
        for _ in range(2 if "forward" in modes else 0):
            _, kept = runner.forward(inputs, 0, modes["forward"])
            if "backward_input" in modes:
                _, rest = runner.backward_input(kept, inputs, douts, 0)
                grads = runner.backward_weight(rest, grads)
            else:
                _, grads = runner.backward(kept, inputs, douts, grads, 0)
        if "evaluate" in modes:
            runner.evaluate(inputs, 0)
    return grads or {}


class _Unchecked(TorchFunctionMode):
    """Leaves out checks of values, which zeros may fail."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func in CHECKS else func(*args, **(kwargs or {}))


def _use(spec: StageSpec, grads: dict[str, Tensor]) -> None:
    squares = sum_of_squares([(spec, grads)])
    whole = Grads(grads)
    whole.scale(clip_factor(squares, 1.0, 1.0))
    whole.scale(speculative_factor(1.0))
    bool(torch.isfinite(squares))


def _step(store: StageStore, optimizer: OptimizerSpec) -> None:
    """A step on small parameters of the same names, types and numbers of dimensions."""
    types = {p.name: getattr(torch, p.grad_dtype) for p in store.spec.params}
    own = {name: _small(p, p.dtype) for name, p in store.masters.items()}
    grads = {name: _small(p, types[name]) for name, p in store.masters.items()}
    apart = {name: store.weights[name] for name, p in store.masters.items() if store.weights[name] is not p}
    weights = {name: _small(p, p.dtype) for name, p in apart.items()}
    rounding = None if store.optimizer is None else store.optimizer.rounding
    for factor in (None, speculative_factor(1.0)):
        StageOptimizer(optimizer, own, rounding=rounding).step(grads, factor=factor, weights=weights or None)


def _small(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros([min(n, SIZE) for n in like.shape], dtype=dtype, device=like.device)


def _zeros(spec: Any, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
