"""The plan: every decision and nothing else, as a document that a user may save, edit and compile again.

The predicted figures and the rivals are kept beside the decisions; the plan's hash covers the decisions alone, so equal
hashes give equal files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..ir.documents import Unreadable, other_fields, plain_errors, read_json
from ..ir.errors import PlanError
from ..ir.precision import BoundaryDtype, GradientDtype, Precision
from ..passes.table import PASSES, decisions_of
from .strategies import STRATEGIES

SAME_PLAN = "the same plan as "  # begins the reason of a rival that came to another one's plan


def _precision(word: str) -> str:
    try:
        return Precision.of(word).name
    except PlanError as error:
        raise ValueError(str(error)) from None


PrecisionName = Annotated[str, AfterValidator(_precision)]  # files of earlier versions have aliases


@dataclass(frozen=True)
class Savings:
    """Shares of a step that could be saved at most: `in_all`, of which `by_plan` by another plan with the same kernels
    and micro-batches, `by_fusing` by kernels that fuse what only reads and writes, and the rest at peak rates."""

    in_all: float
    by_plan: float
    by_fusing: float

    @property
    def text(self) -> str:
        parts = f"at most {self.by_plan:.0%} by another plan, {self.by_fusing:.0%} by fused kernels (--kernels fused)"
        return f"no run on this machine could save more than {self.in_all:.0%} of it: {parts}, the rest at peak rates"


class Prediction(BaseModel):
    """The simulated step: seconds, and bytes per memory and per link."""

    model_config = ConfigDict(extra="forbid")
    step_s: float  # of one among many
    from_rest_s: float | None = None  # of one that begins when all before have ended; None: the same
    peak_bytes: dict[str, int]
    budget_bytes: dict[str, Annotated[int, Field(gt=0)]]
    moved_bytes: dict[str, int]
    busy: dict[str, float]  # "gpu0 compute" -> share of the step
    bottleneck: str
    arena_bytes: list[int]  # per device, part of its peak
    parts: dict[str, dict[str, int]] = {}  # a host's memory -> purpose -> bytes at the memory's peak in a step
    loading_bytes: dict[str, int] = {}  # a host's DRAM -> all its bytes while weights are loaded
    copied_bytes: dict[str, int] = {}  # memory -> bytes that are copied inside it, so that steps may be undone
    bound_s: float = 0.0  # no step of the model on this machine takes less, whatever its kernels and micro-batches
    bound_by: str = ""
    fused_bound_s: float = 0.0  # the same, with the rates that fused kernels reach
    eager_bound_s: float = 0.0  # no plan with PyTorch's own kernels and the same micro-batches takes less
    eager_bound_by: str = ""

    @property
    def savings(self) -> Savings | None:
        """The shares of a step that could be saved at most; None where a plan of an earlier version has no bounds."""
        if not self.eager_bound_s:
            return None
        levels = [self.step_s]
        for bound_s in (self.eager_bound_s, self.fused_bound_s, self.bound_s):
            levels.append(min(bound_s, levels[-1]))
        whole_s, eager_s, fused_s, least_s = levels
        return Savings(1 - least_s / whole_s, 1 - eager_s / whole_s, (eager_s - fused_s) / whole_s)

    @model_validator(mode="after")
    def _same_memories(self) -> Prediction:
        if self.peak_bytes.keys() != self.budget_bytes.keys():
            raise ValueError("peak_bytes and budget_bytes are of different memories")
        return self


class Rival(BaseModel):
    """A candidate that was not chosen, and why. `passes`: its pipeline, to compile it after all."""

    model_config = ConfigDict(extra="forbid")
    name: str
    step_s: float | None = None
    reason: str
    passes: str = ""
    micro_batches: int | None = None

    @property
    def same_as(self) -> str:
        """The candidate to whose plan this one came, by the reason's text; empty for a rival with a plan of its own."""
        before, _, other = self.reason.partition(SAME_PLAN)
        return "" if before else other

    @property
    def strategy(self) -> str:
        """The strategy's name; empty for a candidate without one."""
        label = self.name.rpartition(", ")[0]
        return label if label in STRATEGIES else ""


DECISIONS = decisions_of(PASSES.values())

if TYPE_CHECKING:  # which fields there are depends on the passes

    class Decisions(BaseModel):
        """A value for each decision of the passes."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Decisions = pydantic.create_model(
        "Decisions",
        __config__=ConfigDict(extra="forbid"),
        __module__=__name__,
        __doc__="A value for each decision of the passes.",
        **{decision.name: (decision.type, decision.default) for decision in DECISIONS},
    )


class Plan(BaseModel):
    """See the module's docstring. `passes` is the pipeline as text, `strategy` the name that the user asked for."""

    model_config = ConfigDict(extra="forbid")
    model: str
    hardware: str
    strategy: str
    passes: str
    micro_batches: int = Field(gt=0)
    precision: PrecisionName = "fp32"
    gradient_dtype: GradientDtype = "fp32"  # in which gradients of several micro-batches are added up
    boundary_dtype: BoundaryDtype = "compute"  # of activations between stages that autocast leaves in fp32
    max_grad_norm: float | None = None
    decisions: Decisions
    predicted: Prediction | None = None
    rivals: list[Rival] = []
    notes: dict[str, str] = {}  # pass -> its remark: a proven gap, a solver that was missing

    @property
    def hash(self) -> str:
        """Six hexadecimal digits over the decisions."""
        usual = {name for name in ("gradient_dtype", "boundary_dtype") if name not in self._unusual()}
        decided = self.model_dump(exclude={"predicted", "rivals", "hardware", "notes", *usual})
        for decision in DECISIONS:
            value = getattr(self.decisions, decision.name)
            if not decision.hashed and value == decision.default:
                decided["decisions"].pop(decision.name)
            for name in getattr(value, "unhashed", ()):
                if getattr(value, name) == type(value).model_fields[name].default:
                    decided["decisions"][decision.name].pop(name, None)
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:6]

    def _unusual(self) -> set[str]:
        fields = type(self).model_fields
        return {name for name, value in self if value != fields[name].default}

    def distinct_rivals(self) -> tuple[list[Rival], int]:
        """Rivals, the fastest first and those without a step last, and the number of others, which came to the same
        plan as one of these. Named strategies are always among the rivals."""
        rows = [rival for rival in self.rivals if rival.strategy or not rival.same_as]
        return sorted(rows, key=lambda r: (r.step_s is None, r.step_s)), len(self.rivals) - len(rows)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Raises `PlanError` naming the key that is missing, unknown or wrong."""
        try:
            return Plan.model_validate(read_json(path))
        except Unreadable as error:
            raise PlanError(f"plan {path}: {error}") from error
        except pydantic.ValidationError as error:
            raise PlanError(
                f"plan {path}: {plain_errors(error)}{other_fields(error)}; leave plan out to search anew"
            ) from error

    @staticmethod
    def from_any(given: Any) -> Plan:
        if isinstance(given, Plan):
            return given
        if isinstance(given, (str, Path)):
            return Plan.load(given)
        raise PlanError(f"plan must be a Plan or the path of one; found {type(given).__name__}")
