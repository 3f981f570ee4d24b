"""The ops between devices: messages, and collectives over named groups."""

from __future__ import annotations

from dataclasses import replace

from ..names import COMM, DEVICE, GROUP, PEER, RECV, SEND, TEAM, TRAINING
from .record import Context, Op, Value, Work, tensor, want

__all__ = ["all_gather", "all_reduce", "recv", "reduce_scatter", "send"]


def _send(ctx: Context, value: Value, *, dst: int, tag: str) -> None:
    want(value, "tensor", "what is sent", DEVICE)
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
    transfers=True,
    meets=PEER,
)


def _recv(ctx: Context, like: str, *, src: int, tag: str) -> Value:
    """`like` names the stage output whose shape and dtype arrive: the value itself, or its gradient."""
    _peer(ctx, src)
    stage, _, output = like.partition(".")
    names = [o.name for o in ctx.stage(stage).made]
    if output not in names:
        raise ValueError(f"{stage} has no output {output!r}; it has {', '.join(names)}")
    return tensor(ctx.stage(stage).output(output))


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
    passes_on=True,
    prepares=True,
    meets=PEER,
)


def _all_reduce(ctx: Context, *values: Value, group: str, parts: bool = True) -> tuple[Value, ...]:
    """Sums over the group's members: norms, or gradients, of which only the tied parameter if the group names one.
    Without `parts` the gradients of parameters stay as they are of which members of a team have parts, each its own."""
    members = [stage for stage, _ in ctx.group(group)]
    if len(members) != len(values):
        raise ValueError(f"group {group} has {len(members)} members on device {ctx.device}, found {len(values)} values")
    for value, stage in zip(values, members):
        if value.kind not in ("grads", "norm") or (value.kind == "grads" and stage not in ("", value.stage)):
            raise ValueError(f"group {group} reduces the gradients of {stage} here, found {value.kind} {value.stage}")
    divided = any(value.kind == "grads" and ctx.interface.has_parts(value.stage) for value in values)
    if group.partition(".")[0] == TEAM and parts and divided:
        raise ValueError(f"group {group}: gradients of parts are of different weights on each member; use parts=False")
    if not parts and any(value.kind != "grads" for value in values):
        raise ValueError(f"parts are left out of gradients alone, found {', '.join(value.kind for value in values)}")
    return tuple(values)


def _all_reduce_work(ctx: Context, *values: Value, group: str, parts: bool = True) -> Work:
    stage, name = ctx.group(group)[0]
    num_bytes = values[0].bytes
    if not parts:
        num_bytes = ctx.stage(values[0].stage).common_grad_bytes
    if name:
        params = ctx.interface.part_of(stage, values[0].group).params
        num_bytes = next(p.grad_bytes for p in params if p.name == name)
    memory = values[0].memory
    return Work(COMM, moved_bytes=num_bytes, source=memory, target=memory, group=group, rounds=2)


all_reduce = Op(
    "all_reduce",
    (COMM,),
    _all_reduce,
    _all_reduce_work,
    donates=("values",),
    allowed_in=TRAINING,
    prepares=True,
    meets=GROUP,
    paper="FTPipe 4.4: tied weights across stages",
)


def _all_gather(ctx: Context, shard: Value, *, group: str, hierarchical: bool = False) -> Value:
    """A stage's whole weights, made from the shards of all members. `hierarchical` changes how, not what: each member
    gathers first from the members at its place on other hosts, then inside its host."""
    if want(shard, "shard", "shard", DEVICE).group != group:
        raise ValueError(f"the shard is of group {shard.group!r}, not of {group!r}")
    return Value("weights", ctx.interface.gathered_bytes(shard.stage, group), stage=shard.stage, spread=group)


def _once_round(group: str, num_bytes: int, copied_bytes: int, hierarchical: bool = False) -> Work:
    """`copied_bytes` are read and written inside each member's memory."""
    return Work(
        COMM, moved_bytes=num_bytes, source=DEVICE, target=DEVICE, group=group, rounds=1,
        traffic_bytes=copied_bytes, hierarchical=hierarchical,
    )  # fmt: skip


def _gather_work(ctx: Context, shard: Value, *, group: str, hierarchical: bool = False) -> Work:
    """The others' shards arrive where they stay; the member's own is copied there."""
    return _once_round(group, ctx.interface.gathered_bytes(shard.stage, group), 2 * shard.bytes, hierarchical)


all_gather = Op(
    "all_gather",
    (COMM,),
    _all_gather,
    _gather_work,
    prepares=True,
    meets=GROUP,
    result_in_arena=True,
    paper="Mobius eq. 2, MiCS 3.2, 3.3: every device keeps a part of each stage and has it whole while it runs",
)


def _scatter_work(
    ctx: Context, grads: Value, total: Value | None = None, *, group: str, hierarchical: bool = False,
    whole: bool = False,
) -> Work:  # fmt: skip
    """A received value replaces the sent one; the workspace has room for the first received value. To an earlier sum,
    the new one is added. A whole sum takes the rounds of an all-reduce."""
    part_bytes = ctx.interface.part_of(grads.stage, group).grad_bytes
    added_bytes = 0 if total is None else 3 * part_bytes
    work = _once_round(group, grads.bytes, added_bytes, hierarchical)
    return replace(work, workspace_bytes=part_bytes, rounds=2 if whole else 1)


def _reduce_scatter(
    ctx: Context, grads: Value, total: Value | None = None, *, group: str, hierarchical: bool = False,
    whole: bool = False,
) -> Value:  # fmt: skip
    """The sum of the members' gradients of a stage, of which each member keeps its shard's part. It is added to
    `total`, the sum of earlier micro-batches. `hierarchical` adds up first inside each host, then between hosts.
    `whole`: each member receives the whole sum before it keeps its part of it."""
    if want(grads, "grads", "grads", DEVICE).group:
        raise ValueError(f"the gradients of {grads.stage} were scattered over {grads.group!r} already")
    ctx.group(group)
    if grads.spread != group:
        found = f"gathered over {grads.spread!r}" if grads.spread else "never gathered"
        raise ValueError(f"gradients to scatter over {group!r} are of weights gathered over it; these were {found}")
    if total is not None:
        want(total, "grads", "total", DEVICE)
        if (total.stage, total.group) != (grads.stage, group):
            found = f"of {total.stage}, " + (f"scattered over {total.group!r}" if total.group else "whole")
            raise ValueError(f"total must be gradients of {grads.stage}, scattered over {group!r}; found {found}")
    return Value("grads", ctx.interface.part_of(grads.stage, group).grad_bytes, stage=grads.stage, group=group)


reduce_scatter = Op(
    "reduce_scatter",
    (COMM,),
    _reduce_scatter,
    _scatter_work,
    donates=("grads", "total"),
    allowed_in=TRAINING,
    meets=GROUP,
    result_in_arena=True,
    workspace_in_arena=True,
    paper="Mobius eq. 2, MiCS 3.4",
)
