"""The places of tokens, and the token-wise nodes: against names, and against numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.follow.tokens import TokenFacts, TokenPlace, TokenWork, sequence_lengths, token_facts
from penstock.graph.operators.states import Kind
from penstock.graph.opgraph import OpGraph
from penstock.ir.calls import call_name
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

CHANGED = 3  # the token whose operands are changed


def facts_of(model: nn.Module, batch: Any) -> tuple[OpGraph, TokenFacts]:
    graph = trace(model, batch)
    (length,) = sequence_lengths(graph)
    return graph, token_facts(graph, length)


def values_of(graph: OpGraph, batch: Any) -> dict[fx.Node, Any]:
    """The value of each node on a real batch."""
    found: dict[fx.Node, Any] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[n] = super().run_node(n)
            return found[n]

    Noting(graph.module).run(*(batch[str(n.target)] for n in graph.nodes if n.op == "placeholder"))
    return found


def tokens_of(place: TokenPlace, tensor: Tensor, length: int) -> Tensor:
    """The number of the token of each element along the place's dimension."""
    return torch.arange(tensor.shape[place.dim]) // place.inner % length


def change(tensor: Tensor, place: TokenPlace, length: int) -> Tensor:
    """The tensor with other values at one token."""
    where = (tokens_of(place, tensor, length) == CHANGED).nonzero().flatten()
    return tensor.clone().index_add_(place.dim, where, torch.ones_like(tensor.index_select(place.dim, where)))


def run(graph: OpGraph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_module":
        return graph.module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@pytest.mark.parametrize("name", slow_but(("llama",), ("llama", "gpt2", "opt", "qwen3", "bert", "roberta")))
def test_a_change_at_one_token_changes_token_wise_results_there_alone(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    graph, facts = facts_of(model, batch)
    values, checked = values_of(graph, batch), 0
    for node in graph.nodes:
        place = facts.place(node)
        floats = [a for a in node.all_input_nodes if facts.place(a) and values[a].is_floating_point()]
        if not facts.is_token_wise(node) or node.op == "placeholder" or place is None or not floats:
            continue
        other = {a: change(values[a], facts.place(a), facts.length) for a in floats}  # type: ignore[arg-type]
        with torch.no_grad():
            before, after = run(graph, node, values), run(graph, node, {**values, **other})
        same = (before == after).movedim(place.dim, 0).flatten(1).all(1)
        assert same[tokens_of(place, before, facts.length) != CHANGED].all(), node
        checked += 1
    assert checked > 20


def test_attention_and_the_loss_mix_tokens_and_layers_do_not() -> None:
    model, batch = zoo()["llama"](dropout=0.0)
    graph, facts = facts_of(model, batch)
    layer = [node for node in graph.nodes if node.meta.get("module_path", "").startswith("model.layers.0")]
    mixing = [call_name(node) for node in layer if facts.work[node] is TokenWork.MIXES]
    assert mixing == ["scaled_dot_product_attention"]
    attention = next(node for node in layer if call_name(node) == "scaled_dot_product_attention")
    assert facts.place(attention) == TokenPlace(2) and facts.met[attention][0][0] is Kind.PAIRS
    assert facts.work[graph.outputs["loss"]] is TokenWork.MIXES
    weights = [node for node in layer if node.op == "get_attr"]
    assert weights and all(facts.work[node] is TokenWork.WITHOUT for node in weights)


class Odd(nn.Module):
    """Calls that look token-wise and are not."""

    def __init__(self, call: Any):
        super().__init__()
        self.layer, self.call = nn.Linear(5, 5), call

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        found = self.call(self.layer(F.one_hot(ids, 5).float()))
        return {"loss": found.square().mean()}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.cumsum(1),
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x.softmax(1),
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones(5, 5, 3), padding=1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x @ x.transpose(1, 2),
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: x.transpose(1, 2).reshape(2, 7, 5),  # as many elements, other tokens
        lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x.sort(1).values,
        lambda x: F.pad(x, (0, 0, 1, -1)),
        lambda x: x.select_scatter(torch.ones(2, 5), 1, 0),
        lambda x: x.slice_scatter(torch.ones(2, 2, 5), 1, 0, 2),
    ],
)
def test_what_mixes_tokens_is_told(call: Any) -> None:
    ids = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(0))
    graph, facts = facts_of(Odd(call), {"ids": ids})
    layer = next(node for node in graph.nodes if node.op == "call_module")
    assert facts.is_token_wise(layer)
    between = graph.nodes[graph.nodes.index(layer) + 1 : graph.nodes.index(graph.outputs["loss"]) - 1]
    assert any(facts.work[node] is TokenWork.MIXES for node in between), [facts.work[node] for node in between]


def test_rows_and_tokens_may_share_a_dimension() -> None:
    ids = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(0))
    graph, facts = facts_of(Odd(lambda x: x.reshape(14, 5).relu()), {"ids": ids})
    node = next(node for node in graph.nodes if call_name(node) == "relu")
    place = facts.place(node)
    assert place == TokenPlace(0) and not place.is_plain(node.meta["val"].shape, 7)
