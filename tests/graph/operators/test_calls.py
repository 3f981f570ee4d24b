"""Questions about nodes, by what their functions call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.loss import capture
from penstock.graph.operators.calls import (
    copied_operand,
    is_form,
    names_sizes,
    only_operator,
    operators,
    result_dtype,
    unread_operand,
)
from penstock.graph.operators.record import Elements, operator_name
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.runtime.functions import chunked_cross_entropy
from penstock.tests.passes.running import apply, draft_of

CASTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.double(), lambda x: x.to(torch.float16), lambda x: x.type_as(x.sum().double()), lambda x: x.clone(),
    lambda x: x.contiguous(), lambda x: torch.clone(x), lambda x: x.detach(),
]  # fmt: skip
MOVES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mT, lambda x: x.permute(0, 2, 1), lambda x: torch.swapaxes(x, 1, 2), lambda x: x.movedim(1, 2),
]  # fmt: skip
RESHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flatten(1), lambda x: x.view(-1), lambda x: x[:, None], lambda x: x.unflatten(1, (1, -1)),
]  # fmt: skip
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 1, lambda x: x.expand(2, *x.shape)[:, 0], lambda x: torch.relu(x),
]  # fmt: skip


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() + self.function(x).float().mean()


@pytest.mark.parametrize(
    ("functions", "way"), [(CASTS, Elements.SAME), (MOVES, Elements.MOVED), (RESHAPES, Elements.RESHAPED)]
)
def test_the_operand_whose_elements_a_value_has(functions: list[Callable[[Tensor], Tensor]], way: Elements) -> None:
    for function in functions:
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        (given,) = [node for node in graph.nodes if node.op == "placeholder"]
        ways = (Elements.SAME, Elements.MOVED, Elements.RESHAPED)
        node = next(n for n in graph.nodes if copied_operand(graph, n, *ways) is given)
        assert copied_operand(graph, node, way) is given


def test_values_with_other_elements_have_no_such_operand() -> None:
    for function in OTHERS:
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        (given,) = [node for node in graph.nodes if node.op == "placeholder"]
        assert all(copied_operand(graph, node, Elements.SAME, Elements.MOVED) is not given for node in graph.nodes)


def test_the_operand_of_which_only_the_shape_is_read() -> None:
    for function, is_unread in (
        (lambda x: x.new_zeros(3), True), (torch.ones_like, True), (lambda x: torch.full_like(x, 2.0), True),
        (lambda x: x.to(x.dtype), False), (lambda x: x * 0, False), (lambda x: torch.rand_like(x), False),
    ):  # fmt: skip
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        (given,) = [node for node in graph.nodes if node.op == "placeholder"]
        assert any(unread_operand(graph, node) is given for node in graph.nodes) == is_unread


def test_operators_have_one_name_whatever_the_function() -> None:
    for function in (lambda x: x == 1, lambda x: torch.eq(x, x), lambda x: x.eq(2)):
        graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
        assert "eq" in [only_operator(graph, node) for node in graph.nodes]
    graph = capture(Applied(lambda x: x @ x.mT), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
    called = [[*map(operator_name, operators(graph, node) or ())] for node in graph.nodes]
    assert sum("bmm" in names for names in called) == 1


FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.cat([x, x]), lambda x: torch.stack((x, x), -1), lambda x: x.repeat(1, 2, 1), lambda x: x.half(),
    lambda x: x.repeat_interleave(2, 1), lambda x: x.transpose(1, 2).contiguous(), lambda x: x.expand(3, 2, 3, 4),
]  # fmt: skip


def test_other_forms_of_a_value_are_not_computed() -> None:
    others = [lambda x: x + 0, lambda x: x.cumsum(1), lambda x: torch.ones_like(x)]
    for functions, are_forms in ((FORMS, True), (others, False)):
        for function in functions:
            graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
            (given,) = [node for node in graph.nodes if node.op == "placeholder"]
            readers = [node for node in given.users if node.op != "call_module"]
            assert readers and all(is_form(graph, node) for node in readers) == are_forms, readers


def test_calls_that_name_sizes() -> None:
    told = [lambda x: x.view(2, 12), lambda x: x.unflatten(1, (3, 1)), lambda x: x.new_zeros((2, 3))]
    for functions, names in ((told, True), ([lambda x: x[1], lambda x: x.sum(1), lambda x: x.transpose(1, 2)], False)):
        for function in functions:
            graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
            assert any(names_sizes(graph, node) for node in graph.nodes) == names


def test_calls_that_ask_for_a_type_themselves() -> None:
    fp32 = torch.float32
    asking = [
        lambda x: x.float(), lambda x: x.to(fp32), lambda x: x.type_as(torch.zeros(1)), lambda x: x.softmax(1, fp32),
    ]  # fmt: skip
    for functions, asks in ((asking, True), ([lambda x: x.clone(), lambda x: x + torch.ones(4), torch.relu], False)):
        for function in functions:
            graph = capture(Applied(function), micro_batch_spec({"x": torch.zeros(2, 3, 4)}, 1))
            (given,) = [node for node in graph.nodes if node.op == "placeholder"]
            readers = [node for node in given.users if node.op != "call_module"]
            assert all((result_dtype(graph, node, torch.bfloat16) == fp32) == asks for node in readers) and readers


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), words)


def test_one_chunk_of_a_loss_tells_its_operators() -> None:
    """All chunks call the same operators, and there may be thousands of chunks."""
    batch = {"x": torch.zeros(64, 4), "words": torch.zeros(64, dtype=torch.long)}
    draft = draft_of(trace(Guess(), batch))
    apply(draft, ChunkLoss(1))
    loss = next(node for node in draft.graph.nodes if node.target is chunked_cross_entropy)
    called = operators(draft.graph, loss) or ()
    assert [operator_name(func) for func in called].count("mm") == 1
