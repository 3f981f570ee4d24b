"""Weights packed and unpacked a few rows at a time: the bits are those of a whole weight."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from penstock.runtime.quantised import pieces
from penstock.runtime.quantised.linear_4bit import Format4bit
from penstock.runtime.quantised.linear_8bit import _unpack
from penstock.runtime.quantised.quantisers import Quantiser4bit, Quantiser8bit, parts_of_state
from penstock.runtime.quantised.raw_bytes import as_bytes

ROWS = 520
KINDS = {"nf4": ("nf4", False), "nf4-double": ("nf4", True), "fp4": ("fp4", False), "fp4-double": ("fp4", True)}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)


def params(weight: Tensor, quant_type: str, is_nested: bool) -> Any:
    made = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, quant_type=quant_type, compress_statistics=is_nested, blocksize=64
    )
    return made.to("cpu")


@pytest.mark.parametrize("width", [128, 96, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_in_4_bits(kind: str, width: int) -> None:
    """Rows of 96 and 65 elements end inside of blocks of 64."""
    weight = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = params(weight, *KINDS[kind])
    sizes: list[int] = []
    found = Quantiser4bit(weight.dtype, 64, *KINDS[kind]).quantise(
        lambda begin, end: (sizes.append(end - begin), weight[begin:end])[1], (ROWS, width)
    )
    assert len(sizes) > 1 and sum(sizes) == ROWS
    expected = {"weight": whole.data, **parts_of_state(whole.quant_state)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], as_bytes(tensor)), name


def test_packed_in_8_bits() -> None:
    weight = torch.randn(ROWS, 65, generator=torch.Generator().manual_seed(0))
    whole: Any = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False).to("cpu")
    found = Quantiser8bit().quantise(lambda begin, end: weight[begin:end], (ROWS, 65))
    assert torch.equal(found["weight"].view(torch.int8), whole.data)
    assert torch.equal(found["SCB"].view(torch.float32), whole.SCB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 96, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_from_4_bits(kind: str, width: int, dtype: torch.dtype) -> None:
    """Also where a block's description begins at a byte that no number begins at, as in a shard."""
    weight = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = params(weight, *KINDS[kind])
    parts = {name: as_bytes(tensor) for name, tensor in parts_of_state(whole.quant_state).items()}
    rest = [parts.get(name) for name in ("nested_absmax", "nested_quant_map", "nested_offset")]
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), parts["absmax"]])[3:]
    form = Format4bit((ROWS, width), 64, KINDS[kind][0], torch.bfloat16)
    blocks, rest_of_last = divmod(weight.numel(), 64)  # bitsandbytes 0.50 on AVX-512 reads rows of 96 wrongly
    whole.quant_state.shape = torch.Size([weight.numel()] if rest_of_last else [blocks, 64])
    expected = bitsandbytes.functional.dequantize_4bit(whole.data, whole.quant_state).reshape(ROWS, width)
    assert (expected - weight).abs().max() < 0.3 * weight.abs().max()
    for absmax in (parts["absmax"], moved):
        assert torch.equal(form.unpack(whole.data, absmax, rest, dtype), expected.to(dtype))


def test_weights_are_unpacked_into_what_is_lent() -> None:
    weight = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0))
    packed = params(weight, "nf4", False)
    form = Format4bit((ROWS, 64), 64, "nf4", torch.float32)
    bytes_of_8 = torch.ones(ROWS, 64, dtype=torch.uint8), as_bytes(torch.ones(ROWS))
    lent = torch.empty(4 * ROWS * 64 + 5, dtype=torch.uint8)
    with pieces.lending(lambda num_bytes: lent):
        four = form.unpack(packed.data, as_bytes(packed.quant_state.absmax), (None,) * 3, torch.float32)
        assert four.data_ptr() == lent.data_ptr()
        assert torch.equal(four, bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state))
        assert _unpack(*bytes_of_8, torch.float32).data_ptr() == lent.data_ptr()
    assert _unpack(*bytes_of_8, torch.float32).data_ptr() != lent.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_unpacked_in_full_and_cast_is_that_unpacked_in_the_narrow_type(
    kind: str, dtype: torch.dtype
) -> None:
    """So backward may take the weight that forward unpacked."""
    whole = params(torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(0)), *KINDS[kind])
    parts = {name: as_bytes(tensor) for name, tensor in parts_of_state(whole.quant_state).items()}
    rest = [parts.get(name) for name in ("nested_absmax", "nested_quant_map", "nested_offset")]
    full, narrow = (Format4bit((ROWS, 128), 64, KINDS[kind][0], of) for of in (torch.float32, dtype))
    found, expected = (form.unpack(whole.data, parts["absmax"], rest, dtype) for form in (narrow, full))
    assert torch.equal(found, expected)
