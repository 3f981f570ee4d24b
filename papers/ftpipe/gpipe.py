"""A synchronous step as FTPipe's own runtime takes it for GPipe, by its published source.

Each stage is a process. It takes all forwards, then all backwards, the last micro-batch first. It computes a
micro-batch's forward again before it waits for the gradient, as GPipe does (Huang et al. 2019, section 2.3), and does
not compute that of the last micro-batch again, whose saved tensors are still there. A GPU with several stages runs what
is ready first. The stages, their seconds and their messages are those of a simulated program of ours, which waits for
the gradient before it computes again.

The source: github.com/saareliad/FTPipe, `pipe/pipeline/partition_manager.py`, `GPipePartitionManager`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import micro_batch_of, shown
from ..lab import SimulatedStep

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"


@dataclass
class TimedStage:
    """Seconds for one micro-batch, and what comes from which stages: (stage, bytes). `backward_s` is without what is
    computed again."""

    device: int
    forward_s: float
    backward_s: float
    step_s: float = 0.0
    sources: list[tuple[int, int]] = field(default_factory=list)


def gpipe_s(trial: SimulatedStep, machine: Hardware | None = None) -> float | None:
    """Seconds of a trial's step under FTPipe's runtime; None if it does not fit. `machine`: another one, whose messages
    count."""
    if trial.timeline is None:
        return None
    return step_s(stages_of(trial), trial.workload.micro_batches, machine or trial.hardware)


def busiest_share(trial: SimulatedStep) -> float:
    """The share of that step in which its busiest GPU computes."""
    count, busy_s = trial.workload.micro_batches, [0.0] * trial.hardware.num_devices
    for stage in stages_of(trial):
        busy_s[stage.device] += count * (stage.forward_s + stage.backward_s) + (count - 1) * stage.forward_s
    return max(busy_s) / (gpipe_s(trial) or 1.0)


def stages_of(trial: SimulatedStep) -> list[TimedStage]:
    """The stages of a simulated program whose backwards all compute their forward again."""
    assert trial.timeline is not None
    found: dict[str, TimedStage] = {}
    nodes = [(p, node) for p in shown(trial.programs, trial.hardware)[0] for node in p.ops() if op_of(node).streams]
    for (program, node), span in zip(nodes, trial.timeline.spans, strict=True):
        took_s, name = span.end_s - span.start_s, str(node.args[0])
        if node.target is ops.step:
            found[name].step_s = took_s
        elif node.target is ops.forward and micro_batch_of(node) == 0:
            found[name] = TimedStage(program.device, took_s, 0.0)
        elif node.target is ops.backward and micro_batch_of(node) == 0:
            found[name].backward_s = took_s - found[name].forward_s
    specs = [spec for spec in trial.specs if spec.name in found]
    made = {value.name: number for number, spec in enumerate(specs) for value in spec.made}
    stages = [found[spec.name] for spec in specs]
    for stage, spec in zip(stages, specs):
        stage.sources = [(made[value.name], value.bytes) for value in spec.inputs if value.requires_grad]
    return stages


def step_s(stages: Sequence[TimedStage], micro_batches: int, machine: Hardware) -> float:
    """Seconds until every stage has updated. A message takes its path's latency and rate; those of one GPU go one after
    another, and messages of different GPUs do not slow each other down."""
    return max(_ends(stages, micro_batches, machine))


def _ends(stages: Sequence[TimedStage], count: int, machine: Hardware) -> Iterator[float]:
    names = [device.name for device in machine.devices]
    free, sending = [0.0] * len(names), [0.0] * len(names)  # when a GPU, and its link, has no more to do
    left = [list(_turns(count)) for _ in stages]
    targets: list[list[tuple[int, int]]] = [[] for _ in stages]
    for number, stage in enumerate(stages):
        for source, num_bytes in stage.sources:
            targets[source].append((number, num_bytes))
    arrived: dict[tuple[str, int, int], list[float]] = {}  # what a turn has received

    def ready_s(number: int) -> float | None:
        kind, micro_batch = left[number][0]
        waits = {FORWARD: stages[number].sources, BACKWARD: targets[number]}.get(kind, [])
        here = arrived.get((kind, number, micro_batch), [])
        return max(here, default=0.0) if len(here) == len(waits) else None

    while any(left):
        starts = []
        for number, stage in enumerate(stages):
            if left[number] and (since_s := ready_s(number)) is not None:
                starts.append((max(free[stage.device], since_s), since_s, number))
        start_s, _, number = min(starts)
        stage, (kind, micro_batch) = stages[number], left[number].pop(0)
        end_s = start_s + (stage.backward_s if kind == BACKWARD else stage.forward_s)
        if not left[number]:
            end_s += stage.step_s
            yield end_s
        free[stage.device] = end_s
        others = {FORWARD: targets[number], BACKWARD: stage.sources}.get(kind, [])
        for other, num_bytes in others:
            at_s = end_s
            if stages[other].device != stage.device:
                way = names[stage.device], names[stages[other].device]
                sending[stage.device] = max(sending[stage.device], end_s) + num_bytes / machine.bandwidth(*way)
                at_s = sending[stage.device] + machine.latency_s(*way)
            arrived.setdefault((kind, other, micro_batch), []).append(at_s)


def _turns(count: int) -> Iterator[tuple[str, int]]:
    """The turns of a stage on the micro-batches of a step, in order."""
    yield from ((FORWARD, number) for number in range(count))
    for number in reversed(range(count)):
        if number < count - 1:
            yield AGAIN, number
        yield BACKWARD, number
