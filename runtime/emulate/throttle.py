"""CPU devices throttled to slow links: which of their transfers meet others on a link.

A transfer that always has its links to itself only has to take long enough, which its device sees to; so does a
collective, which all members do at the same time. A transfer that may have to share a link goes through the
`LinkServer` of the process that starts the devices. Under torchrun there is no such process, and every transfer has its
links to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.machine.links import Link
from ...ir.program import Program, work_of
from ..simulate import CostModel, costs_of
from ..simulate.sharing import Cost

ROUNDING = 1e-6


@dataclass
class SharedTransfers:
    """`costs`: per device the costs of all ops, one program after the other. `numbers`: per device and program, the ops
    that share links and the positions of their costs. `collective_s`: likewise for collectives, the seconds of each."""

    costs: list[list[Cost]] = field(default_factory=list)
    numbers: list[dict[str, dict[int, int]]] = field(default_factory=list)
    collective_s: list[dict[str, dict[int, float]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(rows for by_name in self.numbers for rows in by_name.values())


def shared_transfers(programs: Sequence[dict[str, Program]], hardware: Hardware, precision: str) -> SharedTransfers:
    """`programs`: per device by name. Nothing is shared on a machine that is not throttled."""
    found = SharedTransfers()
    if not hardware.throttled:
        return found
    model = CostModel(hardware, precision)
    names = [name for name in programs[0] if all(name in own for own in programs)]
    costs = {name: costs_of([own[name] for own in programs], model) for name in names}
    full = _contended_links(programs, costs, model.links)
    for device, own in enumerate(programs):
        rows: list[Cost] = []
        numbers: dict[str, dict[int, int]] = {}
        collective_s: dict[str, dict[int, float]] = {}
        for name in names:
            numbers[name], collective_s[name] = {}, {}
            for index, node in enumerate(own[name].ops()):
                cost = costs[name][device][index]
                passed = {link for part in cost.parts() for path, _ in part.flows for link in path}
                if op_of(node).transfers and full & {model.links[link].simplex or link for link in passed}:
                    numbers[name][index] = len(rows) + index
                elif work_of(own[name], node).group:
                    collective_s[name][index] = _alone_s(cost, model.links)
            rows += costs[name][device]
        found.costs.append(rows)
        found.numbers.append(numbers)
        found.collective_s.append(collective_s)
    return found


def _contended_links(
    programs: Sequence[dict[str, Program]], costs: dict[str, list[list[Cost]]], links: dict[str, Link]
) -> set[str]:
    """Links on which the streams that use them could ask for more than there is. A stream moves one value at a time."""
    wanted: dict[str, dict[tuple[int, str], float]] = {}
    for name, rows in costs.items():
        for device, own in enumerate(programs):
            for node, cost in zip(own[name].ops(), rows[device], strict=True):
                if not op_of(node).transfers:
                    continue
                user = (device, work_of(own[name], node).stream)
                for path, _ in (flow for part in cost.parts() for flow in part.flows):
                    rate = min(links[link].bandwidth for link in path)
                    for link in path:
                        users = wanted.setdefault(links[link].simplex or link, {})
                        users[user] = max(users.get(user, 0.0), rate / links[link].bandwidth)
    return {resource for resource, users in wanted.items() if sum(users.values()) > 1 + ROUNDING and len(users) > 1}


def _alone_s(cost: Cost, links: dict[str, Link]) -> float:
    """Seconds of flows that share their links with nothing, not even each other."""
    return sum(
        part.fixed_s + max((amount / min(links[n].bandwidth for n in path) for path, amount in part.flows), default=0.0)
        for part in cost.parts()
    )
