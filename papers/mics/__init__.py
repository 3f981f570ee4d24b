"""The tables and figures of MiCS (VLDB 2022, sections 2 to 5) that a simulation can reproduce.

MiCS runs as in its paper: shards are on the GPUs, each layer is gathered for the forward and the backward of each
micro-batch and recomputed, sums are scattered inside the group with every micro-batch and added up over the groups once
a step. Its rival, DeepSpeed's ZeRO-3, is the same program with one group of all GPUs and plain gathers. The findings
are in `scale` and `gains`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.machine.presets import MICS_FITTED
from .experiments import Mics
from .gains import fig2, fig11c, fig12, fig13, fig14, fig15, gathers, traffic
from .programs import STEP_FITTED
from .scale import fig7, fig8, fig9, fig10, huge, scaling, zero2

EXPERIMENTS = Mics
FITTED: Mapping[str, str] = {row.removeprefix("mics "): what for row, what in MICS_FITTED.items()} | STEP_FITTED
FINDINGS = (
    fig2, gathers, traffic, fig7, zero2, fig8, fig9, fig10, fig11c, huge, fig12, fig13, fig14, fig15, scaling
)  # fmt: skip
