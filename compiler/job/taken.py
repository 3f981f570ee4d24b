"""What a plan has taken from the user's model once and for all, and the model can still change afterwards."""

from __future__ import annotations

from torch import nn

from ...ir.errors import PlanError
from ...ir.program import Interface


class Taken:
    """Compares a model with what its plan was made for, at every step and cheaply."""

    def __init__(self, model: nn.Module, interface: Interface):
        trained = {p.name: p.requires_grad for spec in interface.stages.values() for p in spec.params}
        self._places = []  # where each parameter is registered, its name, and whether the plan trains it
        for name, wanted in trained.items():
            path, _, key = name.rpartition(".")
            self._places.append((model.get_submodule(path)._parameters, key, name, wanted))

    def require_unchanged(self) -> None:
        """Raises `PlanError` naming a parameter whose `requires_grad` is another than that of the plan."""
        for store, key, name, wanted in self._places:
            param = store.get(key)
            if param is not None and param.requires_grad != wanted:
                raise PlanError(
                    f"{name}.requires_grad is {param.requires_grad} now, but the plan was made with {wanted}, and "
                    f"{'trains it' if wanted else 'keeps it frozen'}: set it back with requires_grad_({wanted}), or "
                    "sync the job and compile the model again"
                )
