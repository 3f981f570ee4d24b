"""The temporary memory of a step, beside parameters, gradients and states.

torch steps parameters in one of three forms: fused kernels take nothing; the foreach form, torch's default on a GPU
where a class has no fused kernels, makes tensors as large as all parameters of a call together; the loop makes some as
large as one parameter. Which form a class takes on a device, and what it makes, is found by stepping parameters without
memory on that device, which need not be there.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...ir.precision import PORTION_ELEMENTS, ROUNDED_ELEMENTS
from ..optimizer.importable import import_kwargs, resolve
from ..optimizer.leaves import row_leaves
from ..optimizer.param_groups import ParamGroup
from ..optimizer.probe import WHOLE, tiny
from ..optimizer.spec import OptimizerSpec
from ..optimizer.state_shapes import PRIMES, Build, Numbers, Shape, step_plainly
from ..script_caches import kept_caches
from ..torch_names import FOREACH_DEVICES, FOREACH_TYPES, FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves

LARGE = (1024, 1024)  # of the parameter that stands for all those that are updated element by element
FEW_BYTES = 64  # of numbers, such as counts of steps, which are not counted
# What numbers read from tensors are in each step: RAdam takes another way when it has counted some steps.
READ = (0.5, 0.5, 1000.0)
PLAIN = (Tensor, nn.Parameter, FakeTensor)
# The bytes that a call's kernels hold while they run, of its operator, arguments and result; None if nobody knows.
HeldBytes = Callable[[Any, Any, Any, Any], int | None]


@dataclass(frozen=True)
class Temporaries:
    """Bytes that a parameter takes in a call: `each` beside those of the call's other parameters, `once` if it is the
    largest of them."""

    each: float
    once: float

    def times(self, factor: float) -> Temporaries:
        return Temporaries(self.each * factor, self.once * factor)


class Living(TorchDispatchMode):
    """Follows the bytes of all storages that are made while it is on, but for numbers; `most` lived at once, with what
    calls `held`."""

    def __init__(self, *own: Tensor, held: HeldBytes | None = None):
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in own}
        self._held = held
        self.now: int = 0
        self.most: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):  # a tensor of tensors: the calls on those follow
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        if self._held is not None:
            self.most = max(self.most, self.now + (self._held(func, args, kwargs or {}, made) or 0))
        return made

    def most_beside(self, optimizer: torch.optim.Optimizer) -> int:
        """The most bytes that lived beside the optimizer's states."""
        leaves = (leaf for row in optimizer.state.values() for leaf in row_leaves(row).values())
        states = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in leaves}
        kept_bytes = sum(size for size in states.values() if size > FEW_BYTES)
        return max(0, self.most - kept_bytes)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        counted = num_bytes if num_bytes > FEW_BYTES else 0
        weakref.finalize(storage, self._forget, key, counted)
        self.now += counted
        self.most = max(self.most, self.now)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def step_bytes(
    spec: OptimizerSpec,
    params: Sequence[tuple[str, Shape, torch.dtype]],
    kind: str,
    rounds: bool = False,
    held: HeldBytes | None = None,
) -> int:
    """The most bytes that a stage's step takes on a device of this kind ("cpu", "cuda"), for the parameters of these
    names, shapes and dtypes of the step. `rounds`: bf16 weights are updated in portions of fp32. `held`: what the
    device's kernels hold beside what they are given and give, as a sum over rows does on a GPU.

    Groups are stepped one after the other, and each in portions (`StageOptimizer`).
    """
    portion = ROUNDED_ELEMENTS if rounds else PORTION_ELEMENTS
    divisible = spec.traits(torch.device("cpu")).divisible
    members: dict[int, list[tuple[int, Temporaries]]] = {}
    for name, shape, dtype in params:
        index, numel = spec.group_of(name), math.prod(shape)
        if numel:
            members.setdefault(index, []).append((numel, temporaries_of(spec, index, shape, dtype, kind, held)))
    most = 0.0
    for rows in members.values():
        together = sum(row.each for _, row in rows)
        if divisible:
            elements = max(portion, *(numel for numel, _ in rows))
            together = min(together, elements * max(row.each / numel for numel, row in rows))
        most = max(most, together + max(row.once for _, row in rows))
    return math.ceil(most)


def temporaries_of(
    spec: OptimizerSpec, index: int, shape: Shape, dtype: torch.dtype, kind: str, held: HeldBytes | None
) -> Temporaries:
    """The temporary memory for a parameter of a group. A parameter that is updated element by element needs the same
    for each element, in any shape."""
    path, kwargs = spec.class_of(index)
    alone = OptimizerSpec(path, kwargs, groups=(ParamGroup(None, spec.all_groups[index].options),)).to_json()
    if not _is_elementwise(alone):
        return _temporaries_of_group(alone, shape, dtype, kind, held)
    return _temporaries_of_group(alone, LARGE, dtype, kind, held).times(math.prod(shape) / math.prod(LARGE))


@lru_cache(maxsize=1 << 8)
def _is_elementwise(alone: str) -> bool:
    spec = OptimizerSpec.from_json(alone)
    return spec.is_elementwise()


@lru_cache(maxsize=1 << 12)
def _temporaries_of_group(
    alone: str, shape: Shape, dtype: torch.dtype, kind: str, held: HeldBytes | None
) -> Temporaries:
    """Of the one group of an optimizer, which is kept as text: planning asks for it often."""
    spec = OptimizerSpec.from_json(alone)
    if _is_fused(spec, dtype, kind):
        return Temporaries(0, 0)
    path, kwargs = spec.class_of(0)

    def build(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        row = {"params": list(params), **import_kwargs(spec.groups[0].options)}
        made: torch.optim.Optimizer = resolve(path)([row], **import_kwargs(kwargs))
        return made

    with _choosing_as_on(kind):
        try:
            with kept_caches(resolve(path)), FakeTensorMode(allow_fallback_kernels=False), Numbers() as numbers:
                return _measure(build, shape, dtype, held, numbers)
        except Exception:  # whatever a library's step raises on tensors without values: see `find_states`
            small = WHOLE if len(shape) == 2 else PRIMES.get(len(shape), ((2,) * len(shape),))[0]
            return _measure(build, small, dtype, held).times(math.prod(shape) / math.prod(small))


def _is_fused(spec: OptimizerSpec, dtype: torch.dtype, kind: str) -> bool:
    """Whether a job steps the spec's group by fused kernels on devices of this kind."""
    build = resolve(spec.class_of(0)[0])
    if "fused" not in inspect.signature(build).parameters:
        return False
    with kept_caches(build), FakeTensorMode(allow_fallback_kernels=False), _FusedKernels(), Numbers():
        (group,) = spec.build_alone(0, [tiny((2, 2), kind, dtype)]).param_groups
    return bool(group["fused"])


class _FusedKernels(TorchDispatchMode):
    """They update in place, and not each of them can be called on tensors without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func.name().startswith("aten::_fused_") else func(*args, **(kwargs or {}))


@contextmanager
def _choosing_as_on(kind: str) -> Iterator[None]:
    """On a CPU, torch chooses between foreach and the loop as on devices of this kind. It asks for the very type of
    parameters, too: those without memory are like any."""
    devices, types = getattr(*FOREACH_DEVICES)(), [*getattr(*FOREACH_TYPES), FakeTensor]
    more = ["cpu"] if kind in devices else []
    with (
        mock.patch.object(*FOREACH_DEVICES, lambda: [*devices, *more]),
        mock.patch.object(*FOREACH_TYPES, types),
    ):
        yield


def _measure(
    build: Build, shape: Shape, dtype: torch.dtype, held: HeldBytes | None, numbers: Numbers | None = None
) -> Temporaries:
    """From calls with two parameters and with four: what grows with their number is of each. One alone is no measure,
    as a loop still holds a parameter's last tensors when it begins the next."""
    two, four = (
        _most_beside(build, [tiny(shape, dtype=dtype) for _ in range(count)], held, numbers) for count in (2, 4)
    )
    each = max(0, four - two) / 2
    return Temporaries(each, max(0.0, two - 2 * each))


def _most_beside(build: Build, params: Sequence[nn.Parameter], held: HeldBytes | None, numbers: Numbers | None) -> int:
    """The most bytes beside parameters, gradients and states in some steps. States count from the first step on, as a
    plan counts them, though that step makes them."""
    own = [tensor for param in params for tensor in (param, param.grad) if tensor is not None]
    living = Living(*own, held=held)
    with living:
        optimizer = build(params)
        for value in READ:
            if numbers is not None:
                numbers.value = value
            step_plainly(optimizer)
    return living.most_beside(optimizer)
