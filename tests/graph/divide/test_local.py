"""Sizes in the arguments of calls, written anew for a part of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.graph.divide.local import arguments_for_shape

WHOLE, HALF = torch.zeros(2, 8, 6), torch.zeros(2, 4, 6)
CALLS: list[tuple[str, Any, dict[str, Any], Any, dict[str, Any]]] = [
    ("view", (2, 8, 6), {}, (2, 4, 6), {}),
    ("view", ((2, 8, -1),), {}, ((2, 4, -1),), {}),
    ("reshape", ([2, 8, 3, 2],), {}, ([2, 4, 3, 2],), {}),
    ("reshape", (-1, 6), {}, (-1, 6), {}),
    ("unflatten", (1, (2, 4)), {}, (1, (1, 4)), {}),
    ("unflatten", (), {"dim": 1, "sizes": (2, 4)}, (), {"dim": 1, "sizes": (1, 4)}),
    ("new_zeros", (), {"size": (2, 8)}, (), {"size": (2, 4)}),
    ("flatten", (1, 2), {}, (1, 2), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "new_args", "new_kwargs"), CALLS)
def test_a_call_is_told_the_sizes_of_a_part(
    name: str, args: Any, kwargs: dict[str, Any], new_args: Any, new_kwargs: dict[str, Any]
) -> None:
    old, new = getattr(WHOLE, name)(*args, **kwargs).shape, getattr(HALF, name)(*new_args, **new_kwargs).shape
    ways = [(way[1:], named) for way, named in arguments_for_shape((WHOLE, *args), kwargs, old, new)]
    assert (new_args, new_kwargs) in ways and ways[-1] == (args, kwargs)


def test_open_sizes_are_named_on_demand() -> None:
    ways = arguments_for_shape((WHOLE, 2, 8, -1), {}, (2, 8, 6), (2, -1, 6), is_open=False)
    assert [args[1:] for args, _ in ways] == [(2, -1, 6), (2, 8, -1)]
