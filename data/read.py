"""Files to rows: `read_rows`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.errors import PlanError
from .cache import key_of, load_or_make
from .codec import Codec
from .encode import ENCODERS, Example, label_of
from .files import hash_of, read_records
from .images import image_files
from .kinds import columns_of, kind_of
from .layout import classes_of, names_of, packed_rows, padded_rows, stream_rows
from .lengths import Lengths
from .rows import Rows
from .spec import DataSpec


@dataclass(frozen=True)
class DataRows:
    """The rows that were read. `said`: what a user should know of it, a sentence each. `classes`: of a classifier, in
    order."""

    kind: str
    rows: Rows
    said: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)


def read_rows(spec: DataSpec, codec: Codec, head: str, first_position: int = 0) -> DataRows:
    """The rows of these files for a model with that head, from the cache where they are in it.

    first_position: as `pack_documents` takes it. Raises `PlanError` naming the file and row at fault.
    """
    _, said = look(spec, head)
    wishes = spec.model_dump_json(exclude={"paths"})
    hashes = (hash_of(spec.paths), _hash_of_images(spec, codec), codec.fingerprint)
    key = key_of(*hashes, wishes, head, str(first_position))
    found = load_or_make(key, lambda: _plain(_make_rows(spec, codec, head, first_position)))
    return DataRows(found["kind"], Rows(**found["rows"]), [*said, *found["said"]], found["classes"])


def _hash_of_images(spec: DataSpec, codec: Codec) -> str:
    """A hash of the images that chats name by their paths; "" for a model that reads text alone."""
    if codec.processor is None:
        return ""
    records = read_records(spec.paths, spec.split)
    files = (file for record in records for file in image_files(record, columns_of(record, "chat", spec.columns)))
    return hash_of(file for file in files if file.is_file())


def _plain(made: DataRows) -> dict[str, Any]:
    return {"kind": made.kind, "rows": vars(made.rows), "said": made.said, "classes": made.classes}


def examples_of(spec: DataSpec, codec: Codec, head: str, lengths: Lengths) -> Iterator[tuple[str, Example, str | None]]:
    """Kind, example and class of each record that is kept."""
    kind, unseen = "", dict(spec.columns)
    record = None
    for record in read_records(spec.paths, spec.split):
        if not kind:
            kind = kind_of(record, spec.kind, head, spec.columns)
            _require_room(spec, kind, head)
        columns = columns_of(record, kind, spec.columns)
        unseen = {name: column for name, column in unseen.items() if name not in columns}
        label = label_of(record, columns) if kind == "classification" else None
        example = ENCODERS[kind](record, columns, codec)
        lengths.keep_last = kind in ("classification", "seq2seq") and not codec.is_bytes
        is_cut_later = lengths.wish == "truncate" if spec.pack else kind == "text"  # into pieces, or as one stream
        kept = example if is_cut_later else lengths.fit(example, record.where)
        if kept is not None:
            yield kind, kept, label
    if record is not None and unseen:
        (name, column), *_ = unseen.items()
        there = ", ".join(record.values)
        raise PlanError(f'--column {name}={column}: no row has a column "{column}"; the last has {there}')


def _require_room(spec: DataSpec, kind: str, head: str) -> None:
    if spec.pack and kind in ("classification", "seq2seq", "preference"):
        raise PlanError(f"--pack: {kind} has one row for each record; packing is for causal language models")
    if spec.long_rows != "truncate" and kind == "text" and not spec.pack:
        raise PlanError(f"--long-rows {spec.long_rows}: texts are one stream, so that none is too long; give --pack")
    if spec.pack and head == "image-text-to-text":
        raise PlanError("--pack: rows of a model that sees have one chat each; leave it out")
    if spec.targets is not None and kind != "seq2seq":
        raise PlanError(f"--targets {spec.targets}: {kind} has no labels of a length of their own; leave it out")


def _make_rows(spec: DataSpec, codec: Codec, head: str, first_position: int) -> DataRows:
    lengths = Lengths(spec.sequence, spec.long_rows, spec.targets)
    found = list(examples_of(spec, codec, head, lengths))
    said = lengths.describe()
    if not found:
        raise PlanError(f"{', '.join(map(str, spec.paths))}: no row is left to train on; {'; '.join(said)}")
    kind, examples = found[0][0], [example for _, example, _ in found]
    if spec.pack:
        rows, packing = packed_rows(examples, codec, spec.sequence, first_position)
        return DataRows(kind, rows, [packing, *said])
    if kind == "text":
        return DataRows(kind, stream_rows(examples, codec, spec.sequence), said)
    rows = padded_rows(examples, codec, {name: _length(name, examples, spec, kind) for name in names_of(examples)})
    if kind != "classification":
        return DataRows(kind, rows, said)
    labels = [str(label) for _, _, label in found]
    classes = classes_of(labels)
    number = {name: index for index, name in enumerate(classes)}
    columns = {**rows.columns, "labels": torch.tensor([number[label] for label in labels])}
    return DataRows(kind, Rows(columns), said, classes)


def _length(name: str, examples: list[Example], spec: DataSpec, kind: str) -> int:
    """Tokens of a row: as wished; labels of their own have the tokens of the longest."""
    if name == "labels" and kind == "seq2seq":
        return spec.targets or min(spec.sequence, max(len(example[name]) for example in examples))
    return spec.sequence


def look(spec: DataSpec, head: str) -> tuple[str, list[str]]:
    """By their first record the kind of data that these files hold; and in words, which columns are not read."""
    for record in itertools.islice(read_records(spec.paths, spec.split), 1):
        kind = kind_of(record, spec.kind, head, spec.columns)
        used = {**spec.columns, **columns_of(record, kind, spec.columns)}
        others = [name for name, value in record.values.items() if value is not None and name not in used.values()]
        return kind, [f"columns that are not read: {', '.join(others)}"] if others else []
    raise PlanError(f"{', '.join(map(str, spec.paths))} holds no rows")
