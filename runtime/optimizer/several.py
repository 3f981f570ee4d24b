"""Several torch optimizers as one: each steps the groups that are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class SeveralOptimizers(torch.optim.Optimizer):
    """Steps all of `members`, which share its groups and states, so that whoever reads or changes these here, as a
    schedule does, reads and changes what the members step with.

    `order`: for each member the numbers of its groups among all.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer], order: Sequence[Sequence[int]]):
        self.members = list(members)
        placed = {
            index: group for own, at in zip(members, order) for index, group in zip(at, own.param_groups, strict=True)
        }
        names = set.intersection(*(set(member.defaults) for member in members))
        defaults = {name: value for name, value in members[0].defaults.items() if name in names}
        super().__init__([placed[index] for index in sorted(placed)], {})
        self.defaults = defaults  # what all members have: schedules ask whether there are momenta
        for member in members:
            self.state.update(member.state)
            member.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there before a step"
        for member in self.members:
            member.step()
