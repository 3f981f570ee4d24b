"""`use-float8`: which layers it takes, what it refuses, and what its products cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.compiler.capture.trace import trace_in
from penstock.graph.blocks import BlockCost
from penstock.graph.costs.block import measure
from penstock.graph.layers import find_blocks
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import PassError
from penstock.ir.machine.call_mix import CallMix, Product
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import Precision
from penstock.passes.base import check_contracts
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.split_linear import SplitLinear
from penstock.passes.rewrite.tile_sequence import TileSequence
from penstock.passes.rewrite.use_float8 import UseFloat8
from penstock.runtime.functions import linear_float8

WIDTH, TOKENS, PRECISION = 32, 64, "fp8-rowwise"


class Layer(nn.Module):
    """Products of each kind: two of a usual layer, an adapter's, one that 16 does not divide."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.a, self.b = nn.Linear(20 * width, 16, bias=False), nn.Linear(width, 20 * width)
        self.odd = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.relu(self.up(input=x)))
        return x + self.a(self.b(x)).mean(-1, keepdim=True) + self.odd(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 2):
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


TAKEN = ["enter", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


def graph_of(model: nn.Module, precision: str = PRECISION, width: int = WIDTH, **options: Any) -> OpGraph:
    inputs = {"x": {"shape": [1, TOKENS, width], "dtype": "float32"}}
    return trace_in(Precision.of(precision), model, inputs, **options)


def draft_of(graph: OpGraph, machine: str | Hardware = "h100", precision: str = PRECISION) -> Draft:
    hardware = Hardware.preset(machine) if isinstance(machine, str) else machine
    return Draft(graph, hardware, Options(precision=precision))


def meta(width: int = WIDTH) -> Model:
    with torch.device("meta"):
        return Model(width)


def test_it_takes_what_torchao_could_but_heads_and_narrow_layers() -> None:
    draft = draft_of(graph_of(meta()))
    decision = UseFloat8().plan(draft)
    assert decision == TAKEN
    UseFloat8().rewrite(draft, decision)
    calls = [node for node in draft.graph.nodes if node.target is linear_float8]
    assert [str(node.args[1].target).removesuffix(".weight") for node in calls] == TAKEN
    assert all(node.kwargs == {"recipe": "rowwise"} for node in calls)
    note = draft.notes["use-float8"]
    assert "head (the output head)" in note and "2 of layers.*.a (narrow)" in note
    assert "2 of layers.*.odd (its 8 x 32 are not divisible by 16)" in note and "emulated" not in note


def test_a_cpu_emulates_and_says_so() -> None:
    draft = draft_of(graph_of(meta()), Hardware.cpu(num_devices=1))
    UseFloat8().rewrite(draft, ["layers.0.up"])
    (call,) = (node for node in draft.graph.nodes if node.target is linear_float8)
    assert call.kwargs["emulate"] is True
    scales, emulated, *_ = draft.notes["use-float8"].split("; ")
    assert scales == "scales are those of a micro-batch: other micro-batches round otherwise"
    assert emulated == "emulated in fp32, as CPU devices have no float8"
    assert "left out of the plan" in draft.notes["use-float8"]


def test_an_edited_plan_may_take_the_head_but_no_layer_that_cannot_be() -> None:
    graph = graph_of(meta())
    UseFloat8().rewrite(draft_of(graph), ["head"])
    with pytest.raises(PassError, match=r"'layers.0.odd' cannot be in float8: its 8 x 32 are not divisible by 16"):
        UseFloat8().rewrite(draft_of(graph), ["layers.0.odd"])
    with pytest.raises(PassError, match=r"'layers.0.upp' is no linear layer .*; nearest: layers.0.up"):
        UseFloat8().rewrite(draft_of(graph), ["layers.0.upp"])


def test_a_model_without_such_layers_is_refused() -> None:
    with torch.device("meta"):
        model = Model(WIDTH, layers=0)
        model.enter = nn.Linear(WIDTH, 24)
        model.head = nn.Linear(24, 16)
    with pytest.raises(PassError, match=r"no linear layer can be in float8 \(enter: its 24 x 32 are not divisible"):
        UseFloat8().plan(draft_of(graph_of(model)))


def test_another_precision_is_refused() -> None:
    draft = draft_of(graph_of(meta(), "bf16-true"), precision="bf16-true")
    with pytest.raises(PassError, match=r'use-float8 with precision="bf16-true".*allowed are "fp8-rowwise"'):
        UseFloat8().rewrite(draft, ["layers.0.up"])


def test_divided_layers_are_refused() -> None:
    graph = graph_of(meta())
    halves = draft_of(graph)
    SplitLinear().rewrite(halves, {"layers.0.up.weight": [0, 64, 128]})
    with pytest.raises(PassError, match=r"layers.0.up.weight is in parts.*Leave split-linear out"):
        UseFloat8().plan(halves)
    tiled = draft_of(graph)
    TileSequence(tokens=16).rewrite(tiled, TileSequence(tokens=16).plan(tiled))
    with pytest.raises(PassError, match=r"runs over tiles of tokens.*Leave tile-sequence out"):
        UseFloat8().plan(tiled)
    with pytest.raises(PassError, match="comes after 'use-float8', whose work it would change"):
        check_contracts([UseFloat8(), SplitLinear()])


def cost(precision: str, width: int, device_kind: str = "cuda") -> BlockCost:
    """Of one layer with frozen surroundings."""
    graph = graph_of(meta(width), precision, width, device_kind=device_kind)
    machine = Hardware.preset("h100") if device_kind == "cuda" else Hardware.cpu(num_devices=1)
    draft = draft_of(graph, machine, precision)
    if Precision.of(precision).float8:
        UseFloat8().rewrite(draft, ["layers.1.up", "layers.1.down"])
    block = next(b for b in find_blocks(draft.graph, "layer") if "layers.1" in b.name)
    return measure(draft.graph, block, device_kind)


def products(rows: tuple[Product, ...], dtype: str) -> list[tuple[int, int, int, int]]:
    return sorted((row.m, row.n, row.k, row.count) for row in rows if row.dtype == dtype)


@pytest.mark.parametrize(
    ("precision", "of_weights"), [("fp8-rowwise", True), ("fp8-tensorwise", True), ("fp8-rowwise-gw-hp", False)]
)
def test_products_on_gpus_are_counted_in_float8(precision: str, of_weights: bool) -> None:
    """`rowwise-gw-hp` leaves the gradients of weights in bf16. What is saved is what bf16 saves."""
    found, plain = cost(precision, 128), cost("bf16-true", 128)
    assert products(found.forward_mix.products, "fp8") == [(TOKENS, 128, 512, 1), (TOKENS, 512, 128, 1)]
    own = [(TOKENS, 128, 512, 1), (TOKENS, 512, 128, 1)]
    weights = [(128, 512, TOKENS, 1), (512, 128, TOKENS, 1)]
    assert products(found.backward_mix.products, "fp8") == sorted(own + weights * of_weights)
    assert found.kept_bytes == plain.kept_bytes and found.saved_inputs == plain.saved_inputs
    assert found.forward_flops == plain.forward_flops and found.backward_flops == plain.backward_flops
    assert not set(found.uncounted) - set(plain.uncounted)


def test_a_cpu_multiplies_in_fp32() -> None:
    found = cost("fp8-rowwise", 128, "cpu")
    assert not products(found.forward_mix.products, "fp8")
    assert (TOKENS, 512, 128, 1) in products(found.forward_mix.products, "fp32")


def test_large_products_gain_on_cards_with_and_without_a_table_of_rates() -> None:
    fp8, bf16 = (CallMix(products=(Product(dtype, 4096, 4096, 4096),)) for dtype in ("fp8", "bf16"))
    for name in ("h100", "l40s"):
        device = Hardware.preset(name).devices[0]
        arithmetic = [device.arithmetic_s(mix.flops, PRECISION, mix)[0] for mix in (fp8, bf16)]
        assert arithmetic[0] == pytest.approx(arithmetic[1] / 2, rel=0.02), name
        assert device.compute_s(fp8.flops, 0.0, PRECISION, mix=fp8) < device.compute_s(
            bf16.flops, 0.0, PRECISION, mix=bf16
        )
