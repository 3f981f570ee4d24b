"""Calls that an edit writes: alike ones run once, and their values have memory of their own."""

from __future__ import annotations

import torch

from penstock.graph.edit import GraphEdit
from penstock.tests.passes.running import trace_case


def test_alike_calls_run_once_and_share_no_memory() -> None:
    graph = trace_case("mlp")[0]
    at = next(node for node in graph.nodes if node.op == "call_module")
    edit, ran = GraphEdit(graph, at), []

    def double(value: torch.Tensor, factor: float) -> torch.Tensor:
        ran.append(factor)
        return value * factor

    source = at.all_input_nodes[0]
    values = [edit.call(double, source, factor).meta["val"] for factor in (2.0, 2.0, 3.0)]
    assert ran == [2.0, 3.0]
    assert len({value.untyped_storage()._cdata for value in values}) == 3
    first, second, _ = values
    assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
    assert first.requires_grad == second.requires_grad
    views = [edit.call(torch.Tensor.view, source, source.meta["val"].shape, view_of=source) for _ in range(2)]
    assert all(v.meta["val"].untyped_storage()._cdata == source.meta["val"].untyped_storage()._cdata for v in views)
