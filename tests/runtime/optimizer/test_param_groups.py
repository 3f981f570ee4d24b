"""Groups of parameters: found by tensor, name or pattern, stepped as one torch optimizer with the same groups steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from penstock.ir.errors import CheckpointError, PlanError
from penstock.runtime.optimizer.param_groups import ParamGroup, make_groups
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer

KNOWN = ("lr", "betas", "weight_decay", "fused", "foreach")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(3))


def names_of(model: nn.Module, given: Any) -> list[tuple[str, ...] | None]:
    return [group.names for group in make_groups(model, given, KNOWN)]


def test_groups_by_pattern_name_and_tensor() -> None:
    net = Net()
    both = ("embed.weight", "head.weight")
    assert names_of(net, [{"params": ["*.bias", "norm.*"]}]) == [
        ("layers.0.bias", "layers.1.bias", "norm.bias", "norm.weight"),
        None,
    ]
    assert names_of(net, [{"params": "head.weight"}]) == [both, None]
    assert names_of(net, [{"params": [net.head.weight]}]) == [both, None]
    assert names_of(net, [{"params": net.norm.parameters()}]) == [("norm.weight", "norm.bias"), None]
    assert names_of(net, [{"params": net.norm.named_parameters()}]) == [("norm.weight", "norm.bias"), None]
    assert names_of(net, []) == [None]
    assert names_of(net, [{"params": []}]) == [(), None]
    everything = [{"params": [p for n, p in net.named_parameters() if "norm" in n]}, {"params": ["[!n]*"]}]
    assert len(names_of(net, everything)) == 2, "nothing is left over"
    with torch.device("meta"):
        assert names_of(Net(), [{"params": "norm.*"}]) == [("norm.weight", "norm.bias"), None]


def test_frozen_parameters_need_no_group() -> None:
    net = Net()
    for param in (net.embed.weight, *net.layers.parameters()):
        param.requires_grad_(False)
    assert names_of(net, [{"params": "norm.*"}]) == [("norm.weight", "norm.bias")]
    assert make_groups(net, [{"params": "*", "lr": 1}], KNOWN)[0].options == {"lr": 1}


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"params": "layer.0.weight"}], r"param_groups\[0\].*'layer.0.weight' matches no parameter.*layers.0.weight"),
        ([{"params": ["*.biass"]}], r"matches no parameter; near are .*bias"),
        ([{"params": "table"}], "matches no parameter"),
        ([{"params": "norm.*"}, {"params": "*.bias"}], r"param_groups\[1\]: norm.bias is in param_groups\[0\] already"),
        ([{"params": "head.weight"}, {"params": "embed.*"}], "embed.weight is in"),
        ([{"params": "norm.*", "weight_decy": 0.0}], r"no option 'weight_decy'; it has weight_decay"),
        ([{"params": torch.zeros(4, 4)}], r"shape \[4, 4\] is no parameter of the model.*layers.0.weight"),
        ([{"params": torch.zeros(9)}], r"shape \[9\] is no parameter"),
        ([{"params": 3}], "found 3"),
        ([{"params": [3]}], "found 3"),
        ([{"weight_decay": 0.0}], 'must be a dict with "params"'),
        ({"params": "norm.*"}, "found dict; pass a list of dicts"),
        ([{"params": "norm.*", "lr": torch.tensor(1.0)}], "'lr' is a tensor"),
        ([{"params": "norm.*", "lr": -1.0}], r"param_groups\[0\].*Invalid learning rate"),
    ],
)
def test_what_cannot_be_a_group_is_refused(groups: Any, says: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){says}"):
        OptimizerSpec.from_callable(torch.optim.AdamW, model=Net(), param_groups=groups)


def test_muon_takes_matrices_only() -> None:
    net = Net()
    with pytest.raises(PlanError, match=r"Muon does not work for layers.0.bias, of shape \[4\]"):
        OptimizerSpec.from_callable(torch.optim.Muon, model=net)
    for param in net.parameters():
        param.requires_grad_(param.dim() == 2)
    spec = OptimizerSpec.from_callable(torch.optim.Muon, model=net)
    assert not spec.is_elementwise()


def test_a_parameter_that_appeared_later_is_in_no_group() -> None:
    spec = OptimizerSpec("torch.optim:SGD", {"lr": 0.1}, groups=(ParamGroup(("a",)),))
    with pytest.raises(PlanError, match="b was in no group"):
        StageOptimizer(spec, {"a": torch.zeros(2), "b": torch.zeros(2)})


def first(step: int) -> float:
    return 0.5**step


def second(step: int) -> float:
    return 1.0 / (step + 1)


GROUPS: list[dict[str, Any]] = [
    {"params": ["*.bias", "norm.*"], "weight_decay": 0.0},
    {"params": ["layers.1.weight"], "lr": 0.3, "betas": (0.5, 0.9)},
]
SCHEDULERS = [
    partial(lr_scheduler.LambdaLR, lr_lambda=[first, second, first]),
    partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.2, 0.05], total_steps=10),
    None,
]


def gradients(net: nn.Module, step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(step)
    found = {name: torch.randn(p.shape, generator=made) for name, p in net.named_parameters()}
    if step == 1:
        del found["norm.weight"]
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["lambdas", "one-cycle", "constant"])
def test_stages_step_like_one_optimizer_with_the_same_groups(scheduler: Any) -> None:
    net = Net()
    mine = {name: p.detach().clone() for name, p in net.named_parameters()}
    spec = OptimizerSpec.from_callable(
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), scheduler, model=net, param_groups=GROUPS
    )
    assert OptimizerSpec.from_json(spec.to_json()) == spec
    params = dict(net.named_parameters())
    groups = [
        {"params": [params[n] for n in group.names], **group.options}
        for group in spec.groups
        if group.names is not None
    ]
    rest = [p for n, p in params.items() if not any(n in (group.names or ()) for group in spec.groups)]
    eager = torch.optim.AdamW([*groups, {"params": rest}], lr=0.01, weight_decay=0.1, fused=True)
    schedule = scheduler(eager) if scheduler else None

    def stages(*parts: tuple[str, ...]) -> list[StageOptimizer]:
        return [StageOptimizer(spec, {n: mine[n] for n in part}) for part in parts]

    parts = stages(
        ("embed.weight", "layers.0.weight"),
        ("norm.weight", "layers.1.weight", "layers.0.bias", "layers.1.bias", "norm.bias"),
    )
    for step in range(6):
        if step == 3:  # saved and loaded, other stages, one of them without parameters of the last group
            saved = [part.state_dict() for part in parts]
            merged = {key: {**saved[0][key], **saved[1][key]} for key in ("states", "scalars")}
            assert saved[0]["group"] == saved[1]["group"] and saved[0]["scheduler"] == saved[1]["scheduler"]
            parts = stages(
                ("norm.bias", "norm.weight"),
                ("layers.1.weight", "layers.0.bias", "embed.weight"),
                ("layers.0.weight", "layers.1.bias"),
            )
            for part in parts:
                part.load_state_dict({**saved[0], **merged})
        grads = gradients(net, step)
        for part in parts:
            part.step(grads)
        for name, param in params.items():
            param.grad = grads.get(name)
        eager.step()
        if schedule:
            schedule.step()
        for name, param in params.items():
            assert torch.equal(mine[name], param.detach()), (step, name)
    for part in parts:
        assert part.optimizer is not None
        assert [g["lr"] for g in part.optimizer.param_groups] == [g["lr"] for g in eager.param_groups]


def test_a_tied_parameter_is_in_its_group_under_both_names() -> None:
    spec = OptimizerSpec.from_callable(
        partial(torch.optim.SGD, lr=1.0), model=Net(), param_groups=[{"params": "embed.*", "lr": 0.5}]
    )
    own = {"head.weight": torch.zeros(7, 4)}
    StageOptimizer(spec, own).step({"head.weight": torch.ones(7, 4)})
    assert torch.equal(own["head.weight"], torch.full((7, 4), -0.5))


def test_a_checkpoint_with_other_groups_is_refused_and_one_without_is_read() -> None:
    plain = OptimizerSpec("torch.optim:SGD", {"lr": 0.1})
    grouped = OptimizerSpec("torch.optim:SGD", {"lr": 0.1}, groups=(ParamGroup(("a",)), ParamGroup()))
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    saved = StageOptimizer(plain, params).state_dict()
    assert saved["group"]["lr"] == 0.1
    with pytest.raises(CheckpointError, match="has 1 parameter groups, this one 2"):
        StageOptimizer(grouped, params).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="has 2 parameter groups, this one 1"):
        StageOptimizer(plain, params).load_state_dict(StageOptimizer(grouped, params).state_dict())
    StageOptimizer(grouped, params).load_state_dict({"states": {}, "scalars": {}, "group": {}, "scheduler": None})


def test_a_spec_written_before_there_were_groups_is_read() -> None:
    text = '{"path": "torch.optim:SGD", "kwargs": {"lr": 0.1}, "scheduler_path": null, "scheduler_kwargs": {}}'
    assert OptimizerSpec.from_json(text).all_groups == (ParamGroup(),)
