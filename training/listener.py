"""Events of a training run and their listeners: loggers, live views and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """The facts known before the first step. `config` is plain data; `predicted_s` of a step."""

    name: str
    directory: str
    total_steps: int
    done_steps: int = 0
    rows_per_step: int = 0
    predicted_s: float | None = None
    limit_bytes: Mapping[str, int] = field(default_factory=dict)  # memory -> its budget
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One step that has ended. Bytes are per memory or route, over all devices; shares are of `seconds`."""

    step: int
    loss: float
    seconds: float
    tokens: int
    learning_rates: tuple[float, ...] = ()  # of each group of parameters
    gradient_norm: float | None = None
    predicted_s: float | None = None
    model_flops_utilisation: float | None = None
    busy_share: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # device -> stream -> share
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # route -> bytes
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # memory -> bytes
    ssd_written_bytes: int = 0  # since the run began
    ssd_wear_share: float | None = None  # of the life of the SSDs, since the run began

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class OfferRecord:
    """A faster plan for the machine as it was up to `step`: `times` is how many times as long as planned each slow
    device takes; `before_s` and `after_s` are simulated steps there of the plan at hand and of `plan`, a hash. `text`
    says so in a sentence, `how` what takes the plan."""

    step: int
    times: Mapping[str, float]
    before_s: float
    after_s: float
    plan: str
    text: str
    how: str


class Listener:
    """Is told of a run, in the order of these methods. A listener does nothing that a step would wait for."""

    def begin(self, run: RunFacts) -> None:
        """Before the first step."""

    def step(self, record: StepRecord) -> None:
        """After a step has ended, while the next one may already run."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation on held-out rows."""

    def offered(self, offer: OfferRecord) -> None:
        """After a look at the run in which a device was slower than planned, where another plan is faster."""

    def flush(self) -> None:
        """Waits until all that it was told is shown or written."""

    def end(self, interrupted: bool = False) -> None:
        """After the last step, also when the run broke off. Called once."""
