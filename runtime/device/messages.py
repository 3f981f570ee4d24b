"""The ops of the device runtime between devices: messages and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import PlanError
from ..optimizer.gradients import Grads
from ..stage.arena import weights_layout
from ..stage.shards import GradientRows, blocks_of, gathered
from .issuing import Handle, Issuing
from .peers import PeerLink
from .prepare import Issue
from .reduce import reduce_grads, reduce_norms, reduce_whole


class Messages(Issuing):
    """The ops `send` to `reduce_scatter`. A file has its lane's devices and groups, an `Issue` the machine's."""

    def send(self, value: Handle, *, dst: int, tag: str) -> None:
        issue = self._next("send")
        dst = issue.peer
        box, link, throttled = value.box, self._link(), self.pacing.throttled

        def run() -> list[Any]:
            if not throttled:
                link.send(box.value.contiguous(), dst, tag)
                return []
            link.meet_receiver(dst, tag)  # the transfer begins when both sides are there, and ends for both at once
            rest = self.pacing.begin(issue)
            link.send(box.value.contiguous(), dst, tag)
            rest()
            link.meet_receiver(dst, tag)
            return []

        self._launch(issue, [box], run)

    def recv(self, like: str, *, src: int, tag: str) -> Handle:
        issue = self._next("recv")
        src = issue.peer
        stage, _, output = like.partition(".")
        spec, link, throttled = self.interface.stages[stage].output(output), self._link(), self.pacing.throttled

        def run() -> list[Any]:
            into = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
            if throttled:
                link.meet_sender(src, tag)
            link.recv(into, src, tag)
            if throttled:
                link.meet_sender(src, tag)
            return [into]

        return self._launch(issue, [], run)[0]

    def all_reduce(self, *values: Handle, group: str) -> tuple[Handle, ...]:
        issue = self._next("all_reduce")
        group = issue.group
        boxes = [handle.box for handle in values]
        for handle in values:
            handle.release()
        members = [(stage, param) for device, stage, param in self.interface.groups[group] if device == self.index]
        link = self.link

        def run() -> list[Any]:
            found = [box.value for box in boxes]
            if isinstance(found[0], Grads) and not members[0][1]:
                reduce_whole(found[0], link, group)
                return found
            if isinstance(found[0], Grads):
                specs = [self.stores[stage].part for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], link, group)
                return found
            return [reduce_norms(found, link, group)] * len(found)

        return tuple(self._launch(issue, boxes, self._together(issue, group, run)))

    def all_gather(self, shard: Handle, *, group: str, hierarchical: bool = False) -> Handle:
        issue = self._next("all_gather")
        group = issue.group
        box, stage, link, arena = shard.box, issue.stages[0], self.link, self.state.memory.device_arena
        part, count = self.stores[stage].part, self.interface.size(group)
        views = arena.views(f"{stage}, whole", weights_layout(self.interface.stages[stage]), issue.pieces)
        rows = self._staging(issue).view(count, part.weight_bytes)
        index = self._index_in(group)
        copies = arena.once((stage, issue.staging, issue.pieces), lambda: gathered(rows, part, views))

        def run() -> list[Any]:
            rows[index].copy_(box.value)
            if link is not None:
                link.gather_rows(rows, group, hierarchical)
            for whole, piece in copies:
                whole.copy_(piece)
            return [views]

        return self._launch(issue, [], self._together(issue, group, run))[0]

    def reduce_scatter(
        self, grads: Handle, total: Handle | None = None, *, group: str, hierarchical: bool = False
    ) -> Handle:
        issue = self._next("reduce_scatter")
        group = issue.group
        box, link = grads.box, self.link
        before = None if total is None else total.box
        grads.release()
        if total is not None:
            total.release()

        def run() -> list[Any]:
            blocks = self._blocks(issue, box.value.tensors, group)
            for block in blocks:
                block.pack(box.value.tensors)
                own = block.rows[0] if link is None else link.sum_rows(block.rows, group, hierarchical)
                if before is None:
                    block.own.copy_(own)
                else:
                    block.own.add_(own)
            if before is not None:
                return [before.value]
            pieces = {name: piece for block in blocks for name, piece in block.named().items()}
            return [Grads(pieces, flats=[block.own for block in blocks])]

        reads = [box] if before is None else [box, before]
        return self._launch(issue, reads, self._together(issue, group, run))[0]

    def _staging(self, issue: Issue) -> Tensor:
        assert issue.staging is not None
        return self.state.memory.device_arena.range(*issue.staging)

    def _blocks(self, issue: Issue, grads: Mapping[str, Tensor], group: str) -> list[GradientRows]:
        """The rows of these gradients, made once for each place: the graph fixes which gradients there are."""
        arena, part = self.state.memory.device_arena, self.stores[issue.stages[0]].part
        if issue.place is None:  # a result that the step returns
            own = torch.empty(part.grad_bytes, dtype=torch.uint8, device=self.device)
            return blocks_of(grads, part, self.interface.size(group), self._staging(issue), own)
        own = arena.range(issue.place, issue.place_bytes)
        key = (issue.stages[0], issue.staging, issue.place, tuple(grads))
        return arena.once(key, lambda: blocks_of(grads, part, self.interface.size(group), self._staging(issue), own))

    def _index_in(self, group: str) -> int:
        """This device's position among a group's devices."""
        return self.interface.members(group).index(self.index)

    def _together(self, issue: Issue, group: str, run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """`run`; on throttled links it begins when all members are there, and lasts as long as the links need."""
        link = self.link
        if link is None or not issue.least_s:
            return run

        def held() -> list[Any]:
            link.meet_all(group)
            rest = self.pacing.begin(issue)
            found = run()
            rest()
            return found

        return held

    def _link(self) -> PeerLink:
        if self.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.link
