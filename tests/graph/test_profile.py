"""The blocks to time, and the use of the times: samples, seconds of blocks, stages and ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.compiler.capture.trace import trace
from penstock.graph.blocks import Block
from penstock.graph.costs.stage_time import block_seconds
from penstock.graph.layers import find_blocks
from penstock.graph.opgraph import OpGraph
from penstock.graph.profile import check_seconds, distinct, samples, with_seconds
from penstock.graph.stages import build_stages
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir import ops
from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import work_of
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import all_passes, apply, draft_of, trace_case
from penstock.tests.shown_elsewhere import slow_rows_but
from penstock.tests.zoo import token_batch, zoo

SECONDS = TurnSeconds(0.001, 0.002, 0.003)


def blocks_of(graph: OpGraph) -> list[Block]:
    return apply(draft_of(graph), Coarsen()).blocks


def test_one_sample_per_hash_and_shared_tensors_enter_it() -> None:
    graph, _ = trace_case("gpt2")
    blocks = blocks_of(graph)
    first = distinct(blocks)
    assert len(first) == len(blocks) - 1
    found = samples(graph, blocks, first)
    assert [sample.hash for sample in found] == list(first)
    assert [sample.stage.blocks for sample in found] == [(block.name,) for block in first.values()]
    (mine,) = samples(graph, blocks, [blocks[2].hash])
    assert mine.stage.blocks == ("transformer.h.0",)
    (usual,) = [stage for stage in build_stages(graph, blocks, [[b.name] for b in blocks]) if "h.0" in stage.blocks[0]]
    assert len(mine.stage.spec.inputs) == len(blocks[2].inputs) == 2  # the hidden state, and the mask as a tensor
    assert len(list(mine.stage.graph.graph.nodes)) < len(list(usual.graph.graph.nodes))
    assert mine.stage.spec.params == usual.spec.params
    assert mine.stage.spec.forward_flops == usual.spec.forward_flops


def test_indices_know_how_many_rows_they_may_index() -> None:
    graph, _ = trace_case("gpt2")
    blocks = blocks_of(graph)
    rows = {sample.stage.blocks[0]: list(sample.rows.values()) for sample in samples(graph, blocks, distinct(blocks))}
    config = graph.model.config
    assert rows["transformer.wte"] == [config.vocab_size]
    assert rows["transformer.wpe"] == [config.n_positions]
    assert rows["lm_head"] == [config.vocab_size]  # of the labels, shifted and flattened before the loss
    assert rows["transformer.h.0"] == rows["transformer.ln_f"] == []


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(7, 4), nn.Linear(4, 3), nn.CrossEntropyLoss()

    def forward(self, kinds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(torch.relu(self.table(kinds.view(-1)))), labels)


def test_indices_of_leaf_modules() -> None:
    batch = {"kinds": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(6, dtype=torch.long)}
    graph = trace(Classes(), batch)
    blocks = find_blocks(graph)
    found = [list(sample.rows.values()) for sample in samples(graph, blocks, distinct(blocks))]
    assert found == [[7], [3]]


@pytest.mark.parametrize(("b", "s"), slow_rows_but([(2, 8)], [(3, 12), (2, 8)]))
def test_hashes_tell_shapes_apart(b: int, s: int) -> None:
    model, _ = zoo()["gpt2"](dropout=0.0)
    usual, other = (find_blocks(trace(model, token_batch(*sizes))) for sizes in ((2, 12), (b, s)))
    assert [x.name for x in usual] == [x.name for x in other]
    same = {x.name for x, y in zip(usual, other) if x.hash == y.hash}
    assert same <= {"transformer.wpe"}  # one row of positions, whatever the batch
    assert s == 12 or not same


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, None])
def test_what_is_no_time_is_refused_by_name(value: Any) -> None:
    blocks = blocks_of(trace_case("mlp")[0])
    entries = {block.hash: SECONDS for block in blocks}
    wrong = {**entries, blocks[0].hash: replace(SECONDS, backward_s=value)}
    with pytest.raises(PlanError, match=rf"backward_s of block '{blocks[0].name}' \({blocks[0].hash}\) on gpu7 is"):
        with_seconds(blocks, {"gpu7": wrong})
    assert check_seconds(SECONDS, "x") is SECONDS


def test_a_missing_entry_is_refused_by_name() -> None:
    blocks = blocks_of(trace_case("mlp")[0])
    entries = {block.hash: SECONDS for block in blocks[1:] if block.hash != blocks[0].hash}
    with pytest.raises(PlanError, match=f"no entry for block '{blocks[0].name}'.* on gpu7"):
        with_seconds(blocks, {"gpu7": entries})


def constant(seconds: TurnSeconds) -> Any:
    """A profiler that measures nothing."""

    def profile(graph: OpGraph, blocks: list[Block], hardware: Hardware) -> list[Block]:
        entries = {block.hash: seconds for block in blocks}
        return with_seconds(blocks, {device.name: entries for device in hardware.devices})

    return profile


def test_seconds_reach_passes_stages_ops_and_the_simulator() -> None:
    graph, _ = trace_case("gpt2")
    hardware = Hardware.cpu(num_devices=1, memory="1GB")
    draft = draft_of(graph, hardware, profiler=constant(SECONDS))
    Coarsen().rewrite(draft, Coarsen().plan(draft))
    assert draft.notes["coarsen"] == f"times of blocks were measured on {hardware.devices[0].name}"
    block, device = draft.blocks[0], hardware.devices[0]
    assert block_seconds(block, device, "fp32") == SECONDS
    assert block_seconds(block, device, "fp32").long_backward_s == SECONDS.backward_s + SECONDS.rematerialise_s
    apply(draft, *all_passes()[1:])
    (program,) = draft.programs
    count = len(draft.blocks)
    for op, seconds in ((ops.forward, SECONDS.rematerialise_s), (ops.backward, SECONDS.backward_s)):
        found = [work_of(program, node).seconds for node in program.ops() if node.target is op]
        assert found == [((device.name, pytest.approx(count * seconds)),)]
    slower = draft_of(graph, hardware, profiler=constant(TurnSeconds(0.001, 0.002, 0.013)))
    Coarsen().rewrite(slower, Coarsen().plan(slower))
    apply(slower, *all_passes()[1:])
    more_s = simulate(slower.programs, hardware, precision="fp32").step_s
    assert more_s == pytest.approx(simulate(draft.programs, hardware, precision="fp32").step_s + count * 0.01)


def test_rematerialising_takes_a_forward_without_and_one_with_what_backward_needs() -> None:
    graph, _ = trace_case("gpt2")
    hardware = Hardware.cpu(num_devices=1, memory="250kB")  # too little for all stages: weights are fetched
    draft = draft_of(graph, hardware, profiler=constant(SECONDS))
    Coarsen().rewrite(draft, Coarsen().plan(draft))
    apply(draft, *all_passes(stages=len(draft.blocks))[1:])
    (program,) = draft.programs
    again = [node for node in program.ops() if node.target is ops.forward and node.kwargs.get("keep") is False]
    assert again
    assert {work_of(program, node).seconds for node in again} == {(("cpu0", SECONDS.forward_s),)}
    backwards = [node for node in program.ops() if node.target is ops.backward and node.args[2] is None]
    assert len(backwards) == len(again)
    both = (("cpu0", SECONDS.rematerialise_s + SECONDS.backward_s),)
    assert {work_of(program, node).seconds for node in backwards} == {both}
