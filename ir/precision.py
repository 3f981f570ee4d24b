"""The meaning of the user's words for a precision. Plans and settings keep the name, code reads the facts.

| name | weights, activations | autocast | fp32 masters | loss scale |
|---|---|---|---|---|
| `fp32` | the model's own types | no | no | no |
| `bf16-mixed`, `fp16-mixed` | low, autocast decides per call | yes | yes | fp16 |
| `bf16-true` | bf16 | no | yes | no |
| `bf16-pure` | bf16 | no | no: updates are rounded stochastically | no |
| `fp8-rowwise`, `fp8-tensorwise`, `fp8-rowwise-gw-hp` | bf16, products of linear layers in float8 | no | yes | no |
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from .errors import PlanError

MASTER_BYTES = 4  # of one parameter in fp32
TILED_ELEMENTS = 1 << 24  # of parameters that a host steps at once, at most, all its threads together
ROUNDED_ELEMENTS = 1 << 24  # of weights without masters, updated in fp32 at once
# Of parameters stepped in one call, unless one is larger. Each tensor that a call makes is then at most 256 MiB in
# fp32, and a pass over that many takes a GPU about a millisecond, some hundred times the launch of a kernel.
PORTION_ELEMENTS = 1 << 26

GradientDtype = Literal["fp32", "compute"]
BoundaryDtype = Literal["compute", "fp32"]
Arithmetic = Literal["fp32", "bf16", "fp16"]  # a kind of arithmetic that a device has a rate for


@dataclass(frozen=True)
class Precision:
    """The types of a step's numbers. `scales_loss`: gradients overflow or vanish unless the loss is scaled, so that an
    update counts only where the norm of all gradients is finite."""

    name: str
    arithmetic: Arithmetic
    dtype: torch.dtype  # in which a step computes
    autocasts: bool = False  # torch.autocast chooses the type of each call; else all calls take what they are given
    has_masters: bool = False  # the optimizer updates fp32 copies of the weights
    scales_loss: bool = False
    float8: str = ""  # torchao's recipe by which products of linear layers are in float8; "" for none

    @staticmethod
    def of(word: object) -> Precision:
        """The precision of this name or alias. Raises `PlanError` for another word, with the nearest name."""
        known = ALIASES.get(word, word) if isinstance(word, str) else word
        if isinstance(known, str) and known in PRECISIONS:
            return PRECISIONS[known]
        near = difflib.get_close_matches(str(word).lower(), [*PRECISIONS, *ALIASES], 1, 0.0)[0]
        names = ", ".join(f'"{name}"' for name in PRECISIONS)
        raise PlanError(f'precision={word!r}; allowed are {names}; the nearest is "{ALIASES.get(near, near)}"')

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The type of weights and of one micro-batch's gradients; None in fp32, which leaves a model's own types as
        they are."""
        return None if self.dtype == torch.float32 else self.dtype

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast lowers calls to; None without autocast."""
        return self.dtype if self.autocasts else None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The type that floating inputs of the model's forward are cast to; None where they stay as they are."""
        return None if self.autocasts else self.low_dtype

    @property
    def is_pure(self) -> bool:
        """Whether low weights are all there is, so that an update must be rounded without losing small changes."""
        return self.low_dtype is not None and not self.has_masters

    @property
    def master_bytes(self) -> int:
        """Bytes of the master of one trained parameter; 0 without masters."""
        return MASTER_BYTES if self.has_masters else 0

    def sum_dtype(self, micro_batches: int, wish: str = "fp32") -> torch.dtype | None:
        """The type in which gradients of low weights are added up over all micro-batches of a step, those of replicas
        included: fp32 where there are several, unless the wish is "compute". None: that of the weights."""
        wide = self.low_dtype is not None and micro_batches > 1 and wish == "fp32"
        return torch.float32 if wide else None

    def boundary_dtype(self, wish: str = "compute") -> torch.dtype | None:
        """The type, between stages, of activations that autocast leaves in fp32; None where they stay as they are."""
        return self.autocast_dtype if wish == "compute" else None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which a model computes on this device."""
        return torch.autocast(device.type, self.dtype) if self.autocasts else nullcontext()


PRECISIONS: Mapping[str, Precision] = {
    row.name: row
    for row in (
        Precision("fp32", "fp32", torch.float32),
        Precision("bf16-mixed", "bf16", torch.bfloat16, autocasts=True, has_masters=True),
        Precision("fp16-mixed", "fp16", torch.float16, autocasts=True, has_masters=True, scales_loss=True),
        Precision("bf16-true", "bf16", torch.bfloat16, has_masters=True),
        Precision("bf16-pure", "bf16", torch.bfloat16),
        Precision("fp8-rowwise", "bf16", torch.bfloat16, has_masters=True, float8="rowwise"),
        Precision("fp8-tensorwise", "bf16", torch.bfloat16, has_masters=True, float8="tensorwise"),
        Precision("fp8-rowwise-gw-hp", "bf16", torch.bfloat16, has_masters=True, float8="rowwise_with_gw_hp"),
    )
}
FP32 = PRECISIONS["fp32"]
# Words of earlier plans, and of the user.
ALIASES: Mapping[str, str] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-rowwise"}
