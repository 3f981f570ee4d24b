"""The promises of node meta: where an op ran, what it writes, aliases, draws, and how inputs and outputs are named."""

from __future__ import annotations

import enum
import importlib
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ScaledGradient, zoo

from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import is_mode_switch
from penstock.ir.errors import CaptureError


class Model(nn.Module):
    """A model whose forward is a function, for short tests."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.ones(4))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def record(function, x=None, **attributes):
    return trace(Model(function, **attributes), torch.randn(3, 4) if x is None else x)


def find(opgraph, target):
    found = [n for n in opgraph.nodes if n.target == target]
    assert len(found) == 1, f"{target}: {found}"
    return found[0]


def test_every_node_knows_where_it_comes_from():
    opgraph = trace(*zoo()["gpt2"]())
    required = {"val", "module_path", "module_type", "module_call", "source", "no_grad", "autocast", "mutates"}
    for node in opgraph.nodes[:-1]:
        assert required | {"alias_of", "random"} <= node.meta.keys(), node
        assert node.op == "placeholder" or node.meta["source"].partition(":")[0].endswith(".py"), node
    attention = [n for n in opgraph.nodes if n.target is F.scaled_dot_product_attention]
    assert [n.meta["module_path"] for n in attention] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert attention[0].meta["module_type"] == "GPT2Attention"
    assert attention[0].meta["source"].startswith("sdpa_attention.py:")
    leaf = find(opgraph, "transformer.h.0.ln_1")
    assert leaf.op == "call_module" and leaf.meta["module_path"] == "transformer.h.0.ln_1"
    assert "GPT2LMHeadModel" in {n.meta["module_type"] for n in opgraph.nodes[:-1]}


def test_leaves_parameters_and_ties_are_the_users_own():
    model, batch = zoo()["gpt2"]()
    opgraph = trace(model, batch)
    assert opgraph.module.get_submodule("transformer.h.1.ln_2") is model.transformer.h[1].ln_2
    traced_through = [n for n in opgraph.nodes if n.op == "get_attr"]
    assert "transformer.h.0.attn.c_attn.weight" in {n.target for n in traced_through}  # transformers' own Conv1D
    assert opgraph.parameters()["lm_head.weight"] is model.transformer.wte.weight
    assert opgraph.ties() == {"lm_head.weight": "transformer.wte.weight"}
    head = find(opgraph, "lm_head")
    assert opgraph.node_parameters(head) == {"lm_head.weight": model.lm_head.weight}


def test_a_tied_parameter_is_named_by_the_module_that_uses_it():
    class Twice(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Twice(nn.Parameter(torch.randn(4, 4)))
            self.second = Twice(self.first.weight)

        def forward(self, x):
            return self.second(self.first(x)).sum()

    opgraph = trace(Tied(), torch.randn(2, 4))
    first, second = (n for n in opgraph.nodes if n.op == "get_attr")
    assert (first.target, second.target) == ("first.weight", "second.weight")
    assert second.meta["alias_of"] is first


def test_in_place_writes():
    opgraph = trace(*zoo()["in_place"]())
    writers = {}
    for node in opgraph.nodes[:-1]:
        if node.meta["mutates"]:
            writers[getattr(node.target, "__name__", node.target)] = [n.name for n in node.meta["mutates"]]
    assert writers.keys() == {"body.relu", "add_", "mul_", "setitem", "leaky_relu", "lerp_", "add"} | (
        writers.keys() & {"iadd"}
    )
    view = next(n for n in opgraph.nodes if n.target == "view")
    assert view.meta["alias_of"] is not None
    updates = [n.meta["updates_buffers"] for n in opgraph.nodes if "updates_buffers" in n.meta]
    assert updates == [("body.calls",), ("body.mean",)]
    assert all(n.meta["no_grad"] for n in opgraph.nodes if "updates_buffers" in n.meta)


def test_views_alias_and_copies_do_not():
    opgraph = record(lambda m, x: (x.view(4, 3).T[0] * x.clone()[:, 0].sum()).sum())
    x = find(opgraph, "x")
    view, transpose = find(opgraph, "view"), find(opgraph, getattr)
    assert view.meta["alias_of"] is x and transpose.meta["alias_of"] is view
    assert find(opgraph, "clone").meta["alias_of"] is None


def test_an_op_that_hands_back_its_argument_does_not_take_its_place():
    """`x.float()` on floats is x itself, but under autocast it is not: later uses of x must read x."""
    opgraph = record(lambda m, x: (m.linear(x).float() + 1).sum() + m.linear(x).sum())
    assert find(opgraph, "float").args[0].target == "linear"

    def residual(model, x):
        h = model.linear(x)
        return (h.float().pow(2) + h).sum()

    total = next(n for n in record(residual).nodes if n.target is operator.add)
    assert total.args[1].target == "linear"


def test_batch_norm_updates_its_statistics():
    opgraph = trace(*zoo()["wide_resnet"]())
    norm = find(opgraph, "body.norm")
    assert norm.meta["updates_buffers"] == tuple(
        f"body.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    assert norm.meta["mutates"] == ()


def test_functional_batch_norm_mutates_its_statistics():
    def forward(model, x):
        return F.batch_norm(x, model.state, model.other, training=True).sum()

    model = Model(forward)
    model.register_buffer("other", torch.ones(4))
    norm = find(trace(model, torch.randn(3, 4)), F.batch_norm)
    assert norm.meta["updates_buffers"] == ("state", "other")


def test_random_ops_and_their_evaluation_arguments():
    opgraph = trace(*zoo()["llama"](dropout=0.1))
    attention = [n for n in opgraph.nodes if n.target is F.scaled_dot_product_attention]
    assert all(n.meta["random"] for n in attention)
    assert attention[0].kwargs["dropout_p"] == 0.1 and attention[0].meta["eval_kwargs"]["dropout_p"] == 0.0
    without = trace(*zoo()["llama"](dropout=0.0))
    assert not any(n.meta["random"] or "eval_kwargs" in n.meta for n in without.nodes[:-1])
    drops = record(lambda m, x: F.dropout(m.linear(x), 0.5, m.training).sum() + m.drop(x).sum(), drop=nn.Dropout(0.3))
    assert [n.name for n in drops.nodes if n.meta.get("random")] == ["dropout", "drop"]
    functional = find(drops, F.dropout)
    assert functional.kwargs["training"] and functional.meta["eval_kwargs"]["training"] is False


def test_an_unused_draw_stays_so_that_later_ones_do_not_shift():
    opgraph = record(lambda m, x: (torch.rand(3), torch.ones(3), torch.randn_like(x) * m.linear(x))[2].sum())
    assert torch.rand in {n.target for n in opgraph.nodes} and torch.ones not in {n.target for n in opgraph.nodes}


def test_what_only_training_does_is_named():
    opgraph = record(lambda m, x: (m.linear(x) + (torch.randn_like(x) if m.training else x)).sum())
    assert "test_trace_meta.py" in opgraph.eval_error and "randn_like" in opgraph.eval_error


def test_custom_function_is_one_call_that_names_its_class():
    opgraph = trace(*zoo()["custom_function"]())
    call = next(n for n in opgraph.nodes if getattr(n.target, "__self__", None) is ScaledGradient)
    assert call.target.__name__ == "apply" and call.args[1] == 0.25 and not call.meta["random"]


class Way(enum.Enum):
    UP = 1


def test_a_function_taken_from_its_class_is_the_same_call_with_the_same_members():
    apply = ScaledGradient.apply
    opgraph = record(lambda m, x: apply(m.linear(x), Way.UP).sum())
    (call,) = (n for n in opgraph.nodes if getattr(n.target, "__self__", None) is ScaledGradient)
    assert call.args[1] is Way.UP
    assert apply(torch.ones(1), 2.0) == 1, "not redirected outside of a trace"


class Apart(torch.autograd.Function):
    """Fills its context in a function of its own. `forward` may also be called as any other function."""

    @staticmethod
    def forward(x, scale):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale * 2, None


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


taken = Apart.apply


@pytest.mark.parametrize(
    ("forward", "calls"),
    [
        (lambda m, x: taken(m.linear(x), 2.0).sum(), 1),
        (lambda m, x: taken(taken(m.linear(x), 2.0), 3.0).sum(), 2),
        (lambda m, x: Apart.forward(m.linear(x), 2.0).sum(), 0),
    ],
)
def test_a_taken_function_keeps_its_own_gradient(forward, calls):
    model, x = Model(forward), torch.randn(3, 4)
    opgraph = trace(model, x)
    assert len([n for n in opgraph.nodes if getattr(n.target, "__self__", None) is Apart]) == calls
    (found,) = torch.autograd.grad(opgraph.module(x)["loss"], [model.linear.weight])
    (wanted,) = torch.autograd.grad(forward(model, x), [model.linear.weight])
    assert torch.equal(found, wanted)


LIBRARY = """
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

twice = Twice.apply
"""


def test_a_function_of_a_module_that_forward_imports_is_good_for_the_next_trace(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)

    def forward(m, x):
        return importlib.import_module("late_library").twice(m.linear(x)).sum()

    for _ in range(2):
        kinds = [getattr(node.target, "__self__", None) for node in record(forward).nodes]
        assert [kind.__name__ for kind in kinds if isinstance(kind, type)] == ["Twice"]
    assert importlib.import_module("late_library").twice(torch.ones(1)) == 2


def test_a_taken_function_knows_whether_gradients_are_on():
    def forward(m, x):
        with torch.no_grad():
            constant = taken(m.linear(x), 2.0)
        return (m.linear(x) * constant).sum()

    (call,) = (n for n in record(forward).nodes if getattr(n.target, "__self__", None) is Apart)
    assert call.meta["no_grad"]


def test_a_taken_function_that_returns_its_input_is_recorded_or_refused():
    same = Same.apply
    try:
        opgraph = record(lambda m, x: same(m.linear(x)).sum())
    except CaptureError as error:
        assert "Same returns one of its inputs" in str(error) and "write Same.apply(...) at the call" in str(error)
    else:
        assert [n for n in opgraph.nodes if getattr(n.target, "__self__", None) is Same]


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_function_that_draws_is_random():
    opgraph = record(lambda m, x: Noise.apply(m.linear(x)).sum())
    assert [n.meta["random"] for n in opgraph.nodes if getattr(n.target, "__self__", None) is Noise] == [True]


def test_modes_are_switches_in_the_graph_and_facts_on_nodes():
    def forward(model, x):
        with torch.no_grad():
            mean = x.mean()
        with torch.autocast("cpu", torch.bfloat16):
            h = model.linear(x)
        return (h.float() - mean).sum()

    opgraph = record(forward)
    assert sum(is_mode_switch(n) for n in opgraph.nodes) == 4
    assert find(opgraph, "mean").meta["no_grad"] and not find(opgraph, "linear").meta["no_grad"]
    assert find(opgraph, "linear").meta["autocast"][:3] == ("cpu", torch.bfloat16, True)
    assert find(opgraph, "linear").meta["val"].dtype == torch.bfloat16
    assert find(opgraph, "float").meta["autocast"] is None


def test_a_reassigned_buffer_is_written_back():
    def forward(model, x):
        model.state = model.state * 0.5
        return (model.linear(x) * model.state).sum()

    model = Model(forward)
    state = model.state
    opgraph = trace(model, torch.randn(3, 4))
    assert model.state is state and torch.equal(state, torch.ones(4))
    opgraph.module(torch.randn(3, 4))
    assert torch.equal(state, torch.full((4,), 0.5))
    assert [n.meta["updates_buffers"] for n in opgraph.nodes if "updates_buffers" in n.meta] == [("state",)]


def test_a_buffer_that_a_conversion_leaves_as_it_was_is_not_written():
    def forward(model, x):
        model.state = model.state.to(device=x.device, dtype=x.dtype)
        return (model.linear(x) * model.state).sum()

    assert not any("updates_buffers" in n.meta for n in trace(Model(forward), torch.randn(3, 4)).nodes)


def test_tensors_that_are_not_registered_are_kept_with_the_graph():
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    opgraph = record(lambda m, x: (m.linear(x) * m.scale[0]).sum(), scale=[scale])
    assert list(opgraph.constants) == ["_constant0"] and torch.equal(opgraph.module._constant0, scale)


def test_a_checkpoint_is_not_computed_again_while_its_writes_are_looked_at():
    """Outside of a recording, torch's own rule for fake tensors has no such product in fp32."""

    def multiply(weight, x):
        return F.grouped_mm(x, weight[None], offs=torch.tensor([3], dtype=torch.int32)).mul_(2).relu()

    opgraph = record(
        lambda m, x: checkpoint(multiply, m.wide.weight, x, use_reentrant=False).sum(),
        torch.ones(3, 16),
        wide=nn.Linear(16, 16),
    )
    assert any("checkpoint" in note for note in opgraph.notes)


def test_reentrant_checkpoint_is_traced_through():
    opgraph = record(
        lambda m, x: checkpoint(m.linear, x, use_reentrant=True).sum(), torch.ones(3, 4, requires_grad=True)
    )
    assert [n.target for n in opgraph.nodes if n.op == "call_module"] == ["linear"]


def test_names_of_inputs_and_outputs():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, input, pair, scale=2.0):
            h = self.linear(input) * scale + pair["a.b"] + pair["c"][0]
            return {"hidden": (h, h + 1), "nothing": None, "loss": h.sum()}

    x = torch.randn(3, 4)
    opgraph = trace(Nested(), (x, {"a.b": x, "c": [x]}))
    assert list(opgraph.inputs) == ["input_", "pair_a_b", "pair_c_0"]
    assert list(opgraph.outputs) == ["loss", "hidden_0", "hidden_1"]
    assert [n.target for n in opgraph.nodes if n.op == "placeholder"] == list(opgraph.inputs)
    assert opgraph.module(input_=x, pair_a_b=x, pair_c_0=x)["loss"].shape == ()


def test_loss_function_of_output_and_batch():
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(3, 4)
    opgraph = trace(body, x, loss_fn=lambda output, batch: F.mse_loss(output, batch))
    assert list(opgraph.inputs) == ["input_"] and list(opgraph.outputs) == ["loss", "output"]
    assert torch.equal(opgraph.module(x)["loss"], F.mse_loss(body(x), x))


def test_modules_whose_repr_hides_something_are_traced_through():
    def forward(model, x):
        return model.criterion(model.linear(x), torch.zeros(3, dtype=torch.long))

    opgraph = record(forward, criterion=nn.CrossEntropyLoss(label_smoothing=0.3))
    assert find(opgraph, F.cross_entropy).kwargs["label_smoothing"] == 0.3


def test_a_module_with_a_forward_hook_is_traced_through_with_it():
    model = Model(lambda m, x: m.linear(x).sum())
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    opgraph = trace(model, torch.randn(3, 4))
    assert [n.target for n in opgraph.nodes if n.op == "call_function"] == [F.linear, operator.mul]
