"""The tables and figures of FTPipe (ATC 2021, section 5) that a simulation can reproduce: times, not accuracies.

Seq-pipe gives each GPU one run of adjacent blocks, Mixed-pipe several runs, in fp32, with everything on the GPUs.
Synchronous pipelines fill and drain once a step and recompute every stage in backward. Asynchronous pipelines fill once
for many mini-batches, and their last stage recomputes nothing. The findings are in `speedups` and `partitions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .experiments import FineTuning, FtPipe
from .partitions import fig8, fig9, granularity, large, pipedream, search, volume
from .speedups import table2, table2_asynchronous, table3

__all__ = ["EXPERIMENTS", "FINDINGS", "FITTED", "FineTuning", "FtPipe"]
EXPERIMENTS = FtPipe
FITTED: Mapping[str, str] = {}  # a finding, or "finding: setting" -> what of the machine was fitted to it
FINDINGS = (table2, table2_asynchronous, table3, volume, granularity, fig8, pipedream, fig9, large, search)
