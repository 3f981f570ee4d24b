"""The outcome of a candidate: its step, or why it has none; and its text among the plan's rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...ir import ops
from ...ir.errors import DoesNotFit, PenstockError, PlanError, VerifyError
from ...ir.units import format_bytes, format_seconds
from ..plan import SAME_PLAN, Rival
from .candidate import Candidate
from .host_memory import tier_of


class Skipped(Enum):
    """The reasons not to look at a candidate."""

    OUT_OF_TIME = "not tried: out of time"
    NO_GAIN = "not tried: the plans before it gained nothing"
    NO_SSDS = "needs SSDs, of which there are none"
    NO_COPIES = "needs three equal devices or more, two micro-batches, and stages that no lane shares"
    NEAR_BOUND = "ruled out: the best is within 1 % of what no plan undercuts"
    NOT_WORTH_IT = "not tried: over all steps it could save less than the search has taken"


@dataclass(frozen=True)
class Pruned:
    """No schedule of its stages has a shorter step than this, which is no better than the best, because of `by`."""

    bound_s: float
    by: str = ""


@dataclass(frozen=True)
class SamePlan:
    """It comes to the same programs as the trial of this name."""

    name: str


@dataclass(frozen=True)
class Trial:
    """A candidate with a number of micro-batches: its step, or a reason why there is none."""

    candidate: Candidate
    count: int  # of micro-batches
    step_s: float | None = None
    reason: Skipped | Pruned | SamePlan | PenstockError | None = None
    swapped: bool = False  # some stage's weights come from DRAM
    all_swapped: bool = False  # no stage's weights stay on a device
    keeps_all: bool = False  # weights stay on their devices, and nothing is computed again
    alone_on_links: bool = False  # no two devices fetch weights through the same root complex
    cut: str = ""  # equal for the same stages

    @property
    def name(self) -> str:
        return self.candidate.title(self.count)

    def rival(self, best_s: float) -> Rival:
        """As a row of the plan. `best_s`: the chosen plan's step."""
        return Rival(
            name=self.name,
            step_s=self.step_s,
            reason=self._why_not(best_s),
            passes=self.candidate.text,
            micro_batches=self.count,
        )

    def _why_not(self, best_s: float) -> str:
        match self.reason:
            case Skipped():
                return self.reason.value
            case Pruned(bound_s, by):
                return f"pruned: cannot be below {format_seconds(bound_s)}{f' ({by})' if by else ''}"
            case SamePlan(name):
                return f"{SAME_PLAN}{name}"
            case PenstockError():
                return why_not(self.reason)
        assert self.step_s is not None
        slower = self.step_s / best_s - 1
        return "as fast, and moves no less" if slower <= 0 else f"{slower:.1%} slower ({format_seconds(self.step_s)})"


def why_not(error: PenstockError) -> str:
    """One line: which memory lacks how much, or the whole message where it says more than that. What the verifier shows
    of a program says nothing to a person who reads about another one."""
    if isinstance(error, VerifyError):
        return f"refused by the verifier: {str(error).splitlines()[0].rstrip(':')}"
    if isinstance(error, DoesNotFit) and error.memory not in ("", ops.DEVICE) and error.missing_bytes:
        return f"does not fit: {error.memory} lacks {format_bytes(error.missing_bytes)}"
    text = " ".join(str(error).split())
    return f"does not fit: {text}" if isinstance(error, DoesNotFit) else text


def errors_of(trials: Sequence[Trial]) -> list[PenstockError]:
    return [trial.reason for trial in trials if isinstance(trial.reason, PenstockError)]


def nearest_miss(errors: Sequence[PenstockError]) -> PenstockError:
    """The error with the fewest missing bytes, or the first one that is not about memory. A plan that lacks DRAM fits
    every device, and no other plan needs much less DRAM, so the bytes that a worse cut lacks on a device would mislead.
    Likewise a plan that lacks SSDs has come further than one that lacks DRAM."""
    if not errors:
        return PlanError("no candidate could be built for this model and hardware")
    short = [error for error in errors if isinstance(error, DoesNotFit)]
    for tier in (ops.SSD, ops.DRAM, ops.DEVICE):
        if found := [error for error in short if tier_of(error.memory) == tier]:
            return min(found, key=lambda error: error.missing_bytes or 1 << 62)
    return errors[0]


def smallest_step(errors: Sequence[PenstockError], memory_bytes: int) -> PenstockError:
    """The error with the fewest missing bytes; one without that number counts as an eighth of the memory."""
    found = nearest_miss(errors)
    vague = [e for e in errors if isinstance(e, DoesNotFit) and e.memory in ("", ops.DEVICE) and not e.missing_bytes]
    if not isinstance(found, DoesNotFit) or tier_of(found.memory) != ops.DEVICE:
        return found
    return vague[0] if vague and found.missing_bytes > memory_bytes // 8 else found
