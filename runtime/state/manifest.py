"""The manifest of a checkpoint: the file of each tensor, and every scalar of the run.

The manifest is JSON that contains its own sha256. Each tensor's row has the tensor's sha256, so that reading a part of
a checkpoint checks exactly that part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...ir.errors import CheckpointError
from .plain_json import encode

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "penstock checkpoint"


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
    """What one stage wrote, small enough to send to the process that commits. `scalars` has the states that are
    numbers."""

    stage: str
    file: str
    bytes: int
    tensors: tuple[TensorRecord, ...]
    scalars: Mapping[str, Mapping[str, Any]]


def build_manifest(shards: Collection[ShardRecord], progress: RunPosition, ties: Mapping[str, str]) -> dict[str, Any]:
    """Build the manifest of these shards, as `read_manifest` returns it."""
    manifest: dict[str, Any] = {"format": _FORMAT, "version": VERSION}
    for name in RunPosition.__dataclass_fields__:
        manifest[name] = encode(getattr(progress, name), f"{name} of the checkpoint")
    manifest["ties"] = dict(ties)
    manifest["shards"] = [{"stage": s.stage, "file": s.file, "bytes": s.bytes} for s in shards]
    tensors, scalars = _gathered(shards)
    manifest |= {"tensors": tensors, "scalars": scalars, "fingerprint": _fingerprint(tensors)}
    manifest["sha256"] = _own_digest(manifest)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest in the directory `path`. Raises `CheckpointError` if it is missing, damaged or altered."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); {path} is no checkpoint.") from error
    except ValueError as error:
        raise damaged(file, f"is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise damaged(file, "is not the manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{file}: has version {manifest.get('version')}; this Penstock reads version {VERSION}.")
    if manifest.get("sha256") != _own_digest(manifest):
        raise damaged(file, "was altered after writing")
    return manifest


def tensor_key(kind: str, name: str, state: str) -> str:
    """The name of a tensor inside its shard."""
    return f"{kind}.{state}/{name}" if state else f"{kind}/{name}"


def damaged(file: Path, what: str) -> CheckpointError:
    """The error for a checkpoint file that differs from what was written."""
    return CheckpointError(f"{file}: {what}. Restore the file from a copy, or resume from an earlier checkpoint.")


def _gathered(shards: Collection[ShardRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The place of each tensor and the scalars, over all shards. A buffer of several stages is read from the first."""
    tensors: dict[str, Any] = {"weights": {}, "buffers": {}, "optimizer": {}}
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


def _fingerprint(tensors: Mapping[str, Any]) -> str:
    """A hash of the model's names, shapes and dtypes, which does not depend on the stages."""
    rows = [
        [kind, name, tensors[kind][name][""]["dtype"], tensors[kind][name][""]["shape"]]
        for kind in ("weights", "buffers")
        for name in sorted(tensors[kind])
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _own_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
