"""The tables and figures of Fuyou (2024, sections 1 to 5) that a simulation can reproduce.

Fuyou runs as in its paper: every block's weights and states are on SSD, the CPU's optimizer runs during the backward,
and activations are kept, moved or recomputed as the planner chooses. Its rivals are programs of ours under the rules
that the paper gives for them, built from the same passes. The findings are in `capacity`, `speed` and `tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.machine.presets import FUYOU_FITTED
from .capacity import fig4, table2, table4
from .experiments import Fuyou
from .programs import DEEPSPEED_FITTED
from .speed import fig1, fig5, fig6, fig7, fig8
from .tuning import fig9, fig10, sensitivity

EXPERIMENTS = Fuyou
FITTED: Mapping[str, str] = {row.removeprefix("fuyou "): what for row, what in FUYOU_FITTED.items()} | DEEPSPEED_FITTED
FINDINGS = (table2, table4, fig1, fig4, fig5, fig6, fig7, fig8, fig9, fig10, sensitivity)
