"""States in given places, in several calls a step, with conversions: the same bits as one plain torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.ir.errors import PlanError
from penstock.runtime.optimizer import stage_optimizer as stage_optimizers
from penstock.runtime.optimizer.param_groups import ParamGroup
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer, Workspace
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER, Counting, Replacing
from penstock.tests.shown_elsewhere import slow_but

CASES = {**EVERY_OPTIMIZER, "Replacing": Replacing, "Counting": Counting}
TELLING = ("AdamW-fused", "Adafactor-foreach", "Adagrad-loop", "Rprop-loop", "Replacing", "Counting")
SHAPES: dict[str, tuple[int, ...]] = {"w": (6, 5), "b": (5,), "one": (1,), "scale": (), "conv": (3, 2, 2, 2)}
Rows = dict[str, dict[str, Tensor]]


def weights() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    for name in {0: ("b", "conv"), 2: ("w",)}.get(step, ()):  # "b" and "conv" begin later than the others
        del found[name]
    return found


def make_places(spec: OptimizerSpec) -> Rows:
    """Views of one buffer, filled with what must not matter."""
    sizes = {name: spec.state_shapes(shape, name) for name, shape in SHAPES.items()}
    total = sum(math.prod(shape) for row in sizes.values() for shape, _ in row.values())
    flat, offset, places = torch.full((total,), math.nan), 0, dict[str, dict[str, Tensor]]()
    for name, row in sizes.items():
        places[name] = {}
        for key, (shape, dtype) in row.items():
            assert dtype == torch.float32
            places[name][key] = flat[offset : offset + math.prod(shape)].view(shape)
            offset += math.prod(shape)
    return places


def assert_in_places(part: StageOptimizer, places: Rows) -> None:
    for name, row in part.state_dict()["states"].items():
        assert places[name].keys() <= row.keys()
        assert all(row[key] is place for key, place in places[name].items())


def assert_same_states(left: StageOptimizer, right: StageOptimizer) -> None:
    mine, other = left.state_dict(), right.state_dict()
    for key in ("scalars", "group", "scheduler"):
        assert mine[key] == other[key]
    assert mine["states"].keys() <= other["states"].keys()  # some classes have states before the first step
    for name, row in mine["states"].items():
        assert row.keys() == other["states"][name].keys()
        assert all(torch.equal(value, other["states"][name][key]) for key, value in row.items()), name


@pytest.mark.parametrize("case", slow_but(TELLING, CASES))
def test_states_in_places_are_the_same_bits_also_when_loaded_and_moved(case: str) -> None:
    spec = OptimizerSpec.from_callable(CASES[case])
    mine, plain = weights(), weights()
    places = make_places(spec)
    part, reference = StageOptimizer(spec, mine, places), StageOptimizer(spec, plain)
    assert not part.started
    for step in range(6):
        if step == 3:  # from a checkpoint
            places, saved = make_places(spec), part.state_dict()
            part = StageOptimizer(spec, mine, places)
            part.load_state_dict(saved)
            assert_in_places(part, places)
        if step == 4:  # to where their content has been brought already
            moved, own = make_places(spec), {name: w.clone() for name, w in mine.items()}
            for name, row in part.state_dict()["states"].items():
                for key in places[name]:
                    moved[name][key].copy_(row[key])
            part.bind(moved, own)
            places, mine = moved, own
        part.step(gradients(step))
        reference.step(gradients(step))
        assert_in_places(part, places)
        assert_same_states(part, reference)
        for name, want in plain.items():
            assert torch.equal(mine[name], want), (step, name)
    assert part.started == reference.started == bool(reference.state_dict()["states"])


@pytest.mark.parametrize("case", CASES)
def test_the_sizes_of_states_are_known_before(case: str) -> None:
    spec = OptimizerSpec.from_callable(CASES[case])
    part = StageOptimizer(spec, weights())
    part.step({name: torch.ones_like(w) for name, w in weights().items()})
    states = part.state_dict()["states"]
    for name, shape in SHAPES.items():
        known = spec.state_shapes(shape)
        assert all((states[name][key].shape, states[name][key].dtype) == want for key, want in known.items())
        unknown = [value for key, value in states.get(name, {}).items() if key not in known]
        assert all(value.numel() == 1 for value in unknown)
    total = sum(
        s.nbytes for name, row in states.items() for key, s in row.items() if key in spec.state_shapes(SHAPES[name])
    )
    assert spec.state_bytes(SHAPES) == spec.state_bytes(SHAPES.values()) == total


def test_sizes_of_states_by_hand() -> None:
    def shapes(case: str, *shape: int) -> dict[str, tuple[int, ...]]:
        return {n: s for n, (s, _) in OptimizerSpec.from_callable(CASES[case]).state_shapes(shape).items()}

    assert shapes("AdamW-fused", 50257, 12288) == {"exp_avg": (50257, 12288), "exp_avg_sq": (50257, 12288)}
    assert shapes("Adafactor-loop", 300, 4, 50) == {"row_var": (300, 4, 1), "col_var": (300, 1, 50)}
    assert shapes("Adafactor-loop", 300) == {"variance": (300,)}
    assert shapes("SGD-fused", 300, 4) == {}
    spec = OptimizerSpec.from_callable(CASES["AdamW-fused"])
    assert spec.state_bytes([(1 << 20, 1 << 18)]) == 2 << 40


def test_sizes_of_states_by_group() -> None:
    groups = (ParamGroup(("a",), {"amsgrad": True}), ParamGroup())
    spec = OptimizerSpec("torch.optim:Adam", groups=groups)
    assert (len(spec.state_shapes((4,), "a")), len(spec.state_shapes((4,), "b"))) == (3, 2)
    assert len(spec.state_shapes((4,))) == 3, "without a name the most"
    assert spec.state_bytes({"a": (4,), "b": (2,)}) == 48 + 16
    assert spec.state_bytes_per_param() == 12


class Blocks(torch.optim.SGD):
    """Keeps one number for each 50 elements."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["largest"] = torch.zeros(-(-param.numel() // 50))


class ReadBlocks(Blocks):
    """Reads memory by itself, so that nothing but a real step tells its states."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.detach().numpy()
        super().step()


def test_states_by_block_are_known_and_what_follows_no_rule_is_refused_where_places_are_needed() -> None:
    blocks = OptimizerSpec.from_callable(Blocks)
    assert blocks.state_shapes((5, 5)) == {"largest": ((1,), torch.float32)}
    assert blocks.state_shapes((30000, 30000)) == {"largest": ((18_000_000,), torch.float32)}
    spec = OptimizerSpec.from_callable(ReadBlocks)
    assert spec.state_shapes((5, 21)) == {"largest": ((3,), torch.float32)}, "a small one is stepped for real"
    with pytest.raises(PlanError, match="Blocks: its state 'largest' of a parameter with 2 dimensions"):
        spec.state_shapes((500, 500))


class Late(torch.optim.SGD):
    """Keeps whole states of long rows only, so that small ones say something else."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("mean", torch.zeros(param.numel() if param.numel() > 5000 else 2))


def test_states_other_than_planned_are_refused() -> None:
    spec = OptimizerSpec.from_callable(Late)
    with pytest.raises(PlanError, match=r"'mean' of a is torch.float32\[6000\]; .* planned as torch.float32\[2\]"):
        StageOptimizer(spec, {"a": torch.zeros(6000)}, {"a": {"mean": torch.zeros(2)}}).step({"a": torch.ones(6000)})
    with pytest.raises(PlanError, match=r"'mean' of a is torch.float32\[6000\]; no place was planned for it"):
        StageOptimizer(spec, {"a": torch.zeros(6000)}, {"a": {"other": torch.zeros(2)}}).step({"a": torch.ones(6000)})


def test_at_first_the_states_of_one_parameter_exist_twice_at_most() -> None:
    spec = OptimizerSpec.from_callable(CASES["Adagrad-fused"])
    shapes = {f"w{i}": (100, 10) for i in range(5)}
    places = {n: {k: torch.empty(s) for k, (s, _) in spec.state_shapes(shape).items()} for n, shape in shapes.items()}
    part = StageOptimizer(spec, {name: torch.zeros(shape) for name, shape in shapes.items()}, places)
    assert part.state_bytes() == 0
    assert part.optimizer is not None
    outside: list[int] = []
    own = {place.data_ptr() for row in places.values() for place in row.values()}

    def look(*_: object) -> None:
        rows = part.optimizer.state.values() if part.optimizer else []
        outside.append(sum(s.nbytes for row in rows for s in row.values() if s.numel() > 1 and s.data_ptr() not in own))

    part.optimizer.register_step_post_hook(look)
    for _ in range(2):
        part.step({name: torch.ones(shape) for name, shape in shapes.items()})
    assert outside == [4000] * 5 + [0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("portion", slow_but([36], [1, 36, 1 << 20]))
def test_converted_gradients_in_portions_are_the_same_bits(
    case: str, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_optimizers, "PORTION_ELEMENTS", portion)
    spec = OptimizerSpec.from_callable(CASES[case])
    mine, plain = weights(), weights()
    low = {name: torch.full(shape, math.nan, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    workspace = Workspace(torch.device("cpu"))
    part, reference = StageOptimizer(spec, mine, workspace=workspace), StageOptimizer(spec, plain)
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    for step in range(5):
        half = {name: g.bfloat16() for name, g in gradients(step).items()}
        part.step(half, factor=factor, weights=low)
        reference.step({name: g.float().mul_(factor.float()) for name, g in half.items()})
        for name, want in plain.items():
            assert torch.equal(mine[name], want), (step, name)
            if step > 0:
                assert torch.equal(low[name], want.bfloat16()), (step, name)
    assert workspace.bytes <= part.workspace_bytes()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_preserved_where_that_is_asked_for(case: str) -> None:
    spec = OptimizerSpec.from_callable(CASES[case])
    mine, plain = weights(), weights()
    part, reference = StageOptimizer(spec, mine), StageOptimizer(spec, plain)
    for step in range(3):
        grads = gradients(step)
        part.step(grads, preserve=True)
        assert all(torch.equal(g, gradients(step)[name]) for name, g in grads.items())
        reference.step(gradients(step))
    assert all(torch.equal(mine[name], want) for name, want in plain.items())


def test_what_is_known_of_an_optimizer() -> None:
    def traits(case: str) -> tuple[bool, ...]:
        found = OptimizerSpec.from_callable(CASES[case]).traits(torch.device("cpu"))
        return found.divisible, found.keeps_grads, found.in_place, found.born_empty

    assert traits("AdamW-fused") == (True, True, True, True)
    assert traits("SGD-momentum-foreach") == (True, False, True, True)
    assert traits("Adagrad-loop") == (True, True, True, False)
    assert traits("Replacing") == (True, False, False, True)
    assert traits("Counting") == (False, True, True, True)


def transpose_grad(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t()


def expand_grad(grad: Tensor) -> Tensor:
    return grad[:1].expand_as(grad)


@pytest.mark.parametrize("change", [transpose_grad, expand_grad])
def test_gradients_may_lie_otherwise_in_memory(change: Callable[[Tensor], Tensor]) -> None:
    spec = OptimizerSpec.from_callable(CASES["AdamW-fused"])
    mine, plain = torch.zeros(6, 5), torch.zeros(6, 5)
    part, reference = StageOptimizer(spec, {"w": mine}), StageOptimizer(spec, {"w": plain})
    for step in range(1, 2):
        grad = change(gradients(step)["w"])
        part.step({"w": grad})
        reference.step({"w": grad.contiguous()})
    assert torch.equal(mine, plain)
