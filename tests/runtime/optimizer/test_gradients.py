"""Clipping, loss scale, and steps taken before the norm is known: the same bits as steps that waited for it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from penstock.runtime.optimizer.gradients import (
    Grads,
    LossScale,
    Verdict,
    clip_factor,
    judge,
    must_redo,
    speculative_factor,
)
from penstock.runtime.optimizer.snapshot import OptimizerSnapshot
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer

SHAPES = {"a": (5, 7), "b": (9,), "c": (3, 2), "s": ()}
PARTS = (("a", "s"), ("b", "c"))
STEPS = 20
CASES = [
    partial(torch.optim.AdamW, lr=1e-2),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),  # changes gradients in place
    *(
        pytest.param(optimizer, marks=pytest.mark.slow)
        for optimizer in (
            partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),  # has states before its first step
            torch.optim.Adafactor,
            partial(torch.optim.NAdam, lr=1e-2),
        )
    ),
]


class Trainer:
    """Two stages' optimizers, clipping, and a loss scale in fp16: one that waits, or one that steps first."""

    def __init__(self, optimizer: object, precision: str, max_norm: float, speculative: bool):
        spec = OptimizerSpec.from_callable(optimizer, partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS))
        made = torch.Generator().manual_seed(0)
        self.masters = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
        self.parts = [StageOptimizer(spec, {name: self.masters[name] for name in part}) for part in PARTS]
        self.scale = LossScale(growth_steps=3) if precision == "fp16" else None
        self.max_norm, self.speculative = max_norm, speculative
        self.kept: list[OptimizerSnapshot | None] = [None] * len(PARTS)
        self.verdicts: list[Verdict] = []

    def step(self, gradients: dict[str, Tensor]) -> None:
        scale = 1.0 if self.scale is None else self.scale.scale
        squares = sum(torch.linalg.vector_norm(g, dtype=torch.float32).double().square() for g in gradients.values())
        assert isinstance(squares, Tensor)
        all_grads = [Grads({name: gradients[name].clone() for name in part if name in gradients}) for part in PARTS]
        if self.speculative:
            self._step_first(all_grads, squares, scale)
        elif self.scale is None or bool(squares.isfinite()):
            for part, grads in zip(self.parts, all_grads):
                grads.scale(clip_factor(squares, self.max_norm, scale))
                part.step(grads.to_full())
        if self.scale is not None:
            self.scale.update(bool(squares.isfinite()))

    def _step_first(self, all_grads: list[Grads], squares: Tensor, scale: float) -> None:
        for i, (part, grads) in enumerate(zip(self.parts, all_grads)):
            self.kept[i] = part.snapshot(into=self.kept[i])
            before = {name: g.clone() for name, g in grads.tensors.items()}
            part.step(grads.tensors, factor=grads.times(speculative_factor(scale)), preserve=True)
            assert all(same(g, before[name]) for name, g in grads.tensors.items())
        verdict = judge(squares, self.max_norm, None if self.scale is None else scale)
        self.verdicts.append(verdict)
        for part, kept, grads in zip(self.parts, self.kept, all_grads):
            assert kept is not None
            if verdict is not Verdict.KEEP:
                part.restore(kept)
            if verdict is Verdict.REDO:
                grads.scale(clip_factor(squares, self.max_norm, scale))
                part.step(grads.to_full())


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit; one NaN is as good as another."""
    return torch.equal(left.nan_to_num(nan=-7.0), right.nan_to_num(nan=-7.0)) and torch.equal(
        left.isnan(), right.isnan()
    )


def assert_same(left: Trainer, right: Trainer) -> None:
    for name, master in left.masters.items():
        assert same(master, right.masters[name]), name
    for mine, other in zip(left.parts, right.parts):
        states, others = mine.state_dict(), other.state_dict()
        assert states["states"].keys() == others["states"].keys()
        for name, row in states["states"].items():
            assert row.keys() == others["states"][name].keys()
            assert all(same(value, others["states"][name][key]) for key, value in row.items()), name
        for key in ("scalars", "group", "scheduler"):
            assert states[key] == others[key]
    assert left.scale == right.scale


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, float, list[tuple[int, float, str]]]:
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    sizes = st.sampled_from([1e-3, 0.1, 1.0, 30.0])
    what = st.sampled_from(["plain"] * 6 + ["missing", "inf", "nan"])
    steps = draw(st.lists(st.tuples(st.integers(0, 999), sizes, what), min_size=STEPS, max_size=STEPS))
    return precision, draw(st.sampled_from([0.05, 1.0, 7.3, 1e30])), steps


def gradients(seed: int, size: float, what: str, precision: str, scale: float) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    found = {name: (torch.randn(shape, generator=made) * size * scale / 64).to(dtype) for name, shape in SHAPES.items()}
    if what == "missing":
        del found["b"], found["s"]
    elif what != "plain":
        found["a"][1, 2] = float(what)
    return found


@pytest.mark.parametrize("optimizer", CASES, ids=lambda case: getattr(case, "func", case).__name__)
@settings(max_examples=10, deadline=None)
@given(run=runs())
def test_a_speculative_step_equals_one_that_waits_for_the_norm(
    optimizer: object, run: tuple[str, float, list[tuple[int, float, str]]]
) -> None:
    precision, max_norm, steps = run
    waits, first = (Trainer(optimizer, precision, max_norm, speculative) for speculative in (False, True))
    for seed, size, what in steps:
        scale = 1.0 if waits.scale is None else waits.scale.scale
        grads = gradients(seed, size, what, precision, scale)
        waits.step(grads)
        first.step(grads)
        assert_same(waits, first)


def test_the_cases_above_keep_redo_and_undo() -> None:
    trainer = Trainer(CASES[0], "fp16", 1.0, speculative=True)
    for seed, size, what in [(0, 1e-3, "plain"), (1, 15.0, "plain"), (2, 1e-3, "inf")]:
        trainer.step(gradients(seed, size, what, "fp16", 65536.0))
    assert trainer.verdicts == [Verdict.KEEP, Verdict.REDO, Verdict.UNDO]
    assert trainer.scale is not None and trainer.scale.scale == 32768.0


@given(st.floats(0.1, 1e4), st.integers(-4, 4), st.integers(0, 24))
def test_the_decision_is_whether_the_factor_differs(max_norm: float, ulps: int, log_scale: int) -> None:
    """Around the edge, where the norm is max_norm less EPSILON: what clipping multiplies with is all that counts."""
    norm = max_norm - 1e-6
    for _ in range(abs(ulps)):
        norm = math.nextafter(norm, math.inf if ulps > 0 else 0.0)
    scale = 2.0**log_scale
    squares = torch.tensor((norm * scale) ** 2, dtype=torch.float64)
    redo = must_redo(squares, max_norm, scale)
    assert redo == (float(clip_factor(squares, max_norm, scale)) != 1.0 / scale)
    assert not must_redo(squares * 0.99, max_norm, scale) or max_norm < 1e-3
    assert must_redo(squares * 1.01, max_norm, scale)


def test_the_verdict_on_what_is_not_finite() -> None:
    for value in (math.inf, math.nan):
        squares = torch.tensor(value, dtype=torch.float64)
        assert judge(squares, 1.0, None) is Verdict.REDO
        assert judge(squares, 1e30, 65536.0) is Verdict.UNDO


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_norm_that_is_not_finite_does_in_fp32_what_eager_does(value: float, speculative: bool) -> None:
    trainer = Trainer(partial(torch.optim.AdamW, lr=1e-2), "fp32", 1.0, speculative)
    eager = {name: nn.Parameter(w.clone()) for name, w in trainer.masters.items()}
    optimizer = torch.optim.AdamW(eager.values(), lr=1e-2, fused=True)
    grads = gradients(3, 1.0, "plain", "fp32", 1.0)
    grads["a"][0, 0] = value
    for name, param in eager.items():
        param.grad = grads[name].clone()
    torch.nn.utils.clip_grad_norm_(eager.values(), 1.0)
    optimizer.step()
    trainer.step(grads)
    for name, param in eager.items():
        assert same(trainer.masters[name], param.detach()), name
    everything = all(bool(param.isnan().all()) for param in eager.values())
    assert everything == math.isnan(value)
    assert bool(eager["a"][0, 0].isnan())


def test_a_missing_gradient_and_a_norm_of_zero() -> None:
    assert float(clip_factor(torch.zeros((), dtype=torch.float64), 1.0, 4.0)) == 0.25
    assert not must_redo(torch.zeros((), dtype=torch.float64), 1.0, 4.0)
