"""Checks that the user's model still has the properties that its plan took from it once and for all."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...ir.errors import PlanError
from ...ir.program import Interface, ParamSpec, whole_params
from ..capture.gradient_hooks import own_hooks, trace_hooks
from ..capture.python_state import values_of


class Taken:
    """Compares a model with what its plan was made for, at every step and cheaply.

    A plan that is loaded brings its gradient hooks: the model may have none, or the same ones.
    """

    def __init__(self, model: nn.Module, interface: Interface):
        self._places = []  # where each parameter is registered, and what the plan knows of it
        modules = dict(model.named_modules(remove_duplicate=False))
        for spec in whole_params(p for stage in interface.stages.values() for p in stage.params):
            path, _, key = spec.name.rpartition(".")
            if path in modules:  # a written plan that is only looked at has no model
                self._places.append((modules[path]._parameters, key, spec))
        self._known: dict[str, Any] = {}  # parameter -> its hooks, and what these close over, when last looked at
        params = [(param, spec) for store, key, spec in self._places if (param := store.get(key)) is not None]
        if any(own_hooks(param) for param, _ in params):
            self._require_hooks([row for row in params if row[0].requires_grad])

    def require_unchanged(self) -> None:
        """Raises `PlanError` naming a parameter whose `requires_grad`, or whose gradient hooks, are other than those of
        the plan."""
        params = [(param, spec) for store, key, spec in self._places if (param := store.get(key)) is not None]
        for param, spec in params:
            if param.requires_grad != spec.requires_grad:
                wanted = spec.requires_grad
                raise PlanError(
                    f"{spec.name}.requires_grad is {param.requires_grad} now, but the plan was made with {wanted}, and "
                    f"{'trains it' if wanted else 'keeps it frozen'}: set it back with requires_grad_({wanted}), or "
                    "sync the job and compile the model again"
                )
        hooked = [row for row in params if row[0]._backward_hooks or row[0]._post_accumulate_grad_hooks]
        if hooked or self._known:
            self._require_hooks([(p, spec) for p, spec in (params if self._known else hooked) if spec.requires_grad])

    def _require_hooks(self, params: list[tuple[nn.Parameter, ParamSpec]]) -> None:
        for param, spec in params:
            now = {key: values_of(hook) for key, hook in own_hooks(param).items()}
            if self._known.get(spec.name) != now:
                if trace_hooks(spec.name, param) != spec.hook:
                    raise PlanError(_other_hooks(spec, param))
                self._known[spec.name] = now


def _other_hooks(spec: ParamSpec, param: nn.Parameter) -> str:
    now = ", ".join(map(str, trace_hooks(spec.name, param))) or "none"
    return (
        f"the gradient hooks of {spec.name} are {now} now, but the plan was made with "
        f"{', '.join(map(str, spec.hook)) or 'none'}: sync the job and compile the model again"
    )
