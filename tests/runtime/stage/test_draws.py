"""Every draw of a stage begins with a seed of its own, whatever the stage drew before, and only where it says so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ir.errors import VerifyError
from penstock.ir.program import StageSpec, TensorSpec
from penstock.runtime.modules import Scope, Stage, draw_at
from penstock.runtime.stage.draws import Draws, draw_seed, evaluation_seed, micro_batch_seed
from penstock.runtime.stage.runner import StageRunner

CPU = torch.device("cpu")


class Block(Scope):
    def forward(self, x: Tensor) -> Tensor:
        draw_at(self, "drop")
        x = F.dropout(x, 0.5, self.training)
        draw_at(self)
        return x * torch.rand(x.shape)


class Drawing(Stage):
    """Two blocks, the second called twice."""

    def __init__(self, draws: Mapping[str, Sequence[int]] | None = None) -> None:
        super().__init__(draws)
        self.h = Scope({0: Block(), 1: Block()})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.h[0](x), self.h[1](x), self.h[1](x)


class Silent(Stage):
    """Draws and does not say where."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (F.dropout(x, 0.5, self.training),)


def wanted_draws(seed: int, place: str, number: int, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw_seed(seed, f"{place}.drop", number))
        h = F.dropout(x, 0.5)
        torch.manual_seed(draw_seed(seed, place, number))
        return h * torch.rand(x.shape)


def run(stage: Stage, x: Tensor, seed: int) -> tuple[Tensor, ...]:
    with Draws("stage0", stage, CPU).seed_draws(seed):
        found: tuple[Tensor, ...] = stage(x)
    return found


def test_a_place_is_a_path_in_the_model_and_a_number() -> None:
    x = torch.ones(64)
    found = run(Drawing(), x, 5)
    places = [("h.0", 0), ("h.1", 0), ("h.1", 1)]
    assert all(
        torch.equal(y, wanted_draws(5, place, number, x)) for y, (place, number) in zip(found, places, strict=True)
    )


def test_a_stage_says_which_of_the_draws_at_a_place_are_its_own() -> None:
    x = torch.ones(64)
    _, first, second = run(Drawing({"h.1": (3, 1), "h.1.drop": (3, 1)}), x, 5)
    assert torch.equal(first, wanted_draws(5, "h.1", 3, x)) and torch.equal(second, wanted_draws(5, "h.1", 1, x))


def test_a_second_run_draws_the_same_and_the_users_generator_goes_on() -> None:
    stage, x = Drawing(), torch.ones(64)
    draws = Draws("stage0", stage, CPU)
    before = torch.get_rng_state()
    rows = []
    for seed in (1, 1, 2):
        with draws.seed_draws(seed):
            rows.append(torch.stack(stage(x)))
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_runtime_a_stage_draws_as_it_stands() -> None:
    stage, x = Drawing(), torch.ones(64)
    torch.manual_seed(0)
    first = stage(x)
    torch.manual_seed(0)
    assert all(map(torch.equal, first, stage(x))) and not torch.equal(first[0], first[1])


def test_a_stage_that_does_not_say_where_it_draws_is_refused() -> None:
    x = TensorSpec("x", (8,), "float32")
    spec = StageSpec("stage0", (x,), (TensorSpec("y", (8,), "float32"),), ())
    runner = StageRunner(spec, Silent(), CPU, "fp32")
    assert len(runner.evaluate([torch.ones(8)], 0)) == 1  # nothing is drawn there
    with pytest.raises(VerifyError, match=r"stage0 draws random numbers.*draw_at\(self, .*compile the model anew"):
        runner.forward([torch.ones(8)], 0)


def test_seeds_differ_in_every_part_and_fit_a_generator() -> None:
    pairs = list(itertools.product((0, 1), repeat=3))
    seeds = {micro_batch_seed(*row) for row in pairs}
    seeds |= {evaluation_seed(*row, 0) for row in pairs} | {evaluation_seed(*row, 1) for row in pairs}
    seeds |= {draw_seed(seed, place, number) for seed in (0, 1) for place in ("a", "a.b") for number in (0, 1)}
    assert len(seeds) == 8 + 16 + 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert (micro_batch_seed(3, 2, 0), draw_seed(5, "h.0", 1)) == (5558505807181986226, 382047827983081742)
