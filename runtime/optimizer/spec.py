"""The optimizer that a user asked for, as plain data.

An `OptimizerSpec` travels in plans and to workers as JSON.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from .importable import import_kwargs, lists_to_tuples, path_and_kwargs, resolve
from .param_groups import ParamGroup, make_groups
from .probe import FAILURES, TINY, WHOLE, Traits, find_traits, is_elementwise, tiny
from .several import SeveralOptimizers
from .state_shapes import Build, Shape, StateRow, find_states, step_plainly
from .trial import check_params, options_of, require_class, try_groups

MODES = ("fused", "foreach")
ROUNDS = "bf16_stochastic_round"  # the argument of torchao's classes
Row = dict[str, Any]  # a parameter group as torch takes it


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class and its learning rate schedule by import path ("torch.optim:AdamW") and keyword arguments.

    `groups`: in order; () stands for one group of all parameters, with the class's own arguments. A group with a `path`
    has an optimizer of its own.
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
        dtype: torch.dtype | None = torch.float32,
    ) -> OptimizerSpec:
        """From a class or a `partial` of one with keyword arguments; `lr_scheduler` takes the optimizer first;
        `param_groups` of `model` as in `param_groups.make_groups`. `dtype`: that in which parameters are stepped; None:
        their own.

        Raises `PlanError` for what cannot be imported by a worker (a lambda, a class in the script itself), for
        arguments that are no plain data, for optimizers that cannot step on gradients alone, or not on the shapes of
        the model's trained parameters or in that dtype.
        """
        path, kwargs = path_and_kwargs(optimizer, "optimizer", "optimizer=partial(torch.optim.AdamW, lr=5e-5)")
        require_class(path, "optimizer")
        spec = OptimizerSpec(path, kwargs)
        known = options_of(path, kwargs, "optimizer")
        if param_groups is not None:
            assert model is not None, "groups of parameters need the model whose parameters they are"
            own = partial(options_of, where="optimizer of a group:")
            spec = replace(spec, groups=make_groups(model, param_groups, known, own))
        if lr_scheduler is not None:
            example = "lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
            scheduler_path, scheduler_kwargs = path_and_kwargs(lr_scheduler, "lr_scheduler", example)
            spec = replace(spec, scheduler_path=scheduler_path, scheduler_kwargs=scheduler_kwargs)
        try_groups(spec)
        if model is not None:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            check_params(spec, {name: (tuple(p.shape), dtype or p.dtype) for name, p in trained.items()})
        return spec

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> OptimizerSpec:
        raw = json.loads(text)
        for key in ("kwargs", "scheduler_kwargs"):
            raw[key] = _lists_to_tuples(raw[key])
        raw["groups"] = tuple(
            ParamGroup(
                lists_to_tuples(row["names"]),
                _lists_to_tuples(row["options"]),
                row.get("path"),
                _lists_to_tuples(row.get("kwargs", {})),
            )
            for row in raw.get("groups", ())
        )
        return OptimizerSpec(**raw)

    # --- making it

    @property
    def all_groups(self) -> tuple[ParamGroup, ...]:
        """The groups, at least one."""
        return self.groups or (ParamGroup(),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The classes that step parameters, each once."""
        return tuple(dict.fromkeys(self.class_of(index)[0] for index in range(len(self.all_groups))))

    def class_of(self, index: int) -> tuple[str, dict[str, Any]]:
        """The path of a group's class, and its arguments."""
        group = self.all_groups[index]
        return (self.path, self.kwargs) if group.path is None else (group.path, group.kwargs)

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
            return self._make(self.path, self.kwargs, [{"params": list(params)}])
        members: list[list[Tensor]] = [[] for _ in self.all_groups]
        for name, param in params.items():
            members[self.group_of(name)].append(param)
        early = [[] for _ in members] if without_states else members
        optimizer = self._all(early, next(iter(params.values()), None))
        for group, own in zip(optimizer.param_groups, members):
            group["params"] = own
        return optimizer

    def build_alone(self, index: int, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """An optimizer with that group only, on these tensors."""
        return self._make(
            *self.class_of(index), [{"params": list(params), **import_kwargs(self.all_groups[index].options)}]
        )

    def build_tiny(self) -> torch.optim.Optimizer:
        """An optimizer with all groups, each of one small parameter."""
        return self._all([[tiny(TINY)] for _ in self.all_groups])

    def _all(self, members: Sequence[Sequence[Tensor]], like: Tensor | None = None) -> torch.optim.Optimizer:
        """An optimizer with all groups, of these members."""
        rows = [{"params": list(own), **import_kwargs(group.options)} for own, group in zip(members, self.all_groups)]
        together = [index for index, group in enumerate(self.all_groups) if group.path is None]
        order = [together] if together else []
        order += [[index] for index, group in enumerate(self.all_groups) if group.path is not None]
        made = [self._make(*self.class_of(own[0]), [rows[index] for index in own], like) for own in order]
        return made[0] if len(made) == 1 else SeveralOptimizers(made, order)

    def _make(
        self, path: str, kwargs: Mapping[str, Any], rows: list[Row], like: Tensor | None = None
    ) -> torch.optim.Optimizer:
        given = import_kwargs(kwargs)
        params = [param for row in rows for param in row["params"]] or ([] if like is None else [like])
        kinds = {(param.device.type, param.dtype): param for param in params}
        chosen = any(mode in options for mode in MODES for options in (given, *rows))
        if kinds and not chosen and all(_has_fused(path, given, param) for param in kinds.values()):
            given["fused"] = True
        made: torch.optim.Optimizer = resolve(path)(rows, **given)
        return made

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        if self.scheduler_path is None:
            return None
        made: torch.optim.lr_scheduler.LRScheduler = resolve(self.scheduler_path)(
            optimizer, **import_kwargs(self.scheduler_kwargs)
        )
        return made

    # --- its states and traits

    def state_bytes_per_param(self) -> float:
        """Bytes of optimizer state for each trained fp32 parameter, found by stepping a small matrix; with several
        groups, those of the group with the most."""
        return self.state_bytes([TINY]) / math.prod(TINY)

    def state_shapes(
        self, shape: Shape, name: str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, tuple[Shape, torch.dtype]]:
        """The states of one parameter of this shape that is stepped in this dtype, without allocating it: name to shape
        and dtype of all tensors that grow with the parameter or have more than one element, but not of numbers, such as
        the count of steps, nor of what all parameters share. Tensors inside a state are "state.inner".

        With several groups the parameter's `name` tells its group; without a name, the group with the largest states
        counts. Raises `PlanError` if they follow no rule.
        """
        if name is not None:
            return self._large(self.group_of(name), shape, dtype)
        options = [self._large(index, shape, dtype) for index in range(len(self.all_groups))]
        return max(options, key=_total_bytes)

    def state_bytes(self, shapes: Mapping[str, Shape] | Iterable[Shape], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the states, as `state_shapes` has them, of parameters of these shapes."""
        if isinstance(shapes, Mapping):
            return sum(_total_bytes(self.state_shapes(shape, name, dtype)) for name, shape in shapes.items())
        return sum(_total_bytes(self.state_shapes(shape, None, dtype)) for shape in shapes)

    def state_row(self, name: str, shape: Shape, dtype: torch.dtype) -> StateRow:
        """All states of a parameter of this name, numbers included, without their values."""
        return self._row(self.group_of(name), shape, dtype)

    def _large(self, index: int, shape: Shape, dtype: torch.dtype) -> dict[str, tuple[Shape, torch.dtype]]:
        return {name: (tuple(t.shape), t.dtype) for name, t in self._row(index, shape, dtype).large().items()}

    def _row(self, index: int, shape: Shape, dtype: torch.dtype) -> StateRow:
        path, given = self._modeless[index]
        return _find_states(path, given, shape, dtype)

    @cached_property
    def _modeless(self) -> list[tuple[str, str]]:
        """Of each group the class, and its arguments and options as text, without those that only choose kernels: they
        make no difference to the states."""
        found = []
        for index, group in enumerate(self.all_groups):
            path, kwargs = self.class_of(index)
            rows = [{k: v for k, v in given.items() if k not in MODES} for given in (kwargs, group.options)]
            found.append((path, json.dumps(rows, sort_keys=True)))
        return found

    @property
    def _builds(self) -> list[Build]:
        return [partial(self.build_alone, index) for index in range(len(self.all_groups))]

    def traits(self, device: torch.device) -> Traits:
        """The properties of the optimizer's step on this device. Raises `PlanError` if it cannot."""
        if device not in self._traits:
            found = []
            for index, build in enumerate(self._builds):
                try:
                    found.append(find_traits(build, device))
                except FAILURES as error:
                    raise PlanError(
                        f"optimizer {self.class_of(index)[0]} has no step on {device}, where this plan steps it: "
                        f"{error}; use one that has, like torch.optim.AdamW"
                    ) from error
            self._traits[device] = Traits.common(found)
        return self._traits[device]

    @cached_property
    def _traits(self) -> dict[torch.device, Traits]:
        return {}

    def is_elementwise(self, name: str | None = None) -> bool:
        """Whether each element is updated by its own gradients alone, so that a parameter may be updated in pieces:
        elements of this parameter, or of all."""
        if name is None:
            return not self.whole_paths()
        index = self.group_of(name)
        return not self._is_whole(index, self._builds[index])

    def with_parts(self, parts: Mapping[str, str]) -> OptimizerSpec:
        """The same for a model of whose parameters some are in parts, by name, which have the groups of these."""
        groups = []
        for group in self.groups:
            names = group.names
            more = [part for part, name in parts.items() if names is not None and name in names]
            groups.append(group if names is None else replace(group, names=(*names, *more)))
        return replace(self, groups=tuple(groups))

    @property
    def rounds(self) -> bool:
        """Whether it rounds what it writes into bf16 parameters stochastically."""
        return bool(self.kwargs.get(ROUNDS))

    def require_portions(self) -> None:
        """Raise `PlanError` where it cannot step some of its parameters after others, as weights without masters are
        updated."""
        if not self.traits(torch.device("cpu")).divisible:
            raise PlanError(
                f"optimizer {self.path} counts the steps of a group, so that it cannot update bf16 weights in "
                'portions, as precision="bf16-pure" has it: use torch.optim.AdamW, or precision="bf16-true"'
            )

    def whole_paths(self) -> tuple[str, ...]:
        """The classes that update an element by others, or keep states of another shape than the parameter, such as a
        scale for each block; each once."""
        found = [self.class_of(index)[0] for index, build in enumerate(self._builds) if self._is_whole(index, build)]
        return tuple(dict.fromkeys(found))

    def _is_whole(self, index: int, build: Build) -> bool:
        # First the shapes: a step of a long vector takes minutes where states are matrices.
        with contextlib.suppress(PlanError):  # of states that follow no rule
            if any(shape != WHOLE for shape, _ in self._large(index, WHOLE, torch.float32).values()):
                return True
        return not is_elementwise(build)


@lru_cache(maxsize=1 << 12)
def _find_states(path: str, given: str, shape: Shape, dtype: torch.dtype) -> StateRow:
    """`given`: the arguments of the class, and the options of a group, as text; planning asks for them often."""
    kwargs, options = (import_kwargs(_lists_to_tuples(row)) for row in json.loads(given))
    cls = resolve(path)

    def build(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = cls([{"params": list(params), **options}], **kwargs)
        return made

    return find_states(build, shape, dtype, path)


def _has_fused(path: str, kwargs: Mapping[str, Any], like: Tensor) -> bool:
    cls = resolve(path)
    if "fused" not in inspect.signature(cls).parameters:
        return False
    is_low = like.device.type == "cpu" and like.dtype.itemsize < 4
    if is_low and isinstance(cls, type) and issubclass(cls, torch.optim.SGD):
        return False  # the kernel of PyTorch 2.13 leaves 16 elements or more of such parameters as they were
    try:
        step_plainly(cls([tiny((2,), like.device, like.dtype)], **kwargs, fused=True))
    except FAILURES:  # torch raises one of these if this device has none
        return False
    return True


def rounds_itself(optimizer: Any) -> bool:
    """Whether a class, or a partial of one, rounds what it writes into bf16 parameters stochastically."""
    return bool(getattr(optimizer, "keywords", {}).get(ROUNDS))


def _lists_to_tuples(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: lists_to_tuples(value) for name, value in kwargs.items()}


def _total_bytes(states: Mapping[str, tuple[Shape, torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in states.values())
