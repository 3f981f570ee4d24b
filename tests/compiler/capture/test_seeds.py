"""A forward that sets a generator's state is refused: a plan has its own seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]):
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.draw(x)).square().mean()


def seed(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.rand_like(x)


def fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.rand_like(x)


def put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)
    return noise


def seed_gpus(x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)
    return torch.rand_like(x)


@pytest.mark.parametrize(
    ("draw", "name"),
    [(seed, "torch.manual_seed"), (fork, "torch.random.fork_rng"), (put_back, "torch.set_rng_state"),
     (seed_gpus, "torch.cuda.manual_seed_all")],
)  # fmt: skip
def test_a_seed_in_forward_is_refused_by_its_line(draw: Callable[[Tensor], Tensor], name: str) -> None:
    model = Noisy(draw)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=f"forward calls {name}, which") as raised:
        trace(model, (torch.ones(2, 4),))
    assert str(raised.value).startswith("test_seeds.py:")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.manual_seed(7).initial_seed() == 7  # as it was


def test_draws_of_the_default_generator_are_recorded_also_under_checkpoints() -> None:
    def draw(x: Tensor) -> Tensor:
        return checkpoint(torch.rand_like, x, use_reentrant=False)  # type: ignore[no-any-return]

    graph = trace(Noisy(draw), (torch.ones(2, 4),))
    assert sum(bool(node.meta.get("random")) for node in graph.nodes) == 1
