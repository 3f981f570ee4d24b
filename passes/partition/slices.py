"""Time and memory of runs of consecutive blocks as stages, for contiguous partitioners.

In: a draft with blocks. Out: seconds and bytes of blocks[a:b] as stage j of S, where stage j runs on the device
`order[j mod N]` (unequal devices get unequal stages).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import fx

from ...graph.blocks import Block
from ...graph.costs.stage import Storages, storages
from ...graph.costs.stage_time import block_seconds
from ...graph.divide.exchanges import is_exchange, source_of, to_experts
from ...ir.errors import DoesNotFit
from ...ir.units import format_bytes
from ..draft import Draft


@dataclass(frozen=True)
class StageNeed:
    """Device memory of some consecutive blocks as one stage."""

    work_bytes: int  # weights, gradients, saved tensors of one micro-batch, and the workspace of one block
    input_bytes: int  # what enters the stage, for one micro-batch
    entering: Storages = field(default_factory=dict)  # the same by storage

    def total_bytes(self, micro_batches: int, rounds: int) -> int:
        """All bytes, with the inputs of all micro-batches for each of the device's `rounds` stages, which are taken for
        equal, and two gradients of the size of an input."""
        return self.work_bytes + (micro_batches * rounds + 2) * self.input_bytes


class Slices:
    """Time and memory of blocks[a:b] as one stage on a device. `order`: devices in the order of stages 0 to N - 1.
    `inputs_leave`: the inputs of a stage are in another memory until its backward, so that only one of a device's
    stages at a time holds its inputs. `asynchronous`: all but the last stage compute their forward again; weights and
    optimizer states stay. A stage with d others after it holds the inputs of d + 1 micro-batches; a value that skips
    stages waits for it from its making on, one micro-batch for each stage after its maker; and the stage holds the
    gradients of a shared parameter until the farthest stage that shares it has made its own."""

    def __init__(
        self,
        draft: Draft,
        order: Sequence[int] | None = None,
        inputs_leave: bool = False,
        asynchronous: bool = False,
    ):
        self.inputs_leave, self.asynchronous = inputs_leave, asynchronous
        self.blocks = draft.blocks
        self.order = list(order) if order is not None else list(range(draft.lane_hardware.num_devices))
        self.devices = [draft.lane_hardware.devices[index] for index in self.order]
        self.budgets = [device.budget_bytes for device in self.devices]
        self.micro_batches = draft.options.micro_batches
        took = [[block_seconds(b, device, draft.options.precision) for b in self.blocks] for device in self.devices]
        self.time_s = [_sums(block.both_s for block in row) for row in took]
        self.again_s = [_sums(block.forward_s for block in row) for row in took]
        parameters = [gradient_and_weight_bytes(draft, block, states=asynchronous) for block in self.blocks]
        sent = {node for block in self.blocks for node in block.outputs}
        sent |= {node for block in self.blocks for node in block.inputs if is_exchange(node)}
        rows = [BlockRow.from_block(block, own, sent) for block, own in zip(self.blocks, parameters)]
        most = max(self.budgets)
        self.needs = [needs_to_front(rows[:end], asynchronous, most) for end in range(len(rows) + 1)]
        fitting = ((a for a, need in enumerate(row) if need.work_bytes <= most) for row in self.needs)
        self.earliest = [next(starts, len(rows)) for starts in fitting]  # per end, the first start that may fit
        self.shared = _shared_params(draft, self.blocks) if asynchronous else []
        self.maker = {key: i for i, block in enumerate(self.blocks) for key in storages(block.outputs)}

    def stage_time_s(self, a: int, b: int, stage: int) -> float:
        times = self.time_s[stage % len(self.devices)]
        if self.asynchronous and b < len(self.blocks):
            again = self.again_s[stage % len(self.devices)]
            return times[b] - times[a] + again[b] - again[a]
        return times[b] - times[a]

    def times_s(self, starts: NDArray[np.int64], width: int, stage: int) -> NDArray[np.float64]:
        """`stage_time_s` of stages of `width` blocks."""
        ends, times = starts + width, np.array(self.time_s[stage % len(self.devices)])
        took: NDArray[np.float64] = times[ends] - times[starts]
        if self.asynchronous:
            again = np.array(self.again_s[stage % len(self.devices)])
            took = np.where(ends < len(self.blocks), took + again[ends] - again[starts], took)
        return took

    def fitting(self, starts: NDArray[np.int64], width: int, stage: int, count: int) -> NDArray[np.bool_]:
        """`fits` of stages of `width` blocks."""
        return np.fromiter((self.fits(a, a + width, stage, count) for a in starts.tolist()), dtype=bool)

    def need_bytes(self, a: int, b: int, stage: int, count: int) -> int:
        """Device memory of blocks[a:b] as stage number `stage` of `count`."""
        num_devices = len(self.devices)
        if self.asynchronous:
            need = self.needs[b][a]
            others = (count - other for other in range(stage % num_devices, count, num_devices) if other != stage)
            held = sum(size * self._num_under_way(key, stage, count) for key, size in need.entering.items())
            for grad_bytes, sharing in self.shared:
                if any(a <= block < b for block in sharing):
                    later = self._num_later_stages(sharing[0], stage, count) if sharing[0] < a else count - 1 - stage
                    held += grad_bytes * min(self.micro_batches - 1, later - (count - 1 - stage))
            return need.total_bytes(sum(min(self.micro_batches, ahead) for ahead in others), 1) + held
        return self.needs[b][a].total_bytes(self.micro_batches, 1 if self.inputs_leave else -(-count // num_devices))

    def _num_under_way(self, key: int, stage: int, count: int) -> int:
        """The micro-batches of which a stage of `count` holds a value."""
        maker = self.maker.get(key)
        return min(self.micro_batches, count - stage if maker is None else self._num_later_stages(maker, stage, count))

    def _num_later_stages(self, block: int, stage: int, count: int) -> int:
        """The number of stages after that of `block`, a block before this stage. Its stage is not known yet, and is
        taken to be the one that has the block where all stages take equally long."""
        times = self.time_s[0]
        return count - 1 - min(stage - 1, int(count * times[block + 1] / times[-1]))

    def fits(self, a: int, b: int, stage: int, count: int) -> bool:
        return self.need_bytes(a, b, stage, count) <= self.budgets[stage % len(self.budgets)]

    def fewest(self, count: int = 0) -> int | None:
        """A lower bound of the number of stages that fit, of `count` at least; None if there is no such number: more
        stages are more rounds, in which each stage needs no less."""
        budget = max(self.budgets)
        rounds = -(-count // len(self.devices)) if not (self.inputs_leave or self.asynchronous) else min(count, 1)
        least: list[float] = [0]
        for end in range(1, len(self.blocks) + 1):
            starts = range(self.earliest[end], end)
            fitting = (a for a in starts if self._least_bytes(a, end, rounds) <= budget)
            least.append(1 + min((least[a] for a in fitting), default=math.inf))
        return None if least[-1] == math.inf else int(least[-1])

    def _least_bytes(self, a: int, b: int, rounds: int) -> int:
        """At least what blocks[a:b] need on a device of `rounds` stages; 0: of any number of them."""
        need = self.needs[b][a]
        return need.total_bytes(self.micro_batches, rounds) if rounds and not self.asynchronous else need.work_bytes

    def does_not_fit(self, counts: list[int]) -> DoesNotFit:
        budget = max(self.budgets)
        if counts[0] >= len(self.devices) and (found := self._too_large_for_the_smallest(counts[0])):
            return found
        needs = [self.need_bytes(i, i + 1, i, counts[-1]) for i in range(len(self.blocks))]
        need, name = max(zip(needs, (block.name for block in self.blocks)), key=lambda row: row[0])
        if need > budget:
            return DoesNotFit(
                f"block {name!r} alone needs {format_bytes(need)} on a device; the largest has {format_bytes(budget)}, "
                f"missing {format_bytes(need - budget)}. Nearest that fits: devices of {format_bytes(need)}, or more "
                f"micro_batches (now {self.micro_batches}), which are smaller",
                memory="device",
                missing_bytes=need - budget,
            )
        return DoesNotFit(
            f"no contiguous partition into {', '.join(map(str, counts))} stages fits the devices' memories; the "
            f"largest block alone needs {format_bytes(need)} of {format_bytes(budget)}. Nearest that fits: "
            f"stages={len(needs)}, one block each, or devices with more memory",
            memory="device",
        )

    def _too_large_for_the_smallest(self, count: int) -> DoesNotFit | None:
        """The error where one device is smaller than others, and most blocks do not fit it even alone."""
        device = min(self.devices, key=lambda device: device.budget_bytes)
        needs = [self.need_bytes(i, i + 1, i, count) for i in range(len(self.blocks))]
        large = sorted(need for need in needs if need > device.budget_bytes)
        others = [other.budget_bytes for other in self.devices if other.budget_bytes > device.budget_bytes]
        if len(large) <= len(needs) / 2 or not others or large[-1] > min(others):
            return None
        return DoesNotFit(
            f"{len(large)} of {len(needs)} blocks do not fit device {device.name!r} even alone: it has "
            f"{format_bytes(device.budget_bytes)}, and they need up to {format_bytes(large[-1])}; of {count} stages "
            "each device has some. Nearest that fits: the machine without it, or with one as large as the others",
            memory="device",
            missing_bytes=large[-1] - device.budget_bytes,
        )


def _shared_params(draft: Draft, blocks: Sequence[Block]) -> list[tuple[int, list[int]]]:
    """Of each trained parameter that several blocks have, the bytes of its gradient, and these blocks."""
    found: dict[int, tuple[int, list[int]]] = {}
    for i, block in enumerate(blocks):
        rows = {id(p): draft.graph.param_spec(name, p) for node in block.nodes
                for name, p in draft.graph.node_parameters(node).items() if p.requires_grad}  # fmt: skip
        for key, spec in rows.items():
            found.setdefault(key, (spec.grad_bytes, []))[1].append(i)
    return [row for row in found.values() if len(row[1]) > 1]


def _sums(seconds: Iterable[float]) -> list[float]:
    """Running sums: entry i is the sum of the first i values."""
    return [0.0, *itertools.accumulate(seconds)]


def gradient_and_weight_bytes(draft: Draft, block: Block, states: bool = False) -> dict[int, int]:
    """Bytes of each parameter's weight and gradient, by identity; with `states`, those of its optimizer states and fp32
    master, too."""
    graph, key = draft.graph, ("parameters", block.nodes)
    if key not in graph.known:  # every partitioner asks, for each machine
        graph.known[key] = {id(p): graph.param_spec(name, p) for node in block.nodes
                            for name, p in graph.node_parameters(node).items()}  # fmt: skip
    return {
        key: p.bytes + p.grad_bytes * p.requires_grad + (draft.options.optimizer_bytes([p]) if states else 0)
        for key, p in graph.known[key].items()
    }


@dataclass(frozen=True)
class BlockRow:
    """The bytes that a block adds to a stage. `entering`: values from other stages, if the block is the first."""

    made: Storages
    entering: Storages
    saved_inputs: Storages
    counted: Storages  # outputs that are part of `kept_bytes`
    parameters: dict[int, int]
    kept_bytes: int
    workspace_bytes: int

    @classmethod
    def from_block(cls, block: Block, parameters: dict[int, int], sent: set[fx.Node]) -> BlockRow:
        """`parameters`: bytes by identity; `sent`: the values that any block hands on."""
        cost = block.cost
        came = [node for node in block.inputs if node.target is to_experts]
        return cls(
            storages(block.outputs),
            storages(_held_value(node) for node in block.inputs if node in sent or node.op == "placeholder"),
            storages(node for node, is_saved in zip(block.inputs, cost.saved_inputs) if is_saved),
            storages(node for node, is_saved in zip(block.outputs, cost.saved_outputs) if is_saved),
            parameters,
            cost.kept_bytes,
            max(cost.backward_peak_bytes, cost.forward_peak_bytes - cost.kept_bytes) + sum(storages(came).values()),
        )


def _held_value(value: fx.Node) -> fx.Node:
    """The value that is held of an input until backward: of rows that come to experts, the sent ones
    (`insert-remat`)."""
    return source_of(value) if value.target is to_experts else value


def needs_to_front(rows: Sequence[BlockRow], each: bool = False, most_bytes: float = math.inf) -> list[StageNeed]:
    """Per start a the need of rows[a:] as one stage; with `each`, also of each value that enters. Starts from which
    weights and what is kept exceed `most_bytes` have the need of the last one that is above that, and no exact one.

    The blocks need not be neighbours, but come in the model's order.
    """
    needs: list[StageNeed] = []
    weights: dict[int, int] = {}
    inputs: dict[int, int] = {}
    saved: dict[int, int] = {}  # values between blocks, and shared ones
    kept = workspace = weight_bytes = 0
    for row in reversed(rows):
        if weight_bytes + kept > most_bytes:
            needs += [needs[-1]] * (len(rows) - len(needs))
            break
        inputs = {key: size for key, size in inputs.items() if key not in row.made} | row.entering
        saved = {key: size for key, size in saved.items() if key not in row.counted} | row.saved_inputs
        kept += row.kept_bytes
        weight_bytes += sum(size for key, size in row.parameters.items() if key not in weights)
        weights |= row.parameters
        workspace = max(workspace, row.workspace_bytes)
        between = sum(size for key, size in saved.items() if key not in inputs)
        work_bytes = weight_bytes + kept + between + workspace
        needs.append(StageNeed(work_bytes, sum(inputs.values()), dict(inputs) if each else {}))
    return needs[::-1]
