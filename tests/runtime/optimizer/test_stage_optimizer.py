"""Optimizers of stages against one torch optimizer over all parameters: bitwise."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from penstock.ir.errors import CheckpointError, PlanError
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER, HAVE_FUSED, KINDS, name_of


def halving(step: int) -> float:
    return 0.5**step


OPTIMIZERS = list(EVERY_OPTIMIZER.values())
SCHEDULERS = [
    None,
    partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10, cycle_momentum=False),
    partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5),
    partial(lr_scheduler.LambdaLR, lr_lambda=halving),
]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(8, 6), "b": torch.randn(7), "c": torch.randn(3, 5), "frozen": torch.randn(4)}


def gradients(step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    found = {name: torch.randn_like(w) for name, w in weights().items() if name != "frozen"}
    if step == 1:
        del found["b"]
    return found


def eager(optimizer: object, scheduler: object, steps: int) -> tuple[dict[str, nn.Parameter], float]:
    params = {name: nn.Parameter(w) for name, w in weights().items()}
    given = OptimizerSpec.from_callable(optimizer).build([torch.zeros(1)]).param_groups[0]
    fused = {"fused": True} if given.get("fused") else {}
    optim = optimizer(list(params.values()), **fused)  # type: ignore[operator]
    schedule = scheduler(optim) if scheduler else None  # type: ignore[operator]
    for step in range(steps):
        for name, grad in gradients(step).items():
            params[name].grad = grad
        optim.step()
        optim.zero_grad()
        if schedule:
            schedule.step()
    return params, optim.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        pytest.param(
            optimizer,
            scheduler,
            id=f"{name}-{name_of(scheduler)}",
            marks=[pytest.mark.slow] * (number % len(SCHEDULERS) != SCHEDULERS.index(scheduler)),
        )
        for scheduler in SCHEDULERS
        for number, (name, optimizer) in enumerate(EVERY_OPTIMIZER.items())
    ],
)
def test_two_stages_step_like_one_optimizer_also_after_a_resume(optimizer: object, scheduler: object) -> None:
    want, lr = eager(optimizer, scheduler, steps=6)
    spec = OptimizerSpec.from_callable(optimizer, scheduler)
    assert OptimizerSpec.from_json(spec.to_json()) == spec
    mine = weights()
    parts = [StageOptimizer(spec, {n: mine[n] for n in part}) for part in (("a", "frozen"), ("b", "c"))]
    for step in range(3):
        for part in parts:
            part.step(gradients(step))
    saved = [part.state_dict() for part in parts]
    plain = json.loads(json.dumps({key: saved[0][key] for key in ("group", "scheduler")}))
    merged = {key: {**saved[0][key], **saved[1][key]} for key in ("states", "scalars")} | plain
    parts = [StageOptimizer(spec, {n: mine[n] for n in part}) for part in (("c",), ("b", "a", "frozen"))]
    for part in parts:
        part.load_state_dict(merged)
    for step in range(3, 6):
        for part in parts:
            part.step(gradients(step))
    for name in want:
        assert torch.equal(mine[name], want[name]), name
    assert parts[0].lr == lr


def test_fused_is_the_default_where_the_class_has_it() -> None:
    def uses_fused(optimizer: object) -> object:
        return OptimizerSpec.from_callable(optimizer).build([torch.zeros(2)]).param_groups[0].get("fused")

    assert uses_fused(torch.optim.AdamW) is True
    assert uses_fused(partial(torch.optim.AdamW, fused=False)) is False
    assert uses_fused(partial(torch.optim.AdamW, foreach=True)) is None
    assert uses_fused(torch.optim.RMSprop) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HAVE_FUSED)
def test_the_default_form_of_a_step_updates_parameters_of_16_bits(name: str, dtype: torch.dtype) -> None:
    """From zero, so that rounding is relative to the updates. Each operation of the loop rounds by up to 2^-9 of its
    result, and two steps have some ten of them; the fused kernels round once a step."""

    def result(**mode: bool) -> Tensor:
        param = nn.Parameter(torch.zeros(100, dtype=dtype))
        optimizer = OptimizerSpec.from_callable(partial(KINDS[name], **mode)).build([param])
        for step in (1, 2):
            param.grad = torch.linspace(0.5, 1.5, 100, dtype=dtype) / step
            optimizer.step()
        return param.detach()

    assert result(fused=False, foreach=False).abs().min() > 0
    torch.testing.assert_close(result(), result(fused=False, foreach=False), rtol=10 * 2.0**-9, atol=0)


def test_one_parameter_without_right_fused_kernels_keeps_all_from_them() -> None:
    params = {"a": torch.zeros(100), "b": torch.zeros(100, dtype=torch.bfloat16)}
    spec = OptimizerSpec.from_callable(torch.optim.SGD)
    assert not spec.build(params).param_groups[0]["fused"] and spec.build([params["a"]]).param_groups[0]["fused"]


def test_state_bytes() -> None:
    def per_param(optimizer: object) -> float:
        return OptimizerSpec.from_callable(optimizer).state_bytes_per_param()

    assert per_param(torch.optim.AdamW) == 8
    assert per_param(partial(torch.optim.Adam, amsgrad=True)) == 12
    assert per_param(partial(torch.optim.SGD, lr=0.1)) == 0
    assert per_param(partial(torch.optim.SGD, lr=0.1, momentum=0.9)) == 4
    assert per_param(torch.optim.Adafactor) < 0.2
    part = StageOptimizer(OptimizerSpec.from_callable(torch.optim.AdamW), {"a": torch.zeros(10)})
    assert part.state_bytes() == 0
    part.step({"a": torch.ones(10)})
    assert part.state_bytes() == 80 + 4  # two moments, and the number of the step


def test_half_gradients_reach_full_parameters() -> None:
    mine, grad = torch.ones(4), torch.full((4,), 0.5, dtype=torch.bfloat16)
    StageOptimizer(OptimizerSpec.from_callable(partial(torch.optim.SGD, lr=1.0)), {"a": mine}).step({"a": grad})
    assert torch.equal(mine, torch.full((4,), 0.5))


def test_a_stage_without_parameters_has_nothing_to_do() -> None:
    part = StageOptimizer(OptimizerSpec.from_callable(torch.optim.AdamW), {})
    part.step({})
    part.load_state_dict(part.state_dict())
    assert part.lr is None and part.state_bytes() == 0


class InScript(torch.optim.SGD):
    __module__ = "__main__"


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "lambda"),
        (InScript, "the script itself"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "pass the class"),
        (nn.Linear, "no torch.optim.Optimizer class"),
        ("AdamW", "functools.partial"),
        (partial(torch.optim.SGD, 0.1), "by keyword"),
        (partial(torch.optim.SGD, lr=torch.tensor(0.1)), "'lr' is a tensor"),
        (partial(torch.optim.SGD, lr={1: 2}), "only numbers"),
        (partial(torch.optim.AdamW, lr=-1.0), "Invalid learning rate"),
        (partial(torch.optim.AdamW, learning_rate=1.0), "learning_rate"),
        (torch.optim.LBFGS, "closure.*AdamW"),
        (torch.optim.SparseAdam, "dense.*AdamW"),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused(optimizer: object, says: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)optimizer.*{says}"):
        OptimizerSpec.from_callable(optimizer)


def test_what_cannot_be_a_schedule_is_refused() -> None:
    class Here(lr_scheduler.LambdaLR):
        pass

    for scheduler, says in [
        (partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0), "lr_lambda.*lambda cannot be sent"),
        (Here, "defined in a function"),
        (lr_scheduler.ReduceLROnPlateau, "needs a metric"),
        (partial(lr_scheduler.StepLR, gamma=0.1), "step_size"),
    ]:
        with pytest.raises(PlanError, match=f"(?s){says}"):
            OptimizerSpec.from_callable(torch.optim.AdamW, scheduler)


def test_a_users_own_class_in_a_module_is_found_again() -> None:
    spec = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=0.1))
    assert spec.path == "torch.optim:AdamW"
    with pytest.raises(PlanError, match="cannot import 'Gone'"):
        OptimizerSpec("torch.optim:Gone").build([])


def test_a_state_of_another_shape_is_refused() -> None:
    spec = OptimizerSpec.from_callable(torch.optim.AdamW)
    first = StageOptimizer(spec, {"a": torch.zeros(2, 3)})
    first.step({"a": torch.ones(2, 3)})
    with pytest.raises(CheckpointError, match=r"'exp_avg' of a has shape \[2, 3\], not \[3, 2\]"):
        StageOptimizer(spec, {"a": torch.zeros(3, 2)}).load_state_dict(first.state_dict())
