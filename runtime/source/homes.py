"""The modules that a generated file reads torch's functions from, by the names that they have in its text."""

from __future__ import annotations

import math
import operator
import types

import torch
import torch.nn.functional as F

from .. import functions

# Where a function's readable name is looked for, in this order.
HOMES: tuple[tuple[str, types.ModuleType], ...] = (
    ("torch", torch),
    ("F", F),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.sparse", torch.sparse),
    ("math", math),
    ("operator", operator),
    ("functions", functions),
)
IMPORT_LINES = {"torch": "import torch", "nn": "from torch import nn", "F": "import torch.nn.functional as F"}
IMPORT_LINES["functions"] = "from penstock.runtime import functions"
BASES = "from penstock.runtime.modules import Scope, Stage"
DRAWING_BASES = f"{BASES}, draw_at"  # where a stage draws random numbers
