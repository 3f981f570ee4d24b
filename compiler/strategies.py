"""Strategies: a named line of text is a pipeline of passes, and a pipeline is run pass by pass.

After each pass the driver verifies the programs (their memory only at the end: earlier forms are not meant to fit) and
records the pass's time, the change in the number of ops, the simulated step and the peak memory.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..passes.base import Draft, Pass, check_contracts
from ..passes.choose_activations import ChooseActivations
from ..passes.coarsen import Coarsen
from ..passes.insert_fetch import InsertFetch
from ..passes.insert_optimizer import InsertOptimizer
from ..passes.insert_remat import InsertRemat
from ..passes.insert_shard import InsertShard
from ..passes.insert_ssd import InsertSsd
from ..passes.insert_two_hop import InsertTwoHop
from ..passes.map_cross import MapCross
from ..passes.map_round_robin import MapRoundRobin
from ..passes.map_sequential import MapSequential
from ..passes.mesh import Mesh
from ..passes.overlap_optimizer import OverlapOptimizer
from ..passes.partition_acyclic import PartitionAcyclic
from ..passes.partition_balanced import PartitionBalanced
from ..passes.partition_max_stage import PartitionMaxStage
from ..passes.partition_metis import PartitionMetis
from ..passes.partition_min_stage import PartitionMinStage
from ..passes.partition_mip import PartitionMip
from ..passes.partition_mixed import PartitionMixed
from ..passes.partition_pipedream import PartitionPipedream
from ..passes.schedule_1f1b import Schedule1F1B
from ..passes.schedule_async import ScheduleAsync
from ..passes.schedule_interleaved import ScheduleInterleaved
from ..passes.schedule_pipeline import SchedulePipeline
from ..passes.schedule_zero_bubble import ScheduleZeroBubble
from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import profile_memory
from ..runtime.simulate import simulate
from ..runtime.verify import verify

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        Coarsen,
        Mesh,
        PartitionBalanced,
        PartitionMaxStage,
        PartitionMinStage,
        PartitionMip,
        PartitionPipedream,
        PartitionAcyclic,
        PartitionMetis,
        PartitionMixed,
        MapRoundRobin,
        MapCross,
        MapSequential,
        SchedulePipeline,
        Schedule1F1B,
        ScheduleInterleaved,
        ScheduleZeroBubble,
        ScheduleAsync,
        InsertRemat,
        ChooseActivations,
        InsertFetch,
        InsertShard,
        InsertTwoHop,
        InsertSsd,
        InsertOptimizer,
        OverlapOptimizer,
    )
}

# Rematerialisation comes before fetching: only a stage without saved tensors may lose its weights between its forward
# and its backward. The optimizer comes last: where a stage is stepped follows from where its weights live.
PIPELINE = (
    "coarsen, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"
)
ONE_EACH = PIPELINE.replace("partition-balanced", "partition-balanced{stages=devices}")
LOOPED = PIPELINE.replace("partition-balanced", "partition-balanced{stages=2*devices}")
CROSSED = PIPELINE.replace("map-round-robin", "map-cross")
WITH_SSD = "choose-activations, insert-fetch, insert-ssd, overlap-optimizer"
ONE_PASS = re.compile(r"\s*([\w-]+)\s*(?:\{([^{}]*)\})?\s*")
OF_DEVICES = re.compile(r"(?:(\d+)\*)?devices")
BETWEEN_PASSES = re.compile(r",(?![^{]*\})")  # a comma that is not inside braces
STRATEGIES: dict[str, str] = {
    "mobius": CROSSED.replace("partition-balanced", "partition-mip"),
    "mobius-ssd": f"coarsen, partition-mip, map-cross, schedule-pipeline, {WITH_SSD}",
    "fuyou": (
        "coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline, "
        "choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer"
    ),
    "ftpipe": CROSSED.replace("coarsen, partition-balanced", "coarsen{level=operator}, partition-mixed"),
    "balanced": PIPELINE,
    "gpipe": ONE_EACH,
    "looped-bfs": LOOPED,
    "1f1b": ONE_EACH.replace("schedule-pipeline", "schedule-1f1b"),
    "interleaved": LOOPED.replace("schedule-pipeline", "schedule-interleaved"),
    "zero-bubble": ONE_EACH.replace("schedule-pipeline", "schedule-zero-bubble"),
    "data-parallel": (
        "coarsen, mesh, partition-balanced{stages=devices}, map-round-robin, schedule-1f1b, insert-remat, "
        "insert-fetch, insert-optimizer"
    ),
    "zero3-offload": (
        "coarsen, mesh{shards=devices}, partition-min-stage, map-round-robin, schedule-pipeline, "
        "insert-remat{always=true}, insert-shard{tier=dram, prefetch=1, hold=false}, insert-optimizer"
    ),
    "mics": (
        "coarsen, mesh{shards=auto}, partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, insert-shard, "
        "insert-two-hop, insert-optimizer"
    ),
    "balanced-cross": CROSSED,
    "balanced-sequential": PIPELINE.replace("map-round-robin", "map-sequential"),
    "max-stage": CROSSED.replace("partition-balanced", "partition-max-stage"),
    "min-stage": CROSSED.replace("partition-balanced", "partition-min-stage"),
    "pipedream": CROSSED.replace("partition-balanced", "partition-pipedream"),
    "acyclic": CROSSED.replace("partition-balanced", "partition-acyclic"),
    "metis": CROSSED.replace("partition-balanced", "partition-metis"),
    "ftpipe-layers": CROSSED.replace("partition-balanced", "partition-mixed"),
    "async": "coarsen, partition-balanced{stages=devices, asynchronous=true}, map-round-robin, schedule-async",
    "ftpipe-async": "coarsen{level=operator}, partition-mixed{asynchronous=true}, map-cross, schedule-async",
}


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: seconds it took, ops it added, and the programs' simulated step and peak behind it."""

    name: str
    took_s: float
    ops_added: int
    step_s: float | None
    peak_bytes: int | None


def parse_pipeline(text: str, num_devices: int) -> list[Pass]:
    """Passes of a strategy's name or of a line such as "coarsen, partition-balanced{stages=4}, ...".

    `devices` as an option's value is the number of devices, `2*devices` twice that. Raises `PassError` with close
    names.
    """
    line = STRATEGIES.get(text, text)
    if "," not in line and line not in PASSES:
        close = difflib.get_close_matches(line, [*STRATEGIES, *PASSES], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise PassError(f"strategy={text!r} is neither a strategy ({', '.join(STRATEGIES)}, auto) nor a pipeline{hint}")
    passes = []
    for part in BETWEEN_PASSES.split(line):
        found = ONE_PASS.fullmatch(part)
        if found is None:
            raise PassError(f'strategy={text!r}: {part.strip()!r} is no pass, such as "partition-balanced{{stages=4}}"')
        passes.append(_make(found[1], found[2] or "", num_devices))
    check_contracts(passes)
    return passes


def is_synchronous(text: str) -> bool:
    """Whether a strategy's name or line trains as plain PyTorch does with the whole batch."""
    line = STRATEGIES.get(text, text)
    return not any(name in line for name, kind in PASSES.items() if not kind.synchronous)


def require_complete(passes: Sequence[Pass]) -> None:
    """Raise `PassError` where a decision that every job needs is left open."""
    decided = {name for p in passes for name in p.fields or (p.decides,)}
    makers: dict[str, list[str]] = defaultdict(list)
    for kind in PASSES.values():
        if not kind.optional:
            makers[kind.decides].append(kind.name)
    missing = [" or ".join(names) for decision, names in makers.items() if decision not in decided]
    if missing:
        raise PassError(f"strategy {pipeline_text(passes)!r} lacks {', '.join(missing)}; put it behind the others")


def _make(name: str, options: str, num_devices: int) -> Pass:
    if name not in PASSES:
        close = difflib.get_close_matches(name, PASSES, n=3)
        raise PassError(
            f"no pass {name!r}; {'did you mean ' + ' or '.join(close) if close else 'there are ' + ', '.join(PASSES)}"
        )
    kind = PASSES[name]
    known = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in options.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise PassError(f"pass {name!r} has no option {key!r}; it has {', '.join(known) or 'none'}")
        values[key] = _value(name, key, value, type(known[key].default), num_devices)
    return kind(**values)


def _value(name: str, key: str, value: str, kind: type, num_devices: int) -> Any:
    if value == "auto" and key in PASSES[name].automatic:
        return 0
    of_devices = OF_DEVICES.fullmatch(value)
    if of_devices is not None and kind is int:
        return int(of_devices[1] or 1) * num_devices
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError) as error:
        raise PassError(f"pass {name!r}: option {key}={value!r} is not {kind.__name__}") from error


def pipeline_text(passes: Sequence[Pass]) -> str:
    """The passes as text that `parse_pipeline` reads back."""
    return ", ".join(_pass_text(p) for p in passes)


def _pass_text(p: Pass) -> str:
    changed = [f for f in dataclasses.fields(p) if getattr(p, f.name) != f.default]
    options = ", ".join(f"{f.name}={str(getattr(p, f.name)).lower()}" for f in changed)
    return f"{p.name}{{{options}}}" if options else p.name


def run_passes(
    draft: Draft,
    passes: Sequence[Pass],
    decided: Mapping[str, Any] | None = None,
    *,
    dump: Callable[[str, Draft], None] | None = None,
    record: bool = False,
    check: bool = True,
) -> tuple[dict[str, Any], list[PassRecord]]:
    """Run all passes on the draft. Where `decided` has a pass's decision it is applied instead of planning anew.

    `dump(pass name, draft)` is called behind each pass; `record` simulates behind each; `check` verifies behind each.
    Returns decisions and records.
    """
    decisions: dict[str, Any] = {}
    records = []
    for p in passes:
        begin_s, before = time.perf_counter(), _num_ops(draft)
        draft.to_come = tuple(q.name for q in passes[passes.index(p) + 1 :])
        decision = p.gather(decided)
        if decision is None:
            decision = p.plan(draft)
        p.rewrite(draft, decision)
        decisions.update(p.split(decision))
        took_s = time.perf_counter() - begin_s
        if draft.programs and check:
            verify(draft.programs, draft.hardware, memory=False)
        step_s = (
            simulate(draft.programs, draft.whole, precision=draft.options.precision).step_s
            if record and draft.programs
            else None
        )
        peak = max((profile_memory(q).peak_bytes[ops.DEVICE] for q in draft.programs), default=None) if record else None
        records.append(PassRecord(p.name, took_s, _num_ops(draft) - before, step_s, peak))
        if dump is not None:
            dump(p.name, draft)
    return decisions, records


def _num_ops(draft: Draft) -> int:
    return sum(1 for program in draft.programs for _ in program.ops())
