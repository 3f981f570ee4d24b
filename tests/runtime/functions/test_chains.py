"""`functions.fuse`: the same bits as its calls one by one; only what gradients depend on is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.functions import fuse


def norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y * 2


CHAINS: list[tuple[Callable[..., Tensor], list[tuple[int, ...]], list[int], list[bool]]] = [
    (norm, [(2, 3, 8), (8,)], [0, 1], [True, True]),
    (norm, [(2, 3, 8), (8,)], [0, 1], [True, False]),
    (turn, [(2, 3, 8), (3, 8), (3, 8)], [1, 2], [True, False, False]),
    (gate, [(4, 8), (4, 8)], [0, 1], [True, True]),
    (add, [(4, 8), (4, 8)], [], [True, True]),
]


def draw(shapes: list[tuple[int, ...]], wanted: list[bool], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(want) for x, want in zip(drawn, wanted)]


@pytest.mark.parametrize(("body", "shapes", "needed", "wanted"), CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_have_the_same_bits(
    body: Callable[..., Tensor],
    shapes: list[tuple[int, ...]],
    needed: list[int],
    wanted: list[bool],
    dtype: torch.dtype,
) -> None:
    written, given = draw(shapes, wanted, dtype), draw(shapes, wanted, dtype)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = fuse(body, given, needed)
    expected = body(*written)
    assert torch.equal(result, expected) and [id(t) for t in saved] == [id(given[i]) for i in needed]
    expected.square().sum().backward()
    result.square().sum().backward()
    for mine, theirs, want in zip(given, written, wanted):
        assert (mine.grad is None) is not want
        if want:
            assert torch.equal(mine.grad, theirs.grad)


def test_the_modes_of_forward_hold_in_backward() -> None:
    """Under autocast a product inside is of bf16, in the backward that computes it again, too."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x @ y)

    found = []
    for run in (body, lambda *given: fuse(body, given, [0, 1])):
        given = draw([(4, 4), (4, 4)], [True, True], torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = run(*given)
        result.float().sum().backward()
        found.append([result, *(x.grad for x in given)])
    assert all(map(torch.equal, *found)) and found[1][0].dtype == torch.bfloat16


def test_nothing_is_saved_without_autograd() -> None:
    with torch.no_grad():
        result = fuse(gate, draw([(4, 8), (4, 8)], [True, True], torch.float32), [0, 1])
    assert result.grad_fn is None


def test_a_cost_run_sees_one_call_that_reads_and_writes() -> None:
    """Forward reads what enters and writes the result, backward reads its gradient and what is saved."""
    told: list[list[int]] = []

    @contextmanager
    def one_call(read: Any) -> Any:
        made: list[Tensor] = []
        yield made.extend
        told.append([t.numel() for t in (*read, *made)])

    given = draw([(2, 3, 8), (3, 8), (3, 8)], [True, False, False], torch.float32)
    fuse(turn, given, [1, 2], one_call).sum().backward()
    assert told == [[48, 24, 24, 48], [48, 24, 24, 48]]
