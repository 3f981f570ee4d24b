"""Whether forward does at its second call what it did at its first: a program repeats the first one for ever.

In: a finished `Recorder`, with the model as the recorded forward left it. What forward reads beside its inputs and the
model's tensors (a counter, the clock, a global variable, a tensor kept from the last call) would be frozen at its
traced value. Such a forward is refused; one that keeps what it need not compute again is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....graph.dataflow import Dataflow
from ....graph.opgraph import is_mode_switch
from ....ir.calls import function_name
from ....ir.errors import CaptureError
from ..calls import RecordedCall
from ..python_state import REMEDY, State, changes, describe_attribute, require_kept, state_of
from ..recorder import ClassOfOneCall, Recorder
from ..replay import Misaligned, Replay, same
from ..rows.sizes import plain


def require_repeatable(
    recorder: Recorder, run: Callable[[Recorder], dict[str, torch.Tensor]], nodes: dict[str, fx.Node], before: State
) -> None:
    """Call forward again, by `run`. Raises CaptureError if it does something else than what was recorded, or if plain
    attributes of its modules change at every call: those would stay as they were `before` the first.

    An attribute that changes at the first call only, and changes nothing in the second, is a cache.
    """
    held = recorder.held
    after = state_of(held.modules)
    held.begin_again()
    held.caches.forget_by_tensor()  # the second forward is handed the tensors of the first
    repeat = Repeat(recorder)
    try:
        repeat.finish(run(repeat), nodes)
    except ClassOfOneCall:
        raise
    except CaptureError as error:
        raise CaptureError(_depends(str(error), before, after)) from error
    except Misaligned as error:
        raise CaptureError(_depends(str(error), before, after)) from None
    again = state_of(held.modules)
    require_kept(before, after, again)


def _depends(difference: str, before: State, after: State) -> str:
    keys = changes(before, after)
    names = ", ".join(describe_attribute(key, before, after) for key in keys[:3])
    cause = (
        f"forward changes {names}" if keys else "it reads a global variable, the clock, or a tensor of its last call"
    )
    return f"{difference}\n  forward does not do the same twice; {cause}: {REMEDY}"


class Repeat(Replay):
    """Runs forward in the mode in which it was recorded; anything else than the recorded calls is `Misaligned`.

    What follows from no input and from no tensor of the model is the same at every call: forward may have kept it.
    """

    now, then = "the second forward", "the first"

    def __init__(self, recorded: Recorder):
        constant = _constants(recorded)
        super().__init__(recorded, {step for step in recorded.steps if step in constant or is_mode_switch(step)})
        self.rows = None  # plain numbers where sizes were followed, since Python can tell these apart by their types
        self.constant = constant
        for node in constant:
            self.bind(node, node.meta["val"])

    def _next(self, call: RecordedCall, args: Any, kwargs: Any) -> fx.Node | None:
        for position in range(self.position, len(self.recorded.steps)):
            step = self.recorded.steps[position]
            alike = step.op == call.kind and step.target == call.target
            if alike and (step not in self.unused or self._repeats(step, args, kwargs)):
                self._require_modes(step)
                self.position = position + 1
                return step
            if step not in self.unused:
                return None
        return None

    def _is_kept(self, result: Any, touched: list[tuple[fx.Node, torch.Tensor, int]]) -> bool:
        return any(result is tensor and node in self.constant for node, tensor, _ in touched)

    def _repeats(self, step: fx.Node, args: Any, kwargs: Any) -> bool:
        return same(plain((args, kwargs)), plain((step.args, step.kwargs)))

    def _require_modes(self, step: fx.Node) -> None:
        if is_mode_switch(step):  # what matters is under which modes the other calls run
            return
        if step.meta["no_grad"] == torch.is_grad_enabled() or step.meta["autocast"] != self.autocasts[-1][1]:
            raise Misaligned(f"{self.lines.where()}\n  {step.target} runs under other modes than at first")

    def _differ(self, step: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        given, first = _numbers(*plain((args, kwargs))), _numbers(*plain((step.args, step.kwargs)))
        values = "; ".join(f"{found!r}, at first {old!r}" for found, old in zip(given, first) if not same(found, old))
        name = function_name(step.target, str(step.target))
        raise Misaligned(f"{self.lines.where()}\n  {name} is given {values or 'other tensors than at first'}")


def _numbers(*args: Any) -> list[Any]:
    """The plain arguments of a call, in order."""
    found: list[Any] = []
    for value in args:
        if isinstance(value, dict):
            found += _numbers(*value.values())
        elif isinstance(value, (tuple, list)):
            found += _numbers(*value)
        elif not isinstance(value, fx.Node):
            found.append(value)
    return found


def _constants(recorded: Recorder) -> set[fx.Node]:
    """The nodes whose values follow from no input, no tensor that the model registers and no random draw."""
    nodes = recorded.graph.nodes
    computed = [n for n in nodes if n.op in ("call_function", "call_method") and not n.meta["random"]]
    given = set(nodes).difference(computed, (n for n in nodes if n.op == "get_attr" and n.target in recorded.constants))
    return set(nodes) - Dataflow(nodes).descendants(given)
