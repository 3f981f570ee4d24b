"""Rows that are read and tokenised while training, for files that are larger than memory."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from ..ir.errors import PlanError
from .codec import Codec
from .encode import Example
from .layout import names_of, padded_rows
from .lengths import Lengths
from .read import examples_of, look
from .spec import DataSpec

Batch = dict[str, Tensor]
ONE_SIZE = "each row has the same number of images, all of one size"


class StreamedRows:
    """The rows of a spec in the order of the files, from the beginning again after the last one.

    Raises `PlanError` for what needs all rows at once: packing, and classes.
    """

    def __init__(self, spec: DataSpec, codec: Codec, head: str):
        self.kind, self.said = look(spec, head)
        if spec.pack:
            raise PlanError("--streaming --pack: packing looks at all rows; leave one of them out")
        if self.kind == "classification":
            raise PlanError("--streaming: which classes there are is known after the last row; leave it out")
        if self.kind == "seq2seq" and spec.targets is None:
            raise PlanError("--streaming: how long the longest target is, is known after the last row; give --targets")
        self.spec, self.codec, self.head = spec, codec, head
        self.lengths = self._no_lengths()  # what happened to long rows in the first pass, so far

    def batches(self, size: int, start: int = 0) -> Iterator[Batch]:
        """Batches without end, from row `start` on."""
        rows = itertools.islice(self._rows(), start, None)
        while True:
            examples = list(itertools.islice(rows, size))
            found = padded_rows(examples, self.codec, self._sizes(examples))
            if found.uneven:
                raise PlanError(f"--streaming: {ONE_SIZE}; --image-size 448 makes them so, or leave --streaming out")
            yield found.columns

    def _sizes(self, examples: Sequence[Example]) -> dict[str, int]:
        own = {"labels": self.spec.targets} if self.spec.targets is not None else {}
        return {name: own.get(name, self.spec.sequence) for name in names_of(examples)}

    def _no_lengths(self) -> Lengths:
        return Lengths(self.spec.sequence, self.spec.long_rows, self.spec.targets)

    def _rows(self) -> Iterator[Example]:
        self.lengths = lengths = self._no_lengths()
        while True:
            count = 0
            for example in self._cut(lengths) if self.kind == "text" else self._examples(lengths):
                count += 1
                yield example
            if not count:
                why = "; ".join(lengths.describe()) or f"no whole row of {self.spec.sequence} tokens"
                raise PlanError(f"{', '.join(map(str, self.spec.paths))}: no row is left to train on; {why}")
            lengths = self._no_lengths()

    def _examples(self, lengths: Lengths) -> Iterator[Example]:
        for _, example, _ in examples_of(self.spec, self.codec, self.head, lengths):
            yield example
            self._require_short(lengths)
        self._require_short(lengths)

    def _require_short(self, lengths: Lengths) -> None:
        if self.spec.long_rows == "error":
            lengths.describe()

    def _cut(self, lengths: Lengths) -> Iterator[Example]:
        """One stream of tokens, a row of them at a time."""
        tokens: list[int] = []
        for number, example in enumerate(self._examples(lengths)):
            tokens += ([] if number == 0 else self.codec.end_ids) + example["input_ids"]
            while len(tokens) >= self.spec.sequence:
                row, tokens = tokens[: self.spec.sequence], tokens[self.spec.sequence :]
                yield {"input_ids": row, "labels": row}

    @property
    def fingerprint(self) -> str:
        """A hash of the files' names and sizes, and of what decides on rows."""
        found = hashlib.sha256(self.codec.fingerprint.encode() + self.spec.model_dump_json(exclude={"paths"}).encode())
        for path in self.spec.paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                found.update(f"{file.name}:{_size(file)}".encode())
        return found.hexdigest()[:16]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
