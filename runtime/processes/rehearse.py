"""A rehearsal: the processes, threads, events and messages of a plan for another machine, run here in real time.

Nothing is computed or moved. A computation waits for as long as the hardware document says; a transfer or an update by
the host waits for `emulate/link_server.py`, which divides links as the simulator does. Everything else runs: the
printed files, the issuing of their ops, the streams' order and waits, memory accounts, and the matching of messages
between processes. So a rehearsal and a simulation agree if both understand the program in the same way.
"""

from __future__ import annotations

import math
import os

from ...ir.errors import PlanError
from ..device.pacing import Paces
from ..emulate.link_server import LinkServer
from ..simulate import CostModel, Span, Timeline, costs_of, simulate
from .local import LocalWorkers
from .setup import RunSetup

ROOM = "1PB"  # more than any program takes


def rehearse(setup: RunSetup, time_scale: float = 1.0) -> Timeline:
    """Run one step of the files of `setup` as a rehearsal, and return its timeline.

    With `time_scale` 10 every wait takes ten times as long and the result is divided by ten, so that Python's own time
    per op (about 0.1 ms) counts only a tenth. Raises `PlanError` for a scale that is not positive, and
    `BudgetExceeded` or `WorkerError` as a real step would.
    """
    if not (isinstance(time_scale, (int, float)) and 0 < time_scale < math.inf):
        raise PlanError(f"time_scale={time_scale!r}; it is a positive number, like 1.0 for real time")
    workers = RehearsingWorkers(setup, time_scale)
    with workers:
        return workers.rehearse()


class RehearsingWorkers(LocalWorkers):
    """Workers that only wait. The devices of several hosts all have their workers here."""

    several_hosts = True

    def __init__(self, setup: RunSetup, time_scale: float):
        self.time_scale = time_scale
        programs = [programs["step"] for programs in setup.programs]
        self.model = CostModel(setup.hardware, setup.precision)
        self.costs = costs_of(programs, self.model)
        super().__init__(setup)

    def rehearse(self) -> Timeline:
        """Run one step and return its timeline."""
        results = self._run_all("run_step", {}, {})
        peak_bytes: dict[str, int] = {}
        for result in results:
            for memory, peak in result.report["peak_bytes"].items():
                peak_bytes[memory] = peak_bytes.get(memory, 0) + peak
        found = self.timeline()
        spans = [
            Span(s.device, s.stream, s.op, s.text, s.start_s / self.time_scale, s.end_s / self.time_scale)
            for s in found.spans
        ]
        return Timeline(spans, found.device_names, peak_bytes)

    def _patience_s(self) -> float:
        """Every op waits for as long as the document says, `time_scale` times. That programs do not fit is for the
        devices to say, which know what is missing: here they would wait for each other's memory for ever."""
        programs = [programs["step"] for programs in self.setup.programs]
        roomy = self.setup.hardware.with_(memory=ROOM, dram=ROOM, shared_memory=False)
        step_s = simulate(programs, roomy, precision=self.setup.precision).step_s
        return self.setup.timeout_s + step_s * self.time_scale

    def _serve_links(self) -> LinkServer:
        address = os.path.join(self.scratch, "links")
        return LinkServer(address, self.model.links, self.costs, self.time_scale)

    def _serve_turns(self) -> None:
        """None: the link server orders the fetches that share a root complex."""

    def _paces(self, device: int) -> Paces:
        waits_s = [None if cost.flows else cost.fixed_s * self.time_scale for cost in self.costs[device]]
        assert self.link_server is not None
        return Paces(self.link_server.address, waits_s=waits_s)
