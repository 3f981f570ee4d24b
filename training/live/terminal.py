"""The view of a run in the terminal it was started from."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from ..listener import Listener, OfferRecord, RunFacts, StepRecord
from .lines import ProgressLines
from .picture import picture
from .state import RunState

REFRESHES_PER_S = 2.0
MOST_WIDTH = 120


def view_on(screen: Console) -> Listener:
    """A view that redraws itself, or lines where the screen is a file or cannot draw."""
    draws = screen.is_terminal and not screen.is_dumb_terminal and not screen.options.ascii_only
    return TerminalView(screen) if draws else ProgressLines(screen)


class TerminalView(Listener):
    """One picture, which rich's own thread draws anew below what else is printed. The last one stays."""

    def __init__(self, screen: Console, state: RunState | None = None):
        self.state = state or RunState()
        self._live = Live(self, console=screen, refresh_per_second=REFRESHES_PER_S)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        yield picture(self.state.snapshot(), min(options.max_width, MOST_WIDTH), height - 1)

    def begin(self, run: RunFacts) -> None:
        self.state.begin(run)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        self.state.step(record)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.evaluated(step, metrics)

    def offered(self, offer: OfferRecord) -> None:
        self.state.offered(offer)

    def end(self, interrupted: bool = False) -> None:
        self.state.end(interrupted)
        self._live.stop()
