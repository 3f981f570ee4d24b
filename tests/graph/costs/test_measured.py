"""Costs that are remembered are those that measuring finds, and what changes a cost is measured again."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.compiler.capture.trace import trace
from penstock.graph.costs import measured
from penstock.graph.costs.block import measure
from penstock.graph.costs.measured import measure_blocks
from penstock.graph.layers import find_blocks
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.split_vocabulary import SplitVocabulary
from penstock.runtime.functions import part_statistics
from penstock.tests.passes.running import apply, chain, draft_of, trace_case
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo


class Scaled(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return 2.0 * grads[0]


class Layer(nn.Module):
    def __init__(self, own: bool = False):
        super().__init__()
        self.layers, self.own = nn.ModuleList([nn.Linear(4, 4)]), own

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        out: Tensor = (Scaled.apply(x) if self.own else torch.sin(x)).sum()
        return out


@pytest.fixture(autouse=True)
def runs() -> Iterator[mock.Mock]:
    """The measuring, which nothing is remembered of yet."""
    with mock.patch.dict(measured._KNOWN, clear=True), mock.patch.object(measured, "measure", wraps=measure) as runs:
        yield runs


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", slow_but(["in_place"], ["gpt2", "mixtral", "in_place", "wide_resnet"]))
def test_what_is_remembered_is_what_is_measured(name: str, device_kind: str, runs: mock.Mock) -> None:
    graph = trace_case(name)[0]
    measure_blocks(graph, find_blocks(graph), device_kind)
    again = trace(*zoo()[name](seed=1))
    number = runs.call_count
    for block in measure_blocks(again, find_blocks(again), device_kind):
        assert block.cost == measure(again, block, device_kind)
    assert runs.call_count == number


@pytest.mark.parametrize("own", [False, True])
def test_functions_of_the_user_are_measured_each_time(own: bool, runs: mock.Mock) -> None:
    for _ in range(2):
        graph = trace(Layer(own), torch.ones(2, 4))
        measure_blocks(graph, find_blocks(graph))
    assert runs.call_count == (2 if own else 1)


def test_what_changes_a_cost_is_measured_again(runs: mock.Mock) -> None:
    """Here the hash stays: it has neither the order of dimensions in memory nor how the step runs."""

    def look(model: nn.Module, x: Tensor, **options: object) -> None:
        graph = trace(model, x, **options)
        measure_blocks(graph, find_blocks(graph))

    look(Layer(), torch.ones(2, 4))
    look(Layer(), torch.ones(4, 2).t())
    look(Layer(), torch.ones(2, 4), autocast=torch.bfloat16)
    look(Layer(), torch.ones(2, 4), param_dtype=torch.bfloat16, input_dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        look(Layer(), torch.ones(2, 4))
    assert runs.call_count == 5
    look(Layer(), torch.ones(2, 4))
    assert runs.call_count == 5


def test_blocks_of_one_hash_are_measured_once(runs: mock.Mock) -> None:
    draft = draft_of(chain(depth=6))
    Coarsen().rewrite(draft, Coarsen().plan(draft))
    done = [call.args[1].hash for call in runs.call_args_list]
    assert len(done) == len(set(done)) == 3 < len(draft.blocks)


class Guess(nn.Module):
    """A model whose head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(320, 4)

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.table(words), self.table.weight)[0], words[0])


def test_parts_of_a_head_that_differ_in_their_classes_are_measured_once(runs: mock.Mock) -> None:
    draft = draft_of(trace(Guess(), {"words": torch.zeros(1, 29, dtype=torch.long)}))
    apply(draft, SplitVocabulary(8), Coarsen())
    heads = [block for block in draft.blocks if any(node.target is part_statistics for node in block.nodes)]
    measured_heads = [call.args[1] for call in runs.call_args_list if call.args[1].hash in {b.hash for b in heads}]
    assert len(heads) == 8 and len(measured_heads) <= 3  # the first, those between, the last
    assert [block.cost for block in heads] == [measure(draft.graph, block) for block in heads]
