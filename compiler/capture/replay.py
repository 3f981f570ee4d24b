"""Evaluation mode of a recorded graph: run the model once more in eval mode against the recording, without computing.

In: a finished `Recorder`. Out: `eval_args`/`eval_kwargs` meta on the nodes whose arguments differ (dropout flags and
probabilities), or the first place where evaluation does something else. Each call is matched with the next recorded
one and handed the recorded fake result, so the second pass costs only the model's own Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ...graph.edit import evaluation_of, set_evaluation
from ...graph.opgraph import value_tensors
from ...ir.calls import function_name
from ...runtime.torch_names import DisableTorchFunction, set_grad_enabled, tree_map_only
from .calls import RecordedCall
from .recorder import Recorder
from .rows.sizes import NumberSlot, SizeSlot, plain
from .writer import has_tensor


class Misaligned(Exception):
    """Evaluation mode left the recorded path."""


class Replay(Recorder):
    """A recorder that compares with an earlier recording instead of writing nodes.

    `unused` are recorded nodes that nothing needs; evaluation may leave them out. `passed` are those that no later call
    repeats.
    """

    now, then = "evaluation", "training"
    is_again = True

    def __init__(self, recorded: Recorder, unused: set[fx.Node], passed: Collection[fx.Node] = ()):
        super().__init__(recorded.held, recorded.fake_mode)
        self.recorded, self.unused, self.passed = recorded, unused.union(passed), passed
        self.attributes, self.constant_of = recorded.attributes, recorded.constant_of
        self.items, self.sizes, self.lines = recorded.items, recorded.sizes, recorded.lines
        self.calls, self.values, self.viewed = recorded.calls, recorded.values, recorded.viewed
        self.placeholders = {n.target: n for n in recorded.graph.nodes if n.op == "placeholder"}
        self.rows = recorded.rows
        self.position = 0

    def placeholder(self, name: str, fake: torch.Tensor) -> None:
        self.bind(self.placeholders[name], fake)

    def add_plain(self, op: str, target: Any, args: tuple, value: Any) -> fx.Node:
        raise Misaligned(f"{self.lines.current()} uses {target}, which {self.then} does not")

    def bind(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.node_of[id(result)] = node
        self.chosen.note(node)
        for item, child in self.items.get(node, []):
            self.bind(child, item)

    def perform(
        self, call: RecordedCall, args: Any, kwargs: Any, run: Callable[..., Any] | None,
        real_args: tuple = (), real_kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Match a call with the next recorded one and return the recorded result."""
        touched, self.touched = self.touched, []
        step = self._next(call, args, kwargs)
        if run is None and step is not None:
            return step
        run = run or call.target
        exec_args, exec_kwargs = self._executable(args, kwargs, real_args, real_kwargs or {})
        if step is None:
            result = self.outcome(run, exec_args, exec_kwargs, args, kwargs)
            if self.rows is not None:
                self.rows.note_outcome(run, args, kwargs, [node for node, _, _ in touched], result)
            if self._is_kept(result, touched):
                return result
            if has_tensor(result) or any(tensor._version != version for _, tensor, version in touched):
                raise Misaligned(
                    f"{self.lines.current()}: {self.now} calls {_name(call)}, {self.then} {self._next_step_text()}"
                )
            return result
        if call.target is set_grad_enabled:
            self.run(run, exec_args, exec_kwargs)
        if not self._repeats(step, args, kwargs):
            self._differ(step, args, kwargs, self.run(run, exec_args, exec_kwargs))
        if step.meta["mutates"] and self.values is self.recorded.values:
            self._note_values(call, step, run)
        result = step.meta["val"]
        for node, tensor, _ in touched:
            if node in step.meta["mutates"] and node.meta["val"] is result:  # `x.add_(1)` returns the x of this run
                result = tensor
        self.bind(step, result)
        return tree_map_only(torch.Tensor, self._own, result) if self.viewed else result

    def _own(self, recorded: torch.Tensor) -> torch.Tensor:
        """A tensor that forward makes a view of itself is handed as another one: what is recorded keeps its shape."""
        if id(recorded) not in self.viewed:
            return recorded
        with DisableTorchFunction():
            own = self._again(recorded)
        self.know_as(own, recorded)
        return own

    def _is_kept(self, result: Any, touched: list[tuple[fx.Node, torch.Tensor, int]]) -> bool:
        """Whether a call that is not recorded gives back what was there."""
        return False

    def _repeats(self, step: fx.Node, args: Any, kwargs: Any) -> bool:
        """Whether a call has the arguments of a recorded step."""
        return same(args, step.args) and same(kwargs, step.kwargs)

    def _next(self, call: RecordedCall, args: Any, kwargs: Any) -> fx.Node | None:
        """The recorded step that this call repeats; only steps that evaluation may leave out are skipped."""
        for position in range(self.position, len(self.recorded.steps)):
            step = self.recorded.steps[position]
            if step.op == call.kind and step.target == call.target and step not in self.passed:
                self.position = position + 1
                return step
            if step not in self.unused:
                return None
        return None

    def _next_step_text(self) -> str:
        left = [step for step in self.recorded.steps[self.position :] if step not in self.unused]
        if not left:
            return "nothing more"
        return f"{function_name(left[0].target, str(left[0].target))} ({left[0].meta['source']})"

    def _differ(self, step: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        if _nodes(args, kwargs) != _nodes(step.args, step.kwargs):
            raise Misaligned(f"{self.lines.current()}: {step.target} reads other values in evaluation than in training")
        shapes = [[(t.shape, t.dtype) for t in value_tensors(value)] for value in (result, step.meta["val"])]
        if shapes[0] != shapes[1]:
            raise Misaligned(f"{self.lines.current()}: {step.target} gives other shapes in evaluation than in training")
        set_evaluation(step, (args, kwargs))

    def finish(self, outputs: dict[str, torch.Tensor], expected: dict[str, fx.Node]) -> None:
        """Check that nothing is left over and that the outputs are the recorded ones."""
        if any(step not in self.unused for step in self.recorded.steps[self.position :]):
            raise Misaligned(f"{self.now} ends where {self.then} goes on with {self._next_step_text()}")
        found = {name: self.node_of.get(id(value)) for name, value in outputs.items()}
        if found != expected:
            raise Misaligned(
                f"{self.now} returns {', '.join(found)}; {self.then} {', '.join(expected)}, or other values"
            )


class PlainEvaluation(Replay):
    """Evaluation once more, with plain numbers where sizes were followed, since Python can tell these apart by type."""

    now, then = "evaluation with plain numbers", "with sizes that are followed, evaluation"

    def __init__(self, recorded: Recorder, unused: set[fx.Node]):
        super().__init__(recorded, unused)
        self.rows = None

    def _repeats(self, step: fx.Node, args: Any, kwargs: Any) -> bool:
        return same(plain((args, kwargs)), plain(evaluation_of(step) or (step.args, step.kwargs)))

    def _differ(self, step: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        raise Misaligned(f"{self.lines.where()}\n  {step.target} gets other arguments where sizes are plain numbers")


def _name(call: RecordedCall) -> str:
    return function_name(call.target, str(call.target))


def same(a: Any, b: Any) -> bool:
    """Equal fx arguments; True and 1 differ, and a NaN equals itself."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, (SizeSlot, NumberSlot)) and isinstance(b, (SizeSlot, NumberSlot)) and a.number != b.number:
        return False
    return a is b or (type(a) is type(b) and (a == b or (a != a and b != b)))


def _nodes(*args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(args, found.append)
    return found
