"""The room that parts of a parameter's rows must fit into, and the optimizers that refuse parts."""

from __future__ import annotations

from torch import nn

from ..draft import Draft

COPIES = 3  # of a table that is trained: the weights, their gradient, and the gradient that is added to it
SHARE = 0.5  # of a device's memory that a part takes at most, so that another stage has room beside it


def device_room(draft: Draft) -> int:
    """The bytes of the smallest device."""
    return min(device.budget_bytes for device in draft.machine.devices)


def refused_by_optimizer(draft: Draft, name: str, value: nn.Parameter) -> str:
    """The reason why the optimizer needs the whole parameter; empty where it does not."""
    whole = draft.options.takes_whole
    if whole is None or not value.requires_grad or not whole(name):
        return ""
    return "its optimizer looks at whole parameters, not at each element; torch.optim.AdamW would do"
