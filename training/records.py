"""Makes a `StepRecord` of each ended step of a job, without waiting for any.

The work of a step is that of the model's forward and backward on the largest batch, computed once: recomputation, the
optimizer and transfers do not count, so that the utilisation says what a plan loses to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..compiler.job.job import Job
from ..compiler.job.step_report import StepReport
from ..compiler.report.wear import endurance_of
from ..ir.precision import Precision
from .listener import StepRecord


class StepRecords:
    """`written_bytes`: what the run's steps have written to each host's SSDs; checkpoints do not count."""

    def __init__(self, job: Job):
        self.job = job
        self.written_bytes: Counter[int] = Counter()
        self._flops, self._peak_flops = step_flops(job), peak_flops(job)
        self._tokens: dict[int, int] = {}  # of steps whose report has not come

    def count_step(self, tokens: int) -> None:
        """Note the tokens of the step that the job has just made."""
        self._tokens[self.job.step_count] = tokens

    def take(self) -> list[StepRecord]:
        """The records of the steps that have ended since the last call."""
        return [self._record(report) for report in self.job.take_reports()]

    def state(self) -> dict[str, int]:
        """The counts that a checkpoint stores, so that a resumed run continues them."""
        return {str(host): written for host, written in self.written_bytes.items()}

    def load(self, state: Mapping[str, int]) -> None:
        """The reverse of `state`."""
        self.written_bytes = Counter({int(host): written for host, written in state.items()})

    def _record(self, report: StepReport) -> StepRecord:
        for route, num_bytes in report.moved_bytes.items():
            target = route.rpartition(" -> ")[2]
            if target.startswith("ssd"):
                self.written_bytes[self.job.hardware.host_of(target)] += num_bytes
        tokens = self._tokens.get(report.step, 0)
        self._tokens = {step: count for step, count in self._tokens.items() if step > report.step}
        return StepRecord(
            step=report.step,
            loss=report.loss,
            seconds=report.seconds,
            tokens=tokens,
            learning_rates=report.learning_rates,
            gradient_norm=report.gradient_norm,
            predicted_s=report.predicted_s,
            model_flops_utilisation=self._utilisation(report.seconds),
            busy_share=report.busy_share,
            moved_bytes=report.moved_bytes,
            peak_bytes=report.peak_bytes,
            ssd_written_bytes=self.written_bytes.total(),
            ssd_wear_share=self._wear_share(),
        )

    def _utilisation(self, seconds: float) -> float | None:
        if self._flops is None or self._peak_flops is None or seconds <= 0:
            return None
        return self._flops / (seconds * self._peak_flops)

    def _wear_share(self) -> float | None:
        """That of the host whose SSDs are worn most; None unless the hardware has the endurance of all written to."""
        shares = []
        for host, written in self.written_bytes.items():
            endurance_bytes = endurance_of(self.job.hardware.hosts[host])
            if endurance_bytes is None:
                return None
            shares.append(written / endurance_bytes)
        return max(shares, default=None)


def step_flops(job: Job) -> float | None:
    """The model's own work in one step, over all devices; None where batches have any size, so that it differs."""
    interface = job.folder.interface
    if interface.sizes:
        return None
    one = sum(spec.forward_flops + spec.backward_flops for spec in interface.stages.values())
    return one * interface.total_micro_batches or None


def peak_flops(job: Job) -> float | None:
    """The peak FLOP/s of all devices of the plan in the arithmetic of its precision; None where the hardware document
    lacks that of one."""
    dtype = Precision.of(job.plan.precision).arithmetic
    devices = job.hardware.devices[: job.folder.interface.world_size]
    rates = [rate for device in devices if (rate := device.peak_flops.get(dtype)) is not None]
    return sum(rates) if len(rates) == len(devices) else None
