"""Checkpoints: everything a run needs to go on bit for bit, under the user's own names.

A checkpoint is a directory: one safetensors file per stage, written by the process that holds the stage, and
`manifest.json`, written last, which names the file and the sha256 of each tensor and holds every scalar. Nothing in a
checkpoint depends on the partition, so a run may resume with another number of devices, partition or strategy. A new
checkpoint replaces an old one as a whole (`durable.py`).

To save, call `begin`, then `write_shard` for every stage in any process, then `commit`; or `abort` if one of them
raised. All processes must see the directory under the same path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ir.errors import CheckpointError
from ...ir.program import ParamSpec, RowPart, StageSpec, TeamPart, whole_params
from . import durable
from .base_identity import BaseIdentity, frozen_params
from .durable import abort
from .manifest import (
    KINDS,
    MANIFEST,
    RunPosition,
    ShardRecord,
    TensorRecord,
    build_manifest,
    damage,
    position_in,
    read_manifest,
    tensor_key,
)
from .part_params import PartIndex, joined_rows
from .plain_json import decode, encode
from .tensor_file import Reads, StoredTensor, TensorFile, code_of, file_bytes, write_tensors

__all__ = ["Checkpoint", "RunPosition", "SavedStage", "ShardRecord", "abort", "begin", "commit"]
__all__ += ["find_latest", "names_to_save", "open_checkpoint", "remove_oldest", "save_checkpoint", "write_shard"]

Optimizer = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class SavedStage:
    """The state of one stage: tensors on CPU that own their storage; tied names share one tensor."""

    weights: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: Mapping[str, dict[str, Any]]


def begin(directory: str | os.PathLike[str], need_bytes: int = 0) -> Path:
    """Make a hidden directory beside `directory` for the shards. The content of `directory` stays until `commit`.

    Raises `CheckpointError` if `directory` cannot be written, its disk has less than `need_bytes` free, or it holds
    anything but a checkpoint.
    """
    target = Path(directory).resolve()
    temporary = durable.begin(target, need_bytes)
    strangers = _strangers(target) if target.is_dir() else []
    if strangers:
        abort(temporary)
        raise CheckpointError(
            f"{target}: holds what is no checkpoint and would be lost: {', '.join(strangers[:8])}. Save elsewhere."
        )
    return temporary


def write_shard(
    temporary: Path,
    spec: StageSpec,
    weights: Mapping[str, Tensor | StoredTensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
    ties: Mapping[str, str] | None = None,
    with_frozen: bool = True,
) -> ShardRecord:
    """Write one stage's state, tensor by tensor, and sync it to the disk. May run in the process that holds the stage.

    `optimizer` maps a parameter's name to its states, each a tensor or a number. Tensors that another stage owns are
    left out, and frozen parameters unless `with_frozen`: `commit` is then given their identity. `ties` maps each tied
    name to its canonical name (see `model_names.ties_of`), so that a tensor has one name whichever stage wrote it.
    Raises `CheckpointError` naming the file if the disk is full, and removes that file.
    """
    ties = dict(ties or {})
    wholes = ((p.name, p.whole_name) for p in spec.params if isinstance(p.part, TeamPart))
    ties |= {name: ties.get(whole, whole) for name, whole in wholes}
    owned = names_to_save(spec, with_frozen)
    found: dict[tuple[str, str, str], Tensor | StoredTensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for kind, values in (("weights", weights), ("buffers", buffers)):
        for name in (n for n in values if n in owned):
            found.setdefault((kind, ties.get(name, name), ""), values[name])
    absent = {ties.get(n, n) for n in owned} - {name for _, name, _ in found}
    assert not absent, f"{spec.name} owns {sorted(absent)}, but their values were not given"
    for name in (n for n in optimizer if n in owned):
        for state, value in optimizer[name].items():
            if isinstance(value, (Tensor, StoredTensor)):
                found.setdefault(("optimizer", ties.get(name, name), state), value)
            else:
                scalars.setdefault(ties.get(name, name), {})[state] = encode(value, f"optimizer state {name}.{state}")
    path = temporary / f"{spec.name}.safetensors"
    tensors = {tensor_key(*row): tensor for row, tensor in found.items()}
    digests = _write(path, tensors)
    rows = (
        TensorRecord(*row, code_of(tensor.dtype), tuple(tensor.shape), digests[tensor_key(*row)])
        for row, tensor in found.items()
    )
    parts = {p.name: p.part for p in spec.params if isinstance(p.part, RowPart) and p.name in owned}
    return ShardRecord(spec.name, path.name, path.stat().st_size, tuple(rows), scalars, parts)


def names_to_save(spec: StageSpec, with_frozen: bool) -> set[str]:
    """The parameters and buffers of a stage that `write_shard` writes."""
    left_out = () if with_frozen else frozen_params(spec.params)
    return {row.name for row in (*spec.params, *spec.buffers) if row.owner and row not in left_out}


def commit(
    temporary: Path,
    directory: str | os.PathLike[str],
    shards: Collection[ShardRecord],
    progress: RunPosition,
    ties: Mapping[str, str] | None = None,
    base: BaseIdentity | None = None,
) -> Path:
    """Write the manifest and replace `directory` by the new checkpoint. Returns its path. `base` is the identity of the
    frozen weights where the shards do not hold these.

    Raises `CheckpointError` if the disk fails or `progress` holds a value that cannot be saved; the old checkpoint then
    stays.
    """
    manifest = build_manifest(shards, progress, ties or {}, base)
    for shard in shards:
        _require_bytes(temporary / shard.file, shard.bytes)
    with durable.disk_errors(temporary / MANIFEST):
        durable.write_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    durable.replace(temporary, directory)
    return Path(directory)


def save_checkpoint(
    directory: str | os.PathLike[str],
    stages: Iterable[tuple[StageSpec, SavedStage]],
    progress: RunPosition,
    ties: Mapping[str, str] | None = None,
    need_bytes: int = 0,
) -> Path:
    """Save from one process; `stages` yields one stage at a time. On any error the old checkpoint stays as it was."""
    temporary = begin(directory, need_bytes)
    try:
        shards = [
            write_shard(temporary, spec, state.weights, state.buffers, state.optimizer, ties) for spec, state in stages
        ]
        return commit(temporary, directory, shards, progress, ties)
    except BaseException:
        abort(temporary)
        raise


class Checkpoint:
    """A checkpoint opened for reading; made by `open_checkpoint`. `progress` and `base` are those that `commit` was
    given."""

    def __init__(self, path: Path):
        self.path = path
        self._manifest = read_manifest(path)
        self.progress = position_in(self._manifest, path / MANIFEST)
        self.ties = self._manifest.ties
        self._parts = PartIndex(self._manifest.row_parts)
        self.fingerprint = self._manifest.fingerprint
        row = self._manifest.base
        self.base = None if row is None else BaseIdentity(row.name, row.digest)
        self._files: dict[str, TensorFile] = {}
        for shard in self._manifest.shards:
            _require_bytes(path / shard.file, shard.bytes)

    @property
    def names(self) -> list[str]:
        """The names of the checkpoint's parameters; tied parameters have one name."""
        return list(dict.fromkeys(map(self._parts.parameter_of, self._manifest.tensors.weights)))

    def read(self, spec: StageSpec) -> SavedStage:
        """Read the state of a stage of any partition, and check each tensor against its sha256.

        Frozen parameters have no optimizer states; those of `base` are left out. Raises `CheckpointError` if the
        checkpoint lacks a name or shape of the stage, or a file was altered.
        """
        found = self.read_later(spec, {})
        return SavedStage(dict(found.weights), found.buffers, dict(found.optimizer))

    def read_later(self, spec: StageSpec, cache: dict[tuple[str, str, str], Tensor] | None = None) -> SavedStage:
        """As `read`, but weights and states are read, and checked, each time that they are asked for. `cache`: where to
        keep what was read."""
        self.require(spec)

        def one(kind: str, name: str, state: str) -> Tensor:
            if cache is None:
                return self._read(kind, name, state)
            if (kind, name, state) not in cache:
                cache[kind, name, state] = self._read(kind, name, state)
            return cache[kind, name, state]

        def take(kind: str, row: ParamSpec, state: str = "") -> Tensor:
            return joined_rows([(one(kind, name, state), rows) for name, rows in self._pieces(row)])

        def states(name: str) -> dict[str, Any]:
            canonical, _ = self._pieces(held[name])[0]
            where = f"{self.path / MANIFEST}: optimizer state of {canonical}"
            row = {state: take("optimizer", held[name], state) for state in tensors.get(canonical, {})}
            return row | {state: decode(value, where) for state, value in scalars.get(canonical, {}).items()}

        left_out, tensors, scalars = self.left_out(spec), self._manifest.tensors.optimizer, self._manifest.scalars
        held = {param.name: param for param in spec.params if param not in left_out}
        stepped = [n for n, p in held.items() if (c := self._pieces(p)[0][0]) in tensors or c in scalars]
        buffers = {buffer.name: take("buffers", buffer) for buffer in spec.model_buffers}
        return SavedStage(Reads(held, lambda name: take("weights", held[name])), buffers, Reads(stepped, states))

    def require(self, *specs: StageSpec) -> None:
        """Raise `CheckpointError` if the checkpoint lacks tensors of these stages or has them in another shape."""
        wrong = []
        for spec in specs:
            held = [param for param in spec.params if param not in self.left_out(spec)]
            for kind, rows in (("weights", held), ("buffers", spec.model_buffers)):
                for row in whole_params(rows):
                    found = self._shape(kind, self._canonical(row.name))
                    if found is None:
                        wrong.append(f"{row.name} (not there)")
                    elif found != row.shape:
                        wrong.append(f"{row.name} (here {list(found)}, in the model {list(row.shape)})")
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise CheckpointError(
                f"{self.path}: is a checkpoint of another model: {', '.join(wrong[:8])}{more}. It holds "
                f"{len(self.names)} parameters, {', '.join(self.names[:3])} first."
            )

    def left_out(self, spec: StageSpec) -> tuple[ParamSpec, ...]:
        """The frozen parameters of a stage that come with the base, not from here."""
        if self.base is None:
            return ()
        rows = frozen_params(spec.params)
        return tuple(row for row in rows if self._shape("weights", self._canonical(row.whole_name)) is None)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer, one at a time; tied ones once."""
        for kind in ("weights", "buffers"):
            names = self._manifest.tensors.rows_of(kind)
            for name in dict.fromkeys(map(self._parts.parameter_of, names)):
                pieces = self._parts.pieces(name, None)
                yield name, joined_rows([(self._read(kind, piece, ""), rows) for piece, rows in pieces])

    def verify(self) -> None:
        """Read every tensor and compare its sha256. Raises `CheckpointError` naming the first file that differs."""
        for kind in KINDS:
            for name, states in self._manifest.tensors.rows_of(kind).items():
                for state in states:
                    self._read(kind, name, state)

    def _canonical(self, name: str) -> str:
        return self.ties.get(name, name)

    def _pieces(self, row: ParamSpec) -> list[tuple[str, slice]]:
        """The names that hold a parameter, or a part of one, with the rows of each."""
        part = row.part if isinstance(row.part, RowPart) else None
        return self._parts.pieces(self._canonical(row.whole_name), part)

    def _shape(self, kind: str, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter or buffer; None where the checkpoint has none of that name."""
        stored, _ = self._parts.pieces(name, None)[0]
        found = self._manifest.tensors.rows_of(kind).get(stored)
        if found is None:
            return None
        return ParamSpec(stored, tuple(found[""].shape), "", part=self._parts.parts.get(stored)).whole.shape

    def _read(self, kind: str, name: str, state: str) -> Tensor:
        row = self._manifest.tensors.rows_of(kind)[name][state]
        file = self._manifest.shards[row.shard].file
        if file not in self._files:
            self._files[file] = TensorFile(self.path / file)
        entry = self._files[file].entries.get(tensor_key(kind, name, state))
        if entry is None or entry.code != row.dtype or list(entry.shape) != row.shape:
            raise damage(self.path / file, f"its header no longer describes {name!r} as it was written")
        return self._files[file].read(tensor_key(kind, name, state), row.sha256)


def open_checkpoint(directory: str | os.PathLike[str], *, verify: bool = False) -> Checkpoint:
    """Open the checkpoint last saved under this name, even if that save was interrupted while it replaced another.

    File sizes are checked now; contents are checked when they are read, or now with `verify`. Raises `CheckpointError`
    naming the file that is missing, truncated or altered.
    """
    path = durable.locate(directory)
    if path is None:
        raise CheckpointError(_nothing_at(Path(directory)))
    checkpoint = Checkpoint(path)
    if verify:
        checkpoint.verify()
    return checkpoint


def find_latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint of the highest step: `root` itself or a directory in it; None if there is none.

    Directories without a manifest and unfinished saves are skipped. Raises `CheckpointError` if a manifest is damaged.
    """
    root = Path(root).resolve()
    places = [durable.locate(root)]
    if root.is_dir():
        places += [durable.locate(root / name) for name in durable.names_in(root)]
    found = [place for place in places if place is not None and (place / MANIFEST).is_file()]
    return max(found, key=lambda place: read_manifest(place).step, default=None)


def remove_oldest(root: str | os.PathLike[str], keep: int) -> None:
    """Remove the complete checkpoints in a directory, but for the `keep` of the highest steps. Others stay, and so does
    what a save that is under way, in a thread or another process, writes beside them and renames."""
    root = Path(root)
    places = [root / name for name in durable.names_in(root)] if root.is_dir() else []
    found = [path for path in places if (path / MANIFEST).is_file()]
    for path in sorted(found, key=lambda path: read_manifest(path).step)[: max(0, len(found) - keep)]:
        (path / MANIFEST).unlink()  # first, as half a checkpoint is none
        shutil.rmtree(path)


def _write(path: Path, tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, str]:
    need_bytes = file_bytes(tensors)
    durable.require_space(path.parent, need_bytes, what=str(path))
    try:
        with durable.disk_errors(path, need_bytes):
            return write_tensors(path, tensors)
    except CheckpointError:
        path.unlink(missing_ok=True)
        raise


def _require_bytes(path: Path, num_bytes: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        what = "is missing" if found is None else f"has {found} bytes, not the {num_bytes} written"
        raise damage(path, what)


def _strangers(directory: Path) -> list[str]:
    names = (p.name for p in directory.iterdir())
    own = (directory / MANIFEST).is_file()
    return sorted(n for n in names if not (own and (n == MANIFEST or n.endswith(".safetensors"))))


def _nothing_at(directory: Path) -> str:
    parent = directory.parent
    others = [name for name in (durable.names_in(parent) if parent.is_dir() else []) if (parent / name).is_dir()]
    known = [name for name in others if (parent / name / MANIFEST).is_file()]
    return f"{directory}: no such checkpoint; {f'beside it are {known}' if known else 'there are none beside it'}."
