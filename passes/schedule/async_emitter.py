"""Writes one device's program of an asynchronous pipeline: versions of weights, and updates between the turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from ...ir import ops
from ...ir.program import WORLD, StageSpec
from ..optimizer.timing import Updates
from .async_order import Staleness, stages_to_recompute
from .emitter import Emitter, number_of
from .flow import Action, AsyncUpdate, Flow, Placed, Share


class AsyncEmitter(Emitter):
    """Writes one device's program: turns and updates in their order, each update with one mini-batch's gradients."""

    def __init__(
        self, flow: Flow, device: int, order: Sequence[Placed], mode: str, staleness: Staleness, updates: Updates
    ):
        super().__init__(flow, device, order)
        self.staleness, self.mode, self.how = staleness, mode, updates
        self.keeping = flow.trained.difference(stages_to_recompute(flow))
        self.pending: dict[tuple[str, int, bool], fx.Node] = {}  # gradients for an update, and for a late (True) one
        self.read: dict[tuple[str, int], fx.Node] = {}  # per forward under way, the weights that it read
        self.updates: dict[tuple[str, bool], int] = defaultdict(int)
        self.norms: dict[int, fx.Node] = {}  # by mini-batch
        self.complete: list[fx.Node] = []  # the gradients of each whole mini-batch

    def take(self, action: Action) -> None:
        if isinstance(action, AsyncUpdate):
            self.update(action)
        elif isinstance(action, Share):
            self.share(action)
        else:
            super().take(action)

    def weights_of_forward(self, spec: StageSpec, m: int) -> fx.Node:
        """The newest weights; in mode `predict`, those expected at the time of the update."""
        weights, mini_batch = self.weights[spec.name], m // self.staleness.accumulate
        waits = self.staleness.waits(spec.name)
        missing = mini_batch - self.updates[spec.name, waits] if self.staleness.has_unshared(spec) else 0
        shared = mini_batch - self.updates[spec.name, True] if spec.name in self.staleness.shared else 0
        if self.mode == "predict" and missing + shared:
            fields = {"shared": shared} if shared else {}
            names = [f"w{number_of(spec)}_for_m{m}"]
            (weights,) = self.program.emit(ops.predict, spec.name, weights, updates=missing, names=names, **fields)
        self.read[spec.name, m] = weights
        return weights

    def backward(self, spec: StageSpec, m: int) -> None:
        """Write a backward whose gradients are added to those of its own mini-batch."""
        super().backward(spec, m)
        if self.staleness.ends(m):
            grads = self.grads.pop(spec.name)
            if spec.trained_params:
                self.gradients(spec, m, grads)
        self.read.pop((spec.name, m))

    def gradients(self, spec: StageSpec, m: int, grads: fx.Node) -> None:
        """Keep a mini-batch's gradients for the update with them, or for two."""
        self.complete.append(grads)
        mini_batch, late = m // self.staleness.accumulate, spec.name in self.staleness.late
        if late and self.staleness.has_own(spec):
            names = [f"g{number_of(spec)}_m{m}_{part}" for part in ("own", "shared")]
            parts = self.program.emit(ops.split, spec.name, grads, names=names)
            self.pending[spec.name, mini_batch, False], self.pending[spec.name, mini_batch, True] = parts
        else:
            self.pending[spec.name, mini_batch, late] = grads

    def weights_of_backward(self, spec: StageSpec, m: int) -> fx.Node:
        """The newest weights; or those that the forward read, if these are stashed or the forward kept tensors."""
        found = self.read[spec.name, m]
        return found if self.mode == "stash" or (spec.name, m) in self.kept else self.weights[spec.name]

    def update(self, update: AsyncUpdate) -> None:
        spec = self.interface.stages[update.stage]
        self.stash(spec)
        grads, norm = self.pending.pop((update.stage, update.mini_batch, update.is_shared)), []
        if self.how.max_norm is not None:
            norm = [self.norms[update.mini_batch]]
            names = [f"g{number_of(spec)}_m{self.staleness.last_of(update.mini_batch)}_clipped"]
            (grads,) = self.program.emit(ops.clip, grads, *norm, names=names, max_norm=self.how.max_norm)
        self.program.emit(ops.step, update.stage, grads, *(norm if self.how.scaled else []))
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
        """Sum one mini-batch's gradients of shared parameters over all stages that share them; and take the norm of all
        of its gradients."""
        j, m = share.mini_batch, self.staleness.last_of(share.mini_batch)
        for group, rows in self.interface.groups.items():
            mine = [stage for device, stage, _ in rows if device == self.device and stage]
            if mine:
                names = [f"g{number_of(self.interface.stages[stage])}_m{m}_summed" for stage in mine]
                grads = [self.pending[stage, j, True] for stage in mine]
                summed = self.program.emit(ops.all_reduce, *grads, names=names, group=group)
                self.pending.update(((stage, j, True), node) for stage, node in zip(mine, summed))
        if self.how.max_norm is not None:
            grads = [self.pending[stage, j, True] for stage in share.stages]
            (norm,) = self.program.emit(ops.norm, *grads, names=[f"norm_m{m}"])
            if WORLD in self.interface.groups:
                (norm,) = self.program.emit(ops.all_reduce, norm, names=[f"norm_m{m}_world"], group=WORLD)
            self.norms[j] = norm
