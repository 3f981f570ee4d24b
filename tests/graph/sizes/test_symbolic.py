"""Costs of stages as expressions of sizes, against costs measured on static graphs of other sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import OpGraph
from penstock.graph.sizes.named import substitute_sizes, symbol
from penstock.graph.sizes.symbolic import SUMS, StageExpressions
from penstock.ir.program import SizeRange, Sizes, StageSpec
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.usual_dims import usual_dims
from penstock.tests.zoo import gpt2, token_batch, zoo

B, S = symbol("b"), symbol("s")
RANGES = {"b": SizeRange(1, 4), "s": SizeRange(4, 40)}
TRACED = (3, 12)


def batch_of(name: str, b: int, s: int) -> dict[str, Tensor]:
    batch = token_batch(b, s)
    return {**batch, "labels": torch.zeros(b, dtype=torch.long)} if name == "bert" else batch


def stages_of(graph: OpGraph) -> Mapping[str, StageSpec]:
    draft = apply(draft_of(graph), Coarsen(), PartitionBalanced(stages=2))
    return {stage.spec.name: stage.spec for stage in draft.stages}


@functools.cache
def expressions(name: str) -> tuple[nn.Module, StageExpressions]:
    model, _ = gpt2(dropout=0.0, num_layers=1) if name == "gpt2" else zoo()[name](dropout=0.0)
    batch = batch_of(name, *TRACED)
    graph = trace(model, batch, dynamic=usual_dims(batch))
    ranges = {name: of for name, of in RANGES.items() if name in graph.symbols}

    def stages_at(sizes: Sizes) -> Mapping[str, StageSpec]:
        return stages_of(substitute_sizes(graph, sizes, ranges))

    return model, StageExpressions(stages_at, ranges, rows="b")


@pytest.mark.parametrize("sizes", [(3, 8), (2, 32)])
@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_expressions_give_what_a_static_graph_measures(name: str, sizes: tuple[int, int]) -> None:
    model, found = expressions(name)
    assert found.is_exact
    static, made = stages_of(trace(model, batch_of(name, *sizes))), found.evaluate(dict(zip("bs", sizes)))
    for stage, spec in static.items():
        for cost in SUMS:  # a trace with symbols copies, or does not copy, small tensors (labels, a mask's single row)
            assert getattr(made[stage], cost) == pytest.approx(getattr(spec, cost), rel=0.05), cost
        assert made[stage].forward_flops == spec.forward_flops and made[stage].backward_flops == spec.backward_flops
        shapes = [[row.shape for row in (*of.inputs, *of.outputs)] for of in (made[stage], spec)]
        assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_attention_is_quadratic_in_the_sequence_and_all_is_linear_in_the_batch() -> None:
    width, layers = 32, 1
    (of_first,), (of_last,) = (expressions("gpt2")[1].costs[stage]["forward_flops"] for stage in ("stage0", "stage1"))
    flops = of_first + of_last
    assert flops.coeff(B * S**2) == layers * 4 * width  # scores, and their product with the values
    assert flops.coeff(B * S) == layers * 2 * 12 * width**2 + 2 * width * 96  # and the head
    assert flops.as_poly(B, S).degree(B) == 1


class Cubic(nn.Module):
    """Every step of this model squares the sequence once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h.unsqueeze(1) + h.unsqueeze(2)
        return self.outer(h.unsqueeze(1) + h.unsqueeze(2)).sum()


@pytest.mark.slow
def test_what_is_no_such_polynomial_is_measured_at_the_sizes_that_are_asked_for() -> None:
    x = {"x": torch.zeros(2, 6, 4)}
    graph = trace(Cubic(), x, dynamic=usual_dims(x))
    asked: list[Sizes] = []

    def stages_at(sizes: Sizes) -> Mapping[str, StageSpec]:
        asked.append(sizes)
        return stages_of(substitute_sizes(graph, sizes, RANGES))

    found = StageExpressions(stages_at, RANGES, rows="b")
    assert not found.is_exact
    wanted = {"b": 2, "s": 9}
    assert found.evaluate(wanted)["stage0"] == stages_of(substitute_sizes(graph, wanted, RANGES))["stage0"]
    assert asked[-1] == wanted
