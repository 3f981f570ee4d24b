"""Things that models do now and then, each in the smallest model that does it: text runs as the model does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.tests.codegen.generated import differences, eager, equal, generate, gradients, run

TABLE = torch.tensor([[0.1, -2.5e-8, float("inf")], [1 / 3, 3.0, float("-inf")]])


class Odd(nn.Module):
    """Blocks in a list, so that they become classes, each doing `body(block, x)`."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.body = body
        self.blocks = nn.ModuleList(OddBlock(body) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class OddBlock(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("count", torch.zeros(4))
        self.steps = nn.ParameterDict({"a-b": nn.Parameter(torch.ones(4))})
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def no_grad(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(block.linear(x))
        with torch.enable_grad():
            y = block.linear(x) * gate
    return y + block.scale


def autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = block.linear(x)
        with torch.autocast("cpu", enabled=False):
            h = block.linear(h.float())
        h = h @ h.transpose(0, 1) @ h
    return h.float()


def constants(block: nn.Module, x: Tensor) -> Tensor:
    table = TABLE[:, :2].clone()
    return block.linear(x) + table.sum() + torch.tensor([1.0, -2.0, 0.5, 0.25]) * math.pi


def unpacking(block: nn.Module, x: Tensor) -> Tensor:
    first, _, third, *_ = block.linear(x).unbind(-1)
    top, index = x.max(dim=-1, keepdim=True)
    left, right = torch.chunk(x, 2, dim=1)
    return torch.cat([left, right], 1) * top + first[:, None] * third[:, None] + x.gather(1, index)


def in_place(block: nn.Module, x: Tensor) -> Tensor:
    h = block.linear(x)
    h = h.clone()
    h[:, 1:3] *= 2
    h += block.scale
    h[0, ...] = x[0] - 1
    view = h.view(-1)
    view[::2].add_(0.5)
    h.clamp_(min=-1.0, max=1e4)
    return torch.relu_(h) + view.view_as(h)


def masks(block: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], 4, dtype=torch.bool, device=x.device).tril()
    h = block.linear(x).masked_fill(~mask, float("-inf"))
    h = torch.where(torch.isfinite(h), h, torch.finfo(h.dtype).min)
    return F.softmax(h, dim=-1) ** 2 - (-x) ** 2 + 2.0**-x


def odd_names(block: nn.Module, x: Tensor) -> Tensor:
    type = block.linear(x)
    torch_ = type * block.steps["a-b"]
    F_ = torch_ * 2
    return torch.einsum("ij,ij->ij", F_, x).to("cpu", dtype=torch.float64).float()


def random(block: nn.Module, x: Tensor) -> Tensor:
    noise = torch.rand_like(x) - torch.rand_like(x) * F.dropout(torch.rand_like(x), 0.5, block.training)
    return block.linear(F.dropout(x, 0.25, block.training)) + noise


def buffers(block: nn.Module, x: Tensor) -> Tensor:
    block.count.add_(1)
    block.count.lerp_(x.detach().mean(0), 0.5)
    return block.linear(x) * block.count


def modes(block: nn.Module, x: Tensor) -> Tensor:
    h = block.linear(x)
    return h.relu() if block.training else h.tanh() if False else F.leaky_relu(h, 0.0)


def long_lines(block: nn.Module, x: Tensor) -> Tensor:
    y = block.scale
    return (block.linear(x) * 1.5 + x / 2.5 - x * 3.5) @ (y * 2.5 + 1.5)[:, None] * (x + y).sigmoid() + (x - y).sinh()


BODIES = [no_grad, autocast, constants, unpacking, in_place, masks, odd_names, random, buffers, long_lines]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_runs_as_the_model_does(body: Callable[[nn.Module, Tensor], Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Odd(body), {"x": torch.randn(3, 4)}
    generated = generate(model, batch)
    file = generated.load(tmp_path)
    for training in (True, False):
        model.train(training)
        outcomes = []
        for is_generated in (False, True):
            for buffer in model.buffers():
                buffer.zero_()
            model.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            loss = run(generated, file, batch, training)["loss"] if is_generated else eager(model, batch)
            loss.backward()
            state = {name: b.clone() for name, b in model.named_buffers()}
            outcomes.append({"loss": loss.detach(), **gradients(model), **state})
        assert equal(*outcomes) == []


def test_large_values_are_freed_as_early_as_in_a_function() -> None:
    def body(block: nn.Module, x: Tensor) -> Tensor:
        first = block.linear(x)
        second = first.tanh()
        narrow = second.sum(0)
        return narrow * x

    model = Odd(body)
    large, small = (generate(model, {"x": torch.empty(rows, 4, device="meta")}).text for rows in (1 << 17, 4))
    assert "del first, second\n" in large
    assert "del " not in small


def test_lines_stay_within_the_width() -> None:
    text = generate(Odd(long_lines), {"x": torch.randn(3, 4)}).text
    code = [line.partition("  # ")[0].rstrip() for line in text.splitlines()]
    assert max(map(len, code)) <= 112


RUNS = 'a" + str(getattr(open("CANARY", "w"), "close")()) + "b'
NAMES = [
    RUNS, 'a"b', "a\\b", "a\nimport torch\n", "a\r#", "\ufb01", "__x", "class", "007", "\u00b2", "step",
    "torch", "{x}", "# a", "resize", "predict",
]  # fmt: skip


class Named(nn.Module):
    """Modules, a parameter, a buffer and a class with one name, which came from data."""

    def __init__(self, name: str):
        super().__init__()
        kind = type(f"{name}'s", (OddBlock,), {})
        self.blocks = nn.ModuleDict({name: nn.ModuleList(kind(no_grad) for _ in range(2)), f"{name}2": nn.Linear(4, 4)})
        self.inner = nn.Module()
        self.inner.register_parameter(name, nn.Parameter(torch.rand(4)))
        self.inner.register_buffer(f"{name}3", torch.rand(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, second = self.blocks.values()
        for block in first:  # type: ignore[union-attr]
            x = block(x)
        (scale,), (shift,) = self.inner.parameters(), self.inner.buffers()
        return {"loss": (second(x) * scale + shift).square().mean()}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, batch = Named(name), {"x": torch.randn(3, 4)}
    generated = generate(model, batch)
    file = generated.load(tmp_path / "files")  # verified as a stranger's
    assert differences(model, generated, file, batch) == []
    assert not Path("CANARY").exists()
