"""Expressions and literals as text: what is read back is what was meant."""

from __future__ import annotations

import enum
import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from penstock.codegen.expressions import INFIX, PREFIX, Expressions, Text, literal, same
from penstock.codegen.imports import Imports
from penstock.ir.errors import CaptureError


def printer(names: dict[fx.Node, Text]) -> Expressions:
    def name(node: fx.Node) -> Text:
        return names[node] if node in names else printed.node(node)

    printed = Expressions(Imports(), "", name, lambda: "x.device")
    return printed


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 10**20, 0.1, -2.5, 1e-300, -0.0, float("inf"), float("-inf"), 3 + 4j, "", "a b", 'say "x"',
        "back\\slash", "new\nline", ..., torch.bfloat16, torch.strided, torch.channels_last, range(2, 9, 3), b"raw",
        torch.Size([2, 3]), torch.finfo(torch.float32).min, torch.finfo(torch.float16).min,
    ],
)  # fmt: skip
def test_literals_are_read_back(value: Any) -> None:
    found = eval(literal(value).text, {"torch": torch})
    assert type(found) is type(value)
    assert found == value
    assert not isinstance(value, float) or math.copysign(1, found) == math.copysign(1, value)


def test_nan_is_read_back() -> None:
    assert math.isnan(eval(literal(float("nan")).text))


@given(st.floats(allow_nan=False))
def test_floats_are_exact(value: float) -> None:
    assert eval(literal(value).text, {"torch": torch}) == value


@pytest.mark.parametrize("value", [object(), torch.Generator(), lambda: 0])
def test_what_has_no_literal_is_refused(value: Any) -> None:
    with pytest.raises(CaptureError, match="cannot be written into a generated file"):
        literal(value)


@pytest.mark.parametrize(
    "value",
    [(), (1,), [1, (2.0, None)], {"a": [1], 3: slice(1, None, -2)}, {2, 1}, frozenset([4]), (slice(None), [[]])],
)
def test_nests_are_read_back(value: Any) -> None:
    assert eval(printer({}).value(value).text) == value


@pytest.mark.parametrize(
    "index", [0, -1, slice(None), slice(1, None), slice(None, -1, 2), (0, ...), (slice(None), None), (3,), [0, 1], ()]
)
def test_subscriptions(index: Any) -> None:
    class Asked:
        def __getitem__(self, key: Any) -> Any:
            return key

    assert eval(f"x[{printer({}).index(index)}]", {"x": Asked()}) == index


class Colour(enum.Enum):
    RED = "red"


def test_enum_members_are_imported() -> None:
    assert printer({}).value(Colour.RED).text == "Colour.RED"


# --- operators ------------------------------------------------------------------------------------------------------

NUMBERS = [op for op in INFIX if op not in (operator.matmul, operator.pow, operator.lshift, operator.rshift)]


@st.composite
def number_graphs(draw: st.DrawFn) -> tuple[fx.Graph, list[int]]:
    """An expression over two small integers, every node read by one other, with literals in between."""
    graph = fx.Graph()
    open_nodes: list[Any] = [graph.placeholder("a"), graph.placeholder("b")]
    for _ in range(draw(st.integers(1, 7))):
        target = draw(st.sampled_from([*NUMBERS, *PREFIX, operator.pow]))
        left = draw(st.sampled_from(open_nodes))
        if target in PREFIX:
            args = (left,)
        elif target is operator.pow:
            args = (left, draw(st.integers(0, 2)))
        else:
            right = draw(st.one_of(st.sampled_from(open_nodes), st.integers(-3, 3)))
            args = (left, right) if draw(st.booleans()) else (right, left)
        open_nodes.append(graph.call_function(target, args))
    graph.output(open_nodes[-1])
    return graph, [draw(st.integers(-5, 5)), draw(st.integers(-5, 5))]


@settings(max_examples=300, deadline=None)
@given(number_graphs())
def test_nested_operators_keep_their_meaning(case: tuple[fx.Graph, list[int]]) -> None:
    graph, values = case
    a, b = (node for node in graph.nodes if node.op == "placeholder")
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    text = printer({a: Text("a"), b: Text("b")}).node(result).text if result not in (a, b) else result.name
    graph.eliminate_dead_code()
    outcomes = []
    for compute in (
        lambda: fx.Interpreter(torch.nn.Module(), graph=graph).run(*values),
        lambda: eval(text, {"a": values[0], "b": values[1]}),
    ):
        try:
            outcomes.append(compute())
        except (ZeroDivisionError, TypeError, OverflowError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert type(outcomes[0]) is type(outcomes[1])


# --- calls ----------------------------------------------------------------------------------------------------------


def text_of(target: Any, *args: Any, method: bool = False, evaluation: Any = None, **kwargs: Any) -> str:
    graph = fx.Graph()
    x = graph.placeholder("x")
    place = {"x": x}
    given_args = tuple(place.get(a, a) if isinstance(a, str) else a for a in args)
    node = graph.call_method(target, given_args, kwargs) if method else graph.call_function(target, given_args, kwargs)
    if evaluation is not None:
        node.meta["eval_args"], node.meta["eval_kwargs"] = (given_args[0], *evaluation[0]), evaluation[1]
    return printer({x: Text("x")}).node(node).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_of(torch.relu, "x"), "torch.relu(x)"),
        (text_of(F.gelu, "x", approximate="tanh"), 'F.gelu(x, approximate="tanh")'),
        (text_of(torch._C._nn.linear, "x", "x"), "F.linear(x, x)"),
        (text_of(torch.linalg.vector_norm, "x"), "torch.linalg.vector_norm(x)"),
        (text_of(torch.ops.aten.relu.default, "x"), "torch.ops.aten.relu.default(x)"),
        (text_of(math.sqrt, 2), "math.sqrt(2)"),
        (text_of(max, 1, 2), "max(1, 2)"),
        (text_of(torch.Tensor.add, "x", 1), "x.add(1)"),
        (text_of(getattr, "x", "T"), "x.T"),
        (text_of(operator.getitem, "x", (..., slice(None, 2))), "x[..., :2]"),
        (text_of("to", "x", torch.device("cpu"), method=True), "x.to(x.device)"),
        (text_of("to", "x", torch.float16, method=True), "x.to(torch.float16)"),
        (text_of(torch.zeros, (2, 3), device=torch.device("cpu")), "torch.zeros((2, 3), device=x.device)"),
        (text_of(torch.zeros, 2, device="cpu"), "torch.zeros(2, device=x.device)"),
        (text_of(torch.zeros, 2, device=torch.device("meta")), 'torch.zeros(2, device=torch.device("meta"))'),
    ],
)
def test_calls(text: str, expected: str) -> None:
    assert text == expected


def test_arguments_that_differ_in_evaluation() -> None:
    assert text_of(F.dropout, "x", 0.1, True, evaluation=((0.1, False), {})) == "F.dropout(x, 0.1, self.training)"
    assert text_of(F.relu, "x", evaluation=((), {}), inplace=False) == (
        "F.relu(x, inplace=False) if self.training else F.relu(x)"
    )
    assert text_of("pow", "x", 2, method=True, evaluation=((3,), {})) == "x.pow(2 if self.training else 3)"
    assert text_of(torch.sum, "x", (0, 1), evaluation=(((0, 2),), {})) == "torch.sum(x, (0, 1 if self.training else 2))"


def test_same_tells_types_apart() -> None:
    assert not same(1, True)
    assert not same(0.0, 0)
    assert same(float("nan"), float("nan"))
    assert same([1, (2, slice(None))], [1, (2, slice(None))])
    assert not same({"a": 1}, {"a": 1, "b": 2})
