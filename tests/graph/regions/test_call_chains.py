"""Chains of pointwise calls are found by their calls: what they hold, where they end, and what their backward reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.costs.block import measure
from penstock.graph.layers import find_blocks
from penstock.graph.opgraph import OpGraph
from penstock.graph.regions.call_chains import call_chains
from penstock.passes.rewrite.fuse_pointwise import FusePointwise
from penstock.tests.passes.rewrite.test_fuse_pointwise import Stack, batch_of
from penstock.tests.passes.running import apply, draft_of

WIDTH = 16


class OneLayer(nn.Module):
    """`function` between two products."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x), self.weight)).square().sum()


class InList(nn.Module):
    """The layer as one of a list, all of whose calls are the layer's."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OneLayer(function)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers[0](x)
        return loss


def chains_of(function: Any) -> list[tuple[list[str], list[str]]]:
    """Of each chain its calls, and what backward reads."""
    graph = trace(InList(function), {"x": torch.zeros(2, 3, WIDTH)})
    return [
        ([node.name for node in chain.nodes], sorted(node.name.removeprefix("layers_0_") for node in chain.needed))
        for chain in call_chains(graph, "cpu")
    ]


def rms(h: Tensor, weight: Tensor) -> Tensor:
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_norm_is_one_chain_wherever_its_epsilon_is() -> None:
    def root_first(h: Tensor, weight: Tensor) -> Tensor:
        return h / (h.square().mean(-1, keepdim=True).sqrt() + 1e-6) * (1 + weight)

    assert chains_of(rms) == [(["pow_1", "mean", "add", "rsqrt", "mul", "mul_1"], ["before", "weight"])]
    assert chains_of(root_first)[0][1] == ["before", "weight"]


@pytest.mark.parametrize(
    "function",
    [
        lambda h, w: h * 2,  # one call
        lambda h, w: torch.tanh(F.dropout(h * 2, 0.5)),  # a draw is between two calls
        lambda h, w: (h * 2).add_(1),  # written in place
        lambda h, w: h.cumsum(0) @ torch.eye(WIDTH),  # no pass over rows
        lambda h, w: (h - h.mean(0)).flip(0),  # over other dimensions
    ],
)
def test_no_chain(function: Any) -> None:
    assert chains_of(function) == []


def test_a_value_that_is_read_twice_ends_a_chain() -> None:
    def function(h: Tensor, weight: Tensor) -> Tensor:
        once = torch.sigmoid(h * weight)
        return torch.sigmoid(once * 3) @ torch.tanh(once * 2).transpose(1, 2) @ once

    found = chains_of(function)
    assert [calls for calls, _ in found] == [["mul", "sigmoid"], ["mul_1", "sigmoid_1"], ["mul_2", "tanh"]]


def test_a_chain_must_not_save_more() -> None:
    """A sigmoid saves its result; as a chain both terms of the sum would be saved."""

    def function(h: Tensor, weight: Tensor) -> Tensor:
        return torch.sigmoid(h @ torch.eye(WIDTH) + h)

    assert chains_of(function) == []


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_costs_of_fused_layers(device_kind: str) -> None:
    """A layer saves less. A kernel reads what enters it once and writes one result, where there are kernels."""
    graph = trace(Stack(1), batch_of(8))
    fused = apply(draft_of(graph), FusePointwise()).graph
    written, found = (_cost(each, device_kind) for each in (graph, fused))
    assert found.kept_bytes < written.kept_bytes
    assert (found.forward_flops, found.backward_flops) == (written.forward_flops, written.backward_flops)
    spared = sum(chain.spared_bytes for chain in call_chains(graph, "cpu"))
    if device_kind == "cuda":
        assert written.forward_traffic_bytes - found.forward_traffic_bytes == spared
        assert found.backward_traffic_bytes < written.backward_traffic_bytes and found.launches < written.launches
    else:
        assert found.forward_traffic_bytes == written.forward_traffic_bytes
        assert found.backward_traffic_bytes > written.backward_traffic_bytes  # the calls are made again


def _cost(graph: OpGraph, device_kind: str) -> Any:
    return measure(graph, next(b for b in find_blocks(graph) if b.name.startswith("layers")), device_kind)
