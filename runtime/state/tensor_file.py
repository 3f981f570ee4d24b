"""Tensors in one file, in the safetensors format, written and read one tensor at a time.

The safetensors library writes a file from tensors that are all in host memory, contiguous and in their final dtype, and
reads through a memory map that counts as resident while it is open. This module moves, casts, hashes and writes one
tensor after another, so that writing and reading each hold at most one tensor of their own.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ir.documents import Unreadable, open_regular, parse_json
from ...ir.errors import CheckpointError

CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODE_OF = {dtype: code for code, dtype in CODES.items()}
T = TypeVar("T")
_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20
_RESTORE = "Restore the file from its origin, or take an earlier copy."


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype as the format spells it, its shape, its place in bytes from the file's start."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FilePlan:
    """A file without its tensors' data: the header, and each tensor's place. Pickles, so that processes may share a
    file."""

    header: bytes
    entries: dict[str, Entry]

    @property
    def bytes(self) -> int:
        return max([len(self.header), *(entry.end for entry in self.entries.values())])


def plan_file(
    rows: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> FilePlan:
    """Lay out a file of tensors with these dtypes and shapes, wide dtypes first so that each tensor starts aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in sorted(rows.items(), key=lambda row: -row[1][0].itemsize):
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: Entry(row["dtype"], tuple(row["shape"]), start + row["data_offsets"][0], start + row["data_offsets"][1])
        for name, row in header.items()
        if name != "__metadata__"
    }
    return FilePlan(struct.pack("<Q", len(text)) + text, entries)


class StoredTensor:
    """A tensor whose bytes are read piece by piece, from whatever memory has them, while they are written to a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes in order; each piece holds until the next one is asked for."""
        raise NotImplementedError


class Reads(Mapping[str, T]):
    """Values by name, each read whenever it is asked for, so that one at a time is in memory."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]):
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def create_file(path: Path, plan: FilePlan) -> None:
    """Write the header and give the file its final size. Lets the system's OSError through."""
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(plan.header))
        file.truncate(plan.bytes)


def fill_file(
    path: Path, plan: FilePlan, tensors: Mapping[str, Tensor | StoredTensor], *, digests: bool = False
) -> dict[str, str]:
    """Write these tensors to their places in a file made by `create_file`, cast to its dtypes, and sync it to the disk.

    Tensors may be on any device and need not be contiguous; they are moved to host memory and cast one at a time.
    Several processes may fill the same file. With `digests`, returns the sha256 of each tensor's bytes. Lets the
    system's OSError through (for a full disk, say); the partial file stays.
    """
    found = {}
    with open(path, "r+b", buffering=0) as file:
        for name, tensor in sorted(tensors.items(), key=lambda row: plan.entries[row[0]].begin):
            entry = plan.entries[name]
            assert tuple(tensor.shape) == entry.shape, f"{name}: {tuple(tensor.shape)} given, {entry.shape} planned"
            digest = hashlib.sha256()
            file.seek(entry.begin)
            for chunk in _chunks(tensor, CODES[entry.code]):
                if digests:
                    digest.update(chunk)
                _write_all(file, chunk)
            found[name] = digest.hexdigest()
        os.fsync(file.fileno())
    return found if digests else {}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write `tensors` as they are to a new file. Returns the sha256 of each one's bytes; raises as `fill_file` does."""
    plan = plan_file({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    create_file(path, plan)
    return fill_file(path, plan, tensors, digests=True)


def file_bytes(tensors: Mapping[str, Tensor | StoredTensor]) -> int:
    """The size of the file that `write_tensors` writes."""
    return plan_file({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}).bytes


class TensorFile:
    """A safetensors file whose header has been read and checked against the file's size.

    Raises `CheckpointError` naming the file if it is missing, truncated or not in the format.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open_regular(path) as file:
                self.bytes = os.fstat(file.fileno()).st_size
                raw, start = self._read_header(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
        except Unreadable as error:
            raise CheckpointError(f"{path}: {error}.") from error
        self.metadata = self._metadata(raw.pop("__metadata__", {}))
        self.entries = {name: self._entry(name, row, start) for name, row in raw.items()}
        end = max([start, *(entry.end for entry in self.entries.values())])
        if end != self.bytes:
            what = "truncated" if end > self.bytes else "longer than its header says"
            raise CheckpointError(f"{path}: {what}: {self.bytes} bytes, not {end}. {_RESTORE}")
        places = sorted((entry.begin, entry.end, name) for name, entry in self.entries.items())
        for (_, end, first), (begin, _, second) in itertools.pairwise(places):
            if begin < end:
                raise CheckpointError(f"{path}: {first!r} and {second!r} have the same bytes. {_RESTORE}")

    def read(self, name: str, digest: str | None = None) -> Tensor:
        """Read a tensor into new host memory, in the dtype of the file.

        Raises `CheckpointError` if `digest` is given and is not the sha256 of the tensor's bytes.
        """
        return self._read(name, self.entries[name], digest)

    def read_rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read these rows of a tensor only, as `read` does."""
        whole = self.entries[name]
        assert whole.shape and 0 <= begin <= end <= whole.shape[0], f"rows {begin} to {end} of {list(whole.shape)}"
        width = (whole.end - whole.begin) // whole.shape[0] if whole.shape[0] else 0
        start = whole.begin + begin * width
        return self._read(
            name, Entry(whole.code, (end - begin, *whole.shape[1:]), start, start + (end - begin) * width)
        )

    def _read(self, name: str, entry: Entry, digest: str | None = None) -> Tensor:
        if entry.code not in CODES:
            raise CheckpointError(f"{self.path}: {name!r} has dtype {entry.code}; this reads {', '.join(CODES)}.")
        tensor = torch.empty(entry.shape, dtype=CODES[entry.code])
        data, seen = _bytes_of(tensor), hashlib.sha256()
        try:
            with open_regular(self.path) as file:
                file.seek(entry.begin)
                done = 0
                while done < len(data):
                    count = file.readinto(data[done : done + _CHUNK_BYTES])
                    if not count:
                        raise CheckpointError(f"{self.path}: truncated inside {name!r}. {_RESTORE}")
                    if digest is not None:
                        seen.update(data[done : done + count])
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}).") from error
        if digest is not None and seen.hexdigest() != digest:
            raise CheckpointError(f"{self.path}: the bytes of {name!r} were altered after writing. {_RESTORE}")
        return tensor

    def _read_header(self, file: io.FileIO) -> tuple[dict[str, Any], int]:
        bad = f"{self.path}: not a safetensors file, or damaged"
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, self.bytes - 8):
            raise CheckpointError(f"{bad}: its first 8 bytes are no header length for {self.bytes} bytes.")
        try:
            header = parse_json(file.read(length))
        except Unreadable as error:
            raise CheckpointError(f"{bad}: its header {error}.") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{bad}: its header is no JSON object.")
        return header, 8 + length

    def _metadata(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict) or any(not isinstance(value, str) for value in found.values()):
            raise CheckpointError(f"{self.path}: its __metadata__ is no mapping of texts.")
        return found

    def _entry(self, name: str, row: Any, start: int) -> Entry:
        try:
            begin, end = row["data_offsets"]
            entry = Entry(str(row["dtype"]), tuple(row["shape"]), start + begin, start + end)
            if any(type(n) is not int for n in (*entry.shape, begin, end)):
                raise ValueError("a size is no whole number")
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path}: damaged header at {name!r} ({error!r}).") from error
        itemsize = CODES[entry.code].itemsize if entry.code in CODES else None
        wanted = None if itemsize is None else math.prod(entry.shape) * itemsize
        sizes = math.prod(n for n in entry.shape if n)  # torch multiplies them in 64 bits, also beside a zero
        if not start <= entry.begin <= entry.end or min(entry.shape, default=0) < 0 or sizes >= 2**60:
            raise CheckpointError(f"{self.path}: damaged header at {name!r}: {row}.")
        if wanted is not None and wanted != entry.end - entry.begin:
            raise CheckpointError(f"{self.path}: damaged header at {name!r}: {row} should span {wanted} bytes.")
        return entry


def code_of(dtype: torch.dtype) -> str:
    """The format's name of a dtype. Raises `CheckpointError` for a dtype that the format does not have."""
    if dtype not in _CODE_OF:
        known = ", ".join(str(d).removeprefix("torch.") for d in _CODE_OF)
        raise CheckpointError(f"{dtype} cannot be saved; a safetensors file holds {known}.")
    return _CODE_OF[dtype]


def _chunks(tensor: Tensor | StoredTensor, dtype: torch.dtype) -> Iterator[memoryview]:
    if isinstance(tensor, StoredTensor):
        assert tensor.dtype == dtype, f"{tensor.dtype} is stored, {dtype} planned"
        yield from tensor.chunks()
        return
    data = _bytes_of(tensor.detach().to(device="cpu", dtype=dtype))
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy if it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
