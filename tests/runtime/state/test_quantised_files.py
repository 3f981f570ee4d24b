"""Quantised layers in directories: how often a file is read, and how much of it is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.runtime.quantised import pieces
from penstock.runtime.quantised.model import with_bytes
from penstock.runtime.state.stored import Stored
from penstock.runtime.state.weights import open_directory


def layers(device: str = "meta", **options: Any) -> nn.Module:
    with torch.device(device):
        made = [bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", **options) for _ in range(3)]
    return nn.Sequential(*made).requires_grad_(False)


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"weight": (64, 64), "bias": (64,)}
    tensors = {f"{i}.{name}": torch.randn(shape) for i in range(3) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def test_a_whole_weight_is_read_once_by_rows(
    tmp_path: Path, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 20 * 64)
    model = with_bytes(layers())
    source = open_directory(tmp_path, model)
    assert source.unexpected_keys == ()
    reads: list[tuple[str, int, int]] = []
    read = Stored.read_rows

    def read_rows(stored: Stored, begin: int, end: int) -> Tensor:
        reads.append((stored.key, begin, end))
        return read(stored, begin, end)

    monkeypatch.setattr(Stored, "read_rows", read_rows)
    found = {name: source.read(name) for name, _ in model[1].named_parameters(prefix="1")}  # type: ignore[index]
    assert reads == [("1.weight", 0, 20), ("1.weight", 20, 40), ("1.weight", 40, 60), ("1.weight", 60, 64)]
    readings = [place.reading for place in source.where.values() if hasattr(place, "reading")]
    assert readings and not any(reading.packed for reading in readings)
    wanted = bitsandbytes.nn.Params4bit(whole["1.weight"], quant_type="nf4", requires_grad=False).to("cpu")
    assert torch.equal(found["1.weight"], wanted.data)
    assert torch.equal(found["1.absmax"], wanted.quant_state.absmax)
    assert torch.equal(found["1.nested_offset"].view(torch.float32)[0], wanted.quant_state.offset)


def test_a_nan_is_named_while_its_weight_is_packed(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    whole["2.weight"][63, 1] = float("nan")
    save_file(whole, tmp_path / "model.safetensors")
    source = open_directory(tmp_path, with_bytes(layers()))
    source.read("1.weight")
    with pytest.raises(CheckpointError, match=r"^2\.weight in the files has NaN in it"):
        source.read("2.weight")


def test_a_weight_of_another_shape(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    whole["2.weight"] = torch.randn(32, 64)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.weight has shape \[32, 64\] and type float32 .* \[64, 64\]"):
        open_directory(tmp_path, with_bytes(layers()))


def test_a_weight_that_files_have_in_8_bits_is_not_packed_again(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    """Its scales would be lost."""
    whole["2.weight"] = whole["2.weight"].to(torch.float8_e4m3fn)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.weight has shape .* and type float8_e4m3fn .* not quantised yet"):
        open_directory(tmp_path, with_bytes(layers()))
