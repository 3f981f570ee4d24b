"""The loops of Accelerate and Lightning train as plain PyTorch does."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import penstock

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(model: GPT2LMHeadModel, epochs: int) -> list[float]:
    """The same loop without Penstock, on the rows of the examples."""
    ids = torch.randint(0, 256, (32, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in ids.view(4, 8, 32).repeat(epochs, 1, 1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_accelerate", "with_lightning"])
def test_the_loop_trains_as_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32; only the order of additions differs, 1e-5 of a loss of about 5.5 and of weights."""
    module, begun = load(name), []

    class NoDropout(GPT2LMHeadModel):
        def __init__(self, config):  # type: ignore[no-untyped-def]
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            super().__init__(config)
            begun.append({key: value.clone() for key, value in self.state_dict().items()})

    monkeypatch.setattr(module, "GPT2LMHeadModel", NoDropout)
    monkeypatch.setattr(penstock, "compile", partial(penstock.compile, strategy="balanced", micro_batches=2))
    trained, losses = module.main(penstock.Hardware.cpu(num_devices=1), epochs=2)
    assert len(losses) == 8 and losses[-1] < losses[0]
    eager = NoDropout(trained.config)
    eager.load_state_dict(begun[0])
    assert losses == pytest.approx(plain(eager, 2), abs=1e-5)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[key], value, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "lengths", [None, pytest.param(torch.export.Dim("sequence", min=2, max=8), marks=pytest.mark.slow)]
)
def test_a_loop_takes_the_batches_of_a_tokenizer(lengths: Any) -> None:
    """They are no dicts, but wrap one."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=32, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 32, (4, 8))
    batch = BatchEncoding({"input_ids": ids, "labels": ids})
    options: dict[str, Any] = {"strategy": "balanced", "micro_batches": 2, "dynamic_shapes": lengths}
    options["optimizer"] = partial(torch.optim.SGD, lr=0.0)  # so that both steps see the same weights
    with penstock.compile(model, penstock.Hardware.cpu(num_devices=1), example_inputs=batch, **options) as job:
        assert job.step(batch) == job.step(dict(batch))
        assert job.evaluate(batch).loss == job.evaluate(dict(batch)).loss
