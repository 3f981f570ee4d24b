"""The nodes that calls of a model become: memory as it is becomes zeros, and parametrised layers are traced through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError


class Sorted(nn.Module):
    """Rows in the order of a key, and back: the inverse of a permutation is written into memory as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        order = key.argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        room = x.new_empty(x.shape)
        room.copy_(self.linear(x[order]))
        return (room[place] - torch.empty(4).fill_(1.0)).square().mean()


def test_no_memory_is_read_that_nobody_wrote() -> None:
    torch.manual_seed(0)
    model, batch = Sorted(), {"x": torch.randn(6, 4), "key": torch.randperm(6)}
    graph = trace(model, batch)
    assert "empty" not in graph.module.code and "zeros_like" in graph.module.code
    torch.testing.assert_close(graph.module(*batch.values())["loss"], model(**batch))


class Passing(nn.Module):
    """A container without modules, which gives back what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shortcut = nn.Linear(4, 4), nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.shortcut(x)).square().mean()


def test_a_container_without_modules_is_traced_through() -> None:
    model, batch = Passing(), {"x": torch.randn(3, 4)}
    graph = trace(model, batch)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["linear"]
    torch.testing.assert_close(graph.module(*batch.values())["loss"], model(**batch), rtol=0, atol=0)


class Typed(nn.Module):
    """Names types as Python does."""

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.ones(4, dtype=bool)
        count = torch.zeros(4).to(int) + seen.to(float).sum()
        return (x.masked_fill(~seen, 0.0) * count).square().mean()


def test_types_of_python_are_those_that_torch_reads() -> None:
    batch = {"x": torch.randn(3, 4, requires_grad=True)}
    graph = trace(Typed(), {"x": {"shape": [3, 4], "dtype": "float32"}})
    made = graph.module(*batch.values())["loss"]
    assert made.dtype == torch.float64 and torch.equal(made, Typed()(**batch))


def test_layers_that_forward_parametrises_are_traced_through() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            nn.utils.parametrize.register_parametrization(self.layer, "weight", Doubled())
            try:
                return self.layer(x).sum()
            finally:
                nn.utils.parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)

    model, x = Model(), torch.randn(3, 4)
    torch.testing.assert_close(trace(model, x).module(x)["loss"], model(x))


class Old(nn.Module):
    """Makes tensors by types, as code from before `torch.tensor` does."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.LongTensor([[0, 2], [1, 3]])
        scale = torch.FloatTensor(range(1, 5)) * torch.Tensor(4).fill_(2) + torch.Tensor([torch.tensor(0.5), 1, 2, 3])
        kept = (x > 0).type(torch.DoubleTensor) if isinstance(x, torch.FloatTensor) else x
        return (torch.Tensor(x * scale)[:, sizes[1]] * kept[:, : len(sizes)]).square().mean() + torch.Tensor().sum()


def test_tensors_that_types_make() -> None:
    model, x, types = Old(), torch.randn(3, 4), (torch.LongTensor, torch.Tensor.__new__)
    graph = trace(model, {"x": x})
    torch.testing.assert_close(graph.module(x)["loss"], model(x), rtol=0, atol=0)
    assert (torch.LongTensor, torch.Tensor.__new__) == types
    with pytest.raises(CaptureError, match=r"test_calls\.py:.*LongTensor(.|\n)*needs the value"):
        trace(Reading(), {"x": x})


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[torch.LongTensor([x.argmax() // 4])].square().mean()
