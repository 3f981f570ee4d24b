"""The manifest of a checkpoint: the file of each tensor, and every scalar of the run.

The manifest is JSON that contains its own sha256. Each tensor's row has the tensor's sha256, so that reading a part of
a checkpoint checks exactly that part. Whoever altered a manifest could have signed it anew, so it is also read against
a schema: files are in the checkpoint's own directory, every tensor has a digest, every index is in range.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from ...ir.documents import Unreadable, plain_errors, read_json
from ...ir.errors import CheckpointError
from ...ir.program import ParamSpec, RowPart, wrong_parts
from .base_identity import BaseIdentity
from .plain_json import decode, encode
from .rng_state import require_rng_state
from .tensor_file import CODES

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "penstock checkpoint"
KINDS = ("weights", "buffers", "optimizer")  # of tensors
Count = Annotated[int, Field(ge=0, lt=2**63)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class RunPosition:
    """The state of a run besides its tensors. The dicts may hold any value that `plain_json` can write.

    `data` is the position in the data (epoch, samples seen, or whatever the user's loader needs). `rng` has the states
    of random generators outside the plan, see `rng_state.py`; generators inside it follow from `seed` and `step`.
    """

    step: int
    seed: int = 0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a shard. `kind` is "weights", "buffers" or "optimizer"; `state` is the optimizer state's name."""

    kind: str
    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def key(self) -> str:
        return tensor_key(self.kind, self.name, self.state)


@dataclass(frozen=True)
class ShardRecord:
    """The record of one stage's written data, small enough to send to the process that commits. `scalars` has the
    states that are numbers, `parts` the names that are rows of a parameter."""

    stage: str
    file: str
    bytes: int
    tensors: tuple[TensorRecord, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    parts: Mapping[str, RowPart] = field(default_factory=dict)


class ManifestPart(BaseModel):
    """Common rules: no key beyond those listed, and no value of another type than listed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ShardRow(ManifestPart):
    """One file. Its name is plain: it is in the checkpoint's directory itself."""

    stage: str
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")]
    bytes: Count


class TensorRow(ManifestPart):
    """One tensor: the index of its file, and what it must be."""

    shard: Count
    dtype: str
    shape: list[Count]
    sha256: Digest


class TensorRows(ManifestPart):
    """The rows by name and by state; weights and buffers have the one state ""."""

    weights: dict[str, dict[Literal[""], TensorRow]]
    buffers: dict[str, dict[Literal[""], TensorRow]]
    optimizer: dict[str, dict[str, TensorRow]]

    def rows_of(self, kind: str) -> Mapping[str, Mapping[str, TensorRow]]:
        """The rows of "weights", "buffers" or "optimizer"."""
        found: Mapping[str, Mapping[str, TensorRow]] = getattr(self, kind)
        return found


class PartRow(ManifestPart):
    """A name whose tensors are rows `begin` to `end` of those of a parameter with `total` rows."""

    parameter: str
    begin: Count
    end: Count
    total: Count


class BaseRow(ManifestPart):
    """The frozen weights that the checkpoint goes with and does not hold; see `base_identity.py`."""

    name: str
    digest: Digest


class Manifest(ManifestPart):
    """The whole document. `RunPosition`'s fields are as `plain_json` writes them."""

    format: Literal["penstock checkpoint"]
    version: Literal[1]
    step: Count
    seed: int
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    loss_scale: dict[str, Any]
    data: dict[str, Any]
    rng: dict[str, Any]
    ties: dict[str, str]
    shards: list[ShardRow]
    tensors: TensorRows
    scalars: dict[str, dict[str, Any]]
    parts: dict[str, PartRow] = {}
    base: BaseRow | None = None
    fingerprint: Digest
    sha256: Digest

    @pydantic.model_validator(mode="after")
    def _check_range(self) -> Manifest:
        for kind in KINDS:
            for name, states in self.tensors.rows_of(kind).items():
                if kind != "optimizer" and not states:
                    raise ValueError(f"{kind} {name!r} has no row")
                for row in states.values():
                    if row.shard >= len(self.shards) or row.dtype not in CODES:
                        raise ValueError(f"{kind} {name!r} names file {row.shard} of {len(self.shards)}, {row.dtype}")
        for name in self.parts:
            if name not in self.tensors.weights:
                raise ValueError(f"the part {name!r} has no row")
        specs = (
            ParamSpec(name, tuple(self.tensors.weights[name][""].shape), "", part=part)
            for name, part in self.row_parts.items()
        )
        wrong = next(wrong_parts(specs), None)
        if wrong is not None:
            raise ValueError(wrong)
        return self

    @property
    def row_parts(self) -> dict[str, RowPart]:
        return {name: RowPart(**dict(row)) for name, row in self.parts.items()}


def build_manifest(
    shards: Collection[ShardRecord], progress: RunPosition, ties: Mapping[str, str], base: BaseIdentity | None = None
) -> dict[str, Any]:
    """Build the manifest of these shards, as `read_manifest` returns it."""
    manifest: dict[str, Any] = {"format": _FORMAT, "version": VERSION}
    for name in RunPosition.__dataclass_fields__:
        manifest[name] = encode(getattr(progress, name), f"{name} of the checkpoint")
    manifest["ties"] = dict(ties)
    manifest["shards"] = [{"stage": s.stage, "file": s.file, "bytes": s.bytes} for s in shards]
    tensors, scalars = _gather_places(shards)
    parts = {name: part for shard in shards for name, part in shard.parts.items()}
    manifest |= {"tensors": tensors, "scalars": scalars, "fingerprint": _fingerprint(tensors, parts)}
    if parts:
        manifest["parts"] = {name: asdict(part) for name, part in parts.items()}
    if base is not None:
        manifest["base"] = asdict(base)
    manifest["sha256"] = _own_digest(manifest)
    try:
        Manifest.model_validate(manifest)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"this run cannot be saved, as it could not be resumed: {plain_errors(error)}") from error
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in the directory `path`. Raises `CheckpointError` if it is missing, damaged or altered."""
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointError(f"{file}: is missing; {path} is no checkpoint.")
    try:
        manifest = read_json(file)
    except Unreadable as error:
        raise damage(file, str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise damage(file, "is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{file}: has version {manifest.get('version')}; this Penstock reads version {VERSION}. A later release "
            "reads both."
        )
    if manifest.get("sha256") != _own_digest(manifest):
        raise damage(file, "was altered after writing")
    try:
        return Manifest.model_validate(manifest)
    except pydantic.ValidationError as error:
        raise damage(file, f"is not what Penstock writes: {plain_errors(error)}") from error


def position_in(manifest: Manifest, file: Path) -> RunPosition:
    """The state of the run in a manifest. Raises `CheckpointError` for values that no run has."""
    names = RunPosition.__dataclass_fields__
    found = {name: decode(getattr(manifest, name), f"{file}: {name}") for name in names}
    for name in names.keys() - {"step", "seed"}:
        if not isinstance(found[name], dict):
            raise damage(file, f"has {name} that is no mapping")
    require_rng_state(found["rng"], str(file))
    scale = found["loss_scale"].get("state")
    if scale is not None and not _is_scale(scale):
        raise damage(file, f"has the loss scale {scale!r:.60}")
    return RunPosition(**found)


def _is_scale(state: Any) -> bool:
    """Whether this is a factor and a number of good steps."""
    if not (isinstance(state, list) and len(state) == 2 and type(state[0]) in (int, float) and type(state[1]) is int):
        return False
    return 0 < state[0] < math.inf and state[1] >= 0


def tensor_key(kind: str, name: str, state: str) -> str:
    """The name of a tensor inside its shard."""
    return f"{kind}.{state}/{name}" if state else f"{kind}/{name}"


def damage(file: Path, what: str) -> CheckpointError:
    """The error for a checkpoint file that differs from what was written."""
    return CheckpointError(f"{file}: {what}. Restore the file from a copy, or resume from an earlier checkpoint.")


def _gather_places(shards: Collection[ShardRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The place of each tensor and the scalars, over all shards. A buffer of several stages is read from the first."""
    tensors: dict[str, Any] = {kind: {} for kind in KINDS}
    scalars: dict[str, Any] = {}
    for index, shard in enumerate(shards):
        for row in shard.tensors:
            states = tensors[row.kind].setdefault(row.name, {})
            if row.state in states and row.kind == "buffers":
                continue
            assert row.state not in states, f"two stages own {row.name!r}"
            states[row.state] = {"shard": index, "dtype": row.dtype, "shape": list(row.shape), "sha256": row.sha256}
        scalars |= shard.scalars
    return tensors, scalars


def _fingerprint(tensors: Mapping[str, Any], parts: Mapping[str, RowPart]) -> str:
    """A hash of the model's names, shapes and dtypes, which does not depend on the stages."""
    rows = []
    for kind in ("weights", "buffers"):
        found = {}
        for name, states in tensors[kind].items():
            spec = ParamSpec(name, tuple(states[""]["shape"]), states[""]["dtype"], part=parts.get(name)).whole
            found[spec.name] = [kind, spec.name, spec.dtype, list(spec.shape)]
        rows += [found[name] for name in sorted(found)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _own_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
