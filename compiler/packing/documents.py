"""Packs documents into rows of one length, such that no document attends to another.

In: documents as token ids. Out: `PackedRows`: position ids begin anew with each document, which is where transformers'
models end what a token sees, and the first token of each document, which none foretells, is no target.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import PlanError

IGNORED = -100  # the target that cross entropy leaves out

_Piece = tuple[Tensor, Tensor]  # tokens and labels


@dataclass(frozen=True)
class PackedRows:
    """A data set of rows that hold `input_ids`, `position_ids` and `labels`.

    `num_documents`: those that have tokens; `num_pieces`: what they were cut into; `num_padding`: tokens that fill rows
    up.
    """

    input_ids: Tensor  # [rows, sequence]
    position_ids: Tensor  # [rows, sequence]
    labels: Tensor  # [rows, sequence]
    num_documents: int
    num_pieces: int
    num_padding: int

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}

    @property
    def columns(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "labels": self.labels}

    def describe(self) -> str:
        """In words: "3 documents in 2 rows, 5 of 32 tokens are padding (15.6%)"."""
        total = self.input_ids.numel()
        cut = f" ({self.num_pieces} pieces)" if self.num_pieces > self.num_documents else ""
        return (
            f"{self.num_documents} documents{cut} in {len(self)} rows, {self.num_padding} of {total} tokens are "
            f"padding ({self.num_padding / total:.1%})"
        )


def pack_documents(documents: Sequence[Any], sequence: int, *, pad_id: int = 0, first_position: int = 0) -> PackedRows:
    """Pack documents whole into rows of `sequence` tokens, each into the first row with room.

    documents: token ids, as lists or tensors, or mappings with "input_ids" and, where not every token is a target, with
        "labels" (-100: no target). A longer document is cut into pieces, each of which is a document from then on.
    pad_id: the token that fills rows up. Padding is a document of its own without targets.
    first_position: the position of a document's first token; the padding token's id + 1 in models such as RoBERTa.

    The same documents give the same rows. Raises `PlanError` for documents of another form, and where no token is a
    target.
    """
    if not isinstance(sequence, int) or sequence < 2:
        raise PlanError(f"sequence={sequence!r}; a row has 2 tokens or more, as a document's first one is no target")
    given = [_tokens_and_labels(number, document) for number, document in enumerate(documents)]
    given = [document for document in given if len(document[0])]
    pieces = [piece for document in given for piece in _cut(document, sequence)]
    places = first_fit([len(tokens) for tokens, _ in pieces], sequence)
    count = max((row for row, _ in places), default=-1) + 1
    ids = torch.full((count, sequence), pad_id)
    positions, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    ends = [0] * count
    for (tokens, targets), (row, start) in zip(pieces, places):
        end = ends[row] = start + len(tokens)
        ids[row, start:end] = tokens
        positions[row, start:end] = torch.arange(len(tokens))
        labels[row, start + 1 : end] = targets[1:]
    for row, end in enumerate(ends):
        positions[row, end:] = torch.arange(sequence - end)
    if not bool((labels != IGNORED).any()):
        raise PlanError(
            f"none of the {len(documents)} documents has a target: a document needs 2 tokens, the second of which is "
            "no ignored label"
        )
    padding = sum(sequence - end for end in ends)
    return PackedRows(ids, positions + first_position, labels, len(given), len(pieces), padding)


def first_fit(sizes: Sequence[int], room: int) -> list[tuple[int, int]]:
    """The row of each item and its place in it, where each goes into the first row of this much room that it fits."""
    width = 1 << max(len(sizes) - 1, 0).bit_length()  # leaves: one row for each item is enough
    most = [room] * (2 * width)  # node -> the most room of a row below it; its children are 2 * node and 2 * node + 1
    found = []
    for size in sizes:
        node = 1
        while node < width:
            node = 2 * node + (most[2 * node] < size)
        found.append((node - width, room - most[node]))
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return found


def _cut(document: _Piece, sequence: int) -> Iterator[_Piece]:
    tokens, labels = document
    return zip(tokens.split(sequence), labels.split(sequence))


def _tokens_and_labels(number: int, document: Any) -> _Piece:
    where = f"documents[{number}]"
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise PlanError(f'{where} has {", ".join(map(str, document)) or "nothing"}; it needs "input_ids"')
        tokens = _numbers(f'{where}["input_ids"]', document["input_ids"])
        labels = _numbers(f'{where}["labels"]', document["labels"]) if "labels" in document else tokens
    else:
        tokens = labels = _numbers(where, document)
    if len(labels) != len(tokens):
        raise PlanError(f"{where} has {len(tokens)} input_ids and {len(labels)} labels; give one label for each token")
    return tokens, labels


def _numbers(where: str, value: Any) -> Tensor:
    """Token ids as a tensor of one dimension."""
    if isinstance(value, Tensor):
        found = value
    else:
        try:
            found = torch.tensor([operator.index(token) for token in value], dtype=torch.long)
        except TypeError as error:
            raise PlanError(f"{where} is {str(value)[:60]!r}; it is a list or tensor of token ids") from error
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        shape = f"{found.dtype}{list(found.shape)}"
        raise PlanError(f"{where} is {shape}; it is one document, of whole numbers in one dimension")
    return found.long().cpu()
