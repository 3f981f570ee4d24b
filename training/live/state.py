"""The state of a run that all views show, collected from the events that listeners receive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from ...ir import ops
from ..listener import Listener, OfferRecord, RunFacts, StepRecord
from .curve import Curve

RECENT = 20  # the number of steps over which figures are averaged
MOST_EVALUATIONS = 200  # that are kept
WAITING = (ops.SEND, ops.RECV, ops.COMM)  # streams that are busy while they wait for other devices
ORDER = (ops.COMPUTE, *(stream for stream in ops.STREAMS if stream not in (ops.COMPUTE, ops.HOST)), ops.HOST)
PREPARING, TRAINING, ENDED, INTERRUPTED = "preparing", "training", "ended", "interrupted"


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Figures of steps are those of the last `RECENT` ones."""

    phase: str = PREPARING
    run: RunFacts | None = None
    last: StepRecord | None = None
    step: int = 0
    loss: float | None = None
    step_s: float | None = None  # by the devices' clocks
    tokens_per_s: float | None = None  # with the time between steps, for data and checkpoints
    remaining_s: float | None = None
    busy_share: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # device -> kind of stream -> share
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # memory -> the highest peak of the run
    curve: list[tuple[float, float]] = field(default_factory=list)  # steps and losses
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    offer: OfferRecord | None = None  # the last one
    version: int = 0  # grows with all that is told

    @property
    def total_steps(self) -> int:
        return 0 if self.run is None else self.run.total_steps

    @property
    def limit_bytes(self) -> Mapping[str, int]:
        return {} if self.run is None else self.run.limit_bytes

    @property
    def predicted_s(self) -> float | None:
        found = None if self.last is None else self.last.predicted_s
        return found if found is not None or self.run is None else self.run.predicted_s

    @property
    def slowest(self) -> tuple[str, str, float] | None:
        """The device, with its stream and the share, that is busiest with work of its own: the others wait for it."""
        own = [
            (share, device, stream)
            for device, shares in self.busy_share.items()
            for stream, share in shares.items()
            if stream not in WAITING
        ]
        if not own:
            return None
        share, device, stream = max(own, key=lambda row: round(row[0], 4))  # the first of equals
        return device, stream, share


class RunState(Listener):
    """Notes what it is told; any thread may ask for a `snapshot`. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._lock = threading.Lock()
        self._phase, self._version = PREPARING, 0
        self._run: RunFacts | None = None
        self._records: deque[StepRecord] = deque(maxlen=RECENT)
        self._told_s: deque[float] = deque(maxlen=RECENT)  # when each of the records came
        self._peak_bytes: dict[str, int] = {}
        self._curve = Curve()
        self._evaluations: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_EVALUATIONS)
        self._offer: OfferRecord | None = None

    def begin(self, run: RunFacts) -> None:
        with self._lock:
            self._phase, self._run = TRAINING, run
            self._version += 1

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._records.append(record)
            self._told_s.append(self.clock())
            self._curve.add(record.step, record.loss)
            for memory, peak in record.peak_bytes.items():
                self._peak_bytes[memory] = max(peak, self._peak_bytes.get(memory, 0))
            self._version += 1

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            if self._evaluations and self._evaluations[-1][0] == step:  # such as at the end of a run
                self._evaluations.pop()
            self._evaluations.append((step, dict(metrics)))
            self._version += 1

    def offered(self, offer: OfferRecord) -> None:
        with self._lock:
            self._offer = offer
            self._version += 1

    def end(self, interrupted: bool = False) -> None:
        with self._lock:
            self._phase = INTERRUPTED if interrupted else ENDED
            self._version += 1

    @property
    def version(self) -> int:
        return self._version

    def snapshot(self) -> Snapshot:
        with self._lock:  # which `step` waits for, so that no more than copies are made
            records, told_s = list(self._records), list(self._told_s)
            phase, run, version, offer = self._phase, self._run, self._version, self._offer
            peak_bytes, evaluations = dict(self._peak_bytes), list(self._evaluations)
            curve = self._curve.points()
        done = run.done_steps if run is not None else 0
        if not records:
            return Snapshot(phase, run, step=done, evaluations=evaluations, offer=offer, version=version)
        last = records[-1]
        elapsed_s = told_s[-1] - told_s[0]
        if elapsed_s > 0:
            each_s = elapsed_s / (last.step - records[0].step)
            tokens_per_s = sum(record.tokens for record in records[1:]) / elapsed_s
        else:
            each_s, tokens_per_s = last.seconds, last.tokens_per_s
        return Snapshot(
            phase=phase,
            run=run,
            last=last,
            step=last.step,
            loss=fmean(record.loss for record in records),
            step_s=median(record.seconds for record in records),
            tokens_per_s=tokens_per_s,
            remaining_s=None if run is None else max(0, run.total_steps - last.step) * each_s,
            busy_share=_mean_shares(records),
            peak_bytes=peak_bytes,
            curve=curve,
            evaluations=evaluations,
            offer=offer,
            version=version,
        )


def _mean_shares(records: list[StepRecord]) -> dict[str, dict[str, float]]:
    """The mean share of each kind of stream; of several streams of one kind, for example to each peer, the busiest
    counts. Computation comes first."""
    last = records[-1].busy_share
    means: dict[str, dict[str, float]] = {}
    for device, streams in last.items():
        kinds = means.setdefault(device, {})
        for stream in streams:
            share = fmean(record.busy_share.get(device, {}).get(stream, 0.0) for record in records)
            kind = stream.split()[0]
            kinds[kind] = max(min(share, 1.0), kinds.get(kind, 0.0))  # two clocks may make it a little more
    return {device: dict(sorted(kinds.items(), key=_place)) for device, kinds in means.items()}


def _place(kind: tuple[str, float]) -> int:
    return ORDER.index(kind[0]) if kind[0] in ORDER else len(ORDER)
