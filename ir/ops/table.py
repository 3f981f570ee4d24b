"""The instruction set: every op by its name. What an op is: see `record.py`."""

from __future__ import annotations

from . import compute, devices, split, team, transfers, update, versions
from .record import Op

ALL: dict[str, Op] = {
    op.name: op
    for module in (transfers, compute, split, devices, team, update, versions)
    for op in vars(module).values()
    if isinstance(op, Op)
}
