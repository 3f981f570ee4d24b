"""The tables and figures of Mobius (ASPLOS 2023, section 4) that a simulation can reproduce.

Mobius runs as in its paper: stages always come from DRAM and are recomputed in backward, and there is one micro-batch
for each GPU. The rival is ZeRO-3 with CPU offload as programs of our own, on the same machine under the same
assumptions. The findings are in `speed`, `traffic` and `partition`.
"""

from __future__ import annotations

from .experiments import FITTED, Mobius, mobius, table3
from .partition import fig9, fig10, fig12
from .speed import fig5, fig8, fig14, fig15, sensitivity
from .traffic import fig6, fig7

__all__ = ["EXPERIMENTS", "FINDINGS", "FITTED", "Mobius", "mobius"]
EXPERIMENTS = Mobius
FINDINGS = (table3, fig5, fig6, fig7, fig8, fig9, fig10, fig12, fig14, fig15, sensitivity)
