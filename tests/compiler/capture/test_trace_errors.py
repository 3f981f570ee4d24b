"""Models that cannot be captured are refused with the place and a way out; the user's model is always given back as it
was."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn
from usual_dims import usual_dims
from zoo import token_batch, zoo

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError
from penstock.runtime.torch_names import FAKE_LOG, FakeTensorMode
from penstock.tests.shown_elsewhere import slow_but


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def failure(function, **options):
    with pytest.raises(CaptureError) as caught:
        trace(Model(function), torch.randn(3, 4), **options)
    return str(caught.value)


def item(h):
    return h.sum() * h.max().item()  # the line to blame


def branch(h):
    if h.sum() > 0:  # the line to blame
        h = h * 2
    return h.sum()


def to_list(h):
    return h.sum() * h.argmax(1).tolist()[0]  # the line to blame


def to_numpy(h):
    return h.sum() * float(h.detach().numpy().sum())  # the line to blame


def boolean_mask(h):
    return h[h > 0].sum()  # the line to blame


def loop(h):
    for _ in range(h.argmax()):  # the line to blame
        h = h + 1
    return h.sum()


@pytest.mark.parametrize("function", [item, branch, to_list, to_numpy, boolean_mask, loop])
def test_needing_a_value_names_the_line_and_the_remedy(function):
    message = failure(function)
    first, advice = message.split("\n", 1)
    assert first.startswith("test_trace_errors.py:") and first.endswith("# the line to blame")
    assert "torch.where" in advice


@pytest.mark.slow
def test_experts_in_a_loop_and_their_other_implementations():
    model, batch = zoo()["mixtral"](experts="eager")
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        trace(model, batch)


def test_backward_inside_forward():
    assert "return the loss" in failure(lambda h: h.sum().backward())


def test_tensor_hooks():
    assert "hook" in failure(lambda h: h.sum() if h.register_hook(print) else h)


def test_assigning_to_data():
    def forward(h):
        h.data = h * 2
        return h.sum()

    assert "copy_()" in failure(forward)


def test_python_randomness():
    assert "torch.rand" in failure(lambda h: h.sum() * (2 if random.random() < 0.5 else 3))


def test_unregistered_trainable_tensor():
    stray = nn.Parameter(torch.ones(4))
    assert "register" in failure(lambda h: (h * stray).sum())


def test_an_error_of_the_users_own_is_told_once_with_its_line():
    message = failure(lambda h: h.view(7, 7).sum())
    assert message.startswith("test_trace_errors.py:") and message.count("invalid for input of size 12") == 1


def test_no_loss_lists_the_outputs():
    message = failure(lambda h: {"hidden": h, "pooled": h.mean(1)})
    assert "hidden (a float32 tensor of shape [3, 4]), pooled" in message and "loss_fn" in message


def test_missing_labels():
    model, batch = zoo()["gpt2"]()
    del batch["labels"]
    with pytest.raises(CaptureError, match=r'Add "labels" to the batch'):
        trace(model, batch)


def test_loss_function_must_give_a_number():
    assert "shape [3, 4]" in failure(lambda h: h, loss_fn=lambda output, batch: output)


def test_vector_loss():
    assert "one number" in failure(lambda h: {"loss": h.mean(1)})


def test_a_fixed_size_cannot_be_dynamic():
    dims = usual_dims({"x": torch.randn(3, 4)})
    assert "size b was fixed to 3" in failure(lambda h: h.view(3, 4).sum(), dynamic=dims)


def test_bad_arguments():
    with pytest.raises(CaptureError, match="no tensor"):
        trace(nn.Linear(2, 2), {})
    with pytest.raises(CaptureError, match="unknown dtype 'int63'"):
        trace(nn.Linear(2, 2), {"input": {"shape": [2, 2], "dtype": "int63"}})
    with pytest.raises(CaptureError, match="takes 1"):
        trace(nn.Linear(2, 2), (torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(CaptureError, match=r"nn\.Module"):
        trace(lambda x: x, torch.ones(2))


def test_lazy_parameters_and_backward_hooks():
    with pytest.raises(CaptureError, match="run the model once"):
        trace(nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 2))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="backward hooks"):
        trace(hooked, torch.ones(2, 2))


def state(model):
    """Everything that could be left changed: attributes by identity, containers by content, modes, configurations."""
    modules = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module.__dict__.items():
            items = (
                list(value.items())
                if isinstance(value, dict)
                else list(enumerate(value))
                if type(value) is list
                else []
            )
            modules[path, name] = id(value), [(key, id(item)) for key, item in items]
    config = getattr(model, "config", None)
    return modules, dict(config.__dict__) if config is not None else None


@pytest.mark.parametrize("name", slow_but(("gpt2", "in_place", "lstm"), sorted(zoo())))
def test_the_model_is_given_back_as_it_was(name):
    model, batch = zoo()[name]()
    model.eval()
    next(model.children()).train()
    before, values = state(model), {key: value.clone() for key, value in model.state_dict().items()}
    draws, generator = random.getstate(), torch.get_rng_state()
    trace(model, batch)
    assert state(model) == before
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert random.getstate() == draws and torch.equal(torch.get_rng_state(), generator)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_the_model_is_given_back_after_an_error():
    calls = nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.autocast.__enter__
    model, _ = zoo()["mixtral"](experts="eager")
    assert model.config.use_cache
    before = state(model)
    with pytest.raises(CaptureError):
        trace(model, token_batch(), loss_fn=lambda outputs, batch: outputs.loss * outputs.loss.item())
    assert state(model) == before and model.config.use_cache
    assert calls == (nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.autocast.__enter__)


def test_what_forward_leaves_in_the_model_is_dropped():
    class Hoarder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), []

        def forward(self, x):
            self.last = self.linear(x)
            self.seen.append(self.last)
            return self.seen[-1].sum()

    model = Hoarder()
    trace(model, torch.randn(3, 4))
    assert model.seen == [] and not hasattr(model, "last")


def test_flex_attention_and_its_way_out():
    """A mask of booleans does what mask_mod says, and is captured."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def flexible(h):
        q = h.view(1, 1, 3, 4)
        mask = create_block_mask(lambda b, head, i, j: i >= j, None, None, 3, 3, device="cpu")
        return flex_attention(q, q, q, block_mask=mask).sum()  # the line to blame

    def score_attention(h):
        q = h.view(1, 1, 3, 4)
        return flex_attention(q, q, q, score_mod=lambda s, b, head, i, j: s + i - j).sum()  # the line to blame

    def mask_attention(h):
        q = h.view(1, 1, 3, 4)
        mask = torch.ones(3, 3, dtype=torch.bool, device=h.device).tril()
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()

    for function in (flexible, score_attention):
        message = failure(function)
        assert message.startswith("test_trace_errors.py:") and "attn_mask" in message and len(message.split("\n")) == 2
    trace(Model(mask_attention), torch.randn(3, 4))


class Slope(torch.autograd.Function):
    """The derivative of tanh(h) summed up, which autograd.grad gives inside of one call."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            return torch.autograd.grad(h.tanh().sum(), h)[0]

    @staticmethod
    def backward(ctx, dslope):
        with torch.enable_grad():
            h = ctx.saved_tensors[0].detach().requires_grad_()
            slope = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)[0]
            return torch.autograd.grad(slope, h, dslope)[0]


def test_autograd_grad_inside_forward_and_its_ways_out():
    def direct(h):
        return torch.autograd.grad(h.tanh().sum(), h, create_graph=True)[0].square().sum()  # the line to blame

    message = failure(direct)
    assert message.startswith("test_trace_errors.py:") and "autograd.Function" in message
    x = torch.randn(3, 4)
    for way_out in (lambda h: Slope.apply(h).square().sum(), lambda h: (1 - h.tanh().square()).square().sum()):
        model = Model(way_out)
        traced = trace(model, x)
        found = torch.autograd.grad(traced.module(x)["loss"], model.linear.weight)[0]
        model.function = direct
        wanted = torch.autograd.grad(model(x), model.linear.weight)[0]
        torch.testing.assert_close(found, wanted)


TRANSFORMS = {
    "vmap": lambda h: torch.vmap(lambda row: row.tanh() * row.sum())(h).sum(),
    "jvp": lambda h: torch.func.jvp(torch.tanh, (h,), (h,))[1].sum(),
    "vmap of grad": lambda h: torch.vmap(torch.func.grad(lambda row: row.tanh().sum()))(h).square().sum(),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_function_transform_is_refused_with_the_line_and_a_way_out(transform):
    message = failure(transform)
    assert message.startswith("test_trace_errors.py:") and "torch.vmap" in message and "whole batches" in message
    assert "lambda" in message.split("\n")[0]


def test_a_scripted_module():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    with pytest.raises(CaptureError, match=r"'1', a module that torch\.jit\.script"):
        trace(model, torch.randn(3, 4), loss_fn=lambda output, batch: output.sum())


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(torch.float32), lambda m: m.float(), lambda m: m.to("cpu"), lambda m: m.type(torch.float32)],
)
def test_a_conversion_that_changes_nothing_is_let_through(convert):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x):
            self.linear = convert(self.linear)
            return convert(self.lstm)(convert(self).linear(x))[0].sum()

    graph = trace(Net(), torch.randn(3, 4))
    assert graph.eval_error is None


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
def test_a_conversion_that_changes_a_weight_is_refused(convert):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return convert(self.linear)(x).sum()  # the line to blame

    with pytest.raises(CaptureError, match=r"converts 'linear' from torch.float32 to torch\.\w+ \(weight\)") as caught:
        trace(Net(), torch.randn(3, 4))
    assert "the line to blame" in str(caught.value)


def _assign(value):
    def change(model):
        model.linear.weight.requires_grad = value

    return change


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        lambda value: lambda model: model.linear.requires_grad_(value),
        lambda value: lambda model: model.linear.weight.requires_grad_(value),
        _assign,
    ],
)
def test_a_weight_is_trained_for_the_whole_run_or_not(how, is_trained):
    """A change of `requires_grad` in forward was dropped, and the weight trained on."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.change = nn.Linear(4, 4), None
            self.linear.weight.requires_grad_(is_trained)

        def forward(self, x):
            self.change(self)
            return self.linear(x).sum()

    model = Net()
    model.change = how(not is_trained)
    with pytest.raises(CaptureError, match=f"sets requires_grad of 'linear.weight' to {not is_trained}"):
        trace(model, torch.randn(3, 4))
    assert model.linear.weight.requires_grad is is_trained
    model.change = lambda same: same.linear.weight.requires_grad_(is_trained)
    trace(model, torch.randn(3, 4))


@pytest.mark.parametrize("use", ["not", "without gradients", "with gradients"])
def test_a_weight_may_be_frozen_for_a_while_that_nobody_uses_it(use):
    """PEFT does so around a forward without adapters."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.adapter.requires_grad_(False)
            with torch.set_grad_enabled(use == "with gradients"):
                meanwhile = self.linear(x) if use == "not" else self.adapter(x)
            self.adapter.requires_grad_(True)
            return (self.adapter(x) + meanwhile).square().sum()

    model, x = Net(), torch.randn(3, 4)
    if use == "with gradients":
        with pytest.raises(CaptureError, match=r"sets requires_grad of 'adapter\.weight' to False"):
            trace(model, x)
        return
    graph = trace(model, x)
    graph.module(x)["loss"].backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("name", ["late.weight", "linear.weight", "table"])
def test_a_tensor_that_forward_registers_is_refused(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.late = nn.Linear(4, 4), None

        def forward(self, x):
            if name == "late.weight" and self.late is None:
                self.late = nn.Linear(4, 4)
            if name == "linear.weight":
                self.linear.weight = nn.Parameter(self.linear.weight * 2)
            if name == "table" and not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(4.0))
            h = self.linear(x) if self.late is None else self.late(self.linear(x))
            return (h * self.table if name == "table" else h).sum()

    model = Net()
    with pytest.raises(CaptureError, match=f"registers the tensor '{name}'"):
        trace(model, torch.randn(3, 4))
    if name != "linear.weight":
        model(torch.randn(3, 4))  # the way out
        trace(model, torch.randn(3, 4))


def test_a_call_that_fails_is_told_by_the_error_alone():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    FAKE_LOG.addHandler(handler)
    try:
        assert "must match" in failure(lambda h: (h + torch.ones(5)).sum()) and not records
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(4) + torch.ones(5)
    finally:
        FAKE_LOG.removeHandler(handler)
    assert records  # what is recorded elsewhere
