"""The files are those of the safetensors library, in both directions; damage is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.ir.errors import CheckpointError
from penstock.runtime.state.tensor_file import TensorFile, create_file, file_bytes, fill_file, plan_file, write_tensors


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return {
        "byte": torch.randint(0, 255, (5,), dtype=torch.uint8),
        "transposed": base.t(),
        "half": torch.randn(3, 3, dtype=torch.float16),
        "brain": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "count": torch.tensor(9),
    }


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = samples()
    write_tensors(tmp_path / "a.safetensors", tensors, metadata={"format": "pt"})
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(equal_bits(loaded[name], tensors[name]) for name in tensors)
    size = (tmp_path / "a.safetensors").stat().st_size
    write_tensors(tmp_path / "b.safetensors", tensors)
    assert file_bytes(tensors) == (tmp_path / "b.safetensors").stat().st_size < size


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in samples().items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"by": "library"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.metadata == {"by": "library"}
    assert all(equal_bits(file.read(name), tensors[name]) for name in tensors)


def test_a_file_is_filled_piece_by_piece_and_cast(tmp_path: Path) -> None:
    master, path = torch.randn(100), tmp_path / "a.safetensors"
    plan = plan_file({"odd": (torch.uint8, (3,)), "w": (torch.bfloat16, (100,)), "v": (torch.float32, (2, 2))})
    create_file(path, plan)
    assert fill_file(path, plan, {"v": torch.ones(2, 2)}) == {}
    digests = fill_file(path, plan, {"odd": torch.tensor([1, 2, 3]), "w": master}, digests=True)
    assert path.stat().st_size == plan.bytes
    file = TensorFile(path)
    assert equal_bits(file.read("w", digests["w"]), master.bfloat16())
    assert equal_bits(load_file(path)["odd"], torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert equal_bits(load_file(path)["v"], torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: the bytes of 'w' were altered"):
        file.read("w", "0" * 64)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "longer than"),
        (lambda data: data[:4], "no header length"),
        (lambda data: b"\xff" * 8 + data[8:], "no header length"),
        (lambda data: data[:8] + b"x" + data[9:], "no JSON"),
        (lambda data: data.replace(b'"shape":[100]', b'"shape":[101]'), "should span 404 bytes"),
        (lambda data: data.replace(b'"shape":', b'"shope":'), "damaged header at 'w'"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage, reason: str) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.randn(100)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: .*{reason}"):
        TensorFile(path)


def test_tensors_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"v": torch.randn(4), "w": torch.randn(4), "x": torch.randn(4), "empty": torch.randn(0)})
    assert TensorFile(path).entries.keys() == {"v", "w", "x", "empty"}
    path.write_bytes(path.read_bytes().replace(b"[16,32]", b"[8,24] "))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: 'v' and 'w' have the same bytes"):
        TensorFile(path)


def test_a_missing_file_and_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be read"):
        TensorFile(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="complex128 cannot be saved"):
        write_tensors(tmp_path / "a.safetensors", {"w": torch.zeros(1, dtype=torch.complex128)})
