"""The options of the optimizer's parameter groups, read from the devices and set on all of them between two steps."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ....ir.errors import PlanError
from ....runtime.optimizer.probe import TINY
from ....runtime.optimizer.spec import OptimizerSpec
from ....runtime.optimizer.trial import options_of
from ....runtime.processes.interrupt import finishing
from ...planning import fixed_torch
from ..one_call import OneCall
from ..run import JobRun


class GroupOptions(Mapping[str, Any]):
    """A group's options as the next step has them; an assignment sets one on all devices. `params` are names."""

    def __init__(self, run: JobRun, calls: OneCall, index: int, options: Mapping[str, Any]):
        self._run, self._calls, self._index, self._options = run, calls, index, dict(options)

    def __getitem__(self, key: str) -> Any:
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(self._options)

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises `PlanError` for an option that the group does not have, another kind of value, a value that the
        optimizer refuses, and one with which it keeps states that the plan has no room for."""
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        with finishing("param_groups"), self._calls.serving("param_groups"), fixed_torch():
            self._require(key, value)
            driver, args = self._run.driver, {"group": self._index, "key": key, "value": value}
            for stage in _stages(self._run):
                for device in driver.setup.stage_holders[stage]:
                    driver.call("set_option", device, {"stage": stage, **args})
            self._options[key] = value

    def _require(self, key: str, value: Any) -> None:
        where, own = f"job.param_groups[{self._index}][{key!r}]", self._options.get(key)
        if key == "params" or key not in self._options:
            near = difflib.get_close_matches(key, self._options, n=3) or sorted(self._options.keys() - {"params"})
            raise PlanError(f"{where}: the options that can be set are {', '.join(near)}")
        if not _is_like(value, own):
            raise PlanError(f"{where} = {value!r:.60}: it is {own!r}, and takes another value of that kind only")
        spec = OptimizerSpec.from_json(self._run.folder.settings.optimizer)
        path, kwargs = spec.class_of(self._index)
        if key not in options_of(path, kwargs, "optimizer"):
            return  # of the schedule
        kwargs = {**kwargs, **spec.all_groups[self._index].options}
        try:
            now, then = (OptimizerSpec(path, given).state_shapes(TINY) for given in (kwargs, {**kwargs, key: value}))
        except (ValueError, PlanError) as error:
            raise PlanError(f"{where} = {value!r}: {path} refuses it: {error}") from error
        if more := then.keys() - now.keys():
            raise PlanError(
                f"{where} = {value!r}: with it the optimizer keeps {', '.join(more)}, for which the plan has "
                f"no room: compile with {key}={value!r}, and set {key} to {own!r} for the first steps"
            )


def read_groups(run: JobRun, calls: OneCall) -> list[GroupOptions]:
    """The groups of a run, in the order of `param_groups`; [] if nothing is trained. At the end of the last step."""
    stage = next(iter(_stages(run)), None)
    if stage is None:
        return []
    driver, spec = run.driver, OptimizerSpec.from_json(run.folder.settings.optimizer)
    members: list[list[str]] = [[] for _ in spec.all_groups]
    params = [param for each in run.folder.interface.stages.values() for param in each.params]
    for name in dict.fromkeys(param.whole_name for param in params if param.requires_grad):
        members[spec.group_of(name)].append(name)
    groups = driver.call("options", driver.setup.stage_devices[stage], {"stage": stage})[0]["groups"]
    rows = enumerate(zip(members, groups))
    return [GroupOptions(run, calls, index, {"params": names, **row}) for index, (names, row) in rows]


def _stages(run: JobRun) -> list[str]:
    return [name for name, spec in run.folder.interface.stages.items() if spec.trained_params]


def _is_like(value: Any, own: Any) -> bool:
    if isinstance(own, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(own) and all(map(_is_like, value, own))
    return isinstance(value, int | float) and isinstance(own, int | float) and bool not in (type(value), type(own))
