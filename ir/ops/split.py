"""A backward in two ops, so that the second may wait: the gradients of a stage's inputs, then those of its parameters.

The first op makes what the stage before waits for; the second fills the time in which nothing else can run.
"""

from __future__ import annotations

from typing import Any

from ..names import BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE, DEVICE, TRAINING
from ..stages.stage import StageSpec
from .compute import backward
from .record import Context, Op, Value, Work, want
from .transfers import check_micro_batch

__all__ = ["backward_input", "backward_weight", "rest_bytes"]


def rest_bytes(spec: StageSpec) -> int:
    """Bytes held between the two ops: all that autograd saved, inputs included, because its graph is held as a whole,
    and the gradients from which those of parameters are computed."""
    return spec.kept_bytes + sum(i.bytes for i in spec.backward_inputs if i is not None) + spec.split_bytes


def _backward_input(
    ctx: Context,
    stage: str,
    weights: Value,
    kept: Value | None,
    inputs: list[Value | None],
    douts: list[Value | float | None],
    *,
    micro_batch: int,
) -> tuple[Value, ...]:
    """As `backward`, without the gradients of parameters. The op takes over `kept`."""
    *dinputs, _ = backward.infer(ctx, stage, weights, kept, inputs, douts, micro_batch=micro_batch)
    spec = ctx.stage(stage)
    if not dinputs or not spec.trained_params:
        what = "no input that needs a gradient" if not dinputs else "no parameter that is trained"
        raise ValueError(f"{stage} has {what}; its backward has one half, write `backward`")
    return (*dinputs, Value("rest", rest_bytes(spec), DEVICE, stage=stage))


def _backward_input_work(
    ctx: Context, stage: str, weights: Value, kept: Value | None, inputs: list[Value | None], douts: list[Any],
    *, micro_batch: int,
) -> Work:  # fmt: skip
    s, again = ctx.stage(stage), kept is None or bool(kept.classes)
    whole = backward.work(ctx, stage, weights, kept, inputs, douts, micro_batch=micro_batch)
    late = _backward_weight_work(ctx, stage, weights, None, None, micro_batch=micro_batch)
    before = dict(late.seconds)
    return Work(
        COMPUTE,
        flops=whole.flops - late.flops,
        traffic_bytes=whole.traffic_bytes - late.traffic_bytes,
        launches=whole.launches - late.launches,
        workspace_bytes=max(
            s.backward_workspace_bytes, s.whole_again.workspace_bytes if again else 0
        ),  # the other saved tensors count as `rest`
        seconds=tuple((name, seconds - before.get(name, 0.0)) for name, seconds in whole.seconds),
        mix=whole.mix,
    )


backward_input = Op(
    "backward_input",
    (COMPUTE,),
    _backward_input,
    _backward_input_work,
    donates=("kept",),
    allowed_in=TRAINING,
    parts=(BACKWARD_INPUT,),
    paper="Zero Bubble Pipeline Parallelism 2",
)


def _backward_weight(
    ctx: Context, stage: str, weights: Value, rest: Value, grads: Value | None = None, *, micro_batch: int
) -> Value:
    """The gradients of parameters, on the weights that `backward_input` ran on."""
    ctx.stage(stage)
    check_micro_batch(ctx, micro_batch)
    if want(weights, "weights", "weights", DEVICE).stage != stage:
        raise ValueError(f"{stage} runs on its own weights, found those of {weights.stage}")
    if want(rest, "rest", "rest", DEVICE).stage != stage:
        raise ValueError(f"rest belongs to {rest.stage}, not to {stage}")
    if grads is not None and want(grads, "grads", "grads", DEVICE).stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")
    if grads is not None and grads.group:
        raise ValueError("gradients that were scattered cannot grow")
    num_bytes = ctx.interface.grad_bytes(stage, weights.spread)
    return Value("grads", num_bytes, DEVICE, stage=stage, spread=weights.spread)


def _backward_weight_work(
    ctx: Context, stage: str, weights: Value, rest: Value | None, grads: Value | None = None, *, micro_batch: int
) -> Work:
    s = ctx.stage(stage)
    share = s.weight_share
    moved_bytes = s.grad_bytes if weights.spread and grads is None else 0  # gradients that go to their flat place
    return Work(
        COMPUTE,
        flops=share * s.backward_flops,
        traffic_bytes=share * s.backward_traffic_bytes + 2 * moved_bytes,
        launches=round(2 * share * s.launches),
        workspace_bytes=s.backward_workspace_bytes + moved_bytes,
        seconds=tuple((name, share * backward_s) for name, _, _, backward_s in s.seconds),
        mix=s.backward_mix,
    )


backward_weight = Op(
    "backward_weight",
    (COMPUTE,),
    _backward_weight,
    _backward_weight_work,
    donates=("grads",),
    allowed_in=TRAINING,
    parts=(BACKWARD_WEIGHT,),
    paper="Zero Bubble Pipeline Parallelism 2",
)
