"""The ops of asynchronous training: versions of a stage's weights beside those that updates change in place, and
gradients of shared parameters apart from those of a stage's own parameters, which are there earlier.

A stage whose weights stay on its device is updated several times in a program. Its weights are one value throughout,
and an op finds there what the updates before it in the text have made. `stash` keeps a version, `predict` makes a
future one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from ..names import ASYNCHRONOUS, COMPUTE, DEVICE
from ..stages.interface import Interface
from .record import Context, Op, Value, Work, want

__all__ = ["predict", "shared_params", "split", "split_by_sharing", "stash"]

T = TypeVar("T")


def _version(ctx: Context, stage: str, weights: Value) -> Value:
    spec = ctx.stage(stage)
    if want(weights, "weights", "weights", DEVICE).stage != stage:
        raise ValueError(f"weights belong to {weights.stage}, not to {stage}")
    if weights.owned:
        raise ValueError(f"versions are made of the resident weights of {stage}, which updates change")
    return Value("weights", spec.weight_bytes, DEVICE, stage=stage)


def _stash(ctx: Context, stage: str, weights: Value) -> Value:
    """A copy of a stage's weights as they are now; updates do not change it."""
    return _version(ctx, stage, weights)


stash = Op(
    "stash",
    (COMPUTE,),
    _stash,
    lambda ctx, stage, weights: Work(COMPUTE, traffic_bytes=2 * weights.bytes, launches=1),
    allowed_in=(ASYNCHRONOUS,),
    paper="PipeDream's weight stashing, as FTPipe 4.2 has it",
)


def _predict(ctx: Context, stage: str, weights: Value, *, updates: int, shared: int = 0) -> Value:
    """A stage's weights as they would be after `updates` more updates if the optimizer's running averages stayed;
    `shared` is the number of updates for parameters that other stages have, too."""
    if min(updates, shared) < 0 or not updates + shared:
        raise ValueError(f"updates={updates!r}, shared={shared!r}; a prediction is of one update or more")
    return _version(ctx, stage, weights)


def _predict_work(ctx: Context, stage: str, weights: Value, *, updates: int, shared: int = 0) -> Work:
    spec, interface = ctx.stage(stage), ctx.interface
    largest = max((p.numel for p in spec.params if p.requires_grad), default=0)
    return Work(
        COMPUTE,
        traffic_bytes=2 * weights.bytes + interface.state_bytes(spec) + 8 * spec.trained_params,
        launches=5 * len(spec.params),
        workspace_bytes=3 * 4 * largest,  # for one parameter at a time: its update and the terms of it
    )


predict = Op(
    "predict",
    (COMPUTE,),
    _predict,
    _predict_work,
    allowed_in=(ASYNCHRONOUS,),
    paper="SpecTrain and XPipe, which FTPipe 4.2 names as weight prediction",
)


def shared_params(interface: Interface, stage: str) -> frozenset[str]:
    """A stage's trained parameters whose gradients are summed over several stages."""
    return frozenset(name for rows in interface.groups.values() for _, member, name in rows if member == stage and name)


def split_by_sharing(values: Mapping[str, T], shared: Collection[str]) -> tuple[dict[str, T], dict[str, T]]:
    """The `values` whose names are not in `shared`, and those whose names are."""
    own = {name: value for name, value in values.items() if name not in shared}
    return own, {name: value for name, value in values.items() if name in shared}


def _split(ctx: Context, stage: str, grads: Value) -> tuple[Value, Value]:
    """The gradients of a stage's own parameters, and those of the parameters that it shares with other stages."""
    spec = ctx.stage(stage)
    if want(grads, "grads", "grads", DEVICE).stage != stage or grads.group or grads.part:
        raise ValueError(f"all gradients of {stage} are split at once, found a part of those of {grads.stage}")
    shared = shared_params(ctx.interface, stage)
    own, others = split_by_sharing({p.name: p.grad_bytes for p in spec.params if p.requires_grad}, shared)
    if not own or not others:
        raise ValueError(f"{stage} has {len(own)} parameters of its own and shares {len(others)}: nothing to split")
    return (
        Value("grads", sum(own.values()), DEVICE, stage=stage, part="own"),
        Value("grads", sum(others.values()), DEVICE, stage=stage, part="shared"),
    )


split = Op(
    "split",
    (COMPUTE,),
    _split,
    lambda ctx, stage, grads: Work(COMPUTE),
    donates=("grads",),
    allowed_in=(ASYNCHRONOUS,),
)
