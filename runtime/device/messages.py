"""The ops of the device runtime between devices: messages, collectives, and what a team makes of activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import PlanError
from ...ir.program import FORM, Program, TeamPart
from ..accelerator import give_back
from ..experts.exchange import rows_at_experts, sums_at_tokens, warm_up_exchange
from ..experts.routes import Arrivals
from ..optimizer.gradients import Grads
from ..stage.shards import FlatStage
from .issuing import Box, Handle, Issuing
from .peers import PeerLink
from .prepare import Issue
from .reduce import reduce_grads, reduce_norms, reduce_whole

ROUTED: dict[Any, Callable[..., Tensor]] = {ops.to_experts: rows_at_experts, ops.from_experts: sums_at_tokens}


def warm_up_routes(programs: Collection[Program], device: torch.device) -> None:
    """Launch the kernels of exchanges by count, before any message is under way (`stage/warm.py`)."""
    known = set[Any]()
    for program, node in [(p, n) for p in programs for n in p.ops() if n.target in ROUTED]:
        value, routes = (arg.meta["type"] for arg in node.args)  # type: ignore[union-attr]
        given: dict[str, Any] = dict(node.kwargs)
        members, experts = program.interface.size(given["group"]), given["experts"]
        case = (node.target, value.shape, value.dtype, routes.shape, members, experts)
        if case not in known:
            known.add(case)
            zeros = torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device)
            host_routes = torch.zeros(routes.shape, dtype=getattr(torch, routes.dtype))
            warm_up_exchange(ROUTED[node.target], zeros, host_routes, members, experts)
    give_back(device)


class Messages(Issuing):
    """The ops `send` to `reduce_scatter`, and those of `ir/ops/team.py`. A file has its lane's devices and groups, an
    `Issue` the machine's."""

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
        shape = spec.shape
        if issue.sized_as is not None and FORM in self.interface.sizes:
            number = self.interface.stages[stage].made.index(spec)
            shape = self.state.forms[self.form_of(issue.sized_as)].stages[stage].made[number].shape
        elif issue.sized_as is not None and spec.dims:
            shape = spec.shape_at(self.sizes[issue.sized_as])

        def run() -> list[Any]:
            into = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.device)
            if throttled:
                link.meet_sender(src, tag)
            link.recv(into, src, tag)
            if throttled:
                link.meet_sender(src, tag)
            return [into]

        return self._launch(issue, [], run)[0]

    def all_reduce(self, *values: Handle, group: str, parts: bool = True) -> tuple[Handle, ...]:
        issue = self._next("all_reduce")
        group = issue.group
        boxes = [handle.box for handle in values]
        for handle in values:
            handle.release()
        rows, adding = self.interface.groups[group], self.interface.adding(group)
        members = [(stage, param) for device, stage, param in rows if device == self.index]
        adds = [row in adding for row in rows if row[0] == self.index]
        link, own = self.link, set[str]()
        if not parts:
            params = self.interface.stages[issue.stages[0]].params
            own = {param.name for param in params if isinstance(param.part, TeamPart)}

        def run() -> list[Any]:
            found = [box.value for box in boxes]
            if isinstance(found[0], Grads) and not members[0][1]:
                reduce_whole(found[0], link, group, own)
                return found
            if isinstance(found[0], Grads):
                specs = [self.stores[stage].part for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], adds, link, group)
                return found
            return [reduce_norms(found, link, group)] * len(found)

        return tuple(self._launch(issue, boxes, self._together(issue, group, run), boxes))

    def all_gather(self, shard: Handle, *, group: str, hierarchical: bool = False) -> Handle:
        issue = self._next("all_gather")
        group = issue.group
        box, stage, link, arena = shard.box, issue.stages[0], self.link, self.state.memory.device_arena
        flat = self._flat(stage)
        views = arena.views(f"{stage}, whole", flat.whole, issue.pieces)
        place = arena.range(issue.pieces[0][0], flat.whole.total_bytes)
        all_rows = arena.once((stage, issue.pieces), lambda: flat.weight_rows(place))

        def run() -> list[Any]:
            for rows, own in zip(all_rows, flat.weight_slices(box.value), strict=True):
                rows[flat.index].copy_(own)
                if link is not None:
                    link.gather_rows(rows, group, hierarchical)
            return [views]

        return self._launch(issue, [], self._together(issue, group, run))[0]

    def reduce_scatter(
        self, grads: Handle, total: Handle | None = None, *, group: str, hierarchical: bool = False,
        whole: bool = False,
    ) -> Handle:  # fmt: skip
        issue = self._next("reduce_scatter")
        group = issue.group
        box, link, flat = grads.box, self.link, self._flat(issue.stages[0])
        before = None if total is None else total.box
        spares, owns, named = self._places_of_sums(issue, flat)
        grads.release()
        if total is not None:
            total.release()

        def run() -> list[Any]:
            for rows, spare, own in zip(box.value.flats, spares, owns, strict=True):
                into = own if before is None else None
                assert link is not None
                total_rows = link.sum_rows(rows, spare, into, group, hierarchical, whole)
                if before is not None:
                    own.add_(total_rows)
            if before is not None:
                return [before.value]
            return [Grads({name: named[name] for name in box.value.tensors}, flats=owns)]

        reads = [box] if before is None else [box, before]
        over = [] if before is None else [before]
        return self._launch(issue, reads, self._together(issue, group, run), over)[0]

    def member(self, *, group: str) -> Handle:
        self._next("member")
        return Handle(Box(None, self.state.member_in(group)))

    def all_to_all(self, value: Handle, *, group: str, split_dim: int, concat_dim: int) -> Handle:
        issue = self._next("all_to_all")

        def exchange(given: Tensor) -> Tensor:
            rows = self._link().exchange_rows(self._rows(given, issue.group, split_dim), issue.group)
            return _concatenate(rows, concat_dim)

        return self._exchange(issue, value, exchange)

    def gather_parts(self, value: Handle, *, group: str, dim: int) -> Handle:
        issue = self._next("gather_parts")

        def exchange(given: Tensor) -> Tensor:
            link = self._link()
            members = link.groups[issue.group]
            rows = given.new_empty((len(members), *given.shape))
            rows[members.index(self.index)].copy_(given)
            link.gather_rows(rows, issue.group)
            return _concatenate(rows, dim)

        return self._exchange(issue, value, exchange)

    def scatter_sum(self, value: Handle, *, group: str, dim: int) -> Handle:
        issue = self._next("scatter_sum")

        def exchange(given: Tensor) -> Tensor:
            rows = self._rows(given, issue.group, dim)
            total = torch.empty_like(rows[0])
            return self._link().sum_rows(rows, torch.empty_like(total), total, issue.group)

        return self._exchange(issue, value, exchange)

    def sum_parts(self, value: Handle, *, group: str) -> Handle:
        issue = self._next("sum_parts")

        def exchange(given: Tensor) -> Tensor:
            total = given.clone(memory_format=torch.contiguous_format)
            self._link().sum(total, issue.group)
            return total

        return self._exchange(issue, value, exchange)

    def own_part(self, value: Handle, *, group: str, dim: int) -> Handle:
        issue, box = self._next("own_part"), value.box
        members = self.state.members_in(group)
        count, own = len(members), members.index(self.index)
        return self._launch(issue, [box], lambda: [box.value.detach().chunk(count, dim)[own].clone()])[0]

    def pass_on(self, value: Handle, *, group: str, back: bool = False) -> Handle:
        issue = self._next("pass_on")
        return self._exchange(issue, value, lambda given: self._link().pass_on(given.contiguous(), issue.group, back))

    def to_experts(self, value: Handle, routes: Handle, *, group: str, experts: int) -> Handle:
        return self._route(self._next("to_experts"), value, routes, experts, ROUTED[ops.to_experts])

    def from_experts(self, value: Handle, routes: Handle, *, group: str, experts: int) -> Handle:
        return self._route(self._next("from_experts"), value, routes, experts, ROUTED[ops.from_experts])

    def _route(
        self, issue: Issue, value: Handle, routes: Handle, experts: int, made_of: Callable[..., Tensor]
    ) -> Handle:
        """The result of a function of `experts/exchange.py` for a value. The host waits for the routes: who sends how
        many bytes is an argument of a message."""
        link, routed = self._link(), routes.box

        def exchange(given: Tensor) -> Tensor:
            members, host_routes = link.groups[issue.group], routed.value.cpu()
            exchange = partial(link.exchange_counted, group=issue.group)
            arrivals = [Arrivals(host_routes, member, len(members), experts) for member in range(len(members))]
            return made_of(given, arrivals, members.index(self.index), exchange)

        return self._exchange(issue, value, exchange, [routed])

    def _exchange(
        self, issue: Issue, value: Handle, exchange: Callable[[Tensor], Tensor], others: Sequence[Box] = ()
    ) -> Handle:
        """The result of what the members do with a value; with values on GPUs and a group that is not only of GPUs, on
        copies in host memory. `others`: what `made` reads beside it."""
        box, link = value.box, self._link()

        def run() -> list[Tensor]:
            given = box.value.detach()
            if given.is_cuda and not link.on_device(issue.group):
                return [exchange(given.cpu()).to(self.device)]
            return [exchange(given)]

        return self._launch(issue, [box, *others], self._together(issue, issue.group, run))[0]

    def _rows(self, given: Tensor, group: str, dim: int) -> Tensor:
        """The parts of a value for each member, one after the other, in memory of their own."""
        count = len(self._link().groups[group])
        shape = (*given.shape[:dim], count, given.shape[dim] // count, *given.shape[dim + 1 :])
        rows = given.reshape(shape).movedim(dim, 0)
        return rows.clone(memory_format=torch.contiguous_format)

    def _flat(self, stage: str) -> FlatStage:
        flat = self.stores[stage].flat_stage
        assert flat is not None
        return flat

    def _places_of_sums(self, issue: Issue, flat: FlatStage) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """For each segment of a scatter room for what arrives first, and the place of this device's sums; and these by
        parameter. Made once for each place."""
        arena, num_bytes = self.state.memory.device_arena, flat.own_grads.total_bytes
        assert issue.staging is not None
        staging = arena.range(*issue.staging)

        def places(own: Tensor) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
            return flat.grad_slices(staging), flat.grad_slices(own), flat.own_grads.views(own)

        if issue.place is None:  # a result that the step returns
            return places(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        own = arena.range(issue.place, num_bytes)
        return arena.once((issue.stages[0], issue.staging, issue.place), lambda: places(own))

    def _together(self, issue: Issue, group: str, run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """`run`; on throttled links it begins when all members are there, and lasts as long as the links need."""
        link = self.link
        if link is None or not issue.least_s:
            return run

        def operands_to_hold() -> list[Any]:
            link.meet_all(group)
            rest = self.pacing.begin(issue)
            found = run()
            rest()
            return found

        return operands_to_hold

    def _link(self) -> PeerLink:
        if self.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.link


def _concatenate(rows: Tensor, dim: int) -> Tensor:
    """The rows as one value, one after the other along a dimension of each."""
    found: Tensor = rows.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    return found
