"""The prologue of another batch: forward runs once more, on its values, against the recording.

In: a recording of forward whose values were lent, and the values of a batch. Out: what its prologue hands to the
program. The calls of the prologue are made for real; every other call must be the recorded one, with the same numbers,
and is handed the recorded result, so that a run costs only the model's own Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ....graph.opgraph import value_tensors
from ....ir.calls import function_name
from ....runtime.torch_names import DisableTorchFunction, tree_map_only, unset_fake_temporarily
from ..calls import RecordedCall, is_random
from ..recorder import NeedsValue, Recorder
from ..replay import Misaligned, Replay, same
from ..values.known import KnownValues, reads_form
from ..writer import has_tensor
from .nodes import PrologueNodes


class PrologueReplay(Replay):
    """Runs forward on the values of a batch. `found`: by each output of the recorded prologue, its value."""

    now, then = "this batch", "the example"

    def __init__(self, recorded: Recorder, unused: set[fx.Node], values: Mapping[str, torch.Tensor]):
        super().__init__(recorded, unused, recorded.prologue.calls)
        self.given, self.found = values, dict[fx.Node, torch.Tensor]()
        self.values, self._fake_of = KnownValues(), dict[int, torch.Tensor]()  # id(value) -> the fake of it
        self.prologue = PrologueNodes(self.values, self.lines)
        with recorded.values.from_the_start():
            for fake, _ in self.constant_of.values():
                if recorded.values.knew(fake):
                    self._know(fake, recorded.values.last_value(fake).clone())

    def lend(self, values: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        for name, value in self.given.items():
            self._know(inputs[name], value.clone())

    def perform(
        self, call: RecordedCall, args: Any, kwargs: Any, run: Callable[..., Any] | None,
        real_args: tuple = (), real_kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        operands = (real_args, real_kwargs or {})
        if reads_form(function_name(call.target)) and real_args and not self.values.knows(real_args[0]):
            operands = (self.values.form_of(real_args[0]), *real_args[1:]), real_kwargs or {}
        before, touched = self.position, self.touched
        if run is None or call.kind == "call_module" or is_random(call, *operands) or not self._knows_all(operands):
            result = super().perform(call, args, kwargs, run, real_args, real_kwargs)
            written = self.recorded.steps[self.position - 1].meta["mutates"] if self.position > before else ()
            for node, tensor, _ in touched:
                if node in written:
                    self.values.forget(tensor)
            return result
        if self._is_free(run, args, kwargs, operands):
            self.touched = []
            return self._make(run, operands)
        result = super().perform(call, args, kwargs, run, real_args, real_kwargs)
        if self.position > before:
            self._follow(run, operands, result)
        return result

    def _knows_all(self, operands: Any) -> bool:
        tensors: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, tensors.append, operands)
        return all(map(self.values.knows, tensors))

    def _is_free(self, run: Callable[..., Any], args: Any, kwargs: Any, operands: Any) -> bool:
        """Whether a call of known operands is one of the prologue, or reads a value."""
        ids = {id(t) for t in value_tensors(operands)}
        if self.prologue.is_reading or ids & self.prologue.ids:
            return True
        if not ids & self.values.of_batch:
            return False
        exec_args, exec_kwargs = self._executable(args, kwargs, *operands)
        try:
            self.run(run, exec_args, exec_kwargs)
        except NeedsValue:
            return True
        return False

    def _make(self, run: Callable[..., Any], operands: Any) -> Any:
        """Make a call for real. Returns fakes for the tensors of its result."""
        result = self._real(run, operands)
        if result is not None and not has_tensor(result):
            self.prologue.note_read(is_tensor=False)
        with DisableTorchFunction():
            made = tree_map_only(torch.Tensor, self._represent, result)
        self.prologue.ids.update(id(t) for t in value_tensors(made))
        if result is None:  # as of x[i] = y
            self.prologue.ids.update(id(t) for t in value_tensors(operands[0][:1]))
        return made

    def _real(self, run: Callable[..., Any], operands: Any) -> Any:
        self.busy = True
        try:
            with unset_fake_temporarily(), torch.no_grad(), DisableTorchFunction():
                args, kwargs = tree_map_only(torch.Tensor, self.values.value, operands)
                return run(*args, **kwargs)
        finally:
            self.busy = False

    def _represent(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._fake_of:
            fake = self._as_fake(value)
            node = self.graph.placeholder("made")
            node.meta["val"] = fake
            self.node_of[id(fake)] = node
            self.alive.append(fake)
            self._know(fake, value)
        return self._fake_of[id(value)]

    def _follow(self, run: Callable[..., Any], operands: Any, result: Any) -> None:
        """Know the value of a recorded call's result, where the recording did."""
        step = self.recorded.steps[self.position - 1]
        if all(map(self.recorded.values.knew, value_tensors(step.meta["val"]))):
            for fake, value in zip(value_tensors(result), value_tensors(self._real(run, operands))):
                self._know(fake, value)

    def _know(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        self._fake_of[id(value)] = fake
        self.values.know(fake, value, of_batch=True)

    def know_as(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        super().know_as(tensor, other)
        if self.values.knows(tensor):
            self._fake_of[id(self.values.value(tensor))] = tensor

    def finish(self, outputs: dict[str, torch.Tensor], expected: dict[str, fx.Node]) -> None:
        made = {name for name, node in expected.items() if self.recorded.prologue.is_made(node)}
        if not all(self._alike(self.node_of.get(id(outputs.get(name))), expected[name]) for name in made):
            raise Misaligned(f"this batch returns other sizes of {', '.join(sorted(made))}")
        super().finish(
            {name: value for name, value in outputs.items() if name not in made},
            {name: node for name, node in expected.items() if name not in made},
        )

    def _repeats(self, step: fx.Node, args: Any, kwargs: Any) -> bool:
        return self._alike(args, step.args) and self._alike(kwargs, step.kwargs)

    def _alike(self, given: Any, recorded: Any) -> bool:
        """Whether arguments are those of the recording. What a prologue makes may have other values, which are kept."""
        if isinstance(given, (tuple, list)) and isinstance(recorded, (tuple, list)):
            return len(given) == len(recorded) and all(map(self._alike, given, recorded))
        if isinstance(given, dict) and isinstance(recorded, dict):
            return given.keys() == recorded.keys() and all(self._alike(given[key], recorded[key]) for key in given)
        if not isinstance(recorded, fx.Node) or not self.recorded.prologue.is_made(recorded):
            return same(given, recorded)
        if not isinstance(given, fx.Node) or not self.values.knew(given.meta["val"]):
            return False
        value = self.found[recorded] = self.values.last_value(given.meta["val"])
        like = recorded.meta["val"]
        return bool(value.shape == like.shape and value.dtype == like.dtype)

    def _differ(self, step: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        name = function_name(step.target, str(step.target))
        given, first = _text(args), _text(step.args)
        raise Misaligned(f"{self.lines.where()}\n  {name} gets {given} here, and {first} in the program")


def _text(args: Any) -> str:
    return str(fx.map_arg(args, lambda node: node.meta["val"].shape))
