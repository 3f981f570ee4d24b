"""Checks that the user's model still has the properties that its plan took from it once and for all."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

from torch import nn

from ....ir.errors import CaptureError, DoesNotFit, PassError, PlanError
from ....ir.program import ParamSpec, whole_params
from ...capture.gradient_hooks import own_hooks, trace_hooks
from ...capture.python_state import values_of
from ...folder import Folder
from ...replanner import Replanner
from ..counts import LossWeight
from .watch import PythonValues

_TRIES = 3  # new traces for one value that makes no difference


class Taken:
    """Compares a model with what its plan was made for, at every step and cheaply.

    A plan that is loaded brings its gradient hooks: the model may have none, or the same ones. What else Python had is
    in its files, whatever the model has now. `loss_weight`: the user's own count. `replanner`: None for a plan that
    is loaded.
    """

    def __init__(
        self, model: nn.Module, folder: Folder, loss_weight: LossWeight | None, replanner: Replanner | None
    ):
        self.model, self.folder, self.replanner = model, folder, replanner
        own = (loss_weight, None if replanner is None else replanner.loss_fn)
        self._functions = [function for function in own if function is not None]
        self._watch = None if replanner is None else PythonValues(model, self._functions)
        self._without_effect = Counter[str]()  # values that have changed so often and made no difference
        self._places = []  # where each parameter is registered, and what the plan knows of it
        modules = dict(model.named_modules(remove_duplicate=False))
        for spec in whole_params(p for stage in folder.interface.stages.values() for p in stage.params):
            path, _, key = spec.name.rpartition(".")
            if path in modules:  # a written plan that is only looked at has no model
                self._places.append((modules[path]._parameters, key, spec))
        self._known: dict[str, Any] = {}  # parameter -> its hooks, and what these close over, when last looked at
        params = [(param, spec) for store, key, spec in self._places if (param := store.get(key)) is not None]
        if any(own_hooks(param) for param, _ in params):
            self._require_hooks([row for row in params if row[0].requires_grad])

    def require_unchanged(self) -> None:
        """Raises `PlanError` naming a parameter whose `requires_grad`, or whose gradient hooks, are other than those of
        the plan, or what else forward would do otherwise now."""
        self._require_params()
        changed = {} if self._watch is None else self._watch.changes()
        if changed:
            self._require_no_difference(changed)

    def _require_no_difference(self, changed: dict[str, str]) -> None:
        """Accept changed values with which the model still gives the plan."""
        assert self.replanner is not None
        what = "; ".join([*changed.values()][:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        remedy = "Set it back, or sync the job and compile the model again"
        try:
            same = self.replanner.print_anew().is_in(self.folder)
        except (CaptureError, PlanError, PassError, DoesNotFit) as error:
            raise PlanError(f"{what}: with that the model gives no plan any more ({error}). {remedy}") from error
        if not same:
            raise PlanError(f"{what}: the plan was made with what was there before, and trains on with it. {remedy}")
        self._without_effect.update(changed.keys())
        ignored = {name for name, count in self._without_effect.items() if count >= _TRIES}
        for name in ignored & changed.keys():
            warnings.warn(
                f"{name} has changed {_TRIES} times and made no difference to the plan: it is watched no more, and the "
                "plan would miss a difference that it makes later"
            )
        self._watch = PythonValues(self.model, self._functions, ignored)

    def _require_params(self) -> None:
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
