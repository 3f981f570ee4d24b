"""A Trainer's optimizer and its schedule as `penstock.compile` takes them: class, arguments, groups and rates."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import Trainer

from .features import require_known_optimizer

KERNELS = ("fused", "foreach")  # options that only choose kernels, which the devices choose
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")  # schedules of `lr_scheduler_type`


class OptimizerOf:
    """An optimizer of a model as `penstock.compile` takes it, of this class with these arguments. `numbers`: of the
    optimizer's groups, for each of the job's; -1 for parameters in none."""

    def __init__(self, model: nn.Module, optimizer: Any, kind: Any, options: dict[str, Any]):
        self.model, self.optimizer, self.kind = model, optimizer, kind
        self.numbers: list[int] = []
        self.options = {name: value for name, value in options.items() if name not in KERNELS}
        self._defaults = {name: p.default for name, p in inspect.signature(kind).parameters.items()}

    @staticmethod
    def read(model: nn.Module, optimizer: Any) -> OptimizerOf:
        """With the class and the arguments that the optimizer itself shows."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # also one that accelerate has wrapped
        known = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        return OptimizerOf(model, optimizer, type(optimizer), options)

    @staticmethod
    def read_trainer(trainer: Any, is_given: bool) -> OptimizerOf:
        """Of a trainer that has created it. `is_given`: by `optimizers=` or by `create_optimizer` of a subclass."""
        if is_given:
            return OptimizerOf.read(trainer.model, trainer.optimizer)
        if trainer.optimizer_cls_and_kwargs is not None:
            return OptimizerOf(trainer.model, trainer.optimizer, *trainer.optimizer_cls_and_kwargs)
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        require_known_optimizer(kind, str(getattr(trainer.args.optim, "value", trainer.args.optim)))
        return OptimizerOf(trainer.model, trainer.optimizer, kind, options)

    def maker(self, **changes: Any) -> Any:
        """The class with its arguments."""
        return partial(self.kind, **{**self.options, **changes})

    def groups(self) -> Iterator[dict[str, Any]]:
        """Those of the optimizer, with the options that differ from the class's, and bitsandbytes' states of 32 bits
        for embeddings where others have 8. Trained parameters in no group are not updated, as in eager."""
        eight = self.options.get("optim_bits") == 8
        embeddings = {id(m.weight) for m in self.model.modules() if eight and isinstance(m, nn.Embedding)}
        missing = {id(param): param for param in self.model.parameters() if param.requires_grad}
        self.numbers = []
        for number, group in enumerate(self.optimizer.param_groups):
            own = {name: value for name, value in _options(group).items() if self._differs(name, value)}
            for whole, more in ((False, {}), (True, {"optimizer": self.maker(optim_bits=32)})):
                params = [param for param in group["params"] if (id(param) in embeddings) == whole]
                if params:
                    self.numbers.append(number)
                    yield {"params": params, **own, **more}
            for param in group["params"]:
                missing.pop(id(param), None)
        if missing:
            self.numbers.append(-1)
            still: dict[str, Any] = {name: 0.0 for name in ("lr", "weight_decay") if name in self._defaults}
            yield {"params": list(missing.values()), **still}

    def _differs(self, name: str, value: Any) -> bool:
        return name in self._defaults and value != self.options.get(name, self._defaults[name])


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group as they were before a schedule has set rates."""
    found = {name: value for name, value in group.items() if name not in ("params", "initial_lr", *KERNELS)}
    rate = group.get("initial_lr", group.get("lr"))
    return found if rate is None else {**found, "lr": float(rate)}


def makes_optimizer(trainer: Any) -> bool:
    return type(trainer).create_optimizer is not Trainer.create_optimizer


def follows_own_rates(trainer: Any) -> bool:
    """Whether rates come from a scheduler of the script, or from evaluations, so that the job is told them step by
    step."""
    kind = str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))
    return type(trainer).create_scheduler is not Trainer.create_scheduler or kind in FOLLOW_EVALUATIONS
