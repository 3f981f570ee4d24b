"""The instruction set: `ops.fetch` is a record, `ops.ALL` has every record by its name."""

from __future__ import annotations

from ..names import *
from .compute import *
from .devices import *
from .record import Context, Op, Value, Work
from .split import *
from .table import ALL
from .team import *
from .transfers import *
from .update import *
from .versions import *
