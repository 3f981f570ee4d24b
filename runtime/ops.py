"""The instruction set: one record per op.

A record holds the op's name, the streams it may occupy, whether it acts on something besides its results, which
operands it takes over, its inference (operand types to result types; raises on bad operands) and its work (how much
of which resource). The signature of `infer` is the op's signature. All three runtimes implement exactly these names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .program import Interface, StageSpec, TensorSpec

HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU = "host", "compute", "h2d", "d2h", "send", "recv", "comm", "cpu"
STREAMS = (HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU)
DEVICE, DRAM = "device", "dram"  # the two memories a program names; each device has its own, DRAM is its host's


@dataclass(frozen=True)
class Value:
    """The type of one value: what it is, how many bytes, and in which memory it lives.

    `owned` is False for what stays across steps (resident weights): it is never freed by a program. `group` names the
    devices over which a shard, or the gradients of one, are spread; this is one member's piece.
    """

    kind: str  # tensor | weights | part or shard (of weights) | kept | grads | norm
    bytes: int
    memory: str = DEVICE
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stage: str = ""
    requires_grad: bool = False
    owned: bool = True
    group: str = ""


@dataclass(frozen=True)
class Work:
    """What one op occupies: a stream, and an amount of exactly one resource.

    `flops` and `traffic_bytes` for computation, `moved_bytes` with `source` and `target` for transfers ("device",
    "dram" or "device3"), `params` for the optimizer, `launches` torch calls. `workspace_bytes` of `workspace_memory`
    are held while the op runs. `tag` and `peer` match a send with its receive; `group` names a collective, in which
    `moved_bytes` are those of the whole value and `rounds` says how often it goes round the ring of members.
    """

    stream: str
    flops: float = 0.0
    traffic_bytes: float = 0.0
    launches: int = 0
    moved_bytes: int = 0
    source: str = ""
    target: str = ""
    params: int = 0
    workspace_bytes: int = 0
    workspace_memory: str = DEVICE
    peer: int = -1
    tag: str = ""
    group: str = ""
    rounds: int = 0
    seconds: tuple[tuple[str, float], ...] = ()  # of computation, by device, where it was measured


@dataclass(frozen=True)
class Context:
    """Where an op's names are looked up."""

    interface: Interface
    device: int

    def stage(self, name: str) -> StageSpec:
        if name not in self.interface.stages:
            raise ValueError(f"no stage {name!r}; there are {', '.join(self.interface.stages)}")
        return self.interface.stages[name]

    def group(self, name: str) -> list[tuple[str, str]]:
        """This device's members of a group: (stage, parameter)."""
        if name not in self.interface.groups:
            raise ValueError(f"no group {name!r}; there are {', '.join(self.interface.groups) or 'none'}")
        found = [(stage, param) for device, stage, param in self.interface.groups[name] if device == self.device]
        if not found:
            raise ValueError(f"device {self.device} has no member in group {name!r}")
        return found


@dataclass(frozen=True, eq=False)
class Op:
    """See the module's text. Instances are the targets of a program's graph nodes."""

    name: str
    streams: tuple[str, ...]
    infer: Callable[..., Any]
    work: Callable[..., Work]
    effect: bool = False
    donates: tuple[str, ...] = ()
    paper: str = ""
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        own = inspect.signature(self.infer)
        object.__setattr__(self, "signature", own.replace(parameters=list(own.parameters.values())[1:]))
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__qualname__", self.name)
        object.__setattr__(self, "__module__", __name__)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Operands and fields by name, defaults filled in."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"op {self.name!r} is a record; a runtime executes it")

    def __repr__(self) -> str:
        return f"ops.{self.name}"


def _want(value: Any, kind: str, what: str, memory: str | None = None) -> Value:
    if not isinstance(value, Value) or value.kind != kind:
        raise ValueError(f"{what} must be {kind}, found {value.kind if isinstance(value, Value) else value!r}")
    if memory is not None and value.memory != memory:
        raise ValueError(f"{what} must lie in {memory}, it lies in {value.memory}")
    return value


def _tensor(spec: TensorSpec, requires_grad: bool | None = None) -> Value:
    grad = spec.requires_grad if requires_grad is None else requires_grad
    return Value("tensor", spec.bytes, DEVICE, spec.shape, spec.dtype, requires_grad=grad)


def _match(value: Any, spec: TensorSpec, what: str) -> None:
    _want(value, "tensor", what, DEVICE)
    if (value.shape, value.dtype) != (spec.shape, spec.dtype):
        raise ValueError(f"{what} is {spec.dtype}{list(spec.shape)}, found {value.dtype}{list(value.shape)}")


# --- data -----------------------------------------------------------------------------------------------------------


def _load(ctx: Context, batch: Any, name: str, *, micro_batch: int) -> Value:
    if name not in ctx.interface.batch:
        raise ValueError(f"no input {name!r}; there are {', '.join(ctx.interface.batch)}")
    _micro_batch(ctx, micro_batch)
    return _tensor(ctx.interface.batch[name], requires_grad=False)


def _micro_batch(ctx: Context, micro_batch: int) -> None:
    if not 0 <= micro_batch < ctx.interface.micro_batches:
        raise ValueError(f"micro_batch {micro_batch} is not in 0 to {ctx.interface.micro_batches - 1}")


load = Op(
    "load",
    (HOST,),
    _load,
    lambda ctx, batch, name, *, micro_batch: Work(
        HOST, moved_bytes=ctx.interface.batch[name].bytes, source=DRAM, target=DEVICE
    ),
)


# --- weights between memories ---------------------------------------------------------------------------------------


def _weights_name(ctx: Context, name: str) -> StageSpec:
    stage, _, what = name.partition(".")
    if what != "weights":
        raise ValueError(f"{name!r} is not of the form 'stage.weights'")
    return ctx.stage(stage)


def _resident(ctx: Context, name: str) -> Value:
    spec = _weights_name(ctx, name)
    return Value("weights", spec.weight_bytes, DEVICE, stage=spec.name, owned=False)


resident = Op("resident", (HOST,), _resident, lambda ctx, name: Work(HOST))


def _fetch(
    ctx: Context, name: str, begun: Value | None = None, *, params: int | None = None, group: str | None = None
) -> Value:
    """With `params`, only the stage's first so many parameters; a second fetch takes over this part as `begun`. With
    `group`, this device's shard of a stage that is spread over the group."""
    spec = _weights_name(ctx, name)
    if group is not None:
        if begun is not None or params is not None:
            raise ValueError(f"a shard of {spec.name} is fetched at once")
        ctx.group(group)
        return Value("shard", ctx.interface.part_of(spec.name, group).weight_bytes, stage=spec.name, group=group)
    if params is not None:
        if begun is not None or not 0 < params < len(spec.params):
            raise ValueError(f"params of a first fetch of {spec.name} is 1 to {len(spec.params) - 1}, found {params}")
        return Value("part", spec.part_bytes(params), DEVICE, stage=spec.name)
    if begun is not None and _want(begun, "part", "begun", DEVICE).stage != spec.name:
        raise ValueError(f"begun is a part of {begun.stage}, not of {spec.name}")
    return Value("weights", spec.weight_bytes, DEVICE, stage=spec.name)


def _fetch_work(
    ctx: Context, name: str, begun: Value | None = None, *, params: int | None = None, group: str | None = None
) -> Work:
    moved = _fetch(ctx, name, begun, params=params, group=group).bytes - (begun.bytes if begun is not None else 0)
    return Work(H2D, moved_bytes=moved, source=DRAM, target=DEVICE)


fetch = Op(
    "fetch",
    (H2D,),
    _fetch,
    _fetch_work,
    donates=("begun",),
    paper="Mobius 3.1, eq. 5: a stage's copy moves from DRAM to the GPU before it runs, in part where that fits",
)


def _offload(ctx: Context, value: Value) -> Value:
    if not isinstance(value, Value) or value.kind not in ("grads", "tensor") or value.memory != DEVICE:
        raise ValueError("what is offloaded must be gradients or a tensor on the device")
    return replace(value, memory=DRAM, owned=True)


offload = Op(
    "offload",
    (D2H,),
    _offload,
    lambda ctx, value: Work(D2H, moved_bytes=value.bytes, source=DEVICE, target=DRAM),
    paper="Mobius eq. 1: gradients move to DRAM once a step",
)


def _free(ctx: Context, *values: Value) -> None:
    for value in values:
        if not isinstance(value, Value) or not value.owned:
            raise ValueError("only values that the program owns can be freed")


free = Op("free", (HOST,), _free, lambda ctx, *values: Work(HOST), effect=True)


# --- compute --------------------------------------------------------------------------------------------------------


def _stage_operands(ctx: Context, stage: str, weights: Value, inputs: tuple[Value, ...], micro_batch: int) -> StageSpec:
    spec = ctx.stage(stage)
    _micro_batch(ctx, micro_batch)
    _want(weights, "weights", "weights", DEVICE)
    if weights.stage != stage:
        raise ValueError(f"{stage} runs on its own weights, found those of {weights.stage}")
    if len(inputs) != len(spec.inputs):
        raise ValueError(f"{stage} takes {len(spec.inputs)} inputs, found {len(inputs)}")
    for value, want in zip(inputs, spec.inputs):
        _match(value, want, f"input {want.name} of {stage}")
    return spec


def _forward(
    ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int, keep: bool = True
) -> tuple[Value, ...]:
    spec = _stage_operands(ctx, stage, weights, inputs, micro_batch)
    outputs = tuple(_tensor(o) for o in spec.outputs)
    return (*outputs, Value("kept", spec.kept_bytes, DEVICE, stage=stage)) if keep else outputs


def _forward_work(
    ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int, keep: bool = True
) -> Work:
    s = ctx.stage(stage)
    return Work(
        COMPUTE,
        flops=s.forward_flops,
        traffic_bytes=s.forward_traffic_bytes,
        launches=s.launches,
        workspace_bytes=s.forward_workspace_bytes if keep else s.light_workspace_bytes,
        seconds=tuple((name, again_s if keep else forward_s) for name, forward_s, again_s, _ in s.seconds),
    )


forward = Op("forward", (COMPUTE,), _forward, _forward_work)


def _evaluate(ctx: Context, stage: str, weights: Value, *inputs: Value, micro_batch: int) -> tuple[Value, ...]:
    spec = _stage_operands(ctx, stage, weights, inputs, micro_batch)
    return tuple(_tensor(o) for o in (*spec.outputs, *spec.extra_outputs))


evaluate = Op(
    "evaluate",
    (COMPUTE,),
    _evaluate,
    lambda ctx, stage, weights, *inputs, micro_batch: _forward_work(
        ctx, stage, weights, *inputs, micro_batch=micro_batch, keep=False
    ),
)


def _backward(
    ctx: Context,
    stage: str,
    weights: Value,
    kept: Value | None,
    inputs: list[Value],
    douts: list[Value | float | None],
    grads: Value | None = None,
    *,
    micro_batch: int,
) -> tuple[Value, ...]:
    """`kept` None rematerialises from `inputs`. `douts`: per output its gradient, a factor for the loss, or None."""
    spec = _stage_operands(ctx, stage, weights, tuple(inputs), micro_batch)
    if kept is None:
        if not spec.rematerialisable:
            raise ValueError(f"{stage} cannot be rematerialised: a second forward would change its buffers' results")
    elif _want(kept, "kept", "kept", DEVICE).stage != stage:
        raise ValueError(f"kept belongs to {kept.stage}, not to {stage}")
    if len(douts) != len(spec.outputs):
        raise ValueError(f"{stage} has {len(spec.outputs)} outputs, found {len(douts)} gradients")
    for dout, out in zip(douts, spec.outputs):
        if isinstance(dout, Value):
            _match(dout, out, f"gradient of {out.name} of {stage}")
        elif isinstance(dout, float) and out.name != spec.loss:
            raise ValueError(f"only the loss takes a factor; {out.name} of {stage} does not")
    if grads is not None and _want(grads, "grads", "grads", DEVICE).stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")
    if grads is not None and grads.group:
        raise ValueError("gradients that were scattered cannot grow")
    dinputs = tuple(_tensor(i) for i in spec.inputs if i.requires_grad)
    return (*dinputs, Value("grads", spec.grad_bytes, DEVICE, stage=stage))


def _backward_work(
    ctx: Context,
    stage: str,
    weights: Value,
    kept: Value | None,
    inputs: list[Value],
    douts: list[Any],
    grads: Value | None = None,
    *,
    micro_batch: int,
) -> Work:
    s = ctx.stage(stage)
    again = kept is None
    return Work(
        COMPUTE,
        flops=s.backward_flops + (s.forward_flops if again else 0.0),
        traffic_bytes=s.backward_traffic_bytes + (s.forward_traffic_bytes if again else 0.0),
        launches=(3 if again else 2) * s.launches,
        workspace_bytes=max(s.backward_workspace_bytes, s.forward_workspace_bytes if again else 0)
        + (s.kept_bytes if again else 0),
        seconds=tuple((name, backward_s + (again_s if again else 0.0)) for name, _, again_s, backward_s in s.seconds),
    )


backward = Op(
    "backward",
    (COMPUTE,),
    _backward,
    _backward_work,
    donates=("grads",),
    paper="rematerialisation: Mobius 3.1, FTPipe 4.3",
)


def _add(ctx: Context, left: Value, right: Value) -> Value:
    _want(left, "tensor", "left", DEVICE)
    _want(right, "tensor", "right", DEVICE)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        raise ValueError(f"shapes differ: {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}")
    return left


add = Op(
    "add",
    (COMPUTE,),
    _add,
    lambda ctx, left, right: Work(COMPUTE, flops=math.prod(left.shape), traffic_bytes=3 * left.bytes, launches=1),
    donates=("left",),
)


# --- between devices ------------------------------------------------------------------------------------------------


def _send(ctx: Context, value: Value, *, dst: int, tag: str) -> None:
    _want(value, "tensor", "what is sent", DEVICE)
    _peer(ctx, dst)


def _peer(ctx: Context, device: int) -> None:
    if not 0 <= device < ctx.interface.num_devices or device == ctx.device:
        raise ValueError(f"device {device} is no other device of 0 to {ctx.interface.num_devices - 1}")


send = Op(
    "send",
    (SEND,),
    _send,
    lambda ctx, value, *, dst, tag: Work(
        SEND, moved_bytes=value.bytes, source=DEVICE, target=f"device{dst}", peer=dst, tag=tag
    ),
    effect=True,
)


def _recv(ctx: Context, like: str, *, src: int, tag: str) -> Value:
    """`like` names the stage output whose shape and dtype arrive: the value itself, or its gradient."""
    _peer(ctx, src)
    stage, _, output = like.partition(".")
    names = [o.name for o in ctx.stage(stage).outputs]
    if output not in names:
        raise ValueError(f"{stage} has no output {output!r}; it has {', '.join(names)}")
    return _tensor(ctx.stage(stage).output(output))


recv = Op(
    "recv",
    (RECV,),
    _recv,
    lambda ctx, like, *, src, tag: Work(
        RECV,
        moved_bytes=_recv(ctx, like, src=src, tag=tag).bytes,
        source=f"device{src}",
        target=DEVICE,
        peer=src,
        tag=tag,
    ),
)


def _all_reduce(ctx: Context, *values: Value, group: str) -> tuple[Value, ...]:
    """Sum over the group's members. Grads: only the tied parameter that the group names, else all; norms: the whole."""
    members = [stage for stage, _ in ctx.group(group)]
    if len(members) != len(values):
        raise ValueError(f"group {group} has {len(members)} members on device {ctx.device}, found {len(values)} values")
    for value, stage in zip(values, members):
        if value.kind not in ("grads", "norm") or (value.kind == "grads" and stage not in ("", value.stage)):
            raise ValueError(f"group {group} reduces the gradients of {stage} here, found {value.kind} {value.stage}")
    return tuple(values)


def _all_reduce_work(ctx: Context, *values: Value, group: str) -> Work:
    stage, name = ctx.group(group)[0]
    num_bytes = values[0].bytes
    if name:
        params = ctx.interface.part_of(stage, values[0].group).params
        num_bytes = next(p.bytes for p in params if p.name == name)
    memory = values[0].memory
    return Work(COMM, moved_bytes=num_bytes, source=memory, target=memory, group=group, rounds=2)


all_reduce = Op(
    "all_reduce",
    (COMM,),
    _all_reduce,
    _all_reduce_work,
    effect=True,
    donates=("values",),
    paper="FTPipe 4.4: tied weights across stages",
)


def _all_gather(ctx: Context, shard: Value, *, group: str) -> Value:
    """A stage's whole weights, out of the shards of all members."""
    if _want(shard, "shard", "shard", DEVICE).group != group:
        raise ValueError(f"the shard is of group {shard.group!r}, not of {group!r}")
    return Value("weights", ctx.stage(shard.stage).weight_bytes, stage=shard.stage)


def _once_round(group: str, num_bytes: int, workspace_bytes: int) -> Work:
    where = {"source": DEVICE, "target": DEVICE, "group": group}
    return Work(COMM, moved_bytes=num_bytes, **where, rounds=1, workspace_bytes=workspace_bytes)  # type: ignore[arg-type]


def _gather_work(ctx: Context, shard: Value, *, group: str) -> Work:
    """All shards arrive one behind the other, before their pieces are put in place."""
    whole = ctx.stage(shard.stage).weight_bytes
    return _once_round(group, whole, shard.bytes * len(ctx.interface.members(group)))


all_gather = Op(
    "all_gather",
    (COMM,),
    _all_gather,
    _gather_work,
    paper="Mobius eq. 2, MiCS 3.2: every device keeps a part of each stage and has it whole while it runs",
)


def _scatter_work(ctx: Context, grads: Value, *, group: str) -> Work:
    """What is sent, member by member, and as much that arrives."""
    members = len(ctx.interface.members(group))
    return _once_round(group, grads.bytes, 2 * members * ctx.interface.part_of(grads.stage, group).grad_bytes)


def _reduce_scatter(ctx: Context, grads: Value, *, group: str) -> Value:
    """The sum of the members' gradients of a stage, of which each keeps its own shard's part."""
    if _want(grads, "grads", "grads", DEVICE).group:
        raise ValueError(f"the gradients of {grads.stage} were scattered over {grads.group!r} already")
    ctx.group(group)
    return Value("grads", ctx.interface.part_of(grads.stage, group).grad_bytes, stage=grads.stage, group=group)


reduce_scatter = Op(
    "reduce_scatter",
    (COMM,),
    _reduce_scatter,
    _scatter_work,
    donates=("grads",),
    paper="Mobius eq. 2, MiCS 3.4",
)


# --- update ---------------------------------------------------------------------------------------------------------


def _where(value: Value) -> str:
    return COMPUTE if value.memory == DEVICE else CPU


def _norm(ctx: Context, *grads: Value) -> Value:
    """The sum of squares of this device's gradients, each tied parameter counted by its owner only."""
    for value in grads:
        _want(value, "grads", "grads")
    return Value("norm", 8, grads[0].memory if grads else DRAM)


norm = Op(
    "norm",
    (COMPUTE, CPU),
    _norm,
    lambda ctx, *grads: Work(_where(grads[0]) if grads else CPU, traffic_bytes=sum(g.bytes for g in grads), launches=1),
)


def _clip(ctx: Context, grads: Value, norm: Value, *, max_norm: float) -> Value:
    """Divide by the loss scale, and by norm / max_norm where that exceeds 1 (as torch's clip_grad_norm_)."""
    _want(norm, "norm", "norm")
    return _want(grads, "grads", "grads")


clip = Op(
    "clip",
    (COMPUTE, CPU),
    _clip,
    lambda ctx, grads, norm, *, max_norm: Work(_where(grads), traffic_bytes=2 * grads.bytes, launches=1),
    donates=("grads",),
)


def _step(ctx: Context, stage: str, grads: Value, norm: Value | None = None) -> None:
    """Update the stage's weights where its gradients lie; with `norm`, skip the step when that is not finite (fp16)."""
    if _want(grads, "grads", "grads").stage != stage:
        raise ValueError(f"grads belong to {grads.stage}, not to {stage}")


def _step_work(ctx: Context, stage: str, grads: Value, norm: Value | None = None) -> Work:
    spec = ctx.interface.part_of(stage, grads.group)
    per_param = 8 + 2 * ctx.interface.state_bytes_per_param + 4
    return Work(
        _where(grads),
        params=spec.trained_params,
        traffic_bytes=per_param * spec.trained_params,
        launches=len(spec.params) if _where(grads) == COMPUTE else 0,
        workspace_bytes=4 * spec.trained_params if ctx.interface.master else 0,  # the gradients in fp32
        workspace_memory=grads.memory,
    )


step = Op(
    "step",
    (COMPUTE, CPU),
    _step,
    _step_work,
    effect=True,
    paper="ZeRO-Offload: the optimizer runs where its states lie",
)

ALL: dict[str, Op] = {
    op.name: op
    for op in (
        load, resident, fetch, offload, free, forward, evaluate, backward, add, send, recv, all_gather, reduce_scatter,
        all_reduce, norm, clip, step,
    )
}  # fmt: skip
