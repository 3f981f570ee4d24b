"""A check before anything runs under torchrun: all ranks must have the same plan, files, settings and versions, and
each must run on the host that the plan gives its device.

Every rank states what it has, as short texts. A difference would otherwise show as a hang, or as wrong weights.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import PlanError
from .ranks import Ranks
from .rows import Member

if TYPE_CHECKING:
    from ...ir.machine.hardware import Device
    from .setup import RunSetup

HASH_DIGITS = 10
SHOWN = 60  # characters of a value that differs
MOST_ROWS = 6  # differences that are listed


def agree(ranks: Ranks, setup: RunSetup) -> None:
    """Raise the same `PlanError` on every rank if the ranks differ in anything that must be the same, or do not run on
    the hosts that the plan gives their devices."""
    statements = ranks.exchange(statement(setup))
    found = differences(statements, ranks.members)
    found = found or placement_text(ranks.members, setup.hardware.devices)
    if found:
        raise PlanError(f"{found}. Nothing has run")


def statement(setup: RunSetup) -> dict[str, str]:
    """The values of this rank that all must agree on, by name. Long values are hashed."""
    files = {f"program of {Path(path).name}": _hash(Path(path).read_bytes()) for path in setup.all_files}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "penstock's code": _code(),
        "number of ranks": os.environ.get("WORLD_SIZE", "1"),
        "hardware": _hash(setup.hardware.model_dump_json().encode()),
        "interface of the plan": _hash(setup.interface.to_json().encode()),
        **files,
        "optimizer": "none" if setup.optimizer is None else setup.optimizer.to_json(),
        "precision": setup.precision,
        "seed": str(setup.seed),
        "timeout_s": f"{setup.timeout_s:g}",
        "ssd_dirs": str(list(setup.ssd_dirs)),
    }


def differences(statements: Sequence[Mapping[str, str]], members: Sequence[Member]) -> str:
    """The text that says which ranks differ from most others, and in what; empty if all agree."""
    rows = []
    for name in dict.fromkeys(name for own in statements for name in own):
        values = [own.get(name, "none") for own in statements]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        others: dict[str, list[Member]] = {}
        for value, member in zip(values, members, strict=True):
            if value != usual:
                others.setdefault(value, []).append(member)
        for value, who in others.items():
            own_text, usual_text = _contrast(value, usual)
            rows.append(
                f"{_names(who)} {'has' if len(who) == 1 else 'have'} {name} {own_text}, the others {usual_text}"
            )
    if not rows:
        return ""
    more = f"; and {len(rows) - MOST_ROWS} more differences" if len(rows) > MOST_ROWS else ""
    return (
        f"the ranks do not bring the same: {'; '.join(rows[:MOST_ROWS])}{more}. Start all of them with the same "
        "script, arguments, files and versions"
    )


def placement_text(members: Sequence[Member], devices: Sequence[Device]) -> str:
    """The text that says how the ranks' hosts differ from the plan's; empty if they fit.

    All ranks of one host of the plan must belong to one torchrun agent. CPU devices of several hosts may all belong to
    one agent: then the hosts are emulated.
    """
    planned = Counter(device.host for device in devices[: len(members)])
    found = Counter(member.node for member in members)
    if len(found) == 1 and all(device.kind == "cpu" for device in devices):
        return ""
    nodes: dict[int, set[str]] = {}
    hosts: dict[str, set[int]] = {}
    for member, device in zip(members, devices):
        nodes.setdefault(device.host, set()).add(member.node)
        hosts.setdefault(member.node, set()).add(device.host)
    if max(map(len, nodes.values())) == 1 == max(map(len, hosts.values())):
        return ""
    return (
        f"the plan has {_per_host(list(planned.values()))}, torchrun has started {_per_host(list(found.values()))}; "
        "start one rank on each host for each of its devices in the plan, or compile for what is there, with "
        'hardware="auto" or a document of that many hosts'
    )


def _per_host(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]} devices on {'one host' if len(counts) == 1 else f'each of {len(counts)} hosts'}"
    return f"{' + '.join(map(str, counts))} devices on {len(counts)} hosts"


def _names(members: Sequence[Member]) -> str:
    if len(members) == 1:
        return f"rank {members[0].rank} (on {members[0].host})"
    return f"ranks {', '.join(str(member.rank) for member in members)}"


def _contrast(value: str, usual: str) -> tuple[str, str]:
    """Both values; if they are long, the parts around their first difference."""
    if max(len(value), len(usual)) <= SHOWN:
        return value, usual
    same = next((i for i, (a, b) in enumerate(zip(value, usual)) if a != b), min(len(value), len(usual)))
    at = max(0, same - SHOWN // 2)
    lead = "..." if at else ""
    return lead + value[at : at + SHOWN] + "...", lead + usual[at : at + SHOWN] + "..."


def _code() -> str:
    """A hash of this host's files of the modules that run programs."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted((*package.glob("ir/**/*.py"), *package.glob("runtime/**/*.py"))):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:HASH_DIGITS]


def _hash(data: bytes) -> Any:
    return hashlib.sha256(data).hexdigest()[:HASH_DIGITS]
