"""Writes one device's program of an asynchronous pipeline: versions of weights, and updates between the turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from ...ir import ops
from ...ir.program import StageSpec, TensorSpec
from .async_order import recomputed, staleness_of
from .emitter import Emitter, number_of
from .flow import Action, AsyncUpdate, Flow, Placed, Share


class AsyncEmitter(Emitter):
    """Writes one device's program: turns and updates in their order, each update with one micro-batch's gradients."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed], mode: str):
        super().__init__(flow, device, order)
        self.staleness, self.mode = staleness_of(flow), mode
        self.keeping = flow.trained.difference(recomputed(flow))
        self.pending: dict[tuple[str, int, bool], fx.Node] = {}  # gradients of own, and of shared (True) parameters
        self.read: dict[tuple[str, int], fx.Node] = {}  # per forward under way, the weights that it read
        self.updates: dict[tuple[str, bool], int] = defaultdict(int)

    def take(self, action: Action) -> None:
        if isinstance(action, AsyncUpdate):
            self.update(action)
        elif isinstance(action, Share):
            self.share(action)
        else:
            super().take(action)

    def weights_of_forward(self, spec: StageSpec, m: int) -> fx.Node:
        """The newest weights; in mode `predict`, those expected at the time of the update."""
        weights = self.weights[spec.name]
        missing = m - self.updates[spec.name, False] if self.staleness.has_own(spec) else 0
        shared = m - self.updates[spec.name, True] if spec.name in self.staleness.shared else 0
        if self.mode == "predict" and missing + shared:
            fields = {"shared": shared} if shared else {}
            names = [f"w{number_of(spec)}_for_m{m}"]
            (weights,) = self.program.emit(ops.predict, spec.name, weights, updates=missing, names=names, **fields)
        self.read[spec.name, m] = weights
        return weights

    def backward(self, spec: StageSpec, m: int) -> None:
        """Write a backward whose gradients are not added to those of other micro-batches."""
        super().backward(spec, m)
        grads = self.grads.pop(spec.name)
        own, shared = self.staleness.has_own(spec), spec.name in self.staleness.shared
        if own and shared:
            names = [f"g{number_of(spec)}_m{m}_{part}" for part in ("own", "shared")]
            parts = self.program.emit(ops.split, spec.name, grads, names=names)
            self.pending[spec.name, m, False], self.pending[spec.name, m, True] = parts
        elif spec.trained_params:
            self.pending[spec.name, m, shared] = grads
        self.read.pop((spec.name, m))

    def weights_of_backward(self, spec: StageSpec, m: int) -> fx.Node:
        """The newest weights; or those that the forward read, if these are stashed or the forward kept tensors."""
        found = self.read[spec.name, m]
        return found if self.mode == "stash" or (spec.name, m) in self.kept else self.weights[spec.name]

    def gradient(self, spec: StageSpec, out: TensorSpec, m: int) -> fx.Node | float | None:
        """As in the base, but 1 for the loss: each micro-batch has updates of its own."""
        return 1.0 if out.requires_grad and out.name == spec.loss else super().gradient(spec, out, m)

    def update(self, update: AsyncUpdate) -> None:
        self.stash(self.interface.stages[update.stage])
        grads = self.pending.pop((update.stage, update.micro_batch, update.is_shared))
        self.program.emit(ops.step, update.stage, grads)
        self.updates[update.stage, update.is_shared] += 1

    def stash(self, spec: StageSpec) -> None:
        """Before an update, copy the resident weights that forwards under way have read, for their backwards."""
        weights = self.weights[spec.name]
        under_way = [key for key, node in self.read.items() if key[0] == spec.name and node is weights]
        if self.mode != "stash" or not under_way:
            return
        names = [f"w{number_of(spec)}_v{max(self.updates[spec.name, shared] for shared in (False, True))}"]
        (kept,) = self.program.emit(ops.stash, spec.name, weights, names=names)
        self.read.update(dict.fromkeys(under_way, kept))

    def share(self, share: Share) -> None:
        """Sum the gradients of shared parameters of one micro-batch over all stages that share them."""
        m = share.micro_batch
        for group, rows in self.interface.groups.items():
            mine = [stage for device, stage, _ in rows if device == self.device]
            if mine:
                names = [f"g{number_of(self.interface.stages[stage])}_m{m}_summed" for stage in mine]
                grads = [self.pending[stage, m, True] for stage in mine]
                summed = self.program.emit(ops.all_reduce, *grads, names=names, group=group)
                self.pending.update(((stage, m, True), node) for stage, node in zip(mine, summed))
