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
from .issuing import Handle, Issuing, ResultsOf, Run
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
        issue, link = self._next("send"), self._link()
        dst = issue.peer

        def work(run: Run, given: Tensor) -> list[Any]:
            link.send(given.contiguous(), dst, tag)
            return []

        work_at_pace = self._pace(issue, work)

        def meet_and_send(run: Run, given: Tensor) -> Sequence[Any]:
            link.meet_receiver(dst, tag)  # the transfer begins when both sides are there, and ends for both at once
            work_at_pace(run, given)
            link.meet_receiver(dst, tag)
            return []

        self._launch(issue, (value,), meet_and_send if self.pacing.throttled else work)

    def recv(self, like: str, *, src: int, tag: str) -> Handle:
        issue, link = self._next("recv"), self._link()
        src, throttled, device = issue.peer, self.pacing.throttled, self.device
        stage, _, output = like.partition(".")
        maker, sized_as = self.interface.stages[stage], issue.sized_as
        spec, has_forms = maker.output(output), FORM in self.interface.sizes

        def shape(run: Run) -> tuple[int, ...]:
            if sized_as is not None and has_forms:
                form = self.state.forms[run.form_of(sized_as)]
                return form.stages[stage].made[maker.made.index(spec)].shape
            return spec.shape if sized_as is None or not spec.dims else spec.shape_at(run.sizes[sized_as])

        def work(run: Run) -> list[Any]:
            into = torch.empty(shape(run), dtype=getattr(torch, spec.dtype), device=device)
            if throttled:
                link.meet_sender(src, tag)
            link.recv(into, src, tag)
            if throttled:
                link.meet_sender(src, tag)
            return [into]

        return self._launch(issue, (), work)[0]

    def all_reduce(self, *values: Handle, group: str, parts: bool = True) -> tuple[Handle, ...]:
        issue = self._next("all_reduce")
        group = issue.group
        rows, adding = self.interface.groups[group], self.interface.adding(group)
        members = [(stage, param) for device, stage, param in rows if device == self.index]
        adds = [row in adding for row in rows if row[0] == self.index]
        link, own = self.link, set[str]()
        if not parts:
            params = self.interface.stages[issue.stages[0]].params
            own = {param.name for param in params if isinstance(param.part, TeamPart)}

        def work(run: Run, *found: Any) -> Sequence[Any]:
            if isinstance(found[0], Grads) and not members[0][1]:
                reduce_whole(found[0], link, group, own)
                return found
            if isinstance(found[0], Grads):
                specs = [self.stores[stage].part for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], adds, link, group)
                return found
            return [reduce_norms(found, link, group)] * len(found)

        return self._launch(issue, values, self._together(issue, group, work), values, gone=values)

    def all_gather(self, shard: Handle, *, group: str, hierarchical: bool = False) -> Handle:
        issue = self._next("all_gather")
        group, stage, link, arena = issue.group, issue.stages[0], self.link, self.state.memory.device_arena
        flat = self._flat(stage)
        views = arena.views(f"{stage}, whole", flat.whole, issue.pieces)
        all_rows = flat.weight_rows(arena.range(issue.pieces[0][0], flat.whole.total_bytes))

        def work(run: Run, given: Tensor) -> list[Any]:
            for rows, own in zip(all_rows, flat.weight_slices(given), strict=True):
                rows[flat.index].copy_(own)
                if link is not None:
                    link.gather_rows(rows, group, hierarchical)
            return [views]

        return self._launch(issue, (), self._together(issue, group, work), weights=(shard,))[0]

    def reduce_scatter(
        self, grads: Handle, total: Handle | None = None, *, group: str, hierarchical: bool = False,
        whole: bool = False,
    ) -> Handle:  # fmt: skip
        issue = self._next("reduce_scatter")
        group, link, flat = issue.group, self.link, self._flat(issue.stages[0])
        places = self._places_of_sums(issue, flat)

        def work(run: Run, given: Grads, before: Grads | None = None) -> list[Any]:
            spares, owns, named = places()
            for rows, spare, own in zip(given.flats, spares, owns, strict=True):
                into = own if before is None else None
                assert link is not None
                total_rows = link.sum_rows(rows, spare, into, group, hierarchical, whole)
                if before is not None:
                    own.add_(total_rows)
            if before is not None:
                return [before]
            return [Grads({name: named[name] for name in given.tensors}, flats=owns)]

        over = () if total is None else (total,)
        return self._launch(issue, (grads, *over), self._together(issue, group, work), over, gone=(grads, *over))[0]

    def member(self, *, group: str) -> Handle:
        self._next("member")
        return self._hold(lambda run: self.state.member_in(group))

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
        issue, members = self._next("own_part"), self.state.members_in(group)
        count, own = len(members), members.index(self.index)
        return self._launch(issue, (value,), lambda run, given: [given.detach().chunk(count, dim)[own].clone()])[0]

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
        link = self._link()

        def exchange(given: Tensor, routed: Tensor) -> Tensor:
            members, host_routes = link.groups[issue.group], routed.cpu()
            exchange = partial(link.exchange_counted, group=issue.group)
            arrivals = [Arrivals(host_routes, member, len(members), experts) for member in range(len(members))]
            return made_of(given, arrivals, members.index(self.index), exchange)

        return self._exchange(issue, value, exchange, routes)

    def _exchange(self, issue: Issue, value: Handle, exchange: Callable[..., Tensor], *others: Handle) -> Handle:
        """The result of what the members do with a value; with values on GPUs and a group that is not only of GPUs, on
        copies in host memory. `others`: what `exchange` reads beside it."""
        link = self._link()

        def work(run: Run, value: Tensor, *read: Any) -> list[Tensor]:
            given = value.detach()
            if given.is_cuda and not link.on_device(issue.group):
                return [exchange(given.cpu(), *read).to(self.device)]
            return [exchange(given, *read)]

        return self._launch(issue, (value, *others), self._together(issue, issue.group, work))[0]

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

    def _places_of_sums(
        self, issue: Issue, flat: FlatStage
    ) -> Callable[[], tuple[list[Tensor], list[Tensor], dict[str, Tensor]]]:
        """For each segment of a scatter room for what arrives first, and the place of this device's sums; and these by
        parameter."""
        arena, num_bytes = self.state.memory.device_arena, flat.own_grads.total_bytes
        assert issue.staging is not None
        staging = arena.range(*issue.staging)

        def places(own: Tensor) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
            return flat.grad_slices(staging), flat.grad_slices(own), flat.own_grads.views(own)

        if issue.place is None:  # a result that the step returns
            return lambda: places(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        found = places(arena.range(issue.place, num_bytes))
        return lambda: found

    def _together(self, issue: Issue, group: str, work: ResultsOf) -> ResultsOf:
        """`work`; on throttled links it begins when all members are there, and lasts as long as the links need."""
        link = self.link
        if link is None or not issue.least_s:
            return work
        work_at_pace = self._pace(issue, work)

        def meet_and_work(run: Run, *values: Any) -> Sequence[Any]:
            link.meet_all(group)
            return work_at_pace(run, *values)

        return meet_and_work

    def _link(self) -> PeerLink:
        if self.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.link


def _concatenate(rows: Tensor, dim: int) -> Tensor:
    """The rows as one value, one after the other along a dimension of each."""
    found: Tensor = rows.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    return found
