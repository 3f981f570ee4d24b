"""The states that an optimizer keeps for a parameter, from the parameter's shape alone, without allocating it.

Two small parameters that differ in the size of every dimension are stepped. How the sizes of their states follow from
their own is the rule for all parameters of as many dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ...ir.errors import PlanError

Shape = tuple[int, ...]
PRIMES: dict[int, tuple[Shape, Shape]] = {  # large where that is cheap: some optimizers treat small sizes differently
    0: ((), ()),
    1: ((1009,), (1013,)),
    2: ((131, 137), (139, 149)),
    3: ((5, 61, 67), (7, 71, 73)),
    4: ((11, 13, 3, 5), (17, 19, 5, 7)),
}
SMALL = (2, 3, 5, 7, 11, 13, 17)


@dataclass(frozen=True)
class StateRule:
    """Each dimension of a state: a number, or the dimensions of the parameter whose sizes it multiplies."""

    dims: tuple[int | tuple[int, ...], ...]
    dtype: torch.dtype

    def shape(self, param: Sequence[int]) -> Shape:
        """The state's shape for a parameter of this shape."""
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
