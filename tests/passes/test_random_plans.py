"""Random models under random plans train as eager PyTorch does: losses, gradients, updated weights and buffers.

A plan is drawn from every partitioner, mapping and schedule that is registered, or cut by hand: any list of stages of
which none reads a later one, on any devices. Machines are unequal and have any root complexes; any stages are swapped,
with or without early fetches, and rematerialised.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compiler.capture.trace import trace
from penstock.graph.blocks import Block
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.ir.verify import verify
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_replicas import MapReplicas
from penstock.passes.mapping.mapping import Mapping
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.partition import Partition
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule import Schedule
from penstock.passes.schedule.schedule_interleaved import ScheduleInterleaved
from penstock.passes.table import PASSES
from penstock.tests.passes.running import assert_trains_like_eager
from penstock.tests.random_models import MICRO_BATCHES, Batch, Layer, Traits, random_model

MODELS, PLANS = 40, 5  # 200 cases, of which the first FEW models are fast enough for every run
FEW = 1
MANY_MODELS, MANY_PLANS = 250, 20  # 5000 cases

# In a chain each gradient is one product of the same numbers, and micro-batches are added up in the same order: equal
# bit for bit, in fp32. Elsewhere a value with several readers, or a weight with several uses, has its gradients added
# per stage and device first. Of at most 11 terms of size 1 to 10, in fp64, any two orders differ by less than
# 11 * 10 * 2^-53 = 1.2e-14, and the few layers after them make it some times as much.
CHAIN, REORDERED = 0.0, 1e-12

BY_HAND = "by hand"


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= FEW)) for n in range(MODELS)])
def test_random_plans_train_like_eager(number: int) -> None:
    check_model(number, PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1000, 1000 + MANY_MODELS))
def test_many_random_plans_train_like_eager(number: int) -> None:
    check_model(number, MANY_PLANS)


@given(number=st.integers(0, 10**6))
@settings(max_examples=8)
@pytest.mark.slow
def test_random_models_draw_the_same_on_any_devices(number: int) -> None:
    check_model(number, 2, Layer.DRAWING)


def check_model(number: int, plans: int, kinds: Sequence[str] = Layer.KINDS) -> None:
    model, batches, traits = random_model(number, kinds)
    graph = trace(model, batches[0])
    blocks = coarsen_graph(graph)
    for plan in range(plans):
        draw = random.Random(f"model {number}, plan {plan}")
        made: dict[str, object] = {}
        try:
            draft = random_draft(draw, graph, blocks, made)
            check_training(draft, batches, traits)
        except Exception as error:
            error.add_note(f"model {number}, plan {plan}: {made}")
            raise


def check_training(draft: Draft, batches: Sequence[Batch], traits: Traits) -> None:
    verify(draft.programs, draft.lane_hardware)
    tolerance = CHAIN if traits.is_chain else REORDERED
    assert_trains_like_eager(draft, batches[: draft.options.micro_batches], tolerance, steps=1)


def coarsen_graph(graph: OpGraph) -> list[Block]:
    draft = Draft(graph, Hardware.cpu(num_devices=1))
    Coarsen().rewrite(draft, Coarsen().plan(draft))
    return draft.blocks


def partitioners() -> list[type[Partition]]:
    return [kind for kind in PASSES.values() if issubclass(kind, Partition)]


def mappings() -> list[type[Mapping]]:
    """Those that give each stage one device."""
    return [kind for kind in PASSES.values() if issubclass(kind, Mapping) and kind is not MapReplicas]


def schedules() -> list[type[Schedule]]:
    return [kind for kind in PASSES.values() if issubclass(kind, Schedule) and kind.synchronous]


def random_draft(draw: random.Random, graph: OpGraph, blocks: list[Block], made: dict[str, object]) -> Draft:
    """A whole compilation; `made` tells what was drawn, for whoever reads a failure."""
    draft = Draft(graph, random_hardware(draw), Options(micro_batches=draw.randint(1, MICRO_BATCHES)), list(blocks))
    made["hardware"] = [(d.root_complex, d.memory_bytes) for d in draft.lane_hardware.devices]
    made["micro_batches"] = draft.options.micro_batches
    place_stages(draw, draft, made)
    count = draft.lane_hardware.num_devices
    goes_round = (
        len(draft.devices) >= 2 * count
        and len(draft.devices) % count == 0
        and draft.devices == [i % count for i in range(len(draft.devices))]
    )
    schedule = draw.choice([kind for kind in schedules() if goes_round or kind is not ScheduleInterleaved])()
    schedule.rewrite(draft, schedule.plan(draft))
    made[schedule.name] = ""
    choose_tiers(draw, draft, made)
    return draft


def place_stages(draw: random.Random, draft: Draft, made: dict[str, object]) -> None:
    kind = draw.choice([BY_HAND, *partitioners()])
    if kind == BY_HAND:
        stages = random_stages(draw, draft)
        made[BY_HAND] = stages
        PartitionBalanced().rewrite(draft, stages)
        draft.devices = [draw.randrange(draft.lane_hardware.num_devices) for _ in stages]
    else:
        options = random_options(draw, kind, len(draft.blocks))
        p, mapping = kind(**options), draw.choice(mappings())()
        decision = p.plan(draft)
        made[p.name] = options, decision
        p.rewrite(draft, decision)
        mapping.rewrite(draft, mapping.plan(draft))
    made["devices"] = draft.devices


def choose_tiers(draw: random.Random, draft: Draft, made: dict[str, object]) -> None:
    """Stages to rematerialise and to swap, and how many parameters come early: as the passes decide, or any."""
    for p, drawn in ((InsertRemat(), random_remat), (InsertFetch(), random_fetch), (InsertOptimizer(), None)):
        decision = drawn(draw, draft) if drawn is not None and draw.random() < 0.8 else p.plan(draft)
        made[p.name] = decision
        p.rewrite(draft, decision)


def random_remat(draw: random.Random, draft: Draft) -> list[str]:
    share = draw.random()
    return [s.spec.name for s in draft.stages if s.spec.rematerialisable and draw.random() < share]


def random_fetch(draw: random.Random, draft: Draft) -> dict[str, dict[str, int]]:
    share, found = draw.random(), {}
    for stage in draft.stages:
        most = len(stage.spec.params)
        if draw.random() < share:
            kinds = [kind for kind in ("forward", "backward") if most and draw.random() < 0.5]
            found[stage.spec.name] = {kind: draw.randint(1, most) for kind in kinds}
    return found


def random_options(draw: random.Random, kind: type[Partition], num_blocks: int) -> dict[str, int]:
    """Some number of stages, for those that take one."""
    takes = any(field.name == "stages" for field in dataclasses.fields(kind))
    return {"stages": draw.randint(1, num_blocks)} if takes and draw.random() < 0.5 else {}


def random_stages(draw: random.Random, draft: Draft) -> list[list[str]]:
    """Blocks in stages of which none reads a later one: runs of blocks or not."""
    most = draw.randint(1, len(draft.blocks))
    stage_of: list[int] = []
    for makers in Loads(draft).before:
        first = max((stage_of[i] for i in makers), default=0)
        stage_of.append(max(first, draw.randrange(most)))
    names = [[b.name for b, s in zip(draft.blocks, stage_of) if s == stage] for stage in range(most)]
    return [stage for stage in names if stage]


def random_hardware(draw: random.Random) -> Hardware:
    """One to five devices, half of the machines with unequal ones, under one to three root complexes."""
    document = Hardware.cpu(num_devices=draw.randint(1, 5), memory="1MB").model_dump()
    host, count = document["hosts"][0], draw.randint(1, 3)
    host["root_complexes"] = host["root_complexes"][:1] * count
    unequal = draw.random() < 0.5
    for device in document["devices"]:
        device["root_complex"] = draw.randrange(count)
        factor = draw.choice((1, 2, 3)) if unequal else 1
        device["memory_bytes"] *= factor
        device["memory_bandwidth"] *= factor
        device["peak_flops"] = {dtype: factor * rate for dtype, rate in device["peak_flops"].items()}
    return Hardware.model_validate(document)
