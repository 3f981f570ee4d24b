"""The states that an optimizer keeps for a parameter, from the parameter's shape and dtype alone.

Two steps of a parameter of that very shape on tensors that have no memory tell them: whatever depends on the number of
elements, such as states of 8 bits from 4096 elements on, or a scale for each block, is as it will be. An optimizer that
reads memory by itself steps a small parameter for real. For a large one of it, the sizes for two small parameters, that
differ in the size of every dimension, are the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ..forced_eager import forced_eager
from ..script_caches import kept_caches
from ..torch_names import FakeTensorMode, TorchDispatchMode
from .leaves import entries_of, rebuilt, require_movable, row_leaves

Shape = tuple[int, ...]
Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
PRIMES: dict[int, tuple[Shape, Shape]] = {  # large where that is cheap: some optimizers treat small sizes differently
    0: ((), ()),
    1: ((1009,), (1013,)),
    2: ((131, 137), (139, 149)),
    3: ((5, 61, 67), (7, 71, 73)),
    4: ((11, 13, 3, 5), (17, 19, 5, 7)),
}
SMALL = (2, 3, 5, 7, 11, 13, 17)
MOST_OF_MATRIX = 64  # rows of a state that is tried for real
FEW_ELEMENTS = 1 << 16  # of a parameter that is stepped for real


@dataclass(frozen=True)
class StateRow:
    """The states of one parameter after one step and after two, without their values. `shared`: names of tensors that
    all parameters of an optimizer have in common, such as a table of what codes stand for."""

    first: Mapping[str, Any]
    later: Mapping[str, Any]
    shared: frozenset[str] = frozenset()

    def large(self) -> dict[str, Tensor]:
        """The tensors that grow with the parameter or have several elements anyway, unlike a count of steps."""
        found = row_leaves(self.later)
        return {leaf: t for leaf, t in found.items() if leaf not in self.shared and (t.dim() > 0 or t.numel() > 1)}


class Numbers(TorchDispatchMode):
    """Every number that is read from a tensor is `value`, or one: tensors without memory have none."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.5

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return self.value if dtype.is_floating_point else dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


def step_plainly(optimizer: torch.optim.Optimizer) -> None:
    """One step, in which what is compiled runs as it is written: a trial must not wait for a compiler."""
    with forced_eager():
        optimizer.step()


def find_states(build: Build, shape: Shape, dtype: torch.dtype, what: str) -> StateRow:
    """The states of a parameter of this shape and dtype. Raises `PlanError` naming `what` if they follow no rule."""
    try:
        with kept_caches(build), FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True), Numbers():
            row = _take_two_steps(build, shape, dtype)
    except Exception:  # whatever a library's step raises on tensors without values
        row = None
    if row is None:
        few = math.prod(shape) <= FEW_ELEMENTS and not _has_matrices(build, shape, dtype)
        row = _take_two_steps(build, shape, dtype) if few else _row_by_rules(build, shape, dtype, what)
    require_movable(row.later, what)
    return row


def _has_matrices(build: Build, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether states have more elements than the parameter, such as a matrix for each dimension, with which a step of a
    long vector would take minutes."""
    few = tuple(min(size, MOST_OF_MATRIX) for size in shape)
    if few == shape:
        return False
    small = _take_two_steps(build, few, dtype)
    return any(t.numel() > math.prod(few) for t in row_leaves(small.later).values())


def _row_by_rules(build: Build, shape: Shape, dtype: torch.dtype, what: str) -> StateRow:
    small = _take_two_steps(build, SMALL[: len(shape)], dtype)
    numbers = {key: value for key, value in small.later.items() if not isinstance(value, Tensor) or value.dim() == 0}
    rules = find_rules(lambda of: row_leaves(_take_two_steps(build, of, dtype).later), len(shape), what)
    large = {key: rule.shape(shape) for key, rule in rules.items() if rule.is_large}
    tensors = {key: torch.empty(own, dtype=rules[key].dtype, device="meta") for key, own in large.items()}
    first, later = (
        {key: rebuilt(key, value, tensors) for key, value in row.items() if entries_of(value) is not None}
        for row in (small.first, small.later)
    )
    tensors = {key: t for key, t in tensors.items() if key not in row_leaves(later)}
    plain = {key: tensors.get(key, value) for key, value in small.first.items()}
    return StateRow({**plain, **first}, {**numbers, **tensors, **later})


def _take_two_steps(build: Build, shape: Shape, dtype: torch.dtype) -> StateRow:
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(2)]
    optimizer = build(params)
    seen: list[dict[str, Any]] = []
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        step_plainly(optimizer)
        seen.append({name: state for name, state in optimizer.state[params[0]].items() if state is not None})
    one, other = (row_leaves(optimizer.state[param]) for param in params)
    return StateRow(seen[0], seen[1], frozenset(leaf for leaf in one if one[leaf] is other.get(leaf)))


@dataclass(frozen=True)
class StateRule:
    """Each dimension of a state: a number, or the dimensions of the parameter whose sizes it multiplies."""

    dims: tuple[int | tuple[int, ...], ...]
    dtype: torch.dtype

    def shape(self, param: Sequence[int]) -> Shape:
        return tuple(d if isinstance(d, int) else math.prod(param[i] for i in d) for d in self.dims)

    @property
    def is_large(self) -> bool:
        """Whether the state grows with the parameter or has several elements anyway, unlike a count of steps."""
        return any(not isinstance(d, int) or d > 1 for d in self.dims)


def find_rules(states_of: Callable[[Shape], Mapping[str, Tensor]], ndim: int, what: str) -> dict[str, StateRule]:
    """State name to its rule for parameters of `ndim` dimensions; `states_of` gives the states of a small parameter.

    Raises `PlanError` naming `what` if the states follow no rule.
    """
    first, second = PRIMES[ndim] if ndim in PRIMES else _small_primes(ndim, what)
    left, right = states_of(first), states_of(second)
    rules = {}
    for name, tensor in left.items():
        other = right.get(name)
        if other is None or other.dim() != tensor.dim() or other.dtype != tensor.dtype:
            raise _unruly(what, name, ndim)
        dims = []
        for sizes in zip(tensor.shape, other.shape):
            dim = _dim(sizes, first, second)
            if dim is None:
                raise _unruly(what, name, ndim)
            dims.append(dim)
        rules[name] = StateRule(tuple(dims), tensor.dtype)
    return rules


def _dim(sizes: tuple[int, int], first: Shape, second: Shape) -> int | tuple[int, ...] | None:
    if sizes[0] == sizes[1]:
        return sizes[0]
    for count in range(1, len(first) + 1):
        for chosen in combinations(range(len(first)), count):
            if sizes == (math.prod(first[i] for i in chosen), math.prod(second[i] for i in chosen)):
                return chosen
    return None


def _small_primes(ndim: int, what: str) -> tuple[Shape, Shape]:
    if ndim >= len(SMALL):
        raise PlanError(f"{what}: a parameter of {ndim} dimensions; at most {len(SMALL) - 1} are looked at")
    return SMALL[:ndim], SMALL[1 : ndim + 1]


def _unruly(what: str, name: str, ndim: int) -> PlanError:
    return PlanError(
        f"{what}: its state {name!r} of a parameter with {ndim} dimensions has a size that does not follow from the "
        "parameter's, so that no place can be planned for it; use an optimizer like torch.optim.AdamW, or a plan that "
        "keeps the states of every stage on its device"
    )
