"""The ops of asynchronous training: versions of a stage's weights beside those that updates change in place.

A stage whose weights stay on its device is updated several times in a program. Its weights are one value all the time,
and what an op finds there is what the updates before it in the text have made. `stash` keeps a version, `predict`
makes one that is still to come.
"""

from __future__ import annotations

from .op import COMPUTE, DEVICE, Context, Op, Value, Work, want


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
    paper="PipeDream's weight stashing, as FTPipe 4.2 has it",
)


def _predict(ctx: Context, stage: str, weights: Value, *, updates: int) -> Value:
    """A stage's weights as its optimizer would have them `updates` steps from now if its running averages stayed."""
    if not isinstance(updates, int) or updates < 1:
        raise ValueError(f"updates={updates!r}; a prediction is of one update or more")
    return _version(ctx, stage, weights)


def _predict_work(ctx: Context, stage: str, weights: Value, *, updates: int) -> Work:
    spec, face = ctx.stage(stage), ctx.interface
    largest = max((p.numel for p in spec.params if p.requires_grad), default=0)
    return Work(
        COMPUTE,
        traffic_bytes=2 * weights.bytes + face.state_bytes(spec) + 8 * spec.trained_params,
        launches=5 * len(spec.params),
        workspace_bytes=3 * 4 * largest,  # of one parameter at a time: its update and what that is made of
    )


predict = Op(
    "predict",
    (COMPUTE,),
    _predict,
    _predict_work,
    paper="SpecTrain and XPipe, which FTPipe 4.2 names as weight prediction",
)
