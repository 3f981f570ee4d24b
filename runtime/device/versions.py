"""The ops of the device runtime that make versions of a stage's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.ops import DEVICE, shared_params, split_by_sharing
from ..optimizer.extrapolate import extrapolate
from ..optimizer.gradients import Grads
from ..stage.store import StageStore
from .issuing import Handle, Issuing, Run


class Versions(Issuing):
    """The ops `stash`, `predict` and `split`. All run on the compute stream, between the same updates as in the text;
    their results are used and given back on that stream, too."""

    def _let_go(self, store: StageStore, weights: dict[str, Tensor]) -> None:
        """A stage of an asynchronous step has run on these weights: bind its newest ones, if they are another version,
        since a `free` gives that one's memory back. Weights that come anew for each phase have no newest ones on the
        device."""
        if weights is not store.weights and store.home.weights == DEVICE and store.flat_stage is None:
            store.runner.bind(store.weights)

    def stash(self, stage: str, weights: Handle) -> Handle:
        issue, store = self._next("stash"), self.stores[stage]
        return self._launch(issue, (), lambda run: [_copy_weights(store)])[0]

    def predict(self, stage: str, weights: Handle, *, updates: int, shared: int = 0) -> Handle:
        issue, store, names = self._next("predict"), self.stores[stage], shared_params(self.interface, stage)

        def work(run: Run) -> list[Any]:
            made = _copy_weights(store)
            if store.optimizer is not None:
                extrapolate(store.optimizer, made, updates, shared, names)
            return [made]

        return self._launch(issue, (), work)[0]

    def split(self, stage: str, grads: Handle) -> tuple[Handle, ...]:
        issue, names = self._next("split"), shared_params(self.interface, stage)

        def work(run: Run, given: Grads) -> list[Any]:
            own, others = split_by_sharing(given.tensors, names)
            return [Grads(own, part="own"), Grads(others, part="shared")]

        return self._launch(issue, (grads,), work, (grads, grads), gone=(grads,))


def _copy_weights(store: StageStore) -> dict[str, Tensor]:
    """A stage's weights in a flat buffer of their own."""
    flat = torch.empty_like(store.flat)
    flat.copy_(store.flat)
    return store.layout.views(flat)
