"""What one device keeps of one stage across steps: weights, fp32 masters, optimizer states, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .arena import allocate, grads_layout, masters_layout, weights_layout
from .clipping import Grads
from .errors import CheckpointError
from .execute import StageRunner
from .optimizer import OptimizerSpec, StageOptimizer
from .program import StageSpec
from .shards import piece_of, whole_of


@dataclass
class StageState:
    """One stage's part of a checkpoint, nothing copied: weights (masters where they exist), buffers, and what
    `StageOptimizer.state_dict` gives (None where the stage is not trained)."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any] | None


class StageStore:
    """A stage's weights lie in one flat buffer, on the device or, for a swapped stage, in (pinned) DRAM.

    Masters are the weights themselves, unless `master` asks for fp32 copies beside weights of another precision.
    `optimizer` None: the stage is not trained here. `piece`: (index, count) of the shard that is kept here of all
    parameters; what `load` takes is whole, what `state` gives are pieces.
    """

    def __init__(
        self,
        spec: StageSpec,
        module: nn.Module,
        device: torch.device,
        home: str,
        precision: str,
        *,
        master: bool = False,
        optimizer: OptimizerSpec | None = None,
        piece: tuple[int, int] | None = None,
    ):
        self.spec = spec
        self.piece = piece
        self.part = spec if piece is None else spec.shard(piece[1])
        self.home = home
        self.runner = StageRunner(spec, module, device, precision, weights_move=home == ops.DRAM)
        self._where = device if home == ops.DEVICE else torch.device("cpu")
        self._pinned = home == ops.DRAM and device.type == "cuda"
        self.layout = weights_layout(self.part)
        self.flat = allocate(self.layout.total_bytes, self._where, self._pinned)
        self.weights = self.layout.views(self.flat)
        self.masters = self._make_masters(master and optimizer is not None)
        self.optimizer = None if optimizer is None else StageOptimizer(optimizer, self.masters)
        self._grads: dict[str, Tensor] | None = None

    def _make_masters(self, separate: bool) -> dict[str, Tensor]:
        trained = {name for name, param in self.runner.parameters.items() if param.requires_grad}
        if not separate:
            return {name: self.weights[name] for name in self.runner.parameters if name in trained}
        layout = masters_layout(self.part)
        views = layout.views(allocate(layout.total_bytes, self._where))  # no GPU ever reads those in DRAM
        return {name: view for name, view in views.items() if name in trained}

    def grad_buffer(self) -> dict[str, Tensor]:
        """Where offloaded gradients go; taken at the first use."""
        if self._grads is None:
            layout = grads_layout(self.part)
            self._grads = layout.views(allocate(layout.total_bytes, torch.device("cpu"), self._pinned))
        return self._grads

    def update(self, grads: Grads) -> None:
        """One optimizer step on the masters; weights of another precision follow."""
        assert self.optimizer is not None
        self.optimizer.step(grads.in_full())
        self._follow()

    def _follow(self) -> None:
        for name, master in self.masters.items():
            if master is not self.weights[name]:
                self.weights[name].copy_(master)

    def load(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take over copies of these values. Raises `CheckpointError` for a name or shape that does not fit."""
        shapes = {param.name: param.shape for param in self.spec.params}
        for name, own in self.weights.items():
            if name not in weights:
                raise CheckpointError(f"{self.spec.name}: no value for the parameter {name!r}")
            given, shape = weights[name], shapes[name]
            if tuple(given.shape) != shape:
                raise CheckpointError(f"{self.spec.name}: {name} has shape {list(given.shape)}, not {list(shape)}")
            given = given if self.piece is None else piece_of(given, *self.piece)
            own.copy_(given)
            if name in self.masters:
                self.masters[name].copy_(given)
        self.runner.load_buffers(dict(buffers))

    def state(self) -> StageState:
        weights = {name: self.masters.get(name, weight) for name, weight in self.weights.items()}
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return StageState(weights, self.runner.buffers(), optimizer)

    def load_state(self, state: StageState) -> None:
        """The reverse of `state`, with copies."""
        self.load(state.weights, state.buffers)
        if self.optimizer is not None and state.optimizer is not None:
            self.optimizer.load_state_dict(self._own_part(state.optimizer))

    def _own_part(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """Of whole states, those of this shard."""
        if self.piece is None:
            return optimizer
        shapes = {param.name: param.shape for param in self.spec.params}
        states = {
            name: {key: piece_of(t, *self.piece) if tuple(t.shape) == shapes[name] else t for key, t in row.items()}
            for name, row in optimizer["states"].items()
        }
        return {**optimizer, "states": states}


def joined(states: Sequence[StageState], spec: StageSpec) -> StageState:
    """One stage's state out of those of all its shards, in the order of their pieces."""
    first = states[0]
    weights = {p.name: whole_of([state.weights[p.name] for state in states], p.shape) for p in spec.params}
    if first.optimizer is None:
        return StageState(weights, first.buffers, None)
    params = {p.name: (q.shape, p.shape) for p, q in zip(spec.params, spec.shard(len(states)).params)}
    rows: dict[str, dict[str, Tensor]] = {}
    for name, row in first.optimizer["states"].items():
        own, whole = params[name]
        rows[name] = {
            key: whole_of([s.optimizer["states"][name][key] for s in states if s.optimizer], whole)
            if tuple(value.shape) == own
            else value
            for key, value in row.items()
        }
    return StageState(weights, first.buffers, {**first.optimizer, "states": rows})
