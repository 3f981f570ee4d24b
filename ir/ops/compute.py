"""The ops that compute: forward and backward of a stage for one micro-batch, and sums of two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..machine.call_mix import both
from ..names import BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTE, DEVICE, EVALUATE, EVALUATION, FORWARD, TRAINING
from ..stages.stage import SavedSpec, StageSpec
from .record import Context, Op, Value, Work, match, tensor, want
from .transfers import check_micro_batch

__all__ = ["add", "aligned_class", "backward", "counts_in_graph", "evaluate", "forward"]

Keep = bool | Sequence[str]  # everything, nothing, or these classes of saved tensors


def _stage_operands(
    ctx: Context, stage: str, weights: Value, inputs: Sequence[Value | None], micro_batch: int, again: bool = False
) -> StageSpec:
    """`again`: of a backward, which needs not all inputs."""
    spec = ctx.stage(stage)
    check_micro_batch(ctx, micro_batch)
    want(weights, "weights", "weights", DEVICE)
    if weights.stage != stage:
        raise ValueError(f"{stage} runs on its own weights, found those of {weights.stage}")
    if len(inputs) != len(spec.inputs):
        raise ValueError(f"{stage} takes {len(spec.inputs)} inputs, found {len(inputs)}")
    for value, wanted, needed in zip(inputs, spec.inputs, spec.backward_inputs):
        if value is not None or not again or needed is not None:
            match(value, wanted, f"input {wanted.name} of {stage}")
    return spec


def _saved_specs(spec: StageSpec, classes: Sequence[str]) -> list[SavedSpec]:
    """The stage's classes of saved tensors with these names. Raises `ValueError` for an unknown or repeated name."""
    known = {saved.name: saved for saved in spec.saved}
    for name in classes:
        if name not in known:
            raise ValueError(f"{spec.name} has no class {name!r} of saved tensors; it has {', '.join(known) or 'none'}")
    if len(set(classes)) < len(classes):
        raise ValueError(f"a class of saved tensors of {spec.name} is named twice")
    return [known[name] for name in classes]


def _forward(
    ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int, keep: Keep = True
) -> tuple[Value, ...]:
    """`keep` says what is kept for backward: all that autograd saves, nothing, or these classes of saved tensors."""
    spec = _stage_operands(ctx, stage, weights, inputs, micro_batch)
    outputs = tuple(tensor(o) for o in spec.outputs)
    if keep is True:
        num_bytes = 0 if counts_in_graph(ctx, stage, weights) else spec.kept_bytes
        return (*outputs, Value("kept", num_bytes, DEVICE, stage=stage))
    if keep is False or not keep:
        return outputs
    num_bytes = sum(aligned_class(saved) for saved in _saved_specs(spec, keep))
    return (*outputs, Value("kept", num_bytes, DEVICE, stage=stage, classes=tuple(keep)))


def counts_in_graph(ctx: Context, stage: str, weights: Value) -> bool:
    """Whether a stage that runs on these weights saves in a CUDA graph, whose memory stays (`graph_bytes`)."""
    return ctx.interface.cuda_graphs and not weights.owned and not ctx.stage(stage).ungraphable


def aligned_class(saved: SavedSpec) -> int:
    """Bytes of a class of saved tensors in a buffer that holds several classes."""
    return -(-saved.bytes // 512) * 512


def _forward_work(
    ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int, keep: Keep = True
) -> Work:
    s = ctx.stage(stage)
    return Work(
        COMPUTE,
        flops=s.forward_flops,
        traffic_bytes=s.forward_traffic_bytes,
        launches=s.launches,
        workspace_bytes=s.forward_workspace_bytes if keep is True else s.light_workspace_bytes,
        seconds=tuple((name, again_s if keep is True else forward_s) for name, forward_s, again_s, _ in s.seconds),
        mix=s.forward_mix,
    )


forward = Op("forward", (COMPUTE,), _forward, _forward_work, allowed_in=TRAINING, parts=(FORWARD,))


def _evaluate(ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int) -> tuple[Value, ...]:
    spec = _stage_operands(ctx, stage, weights, inputs, micro_batch)
    return tuple(tensor(o) for o in (*spec.outputs, *spec.extra_outputs))


evaluate = Op(
    "evaluate",
    (COMPUTE,),
    _evaluate,
    lambda ctx, stage, weights, *inputs, micro_batch: _forward_work(
        ctx, stage, weights, *inputs, micro_batch=micro_batch, keep=False
    ),
    allowed_in=EVALUATION,
    parts=(EVALUATE,),
)


def _backward(
    ctx: Context,
    stage: str,
    weights: Value,
    kept: Value | None,
    inputs: list[Value | None],
    douts: list[Value | float | None],
    grads: Value | None = None,
    *,
    micro_batch: int,
    unpack_once: bool = False,
) -> tuple[Value, ...]:
    """Without `kept`, the stage is rematerialised from `inputs`; classes of saved tensors in `kept` are not computed
    again. An input that backward needs nothing of is None. `douts` has for each output its gradient, a factor if it is
    the loss, or None. `unpack_once`: the rematerialisation leaves backward the quantised weights that it unpacks."""
    spec = _stage_operands(ctx, stage, weights, inputs, micro_batch, again=True)
    runs_again = kept is None or bool(kept.classes)
    if unpack_once and not (runs_again and spec.unpacked is not None):
        why = f"the forward of {stage} unpacks none" if runs_again else f"{stage} keeps all that backward needs"
        raise ValueError(f"unpack_once is for quantised weights of a forward that runs again, but {why}")
    if kept is not None and want(kept, "kept", "kept", DEVICE).stage != stage:
        raise ValueError(f"kept belongs to {kept.stage}, not to {stage}")
    if (kept is None or kept.classes) and not spec.rematerialisable:
        raise ValueError(f"{stage} cannot be rematerialised: a second forward would change its buffers' results")
    if len(douts) != len(spec.outputs):
        raise ValueError(f"{stage} has {len(spec.outputs)} outputs, found {len(douts)} gradients")
    for dout, out in zip(douts, spec.outputs):
        if isinstance(dout, Value):
            match(dout, out, f"gradient of {out.name} of {stage}")
        elif isinstance(dout, float) and out.name != spec.loss:
            raise ValueError(f"only the loss takes a factor; {out.name} of {stage} does not")
    if grads is not None and want(grads, "grads", "grads", DEVICE).stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")
    if grads is not None and grads.group:
        raise ValueError("gradients that were scattered cannot grow")
    dinputs = tuple(tensor(i) for i in spec.inputs if i.requires_grad)
    num_bytes = ctx.interface.grad_bytes(stage, weights.spread)
    return (*dinputs, Value("grads", num_bytes, DEVICE, stage=stage, spread=weights.spread))


def _backward_work(
    ctx: Context,
    stage: str,
    weights: Value,
    kept: Value | None,
    inputs: list[Value | None],
    douts: list[Any],
    grads: Value | None = None,
    *,
    micro_batch: int,
    unpack_once: bool = False,
) -> Work:
    s = ctx.stage(stage)
    if unpack_once and s.unpacked is not None:
        twice = _backward_work(ctx, stage, weights, kept, inputs, douts, grads, micro_batch=micro_batch)
        given = _saved_specs(s, kept.classes) if kept is not None else []
        return replace(
            twice,
            traffic_bytes=s.unpacked.traffic_bytes + s.whole_again.traffic_bytes,
            workspace_bytes=s.unpacked.workspace_bytes - sum(saved.bytes for saved in given if saved.is_saved),
            mix=both(s.whole_again.mix, s.unpacked.mix),
        )
    again = kept is None or bool(kept.classes)
    there = _saved_specs(s, kept.classes) if kept is not None else []
    spared_flops = sum(saved.flops for saved in there)  # what need not be computed again
    before = s.whole_again
    return Work(
        COMPUTE,
        flops=s.backward_flops + (before.flops - spared_flops if again else 0.0),
        traffic_bytes=s.backward_traffic_bytes + (before.traffic_bytes if again else 0.0),
        launches=2 * s.launches + (before.launches if again else 0),
        workspace_bytes=max(s.backward_workspace_bytes, before.workspace_bytes if again else 0)
        + (max(0, s.kept_bytes - sum(saved.bytes for saved in there if saved.is_saved)) if again else 0),
        seconds=tuple(
            (name, backward_s + (s.again_s(name, again_s, spared_flops) if again else 0.0))
            for name, _, again_s, backward_s in s.seconds
        ),
        mix=both(before.mix, s.backward_mix) if again else s.backward_mix,
    )


backward = Op(
    "backward",
    (COMPUTE,),
    _backward,
    _backward_work,
    donates=("grads",),
    allowed_in=TRAINING,
    parts=(BACKWARD_INPUT, BACKWARD_WEIGHT),
    paper="rematerialisation: Mobius 3.1, FTPipe 4.3",
)


def _add(ctx: Context, left: Value, right: Value) -> Value:
    """The sum of two tensors, or of two sums of gradients that were scattered over the same group."""
    if isinstance(left, Value) and left.kind == "grads" and left.group:
        if left != right:
            raise ValueError(f"gradients of {left.stage}, scattered over {left.group!r}, cannot take up others")
        return left
    want(left, "tensor", "left", DEVICE)
    want(right, "tensor", "right", DEVICE)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        raise ValueError(f"shapes differ: {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}")
    return left


def _numel(value: Value) -> int:
    return math.prod(value.shape) if value.kind == "tensor" else value.bytes // 4


add = Op(
    "add",
    (COMPUTE,),
    _add,
    lambda ctx, left, right: Work(COMPUTE, flops=_numel(left), traffic_bytes=3 * left.bytes, launches=1),
    donates=("left",),
    allowed_in=TRAINING,
    passes_on=True,
)
