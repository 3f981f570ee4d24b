"""Whether forward does the same elsewhere when it leaves out parts that are run for chosen rows alone.

In: a finished `Recorder` that ran each of these parts. Eager runs those with rows, so that what Python carries out of
one (a counter, the number of a turn, the last expert) would be frozen at its traced value. Forward runs again without
some of them, as if they had no rows, against the recording without their calls; what differs is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....ir.errors import CaptureError
from ..recorder import Recorder
from ..replay import Misaligned, same
from ..rows.sizes import plain
from .repeat import Repeat

_DRAWS = 3  # runs without some of the parts, after one without any


def require_own_parts(
    recorder: Recorder, run: Callable[[Recorder], dict[str, torch.Tensor]], nodes: dict[str, fx.Node]
) -> None:
    """Call forward again, by `run`, without parts that have no rows. Raises CaptureError if anything else changes."""
    for number in range(1 + _DRAWS if recorder.chosen.closed else 0):
        recorder.held.begin_again()
        recorder.held.caches.forget_by_tensor()
        again = WithoutParts(recorder, random.Random(number) if number else None)
        try:
            again.finish(run(again), nodes)
        except (CaptureError, Misaligned) as error:
            reason = f"forward does something else elsewhere when it leaves such a part out: {error}"
            raise CaptureError(f"{again.last.text}\n  {reason}") from error


class WithoutParts(Repeat):
    """Runs forward without parts that `draw` chooses, or without all of them."""

    def __init__(self, recorded: Recorder, draw: random.Random | None):
        super().__init__(recorded)
        self.draw, self.spans = draw, {span.path: span for span in recorded.chosen.closed}
        self.last = recorded.chosen.closed[0]  # the part that was left out last
        self.same_as: dict[fx.Node, fx.Node] = {}  # what parts that are left out write back -> what it was before

    def leaves_out(self, path: tuple[int, ...]) -> bool:
        """Go on after the recorded calls of a part, or run it."""
        span = self.spans.get(path)
        left = [] if span is None else self.recorded.steps[self.position : span.steps.start]
        if span is None or not self.unused.issuperset(left):
            raise Misaligned(self.lines.where())
        if self.draw is not None and self.draw.random() < 0.5:
            return False
        self.position, self.last = max(self.position, span.steps.stop), span
        results = self.recorded.chosen.results
        for step in self.recorded.steps[span.steps.start : span.steps.stop]:
            if (before := results.get(step)) is not None:
                self.same_as[step] = self.same_as.get(before, before)
        return True

    def _repeats(self, step: fx.Node, args: Any, kwargs: Any) -> bool:
        given, recorded = (fx.map_arg(each, self._value) for each in ((args, kwargs), (step.args, step.kwargs)))
        return same(plain(given), plain(recorded))

    def _value(self, node: fx.Node) -> fx.Node:
        return self.same_as.get(node, node)
