"""Preference training on pairs of any length equals eager: one program for both forwards and all lengths."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.export import Dim

import penstock
from penstock.tests.compiler.job.any_length.eager import CLOSE, SGD
from penstock.tests.preference_case import adapt, pairs


@pytest.mark.slow
def test_pairs_of_any_length_equal_eager() -> None:
    model = adapt()
    twin = copy.deepcopy(model)
    eager = penstock.DPO(twin)
    optimizer = SGD([p for p in twin.parameters() if p.requires_grad])
    job = penstock.compile(
        penstock.DPO(model), penstock.Hardware.cpu(1, memory="64MB"), example_inputs=pairs(), optimizer=SGD,
        strategy="mobius", micro_batches=2, dynamic_shapes=Dim("sequence", min=6, max=20),
    )  # fmt: skip
    with job:
        for seed, length in enumerate((10, 20, 7)):
            batch = pairs(length=length, seed=seed)
            loss = eager(**batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(job.step(batch), loss.detach(), **CLOSE)
        job.sync()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), msg=f"{name}: {{}}".format, **CLOSE)
