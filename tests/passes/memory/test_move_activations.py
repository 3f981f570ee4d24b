"""Moves of activations: texts, one way for each value, order of use, and the same results bit for bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from penstock.compiler.capture.trace import trace
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, StageSpec, producer_of, profile_memory
from penstock.ir.verify import verify
from penstock.passes.decisions import Activations
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.move_activations import (
    Ahead,
    input_bytes,
    keep_classes,
    move_activations,
    turn_bytes,
)
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.schedule.schedule_1f1b import Schedule1F1B
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    apply,
    assert_prints_and_parses,
    chain,
    draft_of,
    join_batches,
    reference,
    text_of,
    to_schedule,
    trace_case,
)

ROWS = 64
NEXT = Ahead()


def schedule(stages: int = 4, micro_batches: int = 2, devices: int = 1, schedule_1f1b: bool = False) -> Draft:
    hardware = Hardware.cpu(num_devices=devices, memory="64MB", ssd="1GB")
    passes = to_schedule(stages)
    if schedule_1f1b:
        passes[-1] = Schedule1F1B()
    return apply(draft_of(chain(depth=stages - 1, rows=ROWS), hardware, micro_batches=micro_batches), *passes)


def move_line(draft: Draft, choices: dict[str, Activations], ahead: Ahead = NEXT) -> Draft:
    for program in draft.programs:
        keep_classes(program, choices)
        move_activations(program, choices, ahead)
    verify(draft.programs)
    assert_prints_and_parses(draft.programs)
    return draft


def everything(spec: StageSpec, classes_to: Any, inputs_to: Any) -> Activations:
    return Activations(classes=[saved.name for saved in spec.saved], classes_to=classes_to, inputs_to=inputs_to)


def everywhere(draft: Draft, memory: Any, classes: bool = True) -> dict[str, Activations]:
    """All inputs, and all classes, of all stages in one memory."""
    return {
        stage.spec.name: everything(stage.spec, memory, memory) if classes else Activations(inputs_to=memory)
        for stage in draft.stages
        if stage.spec.rematerialisable
    }


def counts(program: Program) -> Counter[str]:
    return Counter(node.target.name for node in program.ops())  # type: ignore[union-attr]


def using(value: fx.Node, op: ops.Op) -> list[fx.Node]:
    return [user for user in value.users if user.target is op]


def test_text_in_dram(golden: Golden) -> None:
    draft = schedule()
    golden(text_of(move_line(draft, everywhere(draft, "dram"))), "dram")


def test_text_on_ssd(golden: Golden) -> None:
    draft = schedule(micro_batches=1)
    golden(text_of(move_line(draft, everywhere(draft, "ssd"), Ahead(1, 1))), "ssd")


def test_a_tensor_that_several_stages_read_moves_once() -> None:
    """x is read by two stages: it leaves once, and comes back for the last of them, which reads it first."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = h = torch.relu(self.first(x))
            for i, layer in enumerate(self.layers):
                h = torch.tanh(layer(h)) * (x if i < 2 else 1.0)
            return {"loss": h.sum()}

    with torch.device("meta"):
        graph = trace(Skip(), {"x": {"shape": [ROWS, 16], "dtype": "float32"}})
    draft = apply(draft_of(graph, Hardware.cpu(num_devices=1), micro_batches=1), *to_schedule(5))
    choices = everywhere(draft, "dram", classes=False)
    (program,) = move_line(draft, choices, Ahead(0, 0)).programs
    sources = [node.args[0] for node in program.ops() if node.target is ops.offload]
    assert len(sources) == len(set(sources))
    shared = [v for v in sources if isinstance(v, fx.Node) and len(using(v, ops.forward)) > 1]
    assert len(shared) == 1 and not using(shared[0], ops.backward)
    (copy,) = using(shared[0], ops.offload)
    (back,) = using(copy, ops.fetch)
    assert len(using(back, ops.backward)) == 2


def test_the_inputs_of_the_batch_are_loaded_again_instead() -> None:
    draft = schedule()
    before = counts(draft.programs[0])["load"]
    names = [stage.spec.name for stage in draft.stages]
    (program,) = move_line(draft, {name: Activations(inputs_to="dram") for name in names}).programs
    assert counts(program)["load"] > before
    assert all(producer_of(n.args[0]).target is not ops.load for n in program.ops() if n.target is ops.offload)  # type: ignore[arg-type]


def test_what_a_stage_that_keeps_everything_reads_or_makes_stays() -> None:
    """Autograd may hold it, so that moving it would free nothing."""
    draft = schedule()
    choices = everywhere(draft, "dram", classes=False)
    del choices["stage1"]
    (program,) = move_line(draft, choices, Ahead(0, 0)).programs
    readers = {
        str(user.args[0])
        for n in program.ops()
        if n.target is ops.fetch
        for user in n.users
        if user.target is ops.backward
    }
    assert readers == {"stage3"}


def test_what_is_used_first_comes_first_and_so_many_turns_ahead() -> None:
    draft = schedule(stages=6, micro_batches=3)
    (program,) = move_line(draft, everywhere(draft, "dram"), Ahead(2)).programs
    turns: list[fx.Node] = []
    fetched = []
    used = {}
    for node in program.ops():
        if node.target is ops.fetch:
            fetched.append((node, len(turns)))
        elif node.target in (ops.forward, ops.backward):
            for value in node.all_input_nodes:
                used.setdefault(value, len(turns))
            turns.append(node)
    uses = [used[node] for node, _ in fetched]
    assert uses == sorted(uses)
    assert {used[node] - turn for node, turn in fetched} == {2}


@pytest.mark.parametrize("memory", ["dram", "ssd"])
def test_what_would_come_back_at_once_stays(memory: str) -> None:
    """The last stage's backward follows its forward."""
    draft = schedule(micro_batches=1)
    (program,) = move_line(draft, everywhere(draft, memory), Ahead(1, 1)).programs
    stages = {n.meta["type"].stage for n in program.ops() if n.target is ops.offload and n.meta["type"].kind == "kept"}
    assert "stage3" not in stages and "stage0" in stages


def test_so_few_turns_from_write_to_read_are_spent_in_dram() -> None:
    draft = schedule(micro_batches=1)
    (program,) = move_line(draft, everywhere(draft, "ssd"), Ahead(1, 50)).programs
    assert counts(program)["write"] == 0 and counts(program)["offload"] > 0


def test_moving_gives_device_memory_back() -> None:
    peaks = {}
    for memory in ("device", "dram", "ssd"):
        draft = schedule(stages=6, micro_batches=3)
        move_line(draft, everywhere(draft, memory), Ahead(1, 1))
        peaks[memory] = profile_memory(draft.programs[0]).peak_bytes
    assert peaks["dram"][ops.DEVICE] < 0.8 * peaks["device"][ops.DEVICE]
    assert peaks["ssd"][ops.DEVICE] == peaks["dram"][ops.DEVICE]
    assert 0 < peaks["ssd"][ops.DRAM] < peaks["dram"][ops.DRAM] and peaks["ssd"][ops.SSD] > 0


def test_bytes_that_can_move_and_come_back_for_one_turn() -> None:
    draft = schedule(micro_batches=2)
    choices = everywhere(draft, "dram")
    (program,) = draft.programs
    keep_classes(program, choices)
    one = ROWS * 16 * 4
    # The inputs of stage3 come back right after its last forward.
    assert input_bytes(program, choices) == {"stage1": 2 * one, "stage2": 2 * one, "stage3": 2 * one}
    kept = max(n.meta["type"].bytes for n in program.graph.nodes if getattr(n.meta.get("type"), "kind", "") == "kept")
    assert one < turn_bytes(program, choices, ("dram",)) <= one + kept
    assert turn_bytes(program, choices, ("ssd",)) == 0


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 2),
    st.tuples(st.integers(0, 6), st.integers(0, 9)),
    st.data(),
)
def test_any_choice_verifies(
    stages: int, micro_batches: int, interleaved: bool, devices: int, ahead: tuple[int, int], data: st.DataObject
) -> None:
    draft = schedule(stages, micro_batches, devices, interleaved)
    memories = st.sampled_from(["device", "dram", "ssd"])
    choices = {}
    for stage in draft.stages:
        names = data.draw(st.sets(st.sampled_from([s.name for s in stage.spec.saved] or ["none"]))) - {"none"}
        if data.draw(st.booleans()):
            choices[stage.spec.name] = Activations(
                classes=sorted(names), classes_to=data.draw(memories), inputs_to=data.draw(memories)
            )
    move_line(draft, choices, Ahead(*ahead))
    apply(draft, InsertFetch(swap=data.draw(st.booleans())), InsertOptimizer())


def train(name: str, move: bool) -> tuple[dict[str, Tensor], int]:
    """Losses of two steps and all weights, and how many values go to SSD."""
    graph, batches = trace_case(name)
    hardware = Hardware.cpu(num_devices=1, memory="500MB", ssd="1GB")
    draft = apply(draft_of(graph, hardware, micro_batches=3), *to_schedule(4))
    if move:
        tiers = [("ssd", "dram"), ("dram", "ssd")]
        choices = {stage.spec.name: everything(stage.spec, *tiers[i % 2]) for i, stage in enumerate(draft.stages)}
        move_line(draft, choices, Ahead(1, 1))
    apply(draft, InsertFetch(swap=move), InsertOptimizer())
    machine = reference(draft)
    found = {}
    for step in range(2):
        losses = machine.step(join_batches(batches))["results"]["loss"]
        found.update({f"loss {step} {i}": loss.clone() for i, loss in enumerate(losses)})
    found.update({f"{s} {name}": w for s, rows in machine.stage_weights.items() for name, w in rows.items()})
    return {**found, **machine.buffers()}, counts(draft.programs[0])["write"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("wide_resnet", marks=pytest.mark.slow)])
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    """With dropout, tied weights and batch norm, and some of everything in DRAM and on SSD."""
    (plain, none), (found, written) = train(name, False), train(name, True)
    assert none == 0 and written > 0
    assert plain.keys() == found.keys()
    for key, value in plain.items():
        assert torch.equal(value, found[key]), key
