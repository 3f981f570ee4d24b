"""Costs of a stage: those of its blocks, one after the other, and the values that are in memory between them.

In: blocks with costs. Out: the cost fields of a `StageSpec`. A storage counts once, however many values share it, and
not at all where a value that enters the stage, a parameter or a buffer owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ...ir.machine.call_mix import merge_mixes
from ...ir.program import AgainSpec, UnpackedSpec
from ..blocks import AgainCost, Block
from ..opgraph import value_tensors

Storages = dict[int, int]  # identity -> bytes


def storages(nodes: Iterable[fx.Node], with_gradient: bool = False) -> Storages:
    """Memory that the nodes' values occupy; with `with_gradient`, only the values that get gradients count."""
    found: Storages = {}
    for node in nodes:
        for tensor in value_tensors(node.meta.get("val")):
            if tensor.requires_grad or not with_gradient:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found


class CastBytes(NamedTuple):
    """Bytes of values in their own type, and in the type that they have between stages."""

    wide: int
    narrow: int


NO_CAST = CastBytes(0, 0)


def cast_bytes(nodes: Sequence[fx.Node], dtype: torch.dtype | None) -> CastBytes:
    """The bytes of these values, which have `dtype` between stages."""
    tensors = [t for node in nodes for t in value_tensors(node.meta.get("val"))]
    width = 0 if dtype is None else dtype.itemsize
    return CastBytes(sum(t.numel() * t.element_size() for t in tensors), sum(t.numel() for t in tensors) * width)


class _Peaks(NamedTuple):
    """Bytes of a stage. `kept`: from forward to backward; the others: in use at the peaks of forward, of a forward that
    saves nothing, of a rematerialisation and of backward."""

    kept: int
    forward: int
    light: int
    again: int
    backward: int


def _find_peaks(
    blocks: Sequence[Block], lives: _Lives, again_peaks: Sequence[int], absent: Set[int], cast_out: CastBytes
) -> _Peaks:
    """`again_peaks`: of each block's rematerialisation; `absent`: the storages that a rematerialisation leaves out."""
    kept: list[int] = []  # per block, with the values between blocks that it is the first to save
    saved: set[int] = set()
    forward = light = again = 0
    for i, block in enumerate(blocks):
        cost, alive = block.cost, lives.alive_before(i)
        unsaved = sum(size for key, size in alive.items() if key not in saved)
        forward = max(forward, sum(kept) + unsaved + cost.forward_peak_bytes)
        unsaved -= sum(size for key, size in alive.items() if key in absent)
        again = max(again, sum(kept) + unsaved + again_peaks[i])
        light = max(light, sum(alive.values()) + cost.light_peak_bytes)
        read = storages(node for node, is_saved in zip(block.inputs, cost.saved_inputs) if is_saved)
        first = {key: size for key, size in read.items() if key not in lives.given and key not in saved}
        kept.append(sum(first.values()) + cost.kept_bytes)
        made = storages(node for node, is_saved in zip(block.outputs, cost.saved_outputs) if is_saved)
        saved |= first.keys() | made.keys()
    backward = max(
        (b.cost.backward_peak_bytes + lives.gradients_after(i) - sum(kept[i + 1 :]) for i, b in enumerate(blocks)),
        default=0,
    )
    if cast_out.wide:
        alive = lives.alive_before(len(blocks))
        at_end = sum(alive.values()) + cast_out.narrow
        forward = max(forward, sum(kept) + at_end - sum(s for k, s in alive.items() if k in saved))
        again = max(again, sum(kept) + at_end - sum(s for k, s in alive.items() if k in saved or k in absent))
        light = max(light, at_end)
    return _Peaks(sum(kept), forward, light, again, backward)


def stage_costs(
    blocks: Sequence[Block],
    inputs: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    trained: Sequence[Storages],
    dinput_bytes: int,
    copied_bytes: int = 0,
    cast_in: CastBytes = NO_CAST,
    cast_out: CastBytes = NO_CAST,
    without: Set[fx.Node] = frozenset(),
    unread: Set[fx.Node] = frozenset(),
) -> dict[str, Any]:
    """Bytes, FLOPs and calls of one micro-batch. `inputs`: what exists before the stage runs, parameters and buffers
    included. `trained`: per block the parameters that get gradients. `dinput_bytes`: gradients that backward hands out.
    `copied_bytes`: inputs that the stage copies into another layout, and keeps. `cast_in`, `cast_out`: inputs that the
    stage casts from the type that they have between stages, and outputs that it casts to it. `without`: the nodes that
    a rematerialisation leaves out; `unread`: those of parts in tiles whose results it does not make.

    A workspace is what an op needs beyond its results, which the program's memory accounting counts.
    """
    inputs = [*inputs]
    lives = _Lives(blocks, storages(inputs), storages(outputs), trained)
    read = {arg for node in unread for arg in node.all_input_nodes if arg not in unread}
    absent = storages(without).keys() | (storages(unread).keys() - storages(read).keys())
    again = [_again(block, without, unread) for block in blocks]
    peaks = _find_peaks(blocks, lives, [cost.peak_bytes for cost in again], absent, cast_out)
    out_bytes = _bytes(outputs) + cast_out.narrow - cast_out.wide
    backward_peak_bytes = peaks.backward + cast_out.wide + cast_in.narrow  # their gradients, cast
    cast_traffic = sum(row.wide + row.narrow for row in (cast_in, cast_out))
    costs: dict[str, Any] = {
        "kept_bytes": peaks.kept + copied_bytes,
        "forward_workspace_bytes": max(0, peaks.forward - peaks.kept - out_bytes),
        "light_workspace_bytes": max(0, peaks.light - out_bytes) + copied_bytes,
        "backward_workspace_bytes": max(0, backward_peak_bytes - dinput_bytes),
        "forward_flops": sum(b.cost.forward_flops for b in blocks),
        "backward_flops": sum(b.cost.backward_flops for b in blocks),
        "forward_traffic_bytes": sum(b.cost.forward_traffic_bytes for b in blocks) + cast_traffic,
        "backward_traffic_bytes": sum(b.cost.backward_traffic_bytes for b in blocks) + cast_traffic,
        "forward_mix": merge_mixes(b.cost.forward_mix for b in blocks),
        "backward_mix": merge_mixes(b.cost.backward_mix for b in blocks),
        "launches": sum(b.cost.launches for b in blocks),
        "seconds": _seconds(blocks, without, unread),
        "taking": _taking(blocks, without, unread),
    }
    if without or unread:
        there_bytes = out_bytes - _bytes(node for node in outputs if node in without or node in unread)
        costs["again"] = AgainSpec(
            inputs=(),
            calls=(),
            flops=sum(cost.flops for cost in again),
            traffic_bytes=sum(cost.traffic_bytes for cost in again) + cast_traffic,
            mix=merge_mixes(cost.mix for cost in again),
            launches=sum(cost.launches for cost in again),
            workspace_bytes=max(0, peaks.again - peaks.kept - there_bytes),
        )
    elif any(block.cost.unpacked is not None for block in blocks):
        others = map(_unpacked_block, blocks)
        kept_too = stage_costs([*others], inputs, outputs, trained, dinput_bytes, copied_bytes, cast_in, cast_out)
        workspaces = (kept_too["forward_workspace_bytes"], kept_too["backward_workspace_bytes"])
        costs["unpacked"] = UnpackedSpec(
            traffic_bytes=kept_too["backward_traffic_bytes"],
            mix=kept_too["backward_mix"],
            workspace_bytes=kept_too["kept_bytes"] + max(workspaces),
        )
    return costs


def _unpacked_block(block: Block) -> Block:
    """The block with the costs of a forward that keeps the weights that it unpacks."""
    unpacked = block.cost.unpacked
    if unpacked is None:
        return block
    changed = {field.name: getattr(unpacked, field.name) for field in fields(unpacked)}
    return block.with_cost(replace(block.cost, unpacked=None, **changed))


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(t.numel() * t.element_size() for n in nodes for t in value_tensors(n.meta.get("val")))


def _again(block: Block, without: Set[fx.Node], unread: Set[fx.Node]) -> AgainCost:
    """The cost of running the block's forward again."""
    cost = block.cost
    if cost.unread is not None and not unread.isdisjoint(block.nodes):
        return cost.unread
    if cost.again is not None and not without.isdisjoint(block.nodes):
        return cost.again
    return AgainCost(
        cost.forward_flops, cost.forward_traffic_bytes, cost.forward_mix, cost.launches, cost.forward_peak_bytes
    )


def _share(block: Block, without: Set[fx.Node], unread: Set[fx.Node]) -> float:
    """The part of a block's measured rematerialisation, which was of the whole forward, that is run again."""
    return _again(block, without, unread).flops / block.cost.forward_flops if block.cost.forward_flops else 1.0


def _seconds(
    blocks: Sequence[Block], without: Set[fx.Node], unread: Set[fx.Node]
) -> tuple[tuple[str, float, float, float], ...]:
    """Per device on which every block was measured: its name, and seconds of forward, rematerialisation, backward."""
    names = [name for name in blocks[0].seconds if all(name in b.seconds for b in blocks)] if blocks else []
    rows = []
    for name in names:
        own = [b.seconds[name] for b in blocks]
        again_s = sum(s.rematerialise_s * _share(b, without, unread) for s, b in zip(own, blocks))
        parts = (sum(s.forward_s for s in own), again_s, sum(s.backward_s for s in own))
        rows.append((name, *parts))
    return tuple(rows)


def _taking(
    blocks: Sequence[Block], without: Set[fx.Node], unread: Set[fx.Node]
) -> tuple[tuple[str, float], ...]:
    """Per device on which every block was measured: its name, and seconds of a rematerialisation with all classes."""
    rows = []
    for name, *_ in _seconds(blocks, without, unread):
        own = [(b.seconds[name], _share(b, without, unread)) for b in blocks]
        took_s = sum((s.rematerialise_s if s.taking_s is None else s.taking_s) * share for s, share in own)
        rows.append((name, took_s))
    return tuple(rows)


class _Lives:
    """The blocks that make and that last read each value between a stage's blocks. Shared nodes are made before the
    first block."""

    def __init__(self, blocks: Sequence[Block], given: Storages, out: Storages, parameters: Sequence[Storages]):
        self.given = given
        self.made: dict[int, int] = {}  # storage -> block
        self.read: dict[int, int] = {}  # storage -> last block
        self.size: Storages = {}
        self.gradients: Storages = {}
        for i, block in enumerate(blocks):
            self.read.update(dict.fromkeys(storages(block.inputs), i))
            values = {**storages(block.inputs), **storages(block.outputs)}
            self.size.update((key, size) for key, size in values.items() if key not in given)
            self.gradients.update(storages(block.outputs, with_gradient=True))
            for key in storages(block.outputs):
                self.made.setdefault(key, i)
        self.end = {**self.read, **dict.fromkeys(out, len(blocks))}
        self.parameters = _spans(parameters)

    def alive_before(self, block: int) -> Storages:
        """The storages that are alive when a block begins, its own inputs included."""
        return {k: size for k, size in self.size.items() if self.made.get(k, -1) < block <= self.end.get(k, -1)}

    def gradients_after(self, block: int) -> int:
        """Bytes that later blocks have left for this block and those before it: gradients of values, and parts of the
        gradients of parameters that several blocks use."""
        values = (size for k, size in self.gradients.items() if self.made[k] <= block < self.read.get(k, -1))
        return sum(values) + sum(size for first, last, size in self.parameters if first <= block < last)


def _spans(parameters: Sequence[Storages]) -> list[tuple[int, int, int]]:
    """(first block, last block, bytes) of each parameter that several blocks use."""
    users: dict[int, list[int]] = {}
    size: Storages = {}
    for i, own in enumerate(parameters):
        size.update(own)
        for key in own:
            users.setdefault(key, []).append(i)
    return [(min(found), max(found), size[key]) for key, found in users.items() if len(found) > 1]
