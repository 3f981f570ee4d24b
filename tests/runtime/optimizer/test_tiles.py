"""A step in tiles: the bits of torch's own step on whole tensors, in every precision and from every layout of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.ir import ops
from penstock.ir.program import Interface, ParamSpec, StageSpec
from penstock.ir.stages import interface
from penstock.runtime.optimizer import tiles
from penstock.runtime.optimizer.rounding import Rounding, round_into
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer, Workspace
from penstock.runtime.stage.shards import rounding_of
from penstock.tests.runtime.optimizer.every_optimizer import HAVE_FUSED, KINDS

SHAPES: dict[str, tuple[int, ...]] = {"w": (30, 41), "b": (41,), "one": (1,), "scale": (), "conv": (5, 3, 7, 2)}
MOST = ((64, 1), (200, 2), (600, 3), (1 << 18, 2))  # elements in the tiles of all threads, and their number


@pytest.fixture(params=MOST)
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    elements, threads = request.param
    own = torch.get_num_threads()
    monkeypatch.setattr(tiles, "tile_elements", lambda: elements)
    torch.set_num_threads(threads)
    yield elements
    torch.set_num_threads(own)


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}


def plain_optimizer(kind: str, params: dict[str, Tensor]) -> torch.optim.Optimizer:
    return KINDS[kind]([torch.nn.Parameter(p) for p in params.values()], fused=True)


def step_plainly(optimizer: torch.optim.Optimizer, grads: dict[str, Tensor]) -> None:
    for param, grad in zip(optimizer.param_groups[0]["params"], grads.values()):
        param.grad = grad
    optimizer.step()


@given(st.lists(st.integers(0, 700), max_size=6), st.integers(64, 400))
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_one_tile_and_pieces_keep_the_lanes(sizes: list[int], most: int) -> None:
    seen = [0] * len(sizes)
    for tile in tiles.cut(tuple(sizes), most):
        assert 0 < sum(size for _, _, size in tile) <= most
        for index, begin, size in tile:
            assert begin == seen[index] and begin % tiles.LANES == 0
            seen[index] += size
    assert seen == sizes


@pytest.mark.parametrize("kind", HAVE_FUSED)
def test_half_gradients_a_factor_and_half_weights_are_the_bits_of_torch(kind: str, most: int) -> None:
    spec = OptimizerSpec.from_callable(KINDS[kind])
    mine, plain = numbers(0), numbers(0)
    low = {name: torch.full(shape, torch.nan, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    workspace = Workspace(torch.device("cpu"))
    part, optimizer = StageOptimizer(spec, mine, workspace=workspace), plain_optimizer(kind, plain)
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    for step in range(3):
        half = numbers(10 + step, torch.bfloat16)
        part.step(half, factor=factor, weights=low)
        step_plainly(optimizer, {name: g.float().mul_(factor.float()) for name, g in half.items()})
        for name, want in plain.items():
            assert torch.equal(mine[name], want), (step, name)
            assert torch.equal(low[name], want.bfloat16()), (step, name)
    assert workspace.bytes <= 4 * most  # one tile of gradients, whatever the stage has


@pytest.mark.parametrize("kind", ["AdamW", "SGD-momentum"])
def test_weights_without_masters_are_rounded_as_whole_ones(kind: str, most: int) -> None:
    spec, rounding = OptimizerSpec.from_callable(KINDS[kind]), Rounding(starts={"w": 7})
    mine, plain = numbers(0, torch.bfloat16), numbers(0, torch.bfloat16)
    workspace = Workspace(torch.device("cpu"))
    part = StageOptimizer(spec, mine, workspace=workspace, rounding=rounding)
    full = {name: p.float() for name, p in plain.items()}
    optimizer = plain_optimizer(kind, full)
    for step in range(3):
        half = numbers(10 + step, torch.bfloat16)
        part.step(half, draw=(3, step))
        step_plainly(optimizer, {name: g.float() for name, g in half.items()})
        for name, weight in plain.items():
            round_into(weight, full[name], (3, step, name), rounding.starts.get(name, 0))
            assert torch.equal(mine[name], weight), (step, name)
            full[name].copy_(weight)
    assert workspace.bytes <= 2 * 4 * most  # a tile of gradients and one of weights


def test_gradients_in_two_types_and_preserved_ones(most: int) -> None:
    """Only what is of another type is converted; what is given stays as it is."""
    spec = OptimizerSpec.from_callable(KINDS["AdamW"])
    mine, plain = numbers(0), numbers(0)
    part, optimizer = StageOptimizer(spec, mine), plain_optimizer("AdamW", plain)
    for step in range(2):
        mixed = {name: g.half() if name in ("b", "conv") else g for name, g in numbers(10 + step).items()}
        before = {name: g.clone() for name, g in mixed.items()}
        part.step(mixed, preserve=True)
        step_plainly(optimizer, {name: g.float() for name, g in before.items()})
        assert all(torch.equal(g, before[name]) for name, g in mixed.items())
    assert all(torch.equal(mine[name], want) for name, want in plain.items())


def test_a_learning_rate_in_a_tensor_and_several_groups(most: int) -> None:
    given: Any = partial(torch.optim.AdamW, lr=1e-2)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 7))
    rows = [{"params": ["*.bias"], "weight_decay": 0.0}, {"params": ["*.weight"], "lr": 1e-3}]
    spec = OptimizerSpec.from_callable(given, model=model, param_groups=rows)
    mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    part = StageOptimizer(spec, mine)
    assert part.optimizer is not None
    part.optimizer.param_groups[1]["lr"] = torch.tensor(1e-3)
    biases, others = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("bias", "weight"))
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": torch.tensor(1e-3)}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for step in range(2):
        made = torch.Generator().manual_seed(step)
        grads = {name: torch.randn(p.shape, generator=made).bfloat16() for name, p in model.named_parameters()}
        part.step(grads)
        for name, param in model.named_parameters():
            param.grad = grads[name].float()
        optimizer.step()
    assert all(torch.equal(mine[name], p.detach()) for name, p in model.named_parameters())


def test_a_class_of_ones_own_is_stepped_on_whole_tensors() -> None:
    """It may read gradients before it calls a fused kernel."""

    class Halved(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.mul_(0.5)
            super().step()

    assert Halved not in tiles.CLASSES
    mine, plain = torch.ones(100), torch.ones(100)
    globals()["Halved"] = Halved
    try:
        part = StageOptimizer(OptimizerSpec(f"{__name__}:Halved", {"fused": True}), {"a": mine})
        grad = torch.linspace(-1, 1, 100).bfloat16()
        part.step({"a": grad})
        step_plainly(torch.optim.AdamW([torch.nn.Parameter(plain)], fused=True), {"a": grad.float() * 0.5})
    finally:
        del globals()["Halved"]
    assert torch.equal(mine, plain)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("most", [512, 1 << 24])
def test_tiles_take_what_is_charged_at_most(rounds: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILED_ELEMENTS", most)
    monkeypatch.setattr(interface, "TILED_ELEMENTS", most)
    shapes = {"a": (40, 50), "b": (30,)}
    params = tuple(ParamSpec(name, shape, "bfloat16") for name, shape in shapes.items())
    stage = StageSpec("stage0", (), (), params)
    plan = Interface({"stage0": stage}, {}, master=not rounds, rounds=rounds, tiles=True)
    charged_bytes = plan.update_bytes(stage, ops.DRAM, converted=True)
    assert charged_bytes == 4 * (1 + rounds) * min(most, 2030) <= plan.update_bytes(stage, ops.DEVICE, converted=True)
    dtype, workspace = torch.bfloat16 if rounds else torch.float32, Workspace(torch.device("cpu"))
    masters = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    spec, rounding = OptimizerSpec.from_callable(torch.optim.AdamW), rounding_of(stage, {}) if rounds else None
    part = StageOptimizer(spec, masters, workspace=workspace, rounding=rounding)
    part.step({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    assert 0 < workspace.bytes <= charged_bytes
