"""Any length over a quantised base: losses are those of the library, bit for bit, whatever the length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import penstock
from penstock.tests.compiler.job.quantised.models import SGD, adapt, load_model, write_whole


def tokens(length: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 128, (4, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_a_quantised_base_takes_any_length_bit_for_bit(kind: str, tmp_path: Path) -> None:
    write_whole(tmp_path)
    model, twin = adapt(load_model(tmp_path, kind)), adapt(load_model(tmp_path, kind))
    optimizer = SGD([p for p in twin.parameters() if p.requires_grad])
    job = penstock.compile(
        model, penstock.Hardware.cpu(1, memory="64MB"), example_inputs=tokens(16, 0), optimizer=SGD, strategy="mobius",
        micro_batches=1, dynamic_shapes=Dim("sequence", min=2, max=32),
    )  # fmt: skip
    with job:
        for seed, length in enumerate((16, 32, 7, 21)):
            loss = twin(**tokens(length, seed)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert torch.equal(job.step(tokens(length, seed)), loss.detach())
