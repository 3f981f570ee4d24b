"""Seconds of one micro-batch of a block or a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class TurnSeconds:
    """Seconds of one micro-batch of a block or a stage on one device."""

    forward_s: float  # a forward that keeps nothing
    rematerialise_s: float  # a forward, first or repeated, that keeps what backward needs
    backward_s: float  # without rematerialisation
    taking_s: float | None = None  # a repeated forward that takes all classes of saved tensors; None: there are none

    def times(self, factor: float) -> TurnSeconds:
        """The seconds of a device that takes `factor` times as long."""
        taking_s = None if self.taking_s is None else self.taking_s * factor
        return TurnSeconds(self.forward_s * factor, self.rematerialise_s * factor, self.backward_s * factor, taking_s)

    @property
    def both_s(self) -> float:
        """One forward and one backward."""
        return self.forward_s + self.backward_s

    @property
    def long_backward_s(self) -> float:
        """A backward that begins with rematerialisation."""
        return self.backward_s + self.rematerialise_s
