"""The ops inside a layer: what the members of a team make together of values of one micro-batch.

A team is some lanes that run the same micro-batches together, each a part of the work inside a layer (`lanes.py`). Its
members hold parts of a value, or each the whole of it, or summands of it. An op makes one from the other, and its
gradient is made by another op of this file: that of `all_to_all` by an `all_to_all` with its dimensions exchanged, that
of `gather_parts` by `scatter_sum` and the other way round, that of `own_part` by `gather_parts`, that of `pass_on` by a
`pass_on` the other way round, that of `to_experts` by `from_experts` and the other way round. `sum_parts` gives every
member the same, and so the sum's gradient is that of a summand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..names import COMM, COMPUTE, DEVICE, GROUP, PAIRS, RING_STEP
from .record import Context, Op, Value, Work, want

__all__ = [
    "all_to_all", "from_experts", "gather_parts", "member", "own_part", "pass_on", "scatter_sum", "sum_parts",
    "to_experts", "token_visits",
]  # fmt: skip


def _member(ctx: Context, *, group: str) -> Value:
    """The device's number among the members of its group: all that differs between the members of a team."""
    ctx.group(group)
    return Value("tensor", 8, DEVICE, (1,), "int64", owned=False)


member = Op("member", (), _member, lambda ctx, *, group: Work(COMM), prepares=True)


def _part_shape(ctx: Context, value: Value, group: str, dim: int) -> tuple[int, ...]:
    """The shape of a member's part of a value along a dimension. Raises `ValueError` where it has no equal parts."""
    want(value, "tensor", "what members exchange", DEVICE)
    ctx.group(group)
    count = ctx.interface.size(group)
    if not 0 <= dim < len(value.shape):
        raise ValueError(f"dimension {dim} is none of the {len(value.shape)} of a value {list(value.shape)}")
    if value.shape[dim] % count:
        raise ValueError(f"dimension {dim} of {list(value.shape)} has no {count} equal parts")
    return (*value.shape[:dim], value.shape[dim] // count, *value.shape[dim + 1 :])


def _gathered_shape(ctx: Context, value: Value, group: str, dim: int) -> tuple[int, ...]:
    """The shape of all members' values one after the other along a dimension."""
    want(value, "tensor", "what members exchange", DEVICE)
    ctx.group(group)
    if not 0 <= dim < len(value.shape):
        raise ValueError(f"dimension {dim} is none of the {len(value.shape)} of a value {list(value.shape)}")
    return (*value.shape[:dim], value.shape[dim] * ctx.interface.size(group), *value.shape[dim + 1 :])


def _team_op(name: str, infer: Callable[..., Value], work: Callable[..., Work], paper: str, meets: str = GROUP) -> Op:
    streams = (COMM,) if meets else (COMPUTE,)
    return Op(name, streams, infer, work, passes_on=True, prepares=True, meets=meets, paper=paper)


def _all_to_all(ctx: Context, value: Value, *, group: str, split_dim: int, concat_dim: int) -> Value:
    """Each member gets its part along `split_dim` of every member's value, and puts them one after the other along
    `concat_dim`."""
    part = replace(value, shape=_part_shape(ctx, value, group, split_dim))
    return replace(value, shape=_gathered_shape(ctx, part, group, concat_dim))


def _all_to_all_work(ctx: Context, value: Value, *, group: str, split_dim: int, concat_dim: int) -> Work:
    """The parts are put one after the other before they leave, and along the other dimension where they arrive."""
    return Work(
        COMM, moved_bytes=value.bytes, source=DEVICE, target=DEVICE, group=group, rounds=1, pattern=PAIRS,
        traffic_bytes=4 * value.bytes, workspace_bytes=2 * value.bytes,
    )  # fmt: skip


all_to_all = _team_op(
    "all_to_all", _all_to_all, _all_to_all_work, "DeepSpeed-Ulysses 3: tokens to heads, and back"
)


def _gather_parts(ctx: Context, value: Value, *, group: str, dim: int) -> Value:
    """Every member's value, one after the other along `dim`."""
    return replace(value, shape=_gathered_shape(ctx, value, group, dim), bytes=value.bytes * ctx.interface.size(group))


def _gather_parts_work(ctx: Context, value: Value, *, group: str, dim: int) -> Work:
    whole_bytes = value.bytes * ctx.interface.size(group)
    return Work(
        COMM, moved_bytes=whole_bytes, source=DEVICE, target=DEVICE, group=group, rounds=1,
        traffic_bytes=2 * (value.bytes + whole_bytes), workspace_bytes=whole_bytes,
    )  # fmt: skip


gather_parts = _team_op("gather_parts", _gather_parts, _gather_parts_work, "Megatron-LM 3, Korthikanti 2022 4.2.2: g")


def _scatter_sum(ctx: Context, value: Value, *, group: str, dim: int) -> Value:
    """The sum of the members' values, of which each member gets its part along `dim`."""
    return replace(value, shape=_part_shape(ctx, value, group, dim), bytes=value.bytes // ctx.interface.size(group))


def _scatter_sum_work(ctx: Context, value: Value, *, group: str, dim: int) -> Work:
    part_bytes = value.bytes // ctx.interface.size(group)
    return Work(
        COMM, moved_bytes=value.bytes, source=DEVICE, target=DEVICE, group=group, rounds=1,
        traffic_bytes=2 * value.bytes, workspace_bytes=value.bytes + part_bytes,
    )  # fmt: skip


scatter_sum = _team_op("scatter_sum", _scatter_sum, _scatter_sum_work, "Korthikanti 2022 4.2.2: g-bar")


def _sum_parts(ctx: Context, value: Value, *, group: str) -> Value:
    """The sum of the members' values, the same bits on every member."""
    ctx.group(group)
    return want(value, "tensor", "what members add up", DEVICE)


sum_parts = _team_op(
    "sum_parts",
    _sum_parts,
    lambda ctx, value, *, group: Work(
        COMM, moved_bytes=value.bytes, source=DEVICE, target=DEVICE, group=group, rounds=2,
        traffic_bytes=2 * value.bytes,
    ),
    "Megatron-LM 3: g",
)  # fmt: skip


def _own_part(ctx: Context, value: Value, *, group: str, dim: int) -> Value:
    """The member's part along `dim` of a value that all members have. No bytes move between devices."""
    return replace(value, shape=_part_shape(ctx, value, group, dim), bytes=value.bytes // ctx.interface.size(group))


def _own_part_work(ctx: Context, value: Value, *, group: str, dim: int) -> Work:
    return Work(COMPUTE, traffic_bytes=2 * value.bytes // ctx.interface.size(group), launches=1)


own_part = _team_op("own_part", _own_part, _own_part_work, "Korthikanti 2022 4.2.2", meets="")


def _pass_on(ctx: Context, value: Value, *, group: str, back: bool = False) -> Value:
    """The value of the member before this one in the group's ring; with `back`, of the one after it."""
    ctx.group(group)
    return want(value, "tensor", "what is passed on", DEVICE)


def _pass_on_work(ctx: Context, value: Value, *, group: str, back: bool = False) -> Work:
    return Work(
        COMM, moved_bytes=value.bytes, source=DEVICE, target=DEVICE, group=group, rounds=1, pattern=RING_STEP
    )  # fmt: skip


pass_on = _team_op("pass_on", _pass_on, _pass_on_work, "Ring Attention, Liu 2023 3.1")


def _check_routes(ctx: Context, value: Value, routes: Value, group: str, experts: int) -> int:
    """The number of members. `routes`: to which of the `experts` each token goes, [tokens of all members, experts of
    each], where all members have equally many tokens and experts. Raises `ValueError` where they cannot be of this
    group."""
    want(value, "tensor", "what goes to experts", DEVICE)
    want(routes, "tensor", "routes", DEVICE)
    ctx.group(group)
    members = ctx.interface.size(group)
    if experts < members or experts % members:
        raise ValueError(f"{members} members have equally many experts; found experts={experts}")
    if routes.dtype != "int32" or len(routes.shape) != 2 or routes.shape[0] % members or not routes.shape[0]:
        raise ValueError(
            f"routes of {members} members say to which experts each token goes, int32 [tokens of all members, experts "
            f"of each], equally many tokens of each member; found {routes.dtype} {list(routes.shape)}"
        )
    if not value.shape:
        raise ValueError("a value without dimensions has no tokens or rows for experts")
    return members


def token_visits(members: int, experts: int, each: int) -> float:
    """To how many of the members a token goes, where any `each` of the experts are as likely."""
    return members * (1 - math.comb(experts - experts // members, each) / math.comb(experts, each))


def _to_experts(ctx: Context, value: Value, routes: Value, *, group: str, experts: int) -> Value:
    """A row for each token of all members and each of its experts that this member has: by expert, of each in the order
    of members and tokens. A token goes to a member once. In the worst case all experts of all tokens are of one member:
    the result has room for that, and zeros after the rows that came."""
    members = _check_routes(ctx, value, routes, group, experts)
    tokens, each = routes.shape
    if value.shape[0] * members != tokens:
        raise ValueError(f"{list(value.shape)} is of no {tokens} // {members} tokens")
    return replace(value, shape=(tokens * each, *value.shape[1:]), bytes=value.bytes * members * each)


def _to_experts_work(ctx: Context, value: Value, routes: Value, *, group: str, experts: int) -> Work:
    """The bytes for equally likely experts: the real number is known only while it runs. Sent rows are gathered; the
    result is cleared before rows are made of the arrivals."""
    members, each = ctx.interface.size(group), routes.shape[1]
    moved_bytes = round(value.bytes * token_visits(members, experts, each))
    return Work(
        COMM, moved_bytes=moved_bytes, source=DEVICE, target=DEVICE, group=group, rounds=1, pattern=PAIRS,
        traffic_bytes=2 * moved_bytes + (members + 2) * each * value.bytes,
        workspace_bytes=(members + min(members, each)) * value.bytes,
    )  # fmt: skip


to_experts = _team_op("to_experts", _to_experts, _to_experts_work, "GShard, Lepikhin 2020 3.2: dispatch, by count")


def _from_experts(ctx: Context, value: Value, routes: Value, *, group: str, experts: int) -> Value:
    """For each token of this member the sum over the rows that all members have of it. A member adds up its rows of a
    token before it sends them."""
    members = _check_routes(ctx, value, routes, group, experts)
    tokens, each = routes.shape
    if value.shape[0] != tokens * each:
        raise ValueError(f"{list(value.shape)} has no room for {each} rows of each of {tokens} tokens")
    return replace(value, shape=(tokens // members, *value.shape[1:]), bytes=value.bytes // (members * each))


def _from_experts_work(ctx: Context, value: Value, routes: Value, *, group: str, experts: int) -> Work:
    members, each = ctx.interface.size(group), routes.shape[1]
    own_bytes = value.bytes // (members * each)
    moved_bytes = round(own_bytes * token_visits(members, experts, each))
    summed_bytes = max(own_bytes, 4 * math.prod(value.shape) // (members * each))  # added up in fp32 at least
    return Work(
        COMM, moved_bytes=moved_bytes, source=DEVICE, target=DEVICE, group=group, rounds=1, pattern=PAIRS,
        traffic_bytes=each * (2 * own_bytes + 3 * summed_bytes) + 3 * moved_bytes,
        workspace_bytes=2 * (members + 1) * (own_bytes + summed_bytes) + min(members, each) * own_bytes,
    )  # fmt: skip


from_experts = _team_op("from_experts", _from_experts, _from_experts_work, "GShard 3.2: combine, by count")
