"""The ops that move values between memories: inputs, weights, optimizer states, gradients, activations.

A stage's weights persist in one memory: on the device (`resident` names them), in DRAM ("stage1.weights" is fetched),
or on SSD ("stage1.weights" is read, and the result is fetched). Optimizer states and fp32 masters persist with the
weights, or on SSD: "stage1.states" names these alone, "stage1.all" the weights with them. Of a stage with parameters
that stay (`ParamSpec.stays`), "stage1.weights" names the others; those that stay, with their masters and states, are on
the device, and are named by nothing. With a `group`, a name stands for the device's shard of a stage that is spread
over that group.
"""

from __future__ import annotations

from dataclasses import replace

from ..names import D2H, DEVICE, DRAM, H2D, HOST, READ, SSD, WRITE
from .record import Context, Op, Value, Work, tensor, want

__all__ = ["fetch", "free", "load", "offload", "read", "resident", "write"]

PERSISTENT = ("weights", "states", "all")  # what a program's text may name of a stage
MOVABLE = ("tensor", "kept")  # activations


def check_micro_batch(ctx: Context, micro_batch: int) -> None:
    if not 0 <= micro_batch < ctx.interface.micro_batches:
        raise ValueError(f"micro_batch {micro_batch} is not in 0 to {ctx.interface.micro_batches - 1}")


def _load(ctx: Context, batch: object, name: str, *, micro_batch: int) -> Value:
    if name not in ctx.interface.batch:
        raise ValueError(f"no input {name!r}; there are {', '.join(ctx.interface.batch)}")
    check_micro_batch(ctx, micro_batch)
    return tensor(ctx.interface.batch[name], requires_grad=False)


load = Op(
    "load",
    (HOST,),
    _load,
    lambda ctx, batch, name, *, micro_batch: Work(
        HOST, moved_bytes=ctx.interface.batch[name].bytes, source=DRAM, target=DEVICE
    ),
    prepares=True,
)


def persistent(
    ctx: Context, name: str, memory: str, kinds: tuple[str, ...] = ("weights",), group: str | None = None
) -> Value:
    """The value that a name such as "stage1.weights" stands for. Raises `ValueError` for another form."""
    stage, _, what = name.partition(".")
    if what not in kinds:
        forms = " or ".join(f"'stage.{kind}'" for kind in kinds)
        raise ValueError(f"{name!r} is not of the form {forms}")
    ctx.stage(stage)
    if group is not None:
        ctx.group(group)
    spec, interface = ctx.interface.part_of(stage, group or ""), ctx.interface
    if what != "weights" and spec.staying:
        raise ValueError(f"the optimizer states of {stage} stay on the device")
    num_bytes = {
        "weights": spec.weight_bytes,
        "states": interface.states_bytes(spec),
        "all": interface.all_bytes(spec),
    }[what]
    return Value(what, num_bytes, memory, stage=spec.name, group=group or "")


def _resident(ctx: Context, name: str, *, group: str | None = None) -> Value:
    """A stage's weights; with `group`, this device's shard of them, which is gathered before it is used."""
    kind = "weights" if group is None else "shard"
    return replace(persistent(ctx, name, DEVICE, group=group), kind=kind, owned=False)


resident = Op(
    "resident",
    (),
    _resident,
    lambda ctx, name, *, group=None: Work(HOST),
    prepares=True,
    persists_in=DEVICE,
)


def _fetch(
    ctx: Context,
    what: str | Value,
    begun: Value | None = None,
    *,
    params: int | None = None,
    group: str | None = None,
    link_turn: int | None = None,
) -> Value:
    """Weights that persist in DRAM, by name, or a value there. With `params`, only the stage's first `params`
    parameters; a second fetch takes over this part as `begun`. With `group`, this device's shard of a stage that is
    spread over the group. `link_turn`: of all weights that devices fetch through one root complex, those with the
    lowest number come first (Mobius 3.3)."""
    if link_turn is not None and not (isinstance(link_turn, int) and link_turn >= 0):
        raise ValueError(f"link_turn is {link_turn!r}; it is a number from 0 on")
    if isinstance(what, Value) and (what.kind not in ("weights", *MOVABLE) or what.memory != DRAM):
        raise ValueError(f"only weights and activations in DRAM can be fetched, found {what.kind} in {what.memory}")
    if isinstance(what, Value) and what.kind in MOVABLE:
        if begun is not None or params is not None or group is not None:
            raise ValueError(f"a {what.kind} is fetched at once")
        if link_turn is not None:
            raise ValueError(f"a {what.kind} comes before all weights and has no link_turn")
        return replace(what, memory=DEVICE)
    spec = ctx.stage(what.stage if isinstance(what, Value) else persistent(ctx, what, DRAM).stage)
    if isinstance(what, Value) and what.group != (group or ""):
        raise ValueError(f"the weights of {spec.name} were read of group {what.group!r}, and fetched of {group!r}")
    if group is not None:
        if begun is not None or params is not None:
            raise ValueError(f"a shard of {spec.name} is fetched at once")
        ctx.group(group)
        return Value("shard", ctx.interface.part_of(spec.name, group).weight_bytes, stage=spec.name, group=group)
    if params is not None:
        most = len(spec.moving) - 1
        if begun is not None or not 0 < params <= most:
            raise ValueError(f"params of a first fetch of {spec.name} is 1 to {most}, found {params}")
        return Value("part", spec.part_bytes(params), DEVICE, stage=spec.name)
    if begun is not None and want(begun, "part", "begun", DEVICE).stage != spec.name:
        raise ValueError(f"begun is a part of {begun.stage}, not of {spec.name}")
    return Value("weights", spec.weight_bytes, DEVICE, stage=spec.name)


def _fetch_work(
    ctx: Context,
    what: str | Value,
    begun: Value | None = None,
    *,
    params: int | None = None,
    group: str | None = None,
    link_turn: int | None = None,
) -> Work:
    moved = _fetch(ctx, what, begun, params=params, group=group).bytes - (begun.bytes if begun is not None else 0)
    return Work(H2D, moved_bytes=moved, source=DRAM, target=DEVICE)


fetch = Op(
    "fetch",
    (H2D,),
    _fetch,
    _fetch_work,
    donates=("begun",),
    passes_on=True,
    prepares=True,
    transfers=True,
    persists_in=DRAM,
    result_in_arena=True,
    paper="Mobius 3.1, eq. 5: a stage's copy moves from DRAM to the GPU before it runs, in part where that fits",
)


def _offload(ctx: Context, value: Value) -> Value:
    if not isinstance(value, Value) or value.kind not in ("grads", *MOVABLE) or value.memory != DEVICE:
        raise ValueError("what is offloaded must be gradients, a tensor or what a forward kept, on the device")
    if value.kind == "kept" and not value.classes:
        raise ValueError("only classes of saved tensors can be offloaded, not everything that autograd saved")
    return replace(value, memory=DRAM, owned=True)


offload = Op(
    "offload",
    (D2H,),
    _offload,
    lambda ctx, value: Work(D2H, moved_bytes=value.bytes, source=DEVICE, target=DRAM),
    passes_on=True,
    transfers=True,
    result_in_arena=True,
    paper="Mobius eq. 1: gradients move to DRAM once a step; Fuyou 4.4: activations",
)


def _read(ctx: Context, what: str | Value, *, group: str | None = None) -> Value:
    if isinstance(what, str):
        return persistent(ctx, what, DRAM, PERSISTENT, group)
    if group is not None:
        raise ValueError("an activation is read as it is, without a group")
    if what.kind not in MOVABLE or what.memory != SSD:
        raise ValueError(f"only activations on SSD can be read as values, found {what.kind} in {what.memory}")
    return replace(what, memory=DRAM)


def _read_work(ctx: Context, what: str | Value, *, group: str | None = None) -> Work:
    """The weights in "stage1.all" are not read if they follow from the masters, or are frozen."""
    value, interface = _read(ctx, what, group=group), ctx.interface
    apart = value.kind == "all" and interface.masters_say_all(ctx.stage(value.stage))
    moved = interface.states_bytes(interface.part_of(value.stage, value.group)) if apart else _update_bytes(ctx, value)
    return Work(READ, moved_bytes=moved, source=SSD, target=DRAM)


def _update_bytes(ctx: Context, value: Value) -> int:
    """The bytes of a value that move between its file and DRAM for an update."""
    if value.kind != "all":
        return value.bytes
    return ctx.interface.updated_bytes(ctx.interface.part_of(value.stage, value.group), value.group)


read = Op(
    "read",
    (READ,),
    _read,
    _read_work,
    passes_on=True,
    transfers=True,
    persists_in=SSD,
    result_in_arena=True,
    paper="Fuyou 4.3, 4.4, eq. 7",
)


def _write(ctx: Context, value: Value, *, to: str | None = None) -> Value | None:
    """With `to`, `value` goes back to its place in the stage's file; else it is an activation, and the result is a
    value on SSD."""
    if not isinstance(value, Value) or value.memory != DRAM:
        raise ValueError("what is written to SSD must be in DRAM")
    if to is None:
        if value.kind not in MOVABLE:
            raise ValueError(f"{value.kind} of {value.stage} is written to its own place: to='{value.stage}.states'")
        return replace(value, memory=SSD)
    there = persistent(ctx, to, DRAM, ("states", "all"), value.group or None)
    if (there.kind, there.stage) != (value.kind, value.stage):
        raise ValueError(f"{to!r} is not the place of {value.stage}.{value.kind}")
    return None


write = Op(
    "write",
    (WRITE,),
    _write,
    lambda ctx, value, *, to=None: Work(WRITE, moved_bytes=_update_bytes(ctx, value), source=DRAM, target=SSD),
    passes_on=True,
    transfers=True,
    updates="to",
    result_in_arena=True,
    paper="Fuyou 4.3, 4.4, eq. 7",
)


def _free(ctx: Context, *values: Value) -> None:
    for value in values:
        if not isinstance(value, Value) or not value.owned:
            raise ValueError("only values that the program owns can be freed")


free = Op("free", (), _free, lambda ctx, *values: Work(HOST))
