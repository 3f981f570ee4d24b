"""The fallback tracer gives the same step as the recorder, with the same names and facts, by an independent road."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from usual_dims import usual_dims
from zoo import zoo

import penstock
from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import is_mode_switch
from penstock.ir.errors import CaptureError

FAST = {"gpt2", "in_place", "lstm"}
NAMES = sorted(set(zoo()) - {"custom_function", "mixtral"})  # mixtral's default experts hold a custom function too


def gradients(opgraph, batch, seed=3):
    model = opgraph.model
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = opgraph.module(**batch)
    outputs["loss"].backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_export_and_recorder_agree(name):
    model, batch = zoo()[name]()
    twin = copy.deepcopy(model)
    exported, recorded = trace(model, batch, tracer="export"), trace(twin, batch, tracer="recorder")
    assert exported.tracer == "export" and not any(n.op == "call_module" for n in exported.nodes)
    assert exported.inputs.keys() == recorded.inputs.keys()
    (outputs, grads), (others, expected) = gradients(exported, batch), gradients(recorded, batch)
    assert list(outputs) == list(others) and grads.keys() == expected.keys()
    torch.testing.assert_close(outputs, others)
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert any(n.meta["random"] for n in exported.nodes[:-1]) == any(n.meta["random"] for n in recorded.nodes[:-1])
    assert {n.meta["module_path"] for n in exported.nodes[:-1]} <= {path for path, _ in model.named_modules()}


def test_export_has_fixed_sizes():
    model, batch = zoo()["mlp"]()
    with pytest.raises(CaptureError, match="has fixed sizes: leave dynamic_shapes out"):
        trace(model, batch, tracer="export", dynamic=usual_dims(batch))


def test_export_evaluation_arguments():
    model, batch = zoo()["bert"]()
    exported = trace(model, batch, tracer="export")
    assert exported.eval_error is None
    torch.testing.assert_close(exported.evaluation()(**batch)["loss"], model.eval()(**batch)["loss"])


def test_export_meta():
    exported = trace(*zoo()["in_place"](), tracer="export")
    updates = [n.meta["updates_buffers"] for n in exported.nodes if "updates_buffers" in n.meta]
    assert updates == [("body.calls",), ("body.mean",)]
    assert sum(is_mode_switch(n) for n in exported.nodes) == 2
    assert all(n.meta["no_grad"] for n in exported.nodes if "updates_buffers" in n.meta)
    relu = next(n for n in exported.nodes if n.target is torch.ops.aten.relu_.default)
    assert relu.meta["module_path"] == "body.relu" and relu.meta["mutates"] == (relu.args[0],)
    assert relu.meta["source"].startswith("zoo.py:")
    view = next(n for n in exported.nodes if n.target is torch.ops.aten.view.default)
    assert view.meta["alias_of"] is view.args[0]
    tied = trace(*zoo()["gpt2"](), tracer="export")
    assert tied.ties() == {"lm_head.weight": "transformer.wte.weight"}


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.vmap(lambda row: (row * row).sum())(self.linear(x)).sum()


def test_auto_falls_back_with_the_reason():
    model, x = Mapped(), torch.randn(3, 4)
    opgraph = trace(model, x)
    assert opgraph.tracer == "export"
    assert "test_export_tracer.py" in opgraph.fallback_reason and "torch.vmap" in opgraph.fallback_reason
    torch.testing.assert_close(opgraph.module(x)["loss"], model(x))
    with pytest.raises(CaptureError, match="recorder cannot see"):
        trace(model, x, tracer="recorder")


class Wide(nn.Module):
    """Function transforms in the middle of a model."""

    def __init__(self, transform):
        super().__init__()
        self.before, self.after, self.transform = nn.Linear(4, 4), nn.Linear(4, 4), transform

    def forward(self, x):
        return self.after(self.transform(self.before(x))).square().mean()


@pytest.mark.parametrize("transform", [
    lambda h: torch.vmap(lambda row: row.tanh() * row.sum())(h),
    pytest.param(lambda h: torch.func.jvp(torch.tanh, (h,), (h,))[1], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_job_of_an_exported_graph_trains(transform):
    torch.manual_seed(0)
    model, x = Wide(transform), torch.randn(4, 4)
    twin = copy.deepcopy(model)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    with penstock.compile(model, hardware, example_inputs=(x,), optimizer=optimizer, micro_batches=1) as job:
        loss = job.step((x,))
        found = job.state_dict()
    expected = twin(x)
    expected.backward()
    optimizer(twin.parameters()).step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, dict(twin.state_dict()))
    assert not torch.equal(found["before.weight"], model.before.weight)


def test_a_custom_function_is_not_exported():
    with pytest.raises(CaptureError, match="ScaledGradient"):
        trace(*zoo()["custom_function"](), tracer="export")


def test_export_gives_the_model_back():
    model, batch = zoo()["gpt2"]()
    model.eval()
    parameters = dict(model.named_parameters())
    trace(model, batch, tracer="export")
    assert not any(module.training for module in model.modules()) and model.config.use_cache
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
