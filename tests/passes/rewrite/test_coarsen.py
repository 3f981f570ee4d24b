"""`coarsen`: blocks follow the user's modules, equal blocks share a hash, and no cut breaks a computation."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.layers import find_blocks
from penstock.ir.errors import PassError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    all_passes,
    apply,
    assert_trains_like_eager,
    chain,
    cut,
    draft_of,
    trace_case,
    traced_model,
)
from penstock.tests.releases import needs_transformers
from penstock.tests.shown_elsewhere import KINDS, slow_but
from penstock.tests.zoo import gpt2, zoo


def blocks_of(name: str) -> Draft:
    """The blocks that `coarsen` finds, without their costs."""
    draft = draft_of(trace_case(name)[0])
    draft.blocks = find_blocks(draft.graph)
    return draft


def text_of_blocks(draft: Draft) -> str:
    letters: dict[str, str] = {}
    rows = []
    for block in draft.blocks:
        letter = letters.setdefault(block.hash, chr(ord("A") + len(letters)))
        reads, gives = ", ".join(n.name for n in block.inputs), ", ".join(n.name for n in block.outputs)
        rows.append(f"{letter} {block.name}: {len(block.nodes)} nodes, {block.param_bytes} bytes")
        rows.append(f"    {reads} -> {gives}")
    return "\n".join(rows) + "\n"


NEWEST = needs_transformers("5.24", "the calls of the library make the nodes of a block")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=NEWEST),
        pytest.param("bert", marks=NEWEST),
        pytest.param("t5", marks=[pytest.mark.slow, NEWEST]),
        "wide_resnet",
        "in_place",
        "lstm",
    ],
)
def test_blocks_of_models(name: str, golden: Golden) -> None:
    golden(text_of_blocks(blocks_of(name)), name.replace("_", "-"))


@pytest.mark.parametrize("name", slow_but(KINDS, zoo()))
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
    hashes = [b.hash for b in find_blocks(traced_model(model, [batch])[0]) if ".h." in b.name]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]
    model.transformer.h[3].requires_grad_(False)  # type: ignore[union-attr, index, operator]
    hashes = [b.hash for b in find_blocks(traced_model(model, [batch])[0]) if ".h." in b.name]
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
    hashes = [block.hash for block in find_blocks(graph)[1:-1]]
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
    draft = draft_of(graph, micro_batches=2)
    apply(draft, *all_passes(3))
    assert_trains_like_eager(draft, batches)


def test_blocks_are_consecutive_and_cover_a_chain() -> None:
    draft = apply(draft_of(chain(depth=3)), Coarsen())
    assert [b.name for b in draft.blocks] == ["layers.0", "layers.1", "layers.2", "head"]
    for before, after in pairwise(draft.blocks[:3]):
        assert set(before.outputs) == set(after.inputs)
    assert draft.blocks[1].hash == draft.blocks[2].hash != draft.blocks[0].hash  # no gradient for the first input


def operators_of(model: nn.Module, batch: dict[str, Tensor]) -> Draft:
    draft = draft_of(traced_model(model, [batch])[0])
    coarsen = Coarsen(level="operator")
    coarsen.rewrite(draft, coarsen.plan(draft))
    return draft


def assert_in_order(draft: Draft) -> None:
    """No block reads what a later one makes, and all nodes of the layers are there once."""
    made = {node: i for i, block in enumerate(draft.blocks) for node in block.nodes}
    assert sum(len(block.nodes) for block in draft.blocks) == len(made)
    assert all(made[n] < i for i, block in enumerate(draft.blocks) for n in block.inputs if n in made)
    assert made.keys() == {node for block in find_blocks(draft.graph) for node in block.nodes}


@pytest.mark.parametrize("name", slow_but((*KINDS, "bert"), zoo()))
def test_operators_are_blocks_that_share_hashes_and_know_their_layer(name: str) -> None:
    graph = trace_case(name)[0]
    blocks = find_blocks(graph, "operator")
    layers = {block.name: block for block in find_blocks(graph)}
    assert len({block.name for block in blocks}) == len(blocks) > len(layers)
    assert {block.layer for block in blocks} <= layers.keys()
    made = {node: i for i, block in enumerate(blocks) for node in block.nodes}
    assert all(made[n] < i for i, block in enumerate(blocks) for n in block.inputs if n in made)
    assert made.keys() == {node for block in layers.values() for node in block.nodes}


def test_equal_operators_of_equal_layers_have_one_hash() -> None:
    model, batch = gpt2(num_layers=3)
    draft = operators_of(model, batch)
    second, third = ([b.hash for b in draft.blocks if b.layer == f"transformer.h.{i}"] for i in (1, 2))
    assert second == third and len(second) > 10
    assert_in_order(draft)


@pytest.mark.parametrize("level", slow_but(["layer"], ["layer", "operator"]))
def test_what_a_compiled_layers_backward_holds_counts_in_its_peaks(level: str) -> None:
    """The gradients of all its parameters, and the one that came to it; not those of what is no repeated layer."""
    model, batch = gpt2(num_layers=3)
    graph = traced_model(model, [batch])[0]
    found = []
    for compile_stages in (False, True):
        draft = draft_of(graph, compile_stages=compile_stages)
        coarsen = Coarsen(level=level)
        coarsen.rewrite(draft, coarsen.plan(draft))
        found.append(draft.blocks)
    more = {b.layer or b.name: b.cost.backward_peak_bytes - a.cost.backward_peak_bytes for a, b in zip(*found)}
    hidden_bytes = batch["input_ids"].numel() * model.config.n_embd * 4
    held_bytes = sum(p.nbytes for p in model.transformer.h[2].parameters()) + hidden_bytes
    assert more["transformer.h.1"] == more["transformer.h.2"] == held_bytes
    assert more["transformer.ln_f"] == 0


class Writes(nn.Module):
    """`before` reads what is then written in place, `after` reads the result through a view made earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.before, self.after, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        flat = x.flatten()
        kept = self.before(x.detach().clone()) + x.sum()
        x.mul_(2.0)
        return self.last(torch.tanh(self.after(flat.reshape(-1, 6)) + kept)).square().mean()


def test_what_reads_a_storage_before_its_last_write_stays_with_it() -> None:
    draft = operators_of(Writes(), {"x": torch.randn(3, 6)})
    assert_in_order(draft)
    home = {node.name: block.name for block in draft.blocks for node in block.nodes}
    writer = next(n for n in draft.graph.nodes if n.meta.get("mutates"))
    assert home["first"] == home["flatten"] == home["sum_1"] == home[writer.name] != home["last"]
    assert home["before"] != home["first"]


@pytest.mark.parametrize("name", slow_but(["in_place"], ["gpt2", "in_place"]))
def test_operators_cut_anywhere_train_like_eager(name: str) -> None:
    double = name != "in_place"  # it casts its buffers itself
    graph, batches = trace_case(name, double=double)
    draft = draft_of(graph, Hardware.cpu(num_devices=3), micro_batches=2)
    coarsen = Coarsen(level="operator")
    coarsen.rewrite(draft, coarsen.plan(draft))
    names = [block.name for block in draft.blocks]
    cuts = sorted({len(names) * i // 7 for i in range(1, 7)} - {0})
    apply(draft, *all_passes()[1:], decisions={"stages": cut(names, cuts)})
    assert_trains_like_eager(draft, batches[:2], 1e-12 if double else 1e-6)


def test_a_stage_prints_whole_layers_as_classes_and_parts_in_its_own_text() -> None:
    draft = operators_of(*gpt2(num_layers=2))
    names = [block.name for block in draft.blocks]
    layers = [block.layer for block in draft.blocks]
    middle = (layers.index("transformer.h.1") + len(layers) - layers[::-1].index("transformer.h.1")) // 2
    apply(draft, *all_passes()[1:], decisions={"stages": cut(names, [middle])})
    printed = [{n.meta["block"] for n in s.graph.graph.nodes if n.meta.get("block")} for s in draft.stages]
    assert "transformer.h.0" in printed[0] and "transformer.h.1" not in printed[0] | printed[1]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(PassError, match="level='layers'; allowed are layer, operator"):
        Coarsen(level="layers").plan(draft_of(trace_case("mlp")[0]))
