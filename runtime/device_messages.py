"""The ops of the device runtime between devices: messages and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arena import weights_layout
from .clipping import Grads
from .errors import PlanError
from .issue import Issue
from .issuing import Handle, Issuing
from .link import Link
from .reduce import reduce_grads, reduce_norms, reduce_whole
from .shards import gathered, packed, unpacked


class Messages(Issuing):
    """`send` to `reduce_scatter`. A file names devices and groups as its lane sees them; the issue has the machine's."""

    def send(self, value: Handle, *, dst: int, tag: str) -> None:
        issue = self._next("send")
        dst = issue.peer
        box, link, throttled = value.box, self._link(), self.session.throttled

        def run() -> list[Any]:
            if not throttled:
                link.send(box.value.contiguous(), dst, tag)
                return []
            link.meet_receiver(dst, tag)  # the transfer begins when both are there, and ends for both at once
            rest = self._pace(issue)
            link.send(box.value.contiguous(), dst, tag)
            rest()
            link.meet_receiver(dst, tag)
            return []

        self._launch(issue, [box], run)

    def recv(self, like: str, *, src: int, tag: str) -> Handle:
        issue = self._next("recv")
        src = issue.peer
        stage, _, output = like.partition(".")
        spec, link, throttled = self.face.stages[stage].output(output), self._link(), self.session.throttled

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
        members = [(stage, param) for device, stage, param in self.face.groups[group] if device == self.index]
        link = self.session.link

        def run() -> list[Any]:
            found = [box.value for box in boxes]
            if isinstance(found[0], Grads) and not members[0][1]:
                reduce_whole(found[0].tensors, link, group)
                return found
            if isinstance(found[0], Grads):
                specs = [self.stores[stage].part for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], link, group)
                return found
            return [reduce_norms(found, link, group)] * len(found)

        return tuple(self._launch(issue, boxes, self._together(issue, group, run)))

    def all_gather(self, shard: Handle, *, group: str) -> Handle:
        issue = self._next("all_gather")
        group = issue.group
        box, stage, link = shard.box, issue.stages[0], self.session.link
        part = self.stores[stage].part
        layout = weights_layout(self.face.stages[stage])
        views = self.session.memory.device_arena.views(f"{stage}, whole", layout, issue.pieces)

        def run() -> list[Any]:
            gathered([box.value] if link is None else link.gather(box.value, group), part, views)
            return [views]

        return self._launch(issue, [], self._together(issue, group, run))[0]

    def reduce_scatter(self, grads: Handle, *, group: str) -> Handle:
        issue = self._next("reduce_scatter")
        group = issue.group
        box, link = grads.box, self.session.link
        part, count = self.stores[issue.stages[0]].part, len(self.face.members(group))
        grads.release()

        def run() -> list[Any]:
            pieces: dict[str, Tensor] = {}
            for rows, names in packed(box.value.tensors, count).values():
                pieces |= unpacked(rows[0] if link is None else link.scatter_sum(rows, group), names, part)
            return [Grads(pieces)]

        return self._launch(issue, [box], self._together(issue, group, run))[0]

    def _together(self, issue: Issue, group: str, run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """A collective; over slower links it begins when all members are there, and lasts as long as those need."""
        link = self.session.link
        if link is None or not issue.least_s:
            return run

        def held() -> list[Any]:
            link.meet_all(group)
            rest = self._pace(issue)
            found = run()
            rest()
            return found

        return held

    def _link(self) -> Link:
        if self.session.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.session.link
