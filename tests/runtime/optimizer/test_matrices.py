"""The matrices for which Muon is meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.runtime.optimizer.param_groups import hidden_matrices
from penstock.tests.zoo import zoo


def test_matrices_inside_blocks_but_not_embeddings_and_heads() -> None:
    model, _ = zoo()["gpt2"]()
    found = hidden_matrices(model)
    assert {name.split(".", 3)[-1] for name in found} == {
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    }  # fmt: skip
    llama, _ = zoo()["llama"]()
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in hidden_matrices(llama))


def test_the_last_layer_of_a_plain_model_is_its_head() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    assert hidden_matrices(model) == ["1.weight"]
    model[1].requires_grad_(False)
    with pytest.raises(PlanError, match="Sequential has no trained matrix beside embeddings"):
        hidden_matrices(model)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert hidden_matrices(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))) == ["0.weight"]
