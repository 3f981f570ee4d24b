"""A small classification task made of text that every Python carries: the language reference, as `help()` shows it.

A passage is 40 consecutive words of one chapter; its label is the group that the chapter belongs to. Which passages are
held out depends on the text alone, so two runs on one Python train and judge on the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

PASSAGE_WORDS, SHARED_WORDS = 40, 10
# Chapters of pydoc_data.topics. No chapter here contains another, so no passage stands twice.
GROUPS: dict[str, tuple[str, ...]] = {
    "strings": ("strings", "string-methods", "formatstrings"),
    "debugger": ("debugger",),
    "collections": ("typesseq", "typesmapping"),
    "statements": ("compound",),
    "special methods": ("specialnames",),
    "names, imports": ("import", "execmodel"),
}


@dataclass(frozen=True)
class Passage:
    """Some text and the index of its group in GROUPS."""

    text: str
    label: int


def passages(num_held_out: int = 20, num_trained: int = 100) -> tuple[list[Passage], list[Passage]]:
    """Passages to train on and passages held out: of every group at most `num_trained` and exactly `num_held_out`.

    Both are spread evenly over the group's chapters. The reference repeats itself here and there: what shares
    `SHARED_WORDS` in a row with a held-out passage is not trained on.
    """
    from pydoc_data.topics import topics

    held_out: list[Passage] = []
    others: list[list[Passage]] = []
    for label, chapters in enumerate(GROUPS.values()):
        cut = [Passage(text, label) for chapter in chapters for text in _cut(topics[chapter])]
        chosen = _spread(len(cut), num_held_out)
        held_out += [cut[index] for index in chosen]
        others.append([passage for index, passage in enumerate(cut) if index not in set(chosen)])
    secret = {run for passage in held_out for run in runs_of_words(passage.text)}
    training: list[Passage] = []
    for group in others:
        rest = [passage for passage in group if secret.isdisjoint(runs_of_words(passage.text))]
        training += [rest[index] for index in _spread(len(rest), min(num_trained, len(rest)))]
    return training, held_out


def runs_of_words(text: str) -> set[str]:
    """Every SHARED_WORDS words in a row."""
    words = text.split()
    return {" ".join(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def _cut(chapter: str) -> list[str]:
    words = chapter.split()
    return [" ".join(words[at : at + PASSAGE_WORDS]) for at in range(0, len(words) - PASSAGE_WORDS + 1, PASSAGE_WORDS)]


def _spread(total: int, count: int) -> list[int]:
    """`count` different indices below `total`, at even distances. Raises ValueError where there are fewer."""
    if count > total:
        raise ValueError(f"{count} passages wanted of {total}: this Python's reference has shorter chapters")
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def epochs(training: Sequence[Passage], batch_size: int, num_epochs: int, seed: int = 0) -> list[list[Passage]]:
    """Full batches, shuffled anew in each epoch; what does not fill a batch is left out of that epoch."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_epochs):
        order = torch.randperm(len(training), generator=generator).tolist()
        for start in range(0, len(order) - batch_size + 1, batch_size):
            batches.append([training[index] for index in order[start : start + batch_size]])
    return batches


class Encoder:
    """Passages to the tensors that a BERT classifier takes, cut or padded to `num_tokens`."""

    def __init__(self, directory: Path, num_tokens: int):
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.enable_truncation(num_tokens)
        self._tokenizer.enable_padding(length=num_tokens)

    def batch(self, rows: Sequence[Passage]) -> dict[str, Tensor]:
        """input_ids and attention_mask int64[rows, num_tokens], labels int64[rows]."""
        encoded = self._tokenizer.encode_batch([row.text for row in rows])
        return {
            "input_ids": torch.tensor([each.ids for each in encoded]),
            "attention_mask": torch.tensor([each.attention_mask for each in encoded]),
            "labels": torch.tensor([row.label for row in rows]),
        }
