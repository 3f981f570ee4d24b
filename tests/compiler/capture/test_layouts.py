"""Values are captured in the layout that they have in a run: stages are told to lay out their inputs so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from penstock.compiler.capture.trace import trace
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo


class Layouts(fx.Interpreter):
    """Runs a graph, and notes each tensor's strides, captured and now."""

    def __init__(self, module: torch.nn.Module, graph: fx.Graph):
        super().__init__(module, graph=graph)
        self.captured: dict[str, tuple[int, ...]] = {}
        self.found: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result, captured = super().run_node(n), n.meta.get("val")
        if isinstance(result, torch.Tensor) and isinstance(captured, torch.Tensor):
            self.captured[n.name], self.found[n.name] = captured.stride(), result.stride()
        return result


@pytest.mark.parametrize(
    "name", slow_but(("gpt2", "lstm", "encoder"), ["gpt2", "llama", "t5", "vit", "wide_resnet", "lstm", "encoder"])
)
def test_captured_strides_are_those_of_a_run(name: str) -> None:
    model, batch = zoo()[name](dropout=0.1)
    graph = trace(model.train(), batch)
    layouts = Layouts(graph.module, graph.module.graph)
    layouts.run(*(batch[name] for name in graph.inputs))
    assert layouts.captured and layouts.captured == layouts.found
