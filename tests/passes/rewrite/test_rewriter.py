"""Graphs that passes made are made once for machines that come to the same decisions, and anew where these differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.search.candidate import PLAIN
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.graph.edit import copy_graph
from penstock.graph.layers import find_blocks
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.tests.passes.running import traced_model


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return nn.functional.cross_entropy(self.head(h * torch.sigmoid(h * 2) + h), labels)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    batch = {"x": torch.zeros(4096, 8), "labels": torch.zeros(4096, dtype=torch.int64)}
    return traced_model(Head(), [batch])[0]


def lane(graph: OpGraph, memory: str, candidate: object = PLAIN) -> Draft:
    return CandidateCompiler(graph, Hardware.cpu(1, memory=memory), Options()).lane(candidate)  # type: ignore[arg-type]


def test_a_larger_memory_finds_the_blocks_of_the_smaller_one(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for kind in (Coarsen, ChunkLoss):
        own = kind.rewrite
        monkeypatch.setattr(kind, "rewrite", lambda self, *a, own=own: (runs.append(self.name), own(self, *a))[1])
    first, second = lane(graph, "4GB"), lane(graph, "8GB")
    assert second.blocks is first.blocks and second.graph is first.graph and second.notes == first.notes
    assert runs.count("coarsen") == 1
    small = lane(graph, "20MB")
    assert small.graph is not first.graph and "chunk-loss" in small.notes and "chunk-loss" not in first.notes
    assert runs.count("coarsen") == 2 and runs.count("chunk-loss") == 2


def test_blocks_of_one_form_of_a_graph_are_not_those_of_another(graph: OpGraph) -> None:
    """`recompute-pointwise` changes no node, but what a block keeps."""
    plain = lane(graph, "4GB")
    again = lane(graph, "4GB", PLAIN.with_graph_passes(*PLAIN.graph_passes, RecomputePointwise()))
    assert [block.hash for block in again.blocks] == [block.hash for block in find_blocks(again.graph)]
    assert {block.hash for block in again.blocks}.isdisjoint(block.hash for block in plain.blocks)


def test_what_is_found_in_a_graph_is_looked_for_once(graph: OpGraph) -> None:
    looked: list[OpGraph] = []
    find = lambda of: (looked.append(of), len(of.nodes))[1]  # noqa: E731
    again = dataclasses.replace(graph, pointwise_again=True)  # of the same nodes
    assert graph.once(find) == again.once(find) == len(graph.nodes) and looked == [graph]
    copy = copy_graph(graph)
    assert copy.once(find) == len(graph.nodes) and looked == [graph, copy]
    copy.rebuild()
    copy.once(find)
    assert looked == [graph, copy, copy]


def test_measured_times_are_of_their_machine(graph: OpGraph) -> None:
    """A profiler may say other times for each machine."""
    asked: list[penstock.Hardware] = []

    def profiler(of: OpGraph, blocks: list, machine: Hardware) -> list:
        asked.append(machine)
        return [block.with_cost(block.cost) for block in blocks]

    for memory in ("4GB", "8GB"):
        options = Options(profiler=profiler)
        found = CandidateCompiler(graph, Hardware.cpu(1, memory=memory), options).lane(PLAIN)
        assert found.blocks
    assert len(asked) == 2
