"""One trace for any number of rows gives, node for node, what a trace of each number gives; what Python makes of a
number of rows is found out."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from zoo import zoo

import penstock
from penstock.compiler import graphs
from penstock.compiler.capture.rows.sizes import OtherTrace
from penstock.compiler.capture.trace import trace
from penstock.compiler.graphs import Graphs
from penstock.compiler.request import Request
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import CaptureError
from penstock.tests.shown_elsewhere import slow_but

FAMILIES = ["gpt2", "llama", "mixtral", "bert", "vit", "wide_resnet", "in_place", "lstm", "encoder"]
META = ("val", "alias_of", "mutates", "source", "module_path", "module_call", "random", "draw", "no_grad", "autocast")


def show(graph: OpGraph) -> list[tuple]:
    """All that passes read of a graph."""
    rows = []
    for node in graph.nodes:
        meta = [str(node.meta.get(key)) for key in (*META, "updates_buffers", "eval_args", "eval_kwargs")]
        rows.append((node.op, str(node.target), node.name, repr(node.args), repr(node.kwargs), *meta))
    return rows


class Body(nn.Module):
    """A linear layer around what a test does with its rows."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.between = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.layer(x)).float().mean()


def at(model: nn.Module, rows: int, other: int) -> tuple[OpGraph, Callable[[], OpGraph]]:
    def batch(number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(number, 6)}

    found = trace(model, batch(rows), any_rows=True)
    assert show(found) == show(trace(model, batch(rows)))
    assert found.at_inputs is not None
    at_inputs = found.at_inputs
    return trace(model, batch(other)), lambda: at_inputs(batch(other))


@pytest.mark.parametrize("name", slow_but(["in_place", "lstm"], FAMILIES))
def test_other_rows_are_what_a_trace_of_them_gives(name: str) -> None:
    model, batch = zoo()[name]()
    one = {key: value[:1] for key, value in batch.items()}
    found = trace(model, batch, any_rows=True)
    assert found.at_inputs is not None
    assert show(found) == show(trace(model, batch))
    assert show(found.at_inputs(one)) == show(trace(model, one))


def write_into(empty: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As DeepSeek puts keys together: what is empty needs a gradient only after the write."""
    empty[..., :6].copy_(x)
    empty[..., 6:].copy_(x[:, :3])
    return empty


def view_in_place(x: torch.Tensor) -> torch.Tensor:
    """The sizes are those of the moment, and a part of a call's results may change its shape, too."""
    y, rows = x.detach() * 2, x.shape[0]
    ones, width = torch.zeros(y.size()), y.size(1)
    y.unsqueeze_(1).add_(width)
    more, part = torch.ones(y.size()), y.chunk(2, -1)[0]
    part.transpose_(0, 2)
    return x + y.squeeze_(1) + ones + more.squeeze_(1) + part.size(2) / rows


FOLLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(x.shape[0], 2, -1),
    "all of the shape": lambda x: torch.zeros(x.shape) + torch.ones(*x.size()),
    "part of the shape": lambda x: x.reshape(x.shape[:1] + (3, 2)),
    "arithmetic": lambda x: x.repeat(2, 1).view(2 * x.shape[0] // 4, -1) + x.size(0) % 3,
    "a number": lambda x: x.sum() / x.shape[0] + 1 / x.shape[0] + 0.5 * len(x.shape) * x.shape[0] + x.shape[0] ** 2,
    "product": lambda x: x.reshape(math.prod(x.shape)) * (1 / math.prod(x.shape[:1])),
    "indices": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)][: x.shape[0] // 2],
    "elements": lambda x: x.view(x.numel() // 3, 3) + torch.full((x.nelement() // 3, 3), 2.0),
    "mask": lambda x: x.new_ones(x.size(0), x.size(0)).tril() @ x,
    "same branch": lambda x: x if x.shape[0] > 1 and isinstance(x.shape[0], int) and x.shape[1] == 6 else x + 1,
    "whole or not": lambda x: x + x.shape[0] * 1 + torch.full((x.shape[0] * 2 // 2, 6), x.shape[0] * 1.0),
    "pad": lambda x: nn.functional.pad(x, (0, 0, 0, 8 - x.shape[0])),
    "in place": lambda x: x.clone().add_(x.shape[0]).mul_(torch.ones(x.shape[0], 1)),
    "view in place": view_in_place,
    "written into": lambda x: write_into(x.new_empty(*x.shape[:-1], 9), x),
    "stride": lambda x: x.as_strided((x.shape[0], 3), (x.stride(0), 2)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_numbers_are_followed(name: str) -> None:
    alone, other = at(Body(FOLLOWED[name]), 4, 2)
    assert show(other()) == show(alone)


class Cache(dict):
    def __missing__(self, key: Any) -> float:
        return float(key)


@functools.cache
def half(number: int) -> int:
    return number // 2


BAKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "branch": lambda x: x * 2 if x.shape[0] > 3 else x,
    "equality": lambda x: x * 2 if x.shape == (4, 6) else x,
    "loop": lambda x: sum((x * i for i in range(x.shape[0])), x),
    "list": lambda x: x + len([0] * x.shape[0]),
    "length": lambda x: x + len(x),
    "int": lambda x: x * int(x.shape[0]),
    "float": lambda x: x * math.sqrt(x.shape[0]),
    "text": lambda x: x * float(f"{x.shape[0]}"),
    "key": lambda x: x * Cache()[x.shape[0]],
    "cache": lambda x: x * half(x.shape[0]),
    "largest": lambda x: x * max(x.shape[0], 3),
    "numpy": lambda x: x * float(np.asarray(x.shape[0]).item()),
    "rows": lambda x: sum(row for row in x),
    "unpacked": lambda x: torch.stack(x.unbind()[1:]),
    "function": lambda x: x * torch.numel(x),
    "size's own": lambda x: x * x.shape.numel(),
    "split": lambda x: sum(x.split(1)),
    "values": lambda x: x * torch.arange(x.shape[0]).sum().item(),
    "bits": lambda x: x * (x.shape[0] & 4),
    "text of a tensor": lambda x: x * len(repr(x).split("4")),
}


@pytest.mark.parametrize("name", BAKED)
def test_what_python_reads_of_rows_is_found_out(name: str) -> None:
    """Either the trace that follows sizes is refused, or the graph of other rows is, or it is what they give."""
    model = Body(BAKED[name])
    try:
        alone, other = at(model, 4, 2)
        assert show(other()) == show(alone)
    except CaptureError as error:
        assert isinstance(error, OtherTrace) or "failed" in str(error) or "value" in str(error)


@pytest.mark.parametrize("name", ["branch", "equality", "loop", "int", "length"])
def test_the_line_that_branches_is_named(name: str) -> None:
    _, other = at(Body(BAKED[name]), 4, 2)
    with pytest.raises(OtherTrace, match=rf"test_row_sizes.py:\d+: \"{name}\""):
        other()


def test_a_rank_that_follows_rows_is_found_out() -> None:
    _, other = at(Body(lambda x: x.unsqueeze(0).squeeze() @ torch.ones(6)), 4, 1)
    with pytest.raises(OtherTrace):
        other()


def test_evaluation_that_reads_rows_otherwise_is_found_out() -> None:
    class Evaluates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0] if self.training else 4
            return (self.layer(x) * rows).mean()

    _, other = at(Evaluates(), 4, 2)
    with pytest.raises(OtherTrace, match="evaluation"):
        other()


@pytest.mark.parametrize("training", slow_but([False], [True, False]))
def test_code_that_asks_for_the_type_of_a_size_is_traced_alone(training: bool) -> None:
    """A followed number is no int by type: what depends on that is found out by a forward with plain numbers."""

    class AsksForType(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            plain = self.training != training or type(x.shape[0]) is int
            return torch.mul(self.layer(x), 2 if plain else 3).mean()

    batch = {"x": torch.zeros(4, 6)}
    with pytest.raises(CaptureError, match="mul"):
        trace(AsksForType(), batch, any_rows=True)
    job = penstock.compile(AsksForType(), penstock.Hardware.cpu(1), example_inputs=batch)  # for any number of rows
    (product,) = re.findall(r"torch\.mul\(.*\)", job.code())
    assert ", 2)" in product and ", 3)" not in product


def test_a_tensor_that_evaluation_alone_makes_wants_another_trace() -> None:
    """As nn.TransformerEncoder asks there whether its mask is one of padding."""

    class Asks(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            if not self.training:
                (h > 0).logical_not()
            return h.mean()

    found = trace(Asks(torch.sin), {"x": torch.zeros(4, 6)}, any_rows=True)
    assert found.at_inputs is not None
    with pytest.raises(OtherTrace, match="something else for other rows"):
        found.at_inputs({"x": torch.zeros(3, 6)})


def test_the_model_is_left_as_it_was() -> None:
    model, batch = zoo()["bert"]()
    before = {id(module): dict(module.__dict__) for module in model.modules()}
    found = trace(model, batch, any_rows=True)
    assert found.at_inputs is not None
    found.at_inputs({key: value[:1] for key, value in batch.items()})
    assert all(module.__dict__ == before[id(module)] for module in model.modules())
    assert torch.is_grad_enabled() and not any(p.is_meta for p in model.parameters())


def graphs_of(model: nn.Module, micro_batches: int | str) -> Graphs:
    """The graphs of a batch of eight rows, as `compile` asks for them."""
    wishes = {name: parameter.default for name, parameter in inspect.signature(penstock.compile).parameters.items()}
    wishes |= {"model": model, "hardware": penstock.Hardware.cpu(1), "micro_batches": micro_batches}
    return Graphs(Request(**wishes | {"example_inputs": {"x": torch.zeros(8, 6)}}).settle())


def test_a_model_that_branches_is_traced_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []  # for each trace, whether sizes were followed
    trace_loss = graphs.trace_loss

    def record(*arguments: Any, **options: Any) -> OpGraph:
        followed.append(options["any_rows"])
        return trace_loss(*arguments, **options)

    model = Body(BAKED["branch"])
    alone = {number: graphs_of(model, number)(number) for number in (1, 2, 4)}
    monkeypatch.setattr(graphs, "trace_loss", record)
    graph_of = graphs_of(model, "auto")
    for number, graph in alone.items():
        assert show(graph_of(number)) == show(graph)
    assert followed == [True, False]  # 4 rows take the branch of 8


def test_no_followed_number_outlives_the_trace() -> None:
    half.cache_clear()
    with pytest.raises(CaptureError, match="unhashable"):
        trace(Body(BAKED["cache"]), {"x": torch.zeros(4, 6)}, any_rows=True)
    assert half.cache_info().currsize == 0
