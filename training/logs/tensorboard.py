"""A log that TensorBoard shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ir.errors import PlanError
from ..listener import OfferRecord, RunFacts, StepRecord
from .queued import QueuedListener
from .scalars import offer_scalars, scalars

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_S = 10


class TensorBoardLog(QueuedListener):
    """Writes DIRECTORY/tensorboard. A resumed run replaces what an earlier one showed of later steps. All figures of a
    step are one event."""

    name = "tensorboard"
    _writer: EventFileWriter

    def open(self, run: RunFacts) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_kind, self._summary_kind = Event, Summary
        path = self.directory / "tensorboard"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(path), flush_secs=FLUSH_S)
        except OSError as error:
            raise PlanError(f"the log {path} cannot be written: {error.strerror}") from error
        if run.done_steps:
            self._add(run.done_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write_step(self, record: StepRecord) -> None:
        self._add_scalars(record.step, scalars(record))

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add_scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def write_offer(self, offer: OfferRecord) -> None:
        self._add_scalars(offer.step, offer_scalars(offer))

    def write_end(self, interrupted: bool) -> None:
        self._writer.close()

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        kind = self._summary_kind.Value
        rows = [kind(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summary_kind(value=rows))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event_kind(wall_time=self.time_s, step=step, **what))
