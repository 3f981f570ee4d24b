"""Finds the nearest plan that fits where none does. It was tried, so that following the advice works.

The order is that of the user's cost: another strategy, more and smaller micro-batches, more memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from ...ir import ops
from ...ir.errors import DoesNotFit, PenstockError
from ...ir.machine.describe import shared_texts
from ...ir.machine.hardware import Hardware
from ...ir.machine.overrides import STOCK_SSD
from ...ir.program import shown
from ...ir.units import format_bytes, format_seconds, parse_bytes, short_bytes
from ...passes.draft import Draft
from ...passes.rewrite.split_experts import SplitExperts
from ...passes.rewrite.split_linear import SplitLinear
from ...passes.rewrite.split_vocabulary import SplitVocabulary
from .attempts import LARGE_GRAPH_NODES, Trace, Wishes
from .candidates import micro_batch_counts
from .compiled import CompiledCandidate
from .host_memory import host_needs, host_of, tier_of
from .search import attempt_smallest, search

BOUNDLESS_BYTES = 1 << 60
TRIES = 8
NEAR = 1.1  # a memory over one that was too small, which is near enough
AGAIN_SHARE = 1 / 16  # of a memory, which is added at least where the missing bytes were not enough
STOCK_BYTES = int(parse_bytes(STOCK_SSD["size_bytes"]) * 0.9)  # what a disk adds where there was none


@dataclass(frozen=True)
class Nearest:
    """The model fits with `change`, arguments of `compile` or of `Hardware.with_`, and then takes `step_s` a step."""

    change: dict[str, Any]
    step_s: float

    def __str__(self) -> str:
        words = ", ".join(f'{name}="{v}"' if isinstance(v, str) else f"{name}={v}" for name, v in self.change.items())
        where = "" if self.change.keys() & {"strategy", "micro_batches"} else "this hardware with "
        return f"Tried, and fits: {where}{words}, {format_seconds(self.step_s)} a step."


class Growth:
    """The sizes that memories are given one after another: first what was missing, then at least a share of what there
    is, and twice as much each time, as each plan that lacks something shows the next bottleneck only."""

    def __init__(self) -> None:
        self._added: dict[str, int] = {}

    def next_size_bytes(self, memory: str, size_bytes: int, missing_bytes: int) -> int:
        more = missing_bytes
        if memory in self._added:
            more = max(missing_bytes, int(AGAIN_SHARE * size_bytes), 2 * self._added[memory])
        self._added[memory] = more if memory in self._added else 0
        return size_bytes + more


def with_nearest(miss: DoesNotFit, trace: Trace, hardware: Hardware, wishes: Wishes) -> DoesNotFit:
    """The same error with the nearest plan that fits in its text and in its `nearest`, and with what the script's own
    copy of the model takes of the memory that is short, and with the other users of that memory."""
    wishes = dataclasses.replace(wishes, dump=None, search_s=0.0, is_asked=False)  # the first that fits will do
    found = next(filter(None, _tries(miss, trace, hardware, wishes)), None)
    whole = _what_stays_whole(trace, hardware, wishes) if tier_of(miss.memory) == ops.DEVICE else ""
    own = _own_copy(hardware, miss.memory)
    said = [str(miss).rstrip("."), *shared_texts(hardware), whole, own, "" if found is None else str(found)]
    return DoesNotFit(
        ". ".join(part for part in said if part),
        memory=miss.memory,
        missing_bytes=miss.missing_bytes,
        nearest={} if found is None else found.change,
    )


def _what_stays_whole(trace: Trace, hardware: Hardware, wishes: Wishes) -> str:
    """The reasons why tables and layers that are large for a device cannot be in parts."""
    first = wishes.micro_batches or micro_batch_counts(wishes.batch_size, hardware)[0][0]
    draft = Draft(trace(first), hardware, wishes.options)
    passes = (SplitVocabulary(), SplitExperts(), SplitLinear())
    return "; ".join(told for split in passes for told in split.look(draft)[1])


def _own_copy(hardware: Hardware, memory: str) -> str:
    if tier_of(memory) == ops.DEVICE:
        num_bytes = hardware.device_by_name[memory].model_bytes if memory in hardware.device_by_name else 0
    else:  # DRAM may take what SSDs have no room for
        memory = f"{ops.DRAM}{host_of(memory)}"
        num_bytes = hardware.hosts[host_of(memory)].model_bytes
    if not num_bytes:
        return ""
    return (
        f"Another {format_bytes(num_bytes)} of {memory} hold your own copy of the model; built on the meta device, "
        "with weights=DIRECTORY, it takes nothing"
    )


def _tries(miss: DoesNotFit, trace: Trace, hardware: Hardware, wishes: Wishes) -> Iterator[Nearest | None]:
    has_ssds = any(host.ssds for host in hardware.hosts)
    tier = tier_of(miss.memory)
    if tier == ops.DRAM and any(host.shared_memory for host in hardware.hosts):
        yield _more_for_dram(miss, trace, hardware, wishes)
    if tier == ops.DRAM and has_ssds:
        if wishes.asked is not None or wishes.decided is not None:
            free = dataclasses.replace(wishes, asked=None, decided=None)
            yield _try_change(trace, hardware, free, {"strategy": "auto"})
        yield _grow(miss, trace, hardware, wishes)
    if tier == ops.SSD:
        yield _grow(miss, trace, hardware, wishes)
    if tier == ops.DEVICE:  # DRAM holds what no strategy makes smaller
        if wishes.asked is not None or wishes.decided is not None:
            free = dataclasses.replace(wishes, asked=None, decided=None)
            yield _try_change(trace, hardware, free, {"strategy": "auto"})
        first = wishes.micro_batches or wishes.batch_size
        more = range(first + 1, wishes.batch_size + 1)
        for count in (m for m in more if wishes.batch_size % m == 0):
            if len(trace(first).nodes) <= LARGE_GRAPH_NODES:
                smaller = dataclasses.replace(wishes, micro_batches=count, decided=None)
                yield _try_change(trace, hardware, smaller, {"micro_batches": count})
    yield _more_memory(trace, hardware, wishes)


def _try_change(trace: Trace, hardware: Hardware, wishes: Wishes, change: dict[str, Any]) -> Nearest | None:
    try:
        return Nearest(change, search(trace, hardware, wishes).best.step_s)
    except PenstockError:
        return None


def _more_memory(trace: Trace, hardware: Hardware, wishes: Wishes) -> Nearest | None:
    """Add missing bytes to devices until a plan fits with boundless DRAM, then give DRAM what that plan needs."""
    wider = hardware.with_(dram=BOUNDLESS_BYTES)
    change: dict[str, Any] = {}
    growth = Growth()
    below_bytes = 0  # the largest memory that was too small
    for _ in range(TRIES):
        tried = attempt_smallest(trace, wider, wishes)
        if isinstance(tried, CompiledCandidate):
            if change and len(trace(tried.count).nodes) <= LARGE_GRAPH_NODES:
                change["memory"], tried = _less(trace, wider, wishes, below_bytes, tried)
            changed = hardware.with_(**change, dram=BOUNDLESS_BYTES)
            if (dram_bytes := _dram_bytes(tried, changed)) > min(host.dram_bytes for host in hardware.hosts):
                change["dram"] = short_bytes(dram_bytes)
            return Nearest(change, tried.step_s)
        if not isinstance(tried, DoesNotFit):
            return None
        largest = max(wider.devices, key=lambda device: device.memory_bytes)
        below_bytes = largest.memory_bytes
        more_bytes = ceil(tried.missing_bytes / largest.usable_fraction) or largest.memory_bytes // 8
        change["memory"] = short_bytes(growth.next_size_bytes("memory", largest.memory_bytes, more_bytes))
        wider = wider.with_(memory=change["memory"])
    return None


def _more_for_dram(miss: DoesNotFit, trace: Trace, hardware: Hardware, wishes: Wishes) -> Nearest | None:
    """Leave DRAM more of the memory that it shares with the devices, by the missing bytes until a plan fits."""
    growth = Growth()
    largest = max(hardware.devices, key=lambda device: device.memory_bytes)
    left_bytes = largest.usable_bytes
    for _ in range(TRIES):
        dram_bytes = growth.next_size_bytes("dram", largest.usable_bytes - left_bytes, miss.missing_bytes)
        left_bytes = largest.usable_bytes - dram_bytes
        if left_bytes <= 0 or not miss.missing_bytes:
            return None
        change = {"memory": short_bytes(int(left_bytes / largest.usable_fraction), up=False)}
        tried = attempt_smallest(trace, hardware.with_(**change), wishes)
        if isinstance(tried, CompiledCandidate):
            return Nearest(change, tried.step_s)
        if not isinstance(tried, DoesNotFit) or tier_of(tried.memory) != ops.DRAM:
            return None
        miss = tried
    return None


def _less(
    trace: Trace, wider: Hardware, wishes: Wishes, below_bytes: int, found: CompiledCandidate
) -> tuple[str, CompiledCandidate]:
    """A memory within a tenth of the least with which a plan fits, between one that was too small and that of `wider`,
    for which `found` fits; and its plan."""
    fitting_bytes = max(device.memory_bytes for device in wider.devices)
    while fitting_bytes > NEAR * below_bytes:
        text = short_bytes((below_bytes + fitting_bytes) // 2)
        middle = wider.with_(memory=text)
        tried = attempt_smallest(trace, middle, wishes)
        if isinstance(tried, CompiledCandidate):
            fitting_bytes, found = max(device.memory_bytes for device in middle.devices), tried
        else:
            below_bytes = max(device.memory_bytes for device in middle.devices)
    return short_bytes(fitting_bytes), found


def _grow(miss: DoesNotFit, trace: Trace, hardware: Hardware, wishes: Wishes) -> Nearest | None:
    """Add SSDs, or DRAM where DRAM is short, by the missing bytes until a plan fits."""
    change: dict[str, Any] = {}
    growth = Growth()
    tried: CompiledCandidate | PenstockError = miss
    for _ in range(TRIES):
        wider = hardware.with_(**change) if change else hardware
        if isinstance(tried, CompiledCandidate):
            return Nearest(change, tried.step_s)
        if not isinstance(tried, DoesNotFit) or tier_of(tried.memory) == ops.DEVICE or not tried.missing_bytes:
            return None
        host = wider.hosts[host_of(tried.memory)]
        if tier_of(tried.memory) == ops.SSD:
            like = host.ssds[0].budget_bytes if host.ssds else STOCK_BYTES
            held_bytes = len(host.ssds) * like
            change["ssds"] = ceil(growth.next_size_bytes("ssds", held_bytes, tried.missing_bytes) / like)
        else:
            more_bytes = ceil(tried.missing_bytes / host.dram_usable_fraction)
            change["dram"] = short_bytes(growth.next_size_bytes("dram", host.dram_bytes, more_bytes))
        tried = attempt_smallest(trace, hardware.with_(**change), wishes)
    return None


def _dram_needs(compiled: CompiledCandidate) -> dict[int, int]:
    """Bytes of DRAM that the programs need, by host."""
    needs = host_needs(*shown(compiled.draft.programs, compiled.draft.machine))
    return {host_of(need.memory): need.peak_bytes for need in needs if tier_of(need.memory) == ops.DRAM}


def _dram_bytes(compiled: CompiledCandidate, hardware: Hardware) -> int:
    """Bytes of DRAM that every host must have for this candidate."""
    hosts = hardware.hosts
    return max(
        ceil((need + hosts[host].model_bytes + hardware.shared_bytes(host)) / hosts[host].dram_usable_fraction)
        for host, need in _dram_needs(compiled).items()
    )
