"""The result of an evaluation: the loss and the model's outputs, of all micro-batches together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Outputs(dict[str, Tensor]):
    """Results by name, also as attributes: `out.loss`, `out["logits"]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(self)}") from None


def join(values: list[Tensor]) -> Any:
    """Join the tensors of all micro-batches to one; a list, where their lengths differ."""
    if values[0].dim() == 0:
        return torch.stack(values).mean(0)
    return torch.cat(values) if len({value.shape[1:] for value in values}) == 1 else values
