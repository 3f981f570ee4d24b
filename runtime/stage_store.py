"""What one device keeps of one stage across steps: weights, fp32 masters, optimizer states, buffers."""

from __future__ import annotations

from collections.abc import Mapping
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
    `optimizer` None: the stage is not trained here.
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
    ):
        self.spec = spec
        self.home = home
        self.runner = StageRunner(spec, module, device, precision, weights_move=home == ops.DRAM)
        self._where = device if home == ops.DEVICE else torch.device("cpu")
        self._pinned = home == ops.DRAM and device.type == "cuda"
        self.layout = weights_layout(spec)
        self.flat = allocate(self.layout.total_bytes, self._where, self._pinned)
        self.weights = self.layout.views(self.flat)
        self.masters = self._make_masters(master and optimizer is not None)
        self.optimizer = None if optimizer is None else StageOptimizer(optimizer, self.masters)
        self._grads: dict[str, Tensor] | None = None

    def _make_masters(self, separate: bool) -> dict[str, Tensor]:
        trained = {name for name, param in self.runner.parameters.items() if param.requires_grad}
        if not separate:
            return {name: self.weights[name] for name in self.runner.parameters if name in trained}
        layout = masters_layout(self.spec)
        views = layout.views(allocate(layout.total_bytes, self._where))  # no GPU ever reads those in DRAM
        return {name: view for name, view in views.items() if name in trained}

    def grad_buffer(self) -> dict[str, Tensor]:
        """Where offloaded gradients go; taken at the first use."""
        if self._grads is None:
            layout = grads_layout(self.spec)
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
        for name, own in self.weights.items():
            if name not in weights:
                raise CheckpointError(f"{self.spec.name}: no value for the parameter {name!r}")
            given = weights[name]
            if given.shape != own.shape:
                raise CheckpointError(f"{self.spec.name}: {name} has shape {list(given.shape)}, not {list(own.shape)}")
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
            self.optimizer.load_state_dict(state.optimizer)
