"""A captured step is the user's step: loss, gradients, buffers bitwise equal to eager for every model of the zoo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from usual_dims import usual_dims
from zoo import SEQUENCE, handwritten_zoo, token_batch, transformers_zoo, without_cache, zoo

from penstock.compiler.capture.trace import trace
from penstock.tests.shown_elsewhere import slow_but

ALL = sorted({**transformers_zoo(), **handwritten_zoo()})


def step(run, model, batch, seed=3):
    """Loss, gradients by name and buffers by name of one training step; gradients are cleared before and after."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = run(**batch)["loss"]
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads, {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found, expected):
    (loss, grads, buffers), (eager_loss, eager_grads, eager_buffers) = found, expected
    assert torch.equal(loss, eager_loss), f"loss {loss} instead of {eager_loss}"
    for name, grad in eager_grads.items():
        assert (grads[name] is None) == (grad is None), name
        assert grad is None or torch.equal(grads[name], grad), f"gradient of {name}"
    for name, buffer in eager_buffers.items():
        assert torch.equal(buffers[name], buffer), f"buffer {name}"


def both(name, **options):
    """A traced model and its eager twin with the same weights."""
    model, batch = zoo()[name](**options)
    twin = without_cache(copy.deepcopy(model))
    return model, twin, batch


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("name", slow_but(("gpt2", "vit", "in_place", "custom_function", "lstm"), ALL))
def test_step_equals_eager(name, dropout):
    model, twin, batch = both(name, dropout=dropout)
    opgraph = trace(model, batch)
    assert_same(step(opgraph.module, model, batch), step(twin, twin, batch))


@pytest.mark.parametrize("name", slow_but(("gpt2", "bert", "in_place", "lstm", "mlp"), ALL))
def test_outputs_and_evaluation_equal_eager(name):
    model, twin, batch = both(name)
    opgraph = trace(model, batch)
    assert opgraph.eval_error is None
    assert next(iter(opgraph.outputs)) == "loss"
    assert opgraph.graph.output_node().args[0] == opgraph.outputs
    model.eval(), twin.eval()
    found, expected = opgraph.evaluation()(**batch), twin(**batch)
    assert found.keys() == opgraph.outputs.keys()
    for output in ("loss", "logits"):
        assert torch.equal(found[output], expected[output]), output


FAST_DYNAMIC = {"in_place", "lstm"}


@pytest.mark.parametrize(
    "name", [n if n in FAST_DYNAMIC else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)  # fmt: skip
def test_another_batch_and_sequence(name):
    model, twin, batch = both(name)
    opgraph = trace(model, batch, dynamic=usual_dims(batch))
    assert "b" in opgraph.symbols
    other = {key: _grow(value, "s" in opgraph.symbols) for key, value in batch.items()}
    assert_same(step(opgraph.module, model, other), step(twin, twin, other))


def _grow(value, longer):
    """One more row, and half a sequence more of anything that is one."""
    value = torch.cat([value, value[:1]])
    is_sequence = longer and (value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point()))
    return torch.cat([value, value[:, : value.shape[1] // 2]], 1) if is_sequence else value


@pytest.mark.parametrize("name", slow_but(("gpt2", "custom_function", "in_place", "lstm"), ALL))
def test_bf16_autocast(name):
    model, twin, batch = both(name)
    opgraph = trace(model, batch, autocast=torch.bfloat16)

    def under_autocast(run):
        def inner(**inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return run(**inputs)

        return inner

    try:
        wanted = step(under_autocast(twin), twin, batch)
    except RuntimeError as error:  # LSTMs in bf16, on processors without AVX-512
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"eager cannot do it on this processor: {error}")
    assert_same(step(under_autocast(opgraph.module), model, batch), wanted)


@pytest.mark.parametrize("name", slow_but(("llama",), ("gpt2", "llama", "bert", "t5", "vit")))
def test_traced_without_autocast_it_still_runs_under_it(name):
    """Also where the model has a full-precision region of its own (Llama's rotary embedding)."""
    model, twin, batch = both(name, dropout=0.0)
    opgraph = trace(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(opgraph.module(**batch)["loss"], twin(**batch)["loss"])


@pytest.mark.parametrize("name", slow_but(("gpt2", "custom_function", "in_place", "lstm"), ALL))
def test_meta_model_gives_the_same_graph(name):
    model, batch = zoo()[name]()
    real = trace(model, batch)
    with torch.device("meta"):
        config = getattr(model, "config", None)
        twin = type(model)(config).train() if config is not None else copy.deepcopy(model).to("meta")
    meta = trace(twin, batch)
    assert _text(meta) == _text(real)
    assert meta.inputs.keys() == real.inputs.keys() and meta.ties() == real.ties()
    assert all(parameter.is_meta for parameter in meta.parameters().values())


def _text(opgraph):
    keys = ("module_path", "module_type", "source", "no_grad", "random", "mutates", "alias_of", "updates_buffers")
    names = [getattr(n.target, "__qualname__", str(n.target)) for n in opgraph.nodes]
    facts = [[str(n.meta.get(key)) for key in keys] for n in opgraph.nodes]
    values = [str(n.meta.get("val")) for n in opgraph.nodes]
    return list(zip([n.format_node() for n in opgraph.nodes if n.op != "output"], names, facts, values))


def test_missing_buffers_of_a_meta_model():
    model, batch = zoo()["llama"]()
    assert trace(model, batch).missing_buffers == ()
    meta = trace(model.to("meta"), batch)
    assert meta.missing_buffers == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")


def test_shapes_are_enough_for_a_batch():
    model, batch = zoo()["gpt2"]()
    shapes = {key: {"shape": list(value.shape), "dtype": "int64"} for key, value in batch.items()}
    assert _text(trace(model, shapes)) == _text(trace(model, batch))


def test_parameters_in_another_dtype():
    model, batch = zoo()["mlp"](dropout=0.0)
    opgraph = trace(model, {**batch, "x": batch["x"].bfloat16()}, param_dtype=torch.bfloat16)
    assert opgraph.param_dtype == torch.bfloat16
    assert opgraph.outputs["logits"].meta["val"].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class DropsPaths(nn.Module):
    """Draws in training only, so that evaluation cannot reuse the training graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return (x + h * torch.rand(len(x), 1).round() if self.training else x + h).sum()


def test_evaluation_mode_can_be_captured_itself():
    model, x = DropsPaths(), torch.randn(3, 4)
    training, evaluation = trace(model, x), trace(model, x, training=False)
    model.eval()
    assert "rand" in training.eval_error and evaluation.eval_error is None
    assert torch.equal(evaluation.evaluation()(x)["loss"], model(x))
    with pytest.raises(ValueError, match="its own trace"):
        training.evaluation()


def test_what_the_model_compiled_for_itself_is_traced_through():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.compile(nn.Linear(4, 4))

        def forward(self, x):
            return self.body(x).sum()

    opgraph = trace(Compiled(), torch.randn(3, 4))
    assert [n.target for n in opgraph.nodes if n.op == "call_module"] == ["body._orig_mod"]
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for module in (inside, inside[0]):
        module.compile()
    opgraph = trace(inside, torch.randn(3, 4), loss_fn=lambda output, batch: output.sum())
    assert [n.target for n in opgraph.nodes if n.op == "call_module"] == ["0", "1"]
    assert inside._compiled_call_impl is not None and inside[0]._compiled_call_impl is not None


@torch.library.custom_op("penstock_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


scale.register_fake(lambda x, factor: torch.empty_like(x))
scale.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def test_a_custom_operator_is_one_call():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return {"loss": torch.ops.penstock_tests.scale(self.linear(x), 3.0).sum()}

    model, batch = Scaled(), {"x": torch.randn(3, 4)}
    opgraph = trace(model, batch)
    assert torch.ops.penstock_tests.scale in {n.target for n in opgraph.nodes}
    assert_same(step(opgraph.module, model, batch), step(model, model, batch))


def test_gradient_checkpointing_in_the_model_is_traced_through():
    model, twin, batch = both("gpt2")
    model.gradient_checkpointing_enable()
    opgraph = trace(model, batch)
    assert_same(step(opgraph.module, model, batch), step(twin, twin, batch))


@pytest.mark.slow
def test_a_gpt3_of_96_layers_is_traced_on_meta():
    """175 billion parameters, evaluation included."""
    import transformers

    config = transformers.GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    opgraph = trace(
        model,
        {key: {"shape": [2, 2048], "dtype": "int64"} for key in ("input_ids", "attention_mask", "labels")},
    )
    assert opgraph.eval_error is None
    assert sum(parameter.numel() for parameter in set(opgraph.parameters().values())) > 174e9


def test_tokens_may_have_any_length():
    """The zoo's batches have padding, so that attention keeps its explicit mask."""
    batch = token_batch(3, 2 * SEQUENCE)
    assert batch["attention_mask"].sum() == 3 * 2 * SEQUENCE - 3
