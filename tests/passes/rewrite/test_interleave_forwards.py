"""`interleave-forwards`: the same step with each part of the model in one place; a model called once stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.errors import PassError
from penstock.graph.opgraph import OpGraph
from penstock.passes.draft import Draft
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.interleave_forwards import InterleaveForwards
from penstock.tests.passes.running import Residual, apply, draft_of, trace_case
from penstock.tests.preference_case import adapt, pairs
from penstock.tests.zoo import zoo

WIDTH = 8


class Towers(nn.Module):
    """One stack for two inputs, with what must keep its order: statistics, a counter, an inner autocast, no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.calls.add_(1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[0].down(self.layers[0].up(x)).float() * self.calls.clone()
        return self.norm(x)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        a = self.run(left)
        with torch.no_grad():
            b = self.run(right)
        scaled = torch.zeros_like(a)
        scaled.copy_(a)
        scaled.mul_(2.0)
        return {"loss": (scaled - b).square().mean(), "distance": (a - b).abs().sum()}


class Twice(nn.Module):
    """Applies its layers again to their own result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


def interleaved(graph: OpGraph) -> Draft:
    draft = draft_of(graph)
    assert InterleaveForwards().plan(draft)
    return apply(draft, InterleaveForwards(), Coarsen())


def run(graph: OpGraph, module: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and gradients of the graph on its model, whose buffers end as they began."""
    model = graph.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    found = module(**batch)
    found["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return {name: value.detach() for name, value in found.items()}, gradients


def assert_same_step(before: OpGraph, after: OpGraph, batch: dict[str, Tensor]) -> None:
    """Bit for bit: one forward has gradients, so that the order of additions is the same."""
    for found, want in zip(run(after, after.module, batch), run(before, before.module, batch), strict=True):
        assert set(found) == set(want)
        assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_policy_and_its_reference(kind: str) -> None:
    graph = trace(penstock.DPO(adapt(kind, num_layers=4)), pairs())
    draft = interleaved(graph)
    assert_same_step(graph, draft.graph, pairs())
    assert len(draft.graph.nodes) >= len(graph.nodes)  # switches apart, all of them are there
    homes: dict[str, set[str]] = {}
    for block in draft.blocks:
        for node in block.nodes:
            users = node.users if node.op == "get_attr" else [node]
            for name in draft.graph.node_parameters(node):
                homes.setdefault(name, set()).update(b.name for b in draft.blocks if set(users) & set(b.nodes))
    tied = {"wte.weight", "lm_head.weight"} if kind == "gpt2" else set()
    assert all(len(found) == 1 for name, found in homes.items() if not any(name.endswith(t) for t in tied))
    assert [block.name for block in draft.blocks if "#" in block.name] == []
    layers = [block for block in draft.blocks if block.name[-1].isdigit()]
    assert len({block.hash for block in layers[1:-1]}) == 1, "equal layers are still printed as one class"


def test_writes_and_modes_keep_their_order() -> None:
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(4, WIDTH, generator=draw) for name in ("left", "right")}
    torch.manual_seed(0)
    model = Towers().train()
    graph = trace(model, batch)
    draft = interleaved(graph)
    found, want = run(draft.graph, draft.graph.module, batch), run(graph, graph.module, batch)
    eager = copy.deepcopy(model)
    assert torch.equal(want[0]["loss"], eager(**batch)["loss"]) and float(eager.calls) == 2.0
    for a, b in zip(found, want, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    order = [node.meta["module_path"] for node in draft.graph.nodes if node.op == "call_module"]
    assert order.index("layers.1.norm") > max(i for i, path in enumerate(order) if path == "layers.0.norm")


@pytest.mark.slow
def test_draws_keep_their_numbers() -> None:
    graph = trace(penstock.DPO(adapt("gpt2", dropout=0.2)), pairs())

    def draw_examples(of: OpGraph) -> dict[str, tuple[str, int]]:
        return {n.name: (n.meta["module_path"], n.meta["draw"]) for n in of.nodes if n.meta.get("random")}

    assert len(draw_examples(graph)) > 10 and draw_examples(interleaved(graph).graph) == draw_examples(graph)


@pytest.mark.parametrize("name", [name for name in zoo() if name in ("gpt2", "t5", "bert", "llama", "mixtral", "vit")])
def test_models_that_are_called_once_stay_as_they_are(name: str) -> None:
    graph, _ = trace_case(name)
    draft = draft_of(graph)
    assert not InterleaveForwards().plan(draft)
    assert apply(draft, InterleaveForwards()).graph is graph


def test_layers_that_are_applied_again_stay_as_they_are() -> None:
    draft = draft_of(trace(Twice(), {"x": torch.randn(2, WIDTH)}))
    assert not InterleaveForwards().plan(draft)
    assert "layers.0#2" in [block.name for block in apply(draft, Coarsen()).blocks]
    with pytest.raises(PassError, match="interleaved is true"):
        InterleaveForwards().rewrite(draft, True)


def test_layers_that_are_applied_again_in_two_forwards() -> None:
    """Each application of the reference stands with that of the policy."""

    class Pair(Twice):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            with torch.no_grad():
                near = super().forward(y)
            return F.relu(super().forward(x) - near)

    graph = trace(Pair(), {"x": torch.randn(2, WIDTH), "y": torch.randn(2, WIDTH)})
    draft = interleaved(graph)
    names = [block.name for block in draft.blocks]
    assert names == ["layers.0", "layers.1", "layers.2", "layers.0#2", "layers.1#2", "layers.2#2"]


def test_parameters_of_the_model_itself() -> None:
    """The end of one forward is not taken for the begin of the next, with which it is recorded in one run."""

    class Scaled(Twice):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def run(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for layer in self.layers:
                x = layer(x)
            return x + self.shift

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            far = self.run(x)
            with torch.no_grad():
                near = self.run(y)
            return {"loss": (far - near).square().mean()}

    batch = {"x": torch.randn(2, WIDTH), "y": torch.randn(2, WIDTH)}
    graph = trace(Scaled(), batch)
    draft = interleaved(graph)
    assert [block.name for block in draft.blocks] == ["model", "layers.0", "layers.1", "layers.2", "model#2"]
    assert_same_step(graph, draft.graph, batch)
