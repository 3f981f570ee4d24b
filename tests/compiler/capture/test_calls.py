"""The nodes that calls of a model become: memory as it is becomes zeros, and parametrised layers are traced through."""

from __future__ import annotations

from collections.abc import Callable

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


class Viewed(nn.Module):
    """Tensors that become views of themselves, beside what is asked of their sizes, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        ones, whole, rows = torch.ones(y.size()), y.view(-1), y.shape[0]
        for _ in range(2):
            y.unsqueeze_(0)
        y.add_(y.dim())[..., 0].mul_(y.size(-1))
        while y.dim() > 2:
            y.squeeze_(0)
        y.t_().mul_(2.0)
        first, second = y.detach().chunk(2)
        second.swapaxes_(0, 1)
        y = (y.transpose_(dim0=0, dim1=1) + ones) * first.size(0) + second.size(0) / rows
        return (y + whole.mean()).square().mean()


def test_a_tensor_becomes_a_view_of_itself() -> None:
    model, batch = Viewed(), {"x": torch.randn(3, 4)}
    graph = trace(model, batch)
    loss, expected = graph.module(*batch.values())["loss"], model(**batch)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, [*model.parameters()])
    torch.testing.assert_close(torch.autograd.grad(loss, [*graph.module.parameters()]), wanted)
    assert not [node for node in graph.nodes if node.target in ("unsqueeze_", "squeeze_", "t_", "transpose_")]


class Reshaping(Viewed):
    def __init__(self, change: Callable[[Reshaping, Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.linear(x).square().mean()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, x: x.unsqueeze_(0), r"unsqueeze_ changes the shape of 'x' in place.*x = x\.unsqueeze\("),
        (lambda model, x: model.scale.unsqueeze_(0), "unsqueeze_ changes the shape of 'scale' in place"),
        (lambda model, x: model.linear(x).resize_(2, 2), "gives a tensor other memory: make a new tensor"),
    ],
)
def test_shapes_that_the_next_call_would_find_changed(change: Callable[..., object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        trace(Reshaping(change), {"x": torch.randn(3, 4)})
