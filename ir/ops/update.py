"""The ops that update weights: norms of gradients, clipping, the optimizer."""

from __future__ import annotations

from ..names import COMPUTE, CPU, DEVICE, DRAM, TRAINING
from .record import Context, Op, Value, Work, want

__all__ = ["clip", "hook", "norm", "redo", "step", "update_traffic"]


def _where(value: Value) -> str:
    return COMPUTE if value.memory == DEVICE else CPU


def _norm(ctx: Context, *grads: Value) -> Value:
    """The sum of squares of this device's gradients, each tied parameter counted by its owner only."""
    for value in grads:
        want(value, "grads", "grads")
    return Value("norm", 8, _memory_of(grads))


def _memory_of(grads: tuple[Value, ...]) -> str:
    """The memory in which a norm is computed: DRAM unless all gradients are on the device, whose memory the host's
    threads see, too."""
    return DEVICE if grads and all(value.memory == DEVICE for value in grads) else DRAM


norm = Op(
    "norm",
    (COMPUTE, CPU),
    _norm,
    lambda ctx, *grads: Work(
        COMPUTE if _memory_of(grads) == DEVICE else CPU, traffic_bytes=sum(g.bytes for g in grads), launches=1
    ),
    allowed_in=TRAINING,
    prepares=True,
)


def _hook(ctx: Context, grads: Value) -> Value:
    """Run the user's gradient hooks on a stage's complete gradients: after all sums, before norm and update."""
    if want(grads, "grads", "grads").part:
        raise ValueError(f"hooks run on all gradients of {grads.stage} at once")
    return grads


hook = Op(
    "hook",
    (COMPUTE, CPU),
    _hook,
    lambda ctx, grads: Work(
        _where(grads),
        traffic_bytes=2 * grads.bytes,
        launches=sum(len(param.hook) + 1 for param in ctx.stage(grads.stage).params if param.hook),
        workspace_bytes=ctx.stage(grads.stage).hook_bytes,
        workspace_memory=grads.memory,
    ),
    donates=("grads",),
    allowed_in=TRAINING,
    prepares=True,
)


def _clip(ctx: Context, grads: Value, norm: Value, *, max_norm: float) -> Value:
    """Divide by the loss scale, and by norm / max_norm where that exceeds 1 (as torch's clip_grad_norm_)."""
    want(norm, "norm", "norm")
    return want(grads, "grads", "grads")


clip = Op(
    "clip",
    (COMPUTE, CPU),
    _clip,
    lambda ctx, grads, norm, *, max_norm: Work(_where(grads), traffic_bytes=2 * grads.bytes, launches=1),
    donates=("grads",),
    allowed_in=TRAINING,
    prepares=True,
)


def _step(
    ctx: Context,
    stage: str,
    grads: Value,
    norm: Value | None = None,
    states: Value | None = None,
    *,
    speculative: bool = False,
) -> Value | None:
    """Update the stage's weights in the memory of its gradients; with `norm`, skip the step when that is not finite
    (fp16).

    With `states`, which were read from SSD, the op updates these, and its result is written back. A `speculative` step
    runs before the norm of all gradients is known, as if nothing had to be clipped; a `redo` must follow.
    """
    if want(grads, "grads", "grads").stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")
    if speculative and norm is not None:
        raise ValueError("a speculative step is one before the norm is known")
    if states is None:
        return None
    if states.kind not in ("states", "all") or states.memory != DRAM or states.stage != stage:
        raise ValueError(f"{stage} is stepped on its own states in DRAM, found {states.kind} of {states.stage}")
    if grads.memory != DRAM:
        raise ValueError(f"states of {stage} came from SSD, so its gradients must be in DRAM")
    if grads.group != states.group:
        raise ValueError(f"states of {stage} are of group {states.group!r}, its gradients of {grads.group!r}")
    return states


def update_traffic(params: float, state_bytes: float) -> float:
    """Bytes that an update moves: it reads and writes masters and states, and reads gradients."""
    return (8 + 4) * params + 2 * state_bytes


def _step_work(
    ctx: Context,
    stage: str,
    grads: Value,
    norm: Value | None = None,
    states: Value | None = None,
    *,
    speculative: bool = False,
) -> Work:
    spec, interface = ctx.interface.part_of(stage, grads.group), ctx.interface
    share = 1.0 if not grads.part or not spec.grad_bytes else grads.bytes / spec.grad_bytes
    # Gradients in another type, or with a factor that waits for the norm, are converted to the masters'.
    low = interface.master or interface.rounds
    converted = low and (speculative or any(p.grad_dtype != "float32" for p in spec.params))
    per_step = share * update_traffic(spec.trained_params, interface.state_bytes(spec))
    kind = "" if states is None else states.kind
    return Work(
        _where(grads),
        params=round(share * spec.trained_params),
        copied_bytes=round(share * interface.copied_to_undo(spec, kind)) if speculative else 0,
        traffic_bytes=per_step,
        launches=len(spec.params) if _where(grads) == COMPUTE else 0,
        workspace_bytes=spec.change_bytes
        + interface.update_bytes(spec, grads.memory, converted, share)
        + interface.temporary_bytes(spec, grads.memory),
        workspace_memory=grads.memory,
    )


step = Op(
    "step",
    (COMPUTE, CPU),
    _step,
    _step_work,
    donates=("states",),
    allowed_in=TRAINING,
    updates="stage",
    paper="ZeRO-Offload: the optimizer runs where its states are; Fuyou 4.3: under the backward of the stages before",
)


def _redo_work(ctx: Context, stage: str, grads: Value, norm: Value, *, max_norm: float) -> Work:
    part = ctx.interface.part_of(stage, grads.group)
    workspace_bytes = ctx.interface.all_bytes(part) + ctx.interface.temporary_bytes(part, DRAM)
    return Work(CPU, workspace_bytes=workspace_bytes, workspace_memory=DRAM)


def _redo(ctx: Context, stage: str, grads: Value, norm: Value, *, max_norm: float) -> None:
    """After a speculative step: if `norm` exceeds `max_norm` or is not finite, the stage goes back to what it was
    before, and is stepped again on the clipped gradients, or not at all."""
    if want(grads, "grads", "grads", DRAM).stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")
    want(norm, "norm", "norm")


redo = Op(
    "redo",
    (CPU,),
    _redo,
    _redo_work,
    allowed_in=TRAINING,
    updates="stage",
    paper="SuperOffload: step, validate, roll back",
)
