"""Weights of a model on the meta device as its initialiser draws them."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.runtime.model_names import ties_of
from penstock.runtime.state.fresh import FreshValues
from penstock.runtime.state.weights import WeightSource


class FreshWeights(WeightSource):
    """The model's own initialisation, drawn from `seed`, to train a model on the meta device from scratch."""

    def __init__(self, model: nn.Module, seed: int = 0):
        self._fresh = FreshValues(model, seed)
        self.ties = ties_of(model)

    def read(self, name: str) -> Tensor:
        return self._fresh.value(self.ties.get(name, name))
