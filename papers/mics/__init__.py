"""What a simulation can say of the tables and figures of MiCS (VLDB 2022, sections 2 to 5).

MiCS runs as its paper has it: shards on the GPUs, each layer gathered for each micro-batch forward and backward and
computed again, sums scattered inside the group with every micro-batch and added up over the groups once a step. Its
rival, DeepSpeed's ZeRO-3, is the same program with one group of all GPUs and plain gathers. Findings: `scale` and
`parts`.
"""

from __future__ import annotations

from .experiments import Mics
from .parts import fig2, fig11c, fig12, fig13, fig14, fig15, traffic
from .scale import fig7, fig8, fig9, fig10, huge, scaling

EXPERIMENTS = Mics
FINDINGS = (fig2, traffic, fig7, fig8, fig9, fig10, fig11c, huge, fig12, fig13, fig14, fig15, scaling)
