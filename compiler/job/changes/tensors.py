"""The weights and buffers of the user's own model: whether the script has changed them since the devices had the same,
and how the devices take them over.

Optimizer states stay as they are, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....ir.errors import CheckpointError, PlanError
from ....ir.program import Interface, ParamSpec, RowPart
from ....runtime.model_names import named_tensors, ties_of
from ....runtime.processes.driver import Driver
from ....runtime.quantised.model import names_of_bytes
from ..state import whole_state

Replacement = Callable[[str, ParamSpec, Tensor], Tensor | None]  # first name, tensor on the devices -> its replacement
_SHOWN = 3  # names in a message
_SMALL = 1 << 20  # bytes of a tensor that is summed at each step: 0.3 ms at most


class OwnTensors:
    """The model's tensors that devices have, with their versions at the last time both were equal."""

    def __init__(self, model: nn.Module, interface: Interface):
        self.model, self.interface = model, interface
        specs = [spec for stage in interface.stages.values() for spec in (*stage.params, *stage.model_buffers)]
        self._names = {spec.whole_name for spec in specs}
        self._marks: list[tuple[dict[str, Any], str, str, Any]] = []  # holder, key, name, what is known of the tensor
        self._sums: list[int] = []  # of the contents of each
        self._turn = 0

    def note(self) -> None:
        """Remember the tensors as they are now."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        self._marks = []
        for name in self._names:
            path, _, key = name.rpartition(".")
            for holder in (modules[path]._parameters, modules[path]._buffers) if path in modules else ():
                tensor = holder.get(key)
                if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_inference():
                    self._marks.append((holder, key, name, _mark(tensor)))
        self._sums = [_sum(holder[key]) for holder, key, _, _ in self._marks]

    def changes(self, whole: bool = False) -> list[str]:
        """The names of tensors that were written, or put in another's place. A write through `.data`, or of statistics
        by batch norm, leaves no trace but the contents: with `whole` those of all are compared, which reads the model
        once; without, those of one small tensor, each time another."""
        self._turn += 1
        found = []
        for index, (holder, key, name, mark) in enumerate(self._marks):
            tensor = holder.get(key)
            looks = whole or (index == self._turn % len(self._marks) and tensor is not None and tensor.nbytes <= _SMALL)
            if _mark(tensor) != mark or (looks and _sum(tensor) != self._sums[index]):
                found.append(name)
        return found

    def other_parameter(self) -> str:
        """The name of a parameter in whose place another object is, or none; "" where there is no such."""
        rows = ((name, holder.get(key), mark) for holder, key, name, mark in self._marks)
        objects = (name for name, now, mark in rows if id(now) != mark[0] and isinstance(now, nn.Parameter | None))
        return next(objects, "")

    def take_over(self, driver: Driver, changed: list[str]) -> bool:
        """Give the devices what was changed. Returns whether any of that is frozen. Elements that are as the devices
        have them, in the model's type, keep what masters of a longer type know of them."""
        ties = ties_of(self.model)
        first = {ties.get(name, name) for name in changed}

        own = {name: tensor.detach() for name, tensor in named_tensors(self.model).items() if name in first}

        def value(name: str, param: ParamSpec, held: Tensor) -> Tensor | None:
            if name not in own:
                return None
            new = _part(own[name], param).to(held.device)
            if new.shape != held.shape:
                raise PlanError(
                    f"{name} has shape {list(new.shape)} now, and {list(held.shape)} in the plan: set it back"
                )
            return torch.where(new == held.to(new.dtype), held, new.to(held.dtype))

        frozen = put(driver, self.interface, ties, value)
        self.note()
        return frozen


def put(driver: Driver, interface: Interface, ties: Mapping[str, str], value: Replacement) -> bool:
    """Replace what devices hold, one stage after another, by what `value` has of it. Returns whether any weights that
    were replaced are frozen."""
    frozen = False
    for stage, spec in interface.stages.items():
        held, is_new = whole_state(driver, spec, with_optimizer=False), False
        weights = dict(held.weights)
        for params, tensors in ((spec.params, weights), (spec.model_buffers, held.buffers)):
            for param in params:
                own = tensors[param.name]
                new = value(ties.get(param.whole_name, param.whole_name), param, own)
                if new is not None and not torch.equal(new, own):
                    tensors[param.name], is_new = new, True
                    frozen = frozen or (params is spec.params and not param.requires_grad)
        if is_new:
            driver.load_stage(stage, weights, held.buffers)
    return frozen


def load_state_dict(
    driver: Driver, model: nn.Module, interface: Interface, state: Mapping[str, Tensor], strict: bool
) -> bool:
    """Put the tensors of a state dict of the model into the devices. Returns whether any that change are frozen.

    Raises `CheckpointError` as torch does for keys that are missing or unknown and for other shapes, and for other
    bytes of quantised weights, which stay as they are."""
    own, ties, packed = model.state_dict(keep_vars=True), ties_of(model), names_of_bytes(model)
    wrong = [f"unknown: {key}" for key in state if key not in own] if strict else []
    wrong += [f"missing: {key}" for key in own if key not in state] if strict else []
    wrong += [
        f"{key} has shape {list(state[key].shape)}, not {list(own[key].shape)}"
        for key in own.keys() & state.keys()
        if key not in packed and state[key].shape != own[key].shape
    ]
    wrong += [
        f"{key} is quantised and stays as it is" for key in packed & state.keys() if _differ(state[key], own[key])
    ]
    if wrong:
        raise CheckpointError(
            f"load_state_dict: {shorten(wrong)}. job.state_dict() has the keys and shapes; strict=False takes what fits"
        )
    given = {ties.get(key, key): value for key, value in state.items() if key in own}

    def value(name: str, param: ParamSpec, held: Tensor) -> Tensor | None:
        if name not in given or name in packed:
            return None
        return _part(given[name], param).detach().to(held.device, held.dtype)

    return put(driver, interface, ties, value)


def _differ(given: Tensor, own: Tensor) -> bool:
    return not own.is_meta and (given.shape != own.shape or not torch.equal(given, own))


def shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _part(whole: Tensor, param: ParamSpec) -> Tensor:
    return whole[param.part.rows] if isinstance(param.part, RowPart) else whole


def _sum(tensor: Tensor | None) -> int:
    """A sum over the bytes of a tensor, at the speed of memory; 0 without memory."""
    if tensor is None or tensor.is_meta or not tensor.numel():
        return 0
    if not tensor.is_contiguous() or tensor.data_ptr() % 8:
        return int(torch.hash_tensor(tensor.detach()).view(torch.int64))
    flat = tensor.detach().view(-1).view(torch.uint8)
    even = flat.numel() // 8 * 8
    return int(flat[:even].view(torch.int64).sum()) + int(flat[even:].sum())


def _mark(tensor: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (id(tensor), tensor._version, tensor.data_ptr())
