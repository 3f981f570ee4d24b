"""The calls of blocks, by shape, and what a device's table of rates makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.compiler.capture.trace import trace
from penstock.graph.costs.stage_time import roofline
from penstock.ir.machine.call_mix import FLASH, CallMix
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops.record import Work
from penstock.ir.program import Interface
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.runtime.simulate.costs import CostModel
from penstock.tests.passes.running import apply, draft_of, trace_case
from penstock.tests.passes.stage_runs import one_device
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import mixtral, zoo

CPU, GPU = Hardware.cpu(), Hardware.preset("rtx4090x1")


@pytest.mark.parametrize("hardware", [pytest.param(CPU, marks=pytest.mark.slow), GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", slow_but(("gpt2", "lstm"), ["gpt2", "llama", "t5", "wide_resnet", "lstm"]))
def test_a_blocks_calls_make_up_its_sums(name: str, hardware: Hardware) -> None:
    blocks = apply(draft_of(trace_case(name, dropout=0.0)[0], hardware), Coarsen()).blocks
    for block in blocks:
        cost = block.cost
        assert cost.forward_mix.flops == pytest.approx(cost.forward_flops), block.name
        assert cost.backward_mix.flops == pytest.approx(cost.backward_flops), block.name
        assert cost.forward_mix.traffic_bytes == cost.forward_traffic_bytes, block.name
    if name in ("gpt2", "llama", "t5"):
        assert all(not block.cost.forward_mix.other_flops for block in blocks)
    if name == "wide_resnet":
        assert any(block.cost.forward_mix.other_flops for block in blocks)  # convolutions


def layer(hardware: Hardware, autocast: torch.dtype | None = None) -> tuple[CallMix, CallMix]:
    """The calls of a GPT-2's layer: 2 rows of 8 tokens, 4 heads of 8."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    graph = trace(model, batch, autocast=autocast, param_dtype=autocast)
    cost = apply(draft_of(graph, hardware), Coarsen()).blocks[2].cost
    return cost.forward_mix, cost.backward_mix


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
def test_products_and_attention_have_their_shapes(hardware: Hardware) -> None:
    forward, backward = layer(hardware)
    rows, width = 16, 32
    shapes = {(row.m, row.n, row.k) for row in forward.products}
    assert shapes == {
        (rows, 3 * width, width),
        (rows, width, width),
        (rows, 4 * width, width),
        (rows, width, 4 * width),
    }
    assert {row.dtype for row in forward.products} == {"fp32"}
    products = sum(row.count * row.flops for row in forward.products)
    assert sum(row.count * row.flops for row in backward.products) == 2 * products
    (call,), (back,) = forward.attention, backward.attention
    assert (call.heads, call.queries, call.keys, call.head_size, call.count) == (8, 8, 8, 8, 1)
    assert back.backward and back.flops == 2.5 * call.flops


def test_a_call_has_the_dtype_that_it_computes_in() -> None:
    forward, backward = layer(GPU, torch.bfloat16)
    assert {row.dtype for row in (*forward.products, *backward.products)} == {"bf16"}
    assert {row.dtype for row in (*forward.attention, *backward.attention)} == {"bf16"}


def test_experts_in_groups_are_products_in_a_batch() -> None:
    model, batch = mixtral(experts="grouped_mm")
    blocks = apply(draft_of(trace(model, batch)), Coarsen()).blocks
    mix = next(b for b in blocks if b.name == "model.layers.0").cost.forward_mix
    assert any(row.batch > 1 and row.k in (32, 64) for row in mix.products) and not mix.other_flops


class Halves(nn.Module):
    """The same FLOPs in one wide product and in many narrow ones."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 512 // pieces, bias=False) for _ in range(pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1).square().sum()


def test_many_small_products_take_longer_than_one_large_one() -> None:
    table = {"source": "made up", "products": {"fp32": {16: "0.1GFLOPS", 128: "20GFLOPS"}}}
    took = {}
    for name, rates in (("table", table), ("constant", None)):
        machine = Hardware.cpu() if rates is None else Hardware.cpu().with_(rates=rates)
        machine = machine.with_(op_overhead_s=0.0, memory_bandwidth="1000TB/s")
        for pieces in (1, 16):
            graph = trace(Halves(pieces), torch.zeros(64, 64))
            (spec,) = (stage.spec for stage in one_device(graph, 1).stages)
            took[name, pieces] = roofline(spec, machine.devices[0], "fp32").forward_s
    assert took["constant", 16] == pytest.approx(took["constant", 1], rel=0.01)
    assert took["table", 16] > 2 * took["table", 1]


def test_the_simulator_and_the_passes_agree_on_a_stages_time() -> None:
    table = {"source": "made up", "products": {"fp32": {16: "0.1GFLOPS", 128: "20GFLOPS"}}, "pointwise": {1: "1GB/s"}}
    machine = Hardware.cpu(1).with_(rates=table, op_overhead_s=0.0)
    (spec,) = (stage.spec for stage in one_device(trace_case("gpt2")[0], 1).stages)
    took = roofline(spec, machine.devices[0], "fp32")
    model = CostModel(machine, "fp32")
    work = Work("compute", spec.forward_flops, spec.forward_traffic_bytes, mix=spec.forward_mix)
    assert model.compute_s(machine.devices[0], work) == pytest.approx(took.forward_s)
    half = Work("compute", spec.backward_flops / 2, spec.backward_traffic_bytes / 2, mix=spec.backward_mix)
    assert model.compute_s(machine.devices[0], half) == pytest.approx(took.backward_s / 2)


def test_an_interface_keeps_the_calls_in_its_file() -> None:
    draft = one_device(trace_case("gpt2")[0], 2)
    specs = {stage.spec.name: stage.spec for stage in draft.stages}
    interface = draft.programs[0].interface
    assert interface.stages == specs
    read = Interface.from_json(interface.to_json())
    assert read.stages == specs and all(spec.forward_mix.products for spec in read.stages.values())


def test_flash_is_the_cpus_only_kernel() -> None:
    assert {row.backend for row in layer(CPU)[0].attention} == {FLASH}
