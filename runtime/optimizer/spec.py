"""What a user asked for as an optimizer, as plain data.

An `OptimizerSpec` travels in plans and to workers as JSON.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from .importable import loaded, path_and_kwargs, resolve, tupled
from .param_groups import ParamGroup, make_groups
from .probe import FAILURES, TINY, Build, Traits, find_traits, is_elementwise, state_kinds, states_of, tiny
from .state_shapes import Shape, StateRule, find_rules

MODES = ("fused", "foreach")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class and its learning rate schedule by import path ("torch.optim:AdamW") and keyword arguments.

    `groups`: in order; () stands for one group of all parameters, with the class's own arguments.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    scheduler_path: str | None = None
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()

    @staticmethod
    def from_callable(
        optimizer: Any,
        lr_scheduler: Any = None,
        *,
        model: nn.Module | None = None,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> OptimizerSpec:
        """From a class or a `partial` of one with keyword arguments; `lr_scheduler` takes the optimizer first;
        `param_groups` of `model` as in `param_groups.make_groups`.

        Raises `PlanError` for what cannot be imported by a worker (a lambda, a class in the script itself), for
        arguments that are no plain data, for optimizers that cannot step on gradients alone, or not on the shapes of
        the model's trained parameters.
        """
        example = "optimizer=partial(torch.optim.AdamW, lr=5e-5)"
        path, kwargs = path_and_kwargs(optimizer, "optimizer", example)
        cls = resolve(path)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise PlanError(f"optimizer: {path} is no torch.optim.Optimizer class; pass one, like {example}")
        spec = OptimizerSpec(path, kwargs)
        spec._try()
        if param_groups is not None:
            assert model is not None, "groups of parameters need the model whose parameters they are"
            known = spec._build([{"params": [tiny(TINY)]}]).defaults
            spec = replace(spec, groups=make_groups(model, param_groups, known))
        if lr_scheduler is not None:
            example = "lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
            scheduler_path, scheduler_kwargs = path_and_kwargs(lr_scheduler, "lr_scheduler", example)
            spec = replace(spec, scheduler_path=scheduler_path, scheduler_kwargs=scheduler_kwargs)
        spec._try_groups()
        if model is not None:
            spec.check_shapes({n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad})
        return spec

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> OptimizerSpec:
        raw = json.loads(text)
        for key in ("kwargs", "scheduler_kwargs"):
            raw[key] = {name: tupled(value) for name, value in raw[key].items()}
        raw["groups"] = tuple(
            ParamGroup(tupled(row["names"]), {key: tupled(value) for key, value in row["options"].items()})
            for row in raw.get("groups", ())
        )
        return OptimizerSpec(**raw)

    # --- making it

    @property
    def all_groups(self) -> tuple[ParamGroup, ...]:
        """The groups, at least one."""
        return self.groups or (ParamGroup(),)

    def group_of(self, name: str) -> int:
        """The number of a parameter's group. Raises `PlanError` for a parameter that is in none."""
        index = self._group_by_name.get(name, self._rest)
        if index is None:
            raise PlanError(f"param_groups: {name} was in no group when they were made, and none takes the rest")
        return index

    @cached_property
    def _group_by_name(self) -> dict[str, int]:
        return {name: index for index, group in enumerate(self.groups) for name in group.names or ()}

    @cached_property
    def _rest(self) -> int | None:
        return next((index for index, group in enumerate(self.all_groups) if group.names is None), None)

    def build(
        self, params: Mapping[str, Tensor] | Iterable[Tensor], *, without_states: bool = False
    ) -> torch.optim.Optimizer:
        """The torch optimizer on these tensors, all on one device, with all groups, even those without any of them.
        Tensors without names are one group. `without_states`: no states are made, even if the class makes them at once.

        The fused kernels are used if the class has them for that device and neither `fused` nor `foreach` is given.
        """
        if not isinstance(params, Mapping):
            return self._build([{"params": list(params)}])
        members: list[list[Tensor]] = [[] for _ in self.all_groups]
        for name, param in params.items():
            members[self.group_of(name)].append(param)
        early = [[] for _ in members] if without_states else members
        rows = [{"params": own, **loaded(group.options)} for own, group in zip(early, self.all_groups)]
        optimizer = self._build(rows, next(iter(params.values()), None))
        for group, own in zip(optimizer.param_groups, members):
            group["params"] = own
        return optimizer

    def build_alone(self, index: int, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """An optimizer with that group only, on these tensors."""
        return self._build([{"params": list(params), **loaded(self.all_groups[index].options)}])

    def _build(self, rows: list[dict[str, Any]], like: Tensor | None = None) -> torch.optim.Optimizer:
        kwargs = loaded(self.kwargs)
        first = next((param for row in rows for param in row["params"]), like)
        chosen = any(mode in options for mode in MODES for options in (kwargs, *(g.options for g in self.groups)))
        if first is not None and not chosen and self._has_fused(first):
            kwargs["fused"] = True
        made: torch.optim.Optimizer = resolve(self.path)(rows, **kwargs)
        return made

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        if self.scheduler_path is None:
            return None
        made: torch.optim.lr_scheduler.LRScheduler = resolve(self.scheduler_path)(
            optimizer, **loaded(self.scheduler_kwargs)
        )
        return made

    # --- its states and traits

    def state_bytes_per_param(self) -> float:
        """Bytes of optimizer state for each trained fp32 parameter, found by stepping a small matrix; with several
        groups, those of the group with the most."""
        found = [states_of(build, TINY).values() for build in self._builds]
        return max(sum(s.nbytes for s in states if s.numel() > 1) / math.prod(TINY) for states in found)

    def state_shapes(self, shape: Shape, name: str | None = None) -> dict[str, tuple[Shape, torch.dtype]]:
        """The states of one fp32 parameter of this shape, without allocating it: name to shape and dtype of all states
        that grow with the parameter or have more than one element, but not of numbers, such as the count of steps.

        With several groups the parameter's `name` tells its group; without a name, the group with the largest states
        counts. Raises `PlanError` if they follow no rule.
        """
        if name is not None:
            return self._large(self.group_of(name), shape)
        options = [self._large(index, shape) for index in range(len(self.all_groups))]
        return max(options, key=_total_bytes)

    def state_bytes(self, shapes: Mapping[str, Shape] | Iterable[Shape]) -> int:
        """Bytes of the states, as `state_shapes` has them, of parameters of these shapes."""
        if isinstance(shapes, Mapping):
            return sum(_total_bytes(self.state_shapes(shape, name)) for name, shape in shapes.items())
        return sum(_total_bytes(self.state_shapes(shape)) for shape in shapes)

    def _large(self, index: int, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        key = (index, len(shape))
        if key not in self._rules:
            self._rules[key] = find_rules(partial(states_of, self._builds[index]), len(shape), self.path)
        rules = self._rules[key]
        return {name: (rule.shape(shape), rule.dtype) for name, rule in rules.items() if rule.is_large}

    @cached_property
    def _rules(self) -> dict[tuple[int, int], dict[str, StateRule]]:
        return {}

    @property
    def _builds(self) -> list[Build]:
        return [partial(self.build_alone, index) for index in range(len(self.all_groups))]

    def traits(self, device: torch.device) -> Traits:
        """How the optimizer steps on this device."""
        if device not in self._traits:
            self._traits[device] = Traits.of_all([find_traits(build, device) for build in self._builds])
        return self._traits[device]

    @cached_property
    def _traits(self) -> dict[torch.device, Traits]:
        return {}

    def is_elementwise(self, name: str | None = None) -> bool:
        """Whether each element is updated by its own gradients alone, so that a parameter may be updated in pieces:
        elements of this parameter, or of all."""
        builds = self._builds if name is None else [self._builds[self.group_of(name)]]
        return all(is_elementwise(build) for build in builds)

    def with_parts(self, parts: Mapping[str, str]) -> OptimizerSpec:
        """The same for a model of whose parameters some are in parts, by name, which have the groups of these."""
        groups = []
        for group in self.groups:
            names = group.names
            more = [part for part, name in parts.items() if names is not None and name in names]
            groups.append(group if names is None else replace(group, names=(*names, *more)))
        return replace(self, groups=tuple(groups))

    def state_kinds(self, name: str, ndim: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of a small parameter of the group of `name`, after one step and after two."""
        key = (self.group_of(name), ndim)
        if key not in self._kinds:
            self._kinds[key] = state_kinds(self._builds[key[0]], ndim)
        return self._kinds[key]

    @cached_property
    def _kinds(self) -> dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]]:
        return {}

    def build_tiny(self) -> torch.optim.Optimizer:
        """An optimizer with all groups, each of one small parameter."""
        return self._build([{"params": [tiny(TINY)], **loaded(group.options)} for group in self.all_groups])

    def check_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Raises `PlanError` naming the first parameter that the optimizer cannot step because of its dimensions."""
        tried: set[tuple[int, int]] = set()
        for name, shape in shapes.items():
            index = self.group_of(name)
            if (index, len(shape)) in tried:
                continue
            tried.add((index, len(shape)))
            try:
                self.build_alone(index, [tiny((2,) * len(shape))]).step()
            except FAILURES as error:
                raise PlanError(
                    f"optimizer {self.path} does not work for {name}, of shape {list(shape)} (tried on a small one: "
                    f"{error}); freeze such parameters (requires_grad_(False)), or use an optimizer for all shapes, "
                    "like torch.optim.AdamW"
                ) from error

    def _has_fused(self, like: Tensor) -> bool:
        cls = resolve(self.path)
        if "fused" not in inspect.signature(cls).parameters:
            return False
        param = tiny((2,), like.device, like.dtype)
        try:
            cls([param], **loaded(self.kwargs), fused=True).step()
        except FAILURES:  # torch raises one of these if this device has none
            return False
        return True

    def _try(self) -> None:
        """Step a small parameter once. Raises `PlanError` with torch's message if that fails."""
        try:
            self._build([{"params": [tiny(TINY)]}]).step()
        except FAILURES as error:
            hint = ""
            if "closure" in str(error) or "sparse" in str(error) or "dense" in str(error):
                hint = "; pass one that needs only dense gradients, like torch.optim.AdamW"
            raise PlanError(f"optimizer {self.path} does not work with {self.kwargs}: {error}{hint}") from error

    def _try_groups(self) -> None:
        """Try each group's options as arguments of the class, which checks them there only; then the schedule."""
        cls, kwargs = resolve(self.path), loaded(self.kwargs)
        takes = inspect.signature(cls).parameters
        for index, group in enumerate(self.groups):
            options = {key: value for key, value in loaded(group.options).items() if key in takes}
            try:
                cls([tiny(TINY)], **{**kwargs, **options})
                self.build_alone(index, [tiny(TINY)]).step()
            except FAILURES as error:
                where = f"param_groups[{index}]"
                raise PlanError(
                    f"{where}: optimizer {self.path} does not work with {group.options}: {error}"
                ) from error
        if self.scheduler_path is not None:
            self._try_scheduler()

    def _try_scheduler(self) -> None:
        optimizer = self.build_tiny()
        try:
            scheduler = self.build_scheduler(optimizer)
        except FAILURES as error:
            count = len(self.all_groups)
            raise PlanError(
                f"lr_scheduler {self.scheduler_path} does not work with {self.scheduler_kwargs}: {error}; the "
                f"optimizer has {count} parameter {'group' if count == 1 else 'groups'}"
            ) from error
        assert scheduler is not None
        if "metrics" in inspect.signature(scheduler.step).parameters:
            raise PlanError(
                f"lr_scheduler {self.scheduler_path} needs a metric at every step; pass one that counts steps, "
                "like torch.optim.lr_scheduler.CosineAnnealingLR"
            )


def _total_bytes(states: Mapping[str, tuple[Shape, torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in states.values())
