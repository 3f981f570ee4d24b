"""`in_tiles`: the body's results and gradients, whatever the tiles; what it is given wrongly is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.functions.tiles import in_tiles, tile_slices


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.up(x))
        return (residual + self.down(h) * scale).transpose(0, 1), h


Run = Callable[[Part, list[Tensor]], tuple[Tensor, ...]]


def outcome(run: Run, dtype: torch.dtype) -> list[Tensor]:
    """Results, and the gradients of operands and parameters."""
    torch.manual_seed(0)
    part = Part().to(dtype)
    operands = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 11, 6), (2, 11, 6), (6,))]
    made = run(part, operands)
    torch.autograd.backward(made, [torch.randn(result.shape, dtype=result.dtype) for result in made])
    assert part.down.weight.grad is None
    return [*(result.detach() for result in made), *(t.grad for t in (*operands, *part.up.parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("tokens", [2, 4, 11, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_and_gradients_are_those_of_the_body(tokens: int, dtype: torch.dtype) -> None:
    def run_in_tiles(part: Part, operands: list[Tensor]) -> tuple[Tensor, ...]:
        return in_tiles(part, tokens, operands, [1, 1, None], [0, 1], [*part.up.parameters()])  # type: ignore[return-value]

    found, want = outcome(run_in_tiles, dtype), outcome(lambda part, operands: part(*operands), dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 0.05  # sums over tiles: each product is rounded
    for mine, whole in zip(found, want, strict=True):
        assert mine.dtype == whole.dtype
        torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance)


def test_results_that_nothing_reads_are_not_made_and_have_gradients() -> None:
    """One token runs, for the shapes of results, in forward; each tile in backward."""
    ran: list[int] = []

    def count(part: Part, *operands: Tensor) -> tuple[Tensor, ...]:
        ran.append(operands[0].shape[1])
        return part(*operands)  # type: ignore[no-any-return]

    found = []
    for unread in (False, True):

        def run_in_tiles(part: Part, operands: list[Tensor], unread: bool = unread) -> tuple[Tensor, ...]:
            body, weights = partial(count, part), [*part.up.parameters()]
            return in_tiles(body, 4, operands, [1, 1, None], [0, 1], weights, unread=unread)  # type: ignore[return-value]

        found.append(outcome(run_in_tiles, torch.float64))
    assert ran == [4, 4, 3] * 2 + [1] + [4, 4, 3]
    for mine, want in zip(found[1][:2], found[0][:2], strict=True):
        assert (mine.shape, mine.dtype) == (want.shape, want.dtype) and mine.untyped_storage().nbytes() == 8
    assert all(torch.equal(mine, want) for mine, want in zip(found[1][2:], found[0][2:], strict=True))


def test_without_gradients_nothing_is_saved_and_memory_lies_as_that_of_the_body() -> None:
    part, x, scale = Part(), torch.randn(2, 11, 6), torch.ones(6)
    with torch.no_grad():
        made = in_tiles(part, 4, [x, x, scale], [1, 1, None], [0, 1])
        want = part(x, x, scale)
    for mine, whole in zip(made, want, strict=True):
        assert mine.stride() == whole.stride() and mine.grad_fn is None
        torch.testing.assert_close(mine, whole)


def test_autocast_holds_in_backward_too() -> None:
    def run(tiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        part, x = Part(), torch.randn(2, 11, 6, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = [x, x, torch.ones(6)]
            weights = [*part.up.parameters()]
            out, h = in_tiles(part, 4, given, [1, 1, None], [0, 1], weights) if tiled else part(*given)
        (out.float().sum() + h.float().square().sum()).backward()
        return [out.detach(), h.detach(), x.grad, part.up.weight.grad]  # type: ignore[list-item]

    for mine, whole in zip(run(True), run(False)):
        assert mine.dtype == whole.dtype
        torch.testing.assert_close(mine, whole, rtol=0.02, atol=0.02)


def test_operands_of_different_lengths_and_results_of_another_are_refused() -> None:
    x = torch.randn(2, 11, 6)
    with pytest.raises(ValueError, match=r"what is cut into tiles has \[6, 11\] tokens"):
        in_tiles(lambda a, b: a, 4, [x, x], [1, 2], [1])
    with pytest.raises(ValueError, match=r"a tile of 4 tokens gave results of shapes \[\(2, 3, 6\)\]"):
        in_tiles(lambda a: a[:, 1:], 4, [x], [1], [1])


def test_a_parameter_that_is_not_among_the_weights_is_refused() -> None:
    part, x = Part(), torch.randn(2, 11, 6, requires_grad=True)
    made = in_tiles(part, 4, [x, x, torch.ones(6)], [1, 1, None], [0, 1], [part.up.weight])
    with pytest.raises(ValueError, match=r"a parameter of shape \(10,\) inside a tile is not among its weights"):
        made[0].sum().backward()  # type: ignore[union-attr]


def test_the_last_tile_may_be_smaller() -> None:
    assert list(tile_slices(11, 4)) == [(0, 4), (4, 4), (8, 3)]
