"""Turns text into rows of equal length, and chooses which rows are held out.

Causal language models take one stream of tokens cut into rows, or documents packed into rows; classifiers take one row
per labelled text, cut or padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compiler.packing.documents import PackedRows, pack_documents
from ..ir.errors import PlanError

NUM_BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")

Encode = Callable[[str], list[int]]  # text to token ids


@dataclass(frozen=True)
class Codec:
    """Turns text into tokens, by a tokenizer or as plain bytes. `special` adds the marks around a classifier's rows."""

    encode: Encode
    special: Encode
    end_id: int | None  # between two texts of one stream
    pad_id: int
    vocab_size: int
    is_bytes: bool = False
    tokenizer: Any = None

    @staticmethod
    def of_directory(directory: Path | None) -> Codec:
        """The tokenizer in a model's directory, or plain bytes if there is none. Never downloads."""
        if directory is None or not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return Codec(_bytes, _bytes, end_id=10, pad_id=0, vocab_size=NUM_BYTES, is_bytes=True)
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
        return Codec(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            lambda text: tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"],
            end_id=end,
            pad_id=0 if pad is None else pad,
            vocab_size=len(tokenizer),
            tokenizer=tokenizer,
        )


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8"))


@dataclass(frozen=True)
class TextSample:
    """One line of a data file."""

    text: str
    label: str | None = None


def read_samples(path: Path, *, labelled: bool) -> list[TextSample]:
    """The one sample of a .txt file, or those of a .jsonl file (one {"text": ..., "label": ...} per line).

    Raises `PlanError` naming the file and the line at fault.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise PlanError(f"{path}: a data file ends in .txt (plain text) or .jsonl (one JSON object a line)")
    if labelled and path.suffix == ".txt":
        raise PlanError(f'{path}: a classifier learns from labels; give a .jsonl file of {{"text": ..., "label": ...}}')
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".txt":
        samples = [TextSample(text)] if text.strip() else []
    else:
        rows = enumerate(text.splitlines(), start=1)
        samples = [_sample(path, number, line, labelled) for number, line in rows if line.strip()]
    if not samples:
        raise PlanError(f"{path} holds no text")
    return samples


def _sample(path: Path, number: int, line: str, labelled: bool) -> TextSample:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise PlanError(f'{where}: found {line[:60]!r}, allowed: an object with the key "text" and a text')
    label = row.get("label")
    if labelled and (label is None or isinstance(label, (dict, list, float))):
        raise PlanError(f'{where}: found the label {label!r}, allowed: a text or a whole number under "label"')
    return TextSample(row["text"], None if label is None else str(label))


@dataclass(frozen=True)
class Rows:
    """Samples of one length: the inputs of a batch by name. Labels are the tokens themselves, or one class per row."""

    columns: dict[str, Tensor]  # [rows, sequence]; labels of classes: [rows]

    @property
    def input_ids(self) -> Tensor:
        return self.columns["input_ids"]

    @property
    def labels(self) -> Tensor:
        return self.columns["labels"]

    def __len__(self) -> int:
        return len(self.input_ids)

    def take(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """These rows as one batch."""
        chosen = torch.tensor(list(indices), dtype=torch.long)  # the dtype matters if there are no indices
        return {name: column[chosen] for name, column in self.columns.items()}

    def split(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """Split into (the other rows, `fraction` of the rows), chosen at random by `seed` alone."""
        order = _order(len(self), seed).tolist()
        count = round(fraction * len(self))
        parts = (sorted(order[count:]), sorted(order[:count]))
        rest, held = (Rows(self.take(part)) for part in parts)
        return rest, held


def stream_rows(samples: Sequence[TextSample], codec: Codec, sequence: int) -> Rows:
    """All texts as one stream of tokens, cut into rows whose labels are the tokens. Left-over tokens are dropped."""
    tokens: list[int] = []
    for i, sample in enumerate(samples):
        if i and codec.end_id is not None:
            tokens.append(codec.end_id)
        tokens += codec.encode(sample.text)
    count = len(tokens) // sequence
    if count == 0:
        raise PlanError(
            f"the text has {len(tokens)} tokens, fewer than one row of sequence={sequence}; give more text, or "
            f"--sequence {max(1, len(tokens))} or less"
        )
    ids = torch.tensor(tokens[: count * sequence]).view(count, sequence)
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def packed_rows(
    samples: Sequence[TextSample], codec: Codec, sequence: int, first_position: int = 0
) -> tuple[Rows, PackedRows]:
    """Each text as a document with its end mark, packed whole, and what is known of the packing."""
    end = [] if codec.end_id is None else [codec.end_id]
    documents = [codec.encode(sample.text) + end for sample in samples]
    packed = pack_documents(documents, sequence, pad_id=codec.pad_id, first_position=first_position)
    return Rows(packed.columns), packed


def labelled_rows(samples: Sequence[TextSample], codec: Codec, sequence: int, classes: Sequence[str]) -> Rows:
    """One row per sample, cut to `sequence` tokens (the last stays the tokenizer's end mark) or padded with a mask."""
    number = {name: i for i, name in enumerate(classes)}
    ids = torch.full((len(samples), sequence), codec.pad_id)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        tokens = codec.special(sample.text)
        if len(tokens) > sequence:
            tokens = [*tokens[: sequence - 1], tokens[-1]] if not codec.is_bytes else tokens[:sequence]
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = 1
        if not tokens:
            mask[row, 0] = 1  # an empty text attends to one padding token, as attention to nothing is undefined
    labels = torch.tensor([number[str(sample.label)] for sample in samples])
    return Rows({"input_ids": ids, "attention_mask": mask, "labels": labels})


def classes_of(samples: Sequence[TextSample]) -> list[str]:
    """The labels in use, sorted; whole numbers by value."""
    names = {str(sample.label) for sample in samples}
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdigit() else (1, 0, name))


def evaluation_batches(rows: Rows, batch: int) -> Iterator[tuple[list[int], int]]:
    """Batches as (row indices, the number that count), in order; the last batch is filled up with the first rows."""
    for start in range(0, len(rows), batch):
        indices = range(start, start + batch)
        yield [i % len(rows) for i in indices], min(batch, len(rows) - start)


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
