"""The memory of sets of blocks on a device: stages that need not be runs of neighbours, and several of them at once.

In: a draft with blocks. Out: `StageMemory` of any set of blocks, and whether a device holds several of these. A device
keeps its stages resident (weights, gradients and optimizer states stay; FTPipe) if they all fit beside the inputs of
all micro-batches and one rematerialised micro-batch of one stage; else they are swapped one by one, without states.

In an asynchronous pipeline a value exists once for each stage after its maker: this number of micro-batches is under
way between its making and the backward that reads it last (`count_under_way`). The gradients of a shared
parameter wait in a stage for those of the farthest stage that shares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...graph.costs.stage import Storages, storages
from ...ir.program import aligned
from ..draft import Draft
from .block_sets import Holdings, Mask
from .graph import BlockGraph


@dataclass(frozen=True)
class StageMemory:
    """Device memory of one stage. `inputs`: each value that enters, and whether a gradient goes back for it."""

    weight_bytes: int  # weights and gradients
    state_bytes: int  # optimizer states and fp32 masters
    kept_bytes: int  # saved tensors of one micro-batch
    workspace_bytes: int  # of one block
    inputs: dict[int, tuple[int, bool]]  # value -> bytes, has a gradient; inputs of the batch have negative numbers
    outputs: frozenset[int]
    first: int  # its first block: stages are passed in this order
    under_way: dict[int, int] = field(default_factory=dict)  # input -> micro-batches of which it is there at once

    @property
    def work_bytes(self) -> int:
        return self.kept_bytes + self.workspace_bytes

    @property
    def lasting_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @cached_property
    def input_bytes(self) -> int:
        return sum([size for size, _ in self.inputs.values()])


class Footprints:
    """Per block what its stage must hold; each parameter and each storage counts once in a stage."""

    def __init__(self, draft: Draft, graph: BlockGraph):
        self.blocks, self.graph = draft.blocks, graph
        self.micro_batches = draft.options.micro_batches
        self.budgets = [device.budget_bytes for device in draft.lane_hardware.devices]
        sent = {node for block in self.blocks for node in block.outputs}
        batch: dict[object, int] = {}
        self.parameters: list[dict[int, tuple[int, int]]] = []
        self.kept, self.workspace = [], []  # type: tuple[list[int], list[int]]
        self.saved: list[Storages] = []  # read from outside and needed by backward
        self.own: list[Storages] = []  # made here and counted in `kept`
        self.batch: list[dict[int, int]] = []
        self.value_storages: list[Storages] = [{} for _ in graph.values]
        for i, block in enumerate(self.blocks):
            cost = block.cost
            found = {id(p): draft.graph.param_spec(name, p) for node in block.nodes
                     for name, p in draft.graph.node_parameters(node).items()}  # fmt: skip
            self.parameters.append({
                key: (aligned(p.bytes) + aligned(p.grad_bytes) * p.requires_grad, draft.options.optimizer_bytes([p]))
                for key, p in found.items()
            })  # fmt: skip
            self.kept.append(cost.kept_bytes)
            self.workspace.append(max(cost.backward_peak_bytes, cost.forward_peak_bytes - cost.kept_bytes))
            self.saved.append(storages(n for n, is_saved in zip(block.inputs, cost.saved_inputs) if is_saved))
            self.own.append(storages(n for n, is_saved in zip(block.outputs, cost.saved_outputs) if is_saved))
            loaded = [n for n in block.inputs if n.op == "placeholder" and n not in sent]
            sizes = (sum(storages([n]).values()) for n in loaded)
            self.batch.append({-1 - batch.setdefault(n, len(batch)): size for n, size in zip(loaded, sizes)})
            for k, node in zip(graph.made[i], block.outputs):
                self.value_storages[k] = storages([node])
        self.gradients = _gradients(draft)
        homes: dict[int, list[int]] = {}
        for i, row in enumerate(self.parameters):
            for key in row.keys() & self.gradients.keys():
                homes.setdefault(key, []).append(i)
        self.shared = {key: blocks for key, blocks in homes.items() if len(blocks) > 1}
        self.distance: list[int] = []  # per block the number of stages after its own; empty in a synchronous pipeline
        self.alone_bytes = [self.lasting_bytes(i) + self.kept[i] for i in range(len(self.blocks))]
        self.prepare()

    def prepare(self) -> None:
        """Make arrays of what blocks hold."""
        self.sent = [(value.bytes, value.has_gradient) for value in self.graph.values]
        lasting = {key: row for own in self.parameters for key, row in own.items()}
        self.lasting = Holdings(lasting, self.parameters)
        held = (*self.saved, *self.own, *self.value_storages)
        sizes = {key: size for row in held for key, size in row.items()}
        self.storages = Holdings(sizes, self.saved, self.own, self.value_storages)
        self.kept_bytes, self.workspace_bytes = np.array(self.kept), np.array(self.workspace)
        self.loading = [i for i, row in enumerate(self.batch) if row]

    def count_under_way(self, members: Sequence[Sequence[int]], distances: Sequence[int]) -> None:
        """Take these for the stages of an asynchronous pipeline from here on; `distances`: the number of stages after
        each."""
        found = {block: distance for own, distance in zip(members, distances, strict=True) for block in own}
        self.distance = [found[block] for block in range(len(self.blocks))]

    def _num_under_way(self, value: int, reader: int) -> int:
        """The number of micro-batches whose input of a block is in memory at once."""
        if not self.distance:
            return self.micro_batches
        ahead = self.distance[reader] + 1 if value < 0 else self.distance[self.graph.values[value].maker]
        return min(self.micro_batches, max(1, ahead))

    def _waiting_bytes(self, own: Sequence[int]) -> int:
        """Bytes of gradients of shared parameters that wait in an asynchronous stage of these blocks."""
        total, inside = 0, set(own)
        for key, blocks in self.shared.items() if self.distance else ():
            if not inside.isdisjoint(blocks):
                lag = max(self.distance[i] for i in blocks) - max(self.distance[i] for i in own)
                total += min(self.micro_batches - 1, max(0, lag)) * self.gradients[key]
        return total

    def lasting_bytes(self, block: int) -> int:
        """Bytes of a block's weights, gradients and optimizer states."""
        return sum(sum(row) for row in self.parameters[block].values())

    @cached_property
    def least_resident_bytes(self) -> int:
        """A lower bound of what all devices together hold if they keep all stages resident: each parameter is in some
        stage, with its gradient and its states."""
        return int(self.lasting.bytes.sum())

    def most_alone_bytes(self, block: int) -> int:
        """An upper bound of what a device holds while it runs one block alone."""
        read = self.graph.read[block]
        inputs = sum([self.graph.values[k].bytes for k in read]) + sum(self.batch[block].values())
        weights = sum([weights for weights, _ in self.parameters[block].values()])
        work = self.kept[block] + self.workspace[block] + sum(self.saved[block].values())
        return weights + work + (self.micro_batches + 2) * inputs

    def stage(self, members: Iterable[int]) -> StageMemory:
        own = list(members)
        inside = self.graph.ends.mask(own)
        entering, leaving = self.graph.ends.crossing(inside)
        values = np.flatnonzero(entering).tolist()
        inputs = {k: self.sent[k] for k in values}
        under_way = {k: self._num_under_way(k, 0) for k in values} if self.distance else {}
        for i in (i for i in self.loading if inside[i]):
            inputs.update((k, (size, False)) for k, size in self.batch[i].items())
            if self.distance:
                under_way.update((k, max(under_way.get(k, 0), self._num_under_way(k, i))) for k in self.batch[i])
        parameters = self.lasting.mark(self.lasting.groups[0].select(inside))
        weight_bytes, state_bytes = self.lasting.bytes[parameters].sum(axis=0).tolist() if parameters.any() else (0, 0)
        return StageMemory(
            weight_bytes + self._waiting_bytes(own),
            state_bytes,
            int(self.kept_bytes[inside].sum()) + self._passing_bytes(inside, entering),
            int(self.workspace_bytes[inside].max(initial=0)),
            inputs,
            frozenset(np.flatnonzero(leaving).tolist()),
            min(own, default=0),
            under_way,
        )

    def _passing_bytes(self, inside: Mask, entering: Mask) -> int:
        """Bytes of values that these blocks save, but for those that enter, or that are in `kept`."""
        saved, own, values = self.storages.groups
        found = self.storages.mark(saved.select(inside))
        found[own.select(inside)] = found[values.select(entering)] = False
        return int(self.storages.bytes[found].sum())

    def activation_bytes(self, stages: Sequence[StageMemory]) -> int:
        """Bytes of the inputs of all micro-batches, each value once, until the backward of the first stage that reads
        them; gradients of values that several stages read, or that are made here, until the last part is there; and
        twice the gradients of one input. In an asynchronous pipeline, the inputs of the micro-batches under way."""
        passing = max((stage.input_bytes for stage in stages), default=0)
        if self.distance:
            there: dict[int, int] = {}
            for stage in stages:
                for k, (size, _) in stage.inputs.items():
                    there[k] = max(there.get(k, 0), size * stage.under_way[k])
            return sum(there.values()) + 2 * passing
        backward = sorted(stages, key=lambda stage: -stage.first)
        made = {k for stage in stages for k in stage.outputs}
        sizes = {k: row for stage in stages for k, row in stage.inputs.items()}
        readers = Counter(k for stage in stages for k in stage.inputs)
        held = peak = sum(size for size, _ in sizes.values())
        waiting: set[int] = set()  # gradients
        for stage in backward:
            for k, (size, has_gradient) in stage.inputs.items():
                readers[k] -= 1
                if has_gradient and k not in waiting and (readers[k] or k in made):
                    waiting.add(k)
                    held += size
                if not readers[k]:
                    held -= size
                    if k in waiting and k not in made:
                        held -= size
            peak = max(peak, held)
            held -= sum(sizes[k][0] for k in stage.outputs if k in waiting)
        return self.micro_batches * peak + 2 * passing

    def resident_bytes(self, stages: Sequence[StageMemory]) -> int:
        """Bytes of all these stages on one device, with everything that lasts on it."""
        lasting = sum(stage.lasting_bytes for stage in stages)
        return lasting + self.activation_bytes(stages) + max((stage.work_bytes for stage in stages), default=0)

    def may_keep(self, device: int, stages: Sequence[StageMemory]) -> list[bool]:
        """Whether each resident stage of a device may keep the saved tensors of all micro-batches: the smallest may."""
        room = self.budgets[device] - self.resident_bytes(stages)
        found = [False] * len(stages)
        for j in sorted(range(len(stages)), key=lambda j: stages[j].kept_bytes):
            room -= self.micro_batches * stages[j].kept_bytes
            found[j] = room >= 0
        return found

    def swapped_bytes(self, stages: Sequence[StageMemory]) -> int:
        """Bytes of all these stages on one device, one at a time."""
        largest = max((stage.weight_bytes + stage.work_bytes for stage in stages), default=0)
        return largest + self.activation_bytes(stages)

    def fits(self, device: int, stages: Sequence[StageMemory], swapped: bool) -> bool:
        """Whether a device holds all these stages. Most often the bounds of `activation_bytes` tell: inputs take at
        least those of one stage, at most twice those of all, as each gradient that waits is as large as its value."""
        if not stages:
            return True
        budget = self.budgets[device]
        largest, total = max([s.input_bytes for s in stages]), sum([s.input_bytes for s in stages])
        if swapped:
            rest = max([s.weight_bytes + s.work_bytes for s in stages])
        else:
            rest = sum([s.lasting_bytes for s in stages]) + max([s.work_bytes for s in stages])
        rest += 2 * largest
        if rest + 2 * self.micro_batches * total <= budget:
            return True
        if rest + self.micro_batches * largest > budget and not self.distance:
            return False
        return rest - 2 * largest + self.activation_bytes(stages) <= budget


def _gradients(draft: Draft) -> dict[int, int]:
    """The bytes of the gradient of each trained parameter, by identity."""
    found: dict[int, int] = {}
    for node in (node for block in draft.blocks for node in block.nodes):
        rows = draft.graph.node_parameters(node).items()
        found |= {id(p): draft.graph.param_spec(name, p).grad_bytes for name, p in rows if p.requires_grad}
    return found
