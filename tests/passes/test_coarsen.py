"""`coarsen`: blocks follow the user's modules, equal blocks share a hash, and no cut breaks a computation."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from penstock.passes.base import Draft
from penstock.passes.coarsen import Coarsen
from penstock.runtime.errors import PlanError
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    all_passes,
    apply,
    assert_trains_like_eager,
    chain,
    draft_of,
    traced,
    traced_model,
)
from penstock.tests.zoo import gpt2, zoo


def blocks_of(name: str) -> Draft:
    return apply(draft_of(traced(name)[0]), Coarsen())


def text_of_blocks(draft: Draft) -> str:
    letters: dict[str, str] = {}
    rows = []
    for block in draft.blocks:
        letter = letters.setdefault(block.hash, chr(ord("A") + len(letters)))
        reads, gives = ", ".join(n.name for n in block.inputs), ", ".join(n.name for n in block.outputs)
        rows.append(f"{letter} {block.name}: {len(block.nodes)} nodes, {block.param_bytes} bytes")
        rows.append(f"    {reads} -> {gives}")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "wide_resnet", "in_place", "lstm"])
def test_blocks_of_models(name: str, golden: Golden) -> None:
    golden(text_of_blocks(blocks_of(name)), name.replace("_", "-"))


@pytest.mark.parametrize("name", zoo())
def test_every_node_is_in_one_block_or_shared(name: str) -> None:
    """Blocks are runs of the recorded order, so that they depend on earlier ones only."""
    draft = blocks_of(name)
    order = {node: i for i, node in enumerate(draft.graph.nodes)}
    inside = [node for block in draft.blocks for node in block.nodes]
    assert len(set(inside)) == len(inside)
    assert [order[n] for n in inside] == sorted(order[n] for n in inside)
    left_out = set(draft.graph.nodes) - set(inside)
    assert not any(draft.graph.node_parameters(node) or node.meta.get("random") for node in left_out)
    assert draft.graph.outputs["loss"] in inside


def test_equal_layers_have_one_hash_and_unequal_ones_do_not() -> None:
    model, batch = gpt2(num_layers=4)
    model.transformer.h[2].attn.resid_dropout.p = 0.3  # type: ignore[union-attr, index, operator]
    hashes = [b.hash for b in apply(draft_of(traced_model(model, [batch])[0]), Coarsen()).blocks if ".h." in b.name]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]
    model.transformer.h[3].requires_grad_(False)  # type: ignore[union-attr, index, operator]
    hashes = [b.hash for b in apply(draft_of(traced_model(model, [batch])[0]), Coarsen()).blocks if ".h." in b.name]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class Gate(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], heads: int):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function.apply(self.linear(x))
        return x + self.attention(x, x, x, need_weights=False)[0]


class Gates(nn.Module):
    def __init__(self, *gates: Gate):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gates = nn.ModuleList(gates)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for gate in self.gates:
            x = gate(x)
        return x.square().mean()


def test_what_a_modules_text_leaves_out_still_tells_blocks_apart() -> None:
    """Two autograd functions share a name, and `nn.MultiheadAttention` does not print its heads."""
    model = Gates(Gate(Scale, 2), Gate(Reverse, 2), Gate(Scale, 4), Gate(Scale, 2), Gate(Scale, 2))
    graph, _ = traced_model(model, [{"x": torch.randn(2, 3, 8)}])
    hashes = [block.hash for block in apply(draft_of(graph), Coarsen()).blocks[1:-1]]
    assert len(hashes) == 4 and len(set(hashes)) == 3 and hashes[0] == hashes[3]


class Counter(nn.Module):
    """Both layers write the same buffer, and a tuple made in the first is read in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.seen.add_(x.detach().mean(0))  # type: ignore[operator]
        x = self.layers[1](x)
        self.seen.mul_(0.5)  # type: ignore[operator]
        x = self.layers[2](self.norm(x))
        left, right = x.chunk(2, dim=1)
        return self.norm(self.layers[3](x)).square().mean() + (left * right).mean()


def test_a_buffers_writers_and_the_readers_of_a_tuple_stay_together() -> None:
    graph, batches = traced_model(Counter(), [{"x": torch.randn(4, 8)}, {"x": torch.randn(4, 8)}])
    draft = draft_of(graph, micro_batches=2)
    apply(draft, Coarsen())
    assert [b.name for b in draft.blocks] == ["layers.0", "norm"]
    apply(draft, *all_passes()[1:])
    assert_trains_like_eager(draft, batches)


def test_a_model_without_parameters_in_use_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    graph, _ = traced_model(Mean(), [{"x": torch.zeros(2, 2)}])
    with pytest.raises(PlanError, match="Mean's loss depends on no parameter"):
        apply(draft_of(graph), Coarsen())


def test_names_that_python_or_the_program_uses() -> None:
    """Inputs called like what a program is made of, and like a gradient of another value."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, batch: Tensor, rt: Tensor, lambda_: Tensor, d_x: Tensor, x: Tensor) -> Tensor:
            y = self.layers[0](batch * rt - lambda_)
            return self.layers[2](self.layers[1](y) + d_x + x).square().mean()

    torch.manual_seed(0)
    batches = [{n: torch.randn(2, 4) for n in ("batch", "rt", "lambda_", "d_x", "x")} for _ in range(2)]
    graph, batches = traced_model(Odd(), batches)
    draft = draft_of(graph, micro_batches=2, stages=3)
    apply(draft, *all_passes())
    assert_trains_like_eager(draft, batches)


def test_blocks_are_consecutive_and_cover_a_chain() -> None:
    draft = apply(draft_of(chain(depth=3)), Coarsen())
    assert [b.name for b in draft.blocks] == ["layers.0", "layers.1", "layers.2", "head"]
    for before, after in pairwise(draft.blocks[:3]):
        assert set(before.outputs) == set(after.inputs)
    assert draft.blocks[1].hash == draft.blocks[2].hash != draft.blocks[0].hash  # no gradient for the first input
