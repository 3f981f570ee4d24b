"""Examples to rows of one length: cut from one stream, packed, or padded each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compiler.packing.documents import IGNORED, pack_documents
from ..ir.errors import PlanError
from .codec import Codec
from .encode import Example
from .rows import Rows


def stream_rows(examples: Sequence[Example], codec: Codec, sequence: int) -> Rows:
    """All texts as one stream of tokens, cut into rows whose labels are the tokens. Left-over tokens are dropped."""
    tokens: list[int] = []
    for number, example in enumerate(examples):
        if number:
            tokens += codec.end_ids
        tokens += example["input_ids"]
    count = len(tokens) // sequence
    if count == 0:
        raise PlanError(
            f"the text has {len(tokens)} tokens, fewer than one row of sequence={sequence}; give more text, or "
            f"--sequence {max(1, len(tokens))} or less"
        )
    ids = torch.tensor(tokens[: count * sequence]).view(count, sequence)
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def packed_rows(examples: Sequence[Example], codec: Codec, sequence: int, first_position: int) -> tuple[Rows, str]:
    """Each example whole in a row with others, none of which sees another; and what is known of the packing. A text
    gets its end mark."""
    documents = [
        example if "labels" in example else {"input_ids": example["input_ids"] + codec.end_ids} for example in examples
    ]
    packed = pack_documents(documents, sequence, pad_id=codec.pad_id, first_position=first_position)
    return Rows(packed.columns), packed.describe()


def padded_rows(examples: Sequence[Example], codec: Codec, lengths: dict[str, int]) -> Rows:
    """One row per example. Token ids get a mask, in which an example without tokens has one, as attention to nothing is
    undefined; labels are ignored where there are none. Tensors are those of images."""
    columns, uneven = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name in names_of(examples):
        if any(isinstance(example.get(name), Tensor) for example in examples):
            images = _images([example.get(name) for example in examples], name)
            if any(each.shape != images[0].shape for each in images):
                uneven[name] = images
            else:
                columns[name] = torch.stack(images)
            continue
        is_ids = name.endswith("input_ids")
        filler = codec.pad_id if is_ids else IGNORED if name.endswith("labels") else 0
        rows = torch.full((len(examples), lengths[name]), filler)
        mask = torch.zeros_like(rows)
        for number, example in enumerate(examples):
            values = example.get(name, [])
            count = len(values)
            rows[number, :count] = torch.tensor(values, dtype=torch.long)
            mask[number, : max(count, 1)] = 1
        columns[name] = rows
        if is_ids:
            columns[name.replace("input_ids", "attention_mask")] = mask
    return Rows(columns, uneven)


def names_of(examples: Sequence[Example]) -> list[str]:
    """The names of all values; a row without images lacks those of images."""
    return list(dict.fromkeys(name for example in examples for name in example))


def _images(tensors: list[Tensor | None], name: str) -> list[Tensor]:
    """The images of each row. Raises `PlanError` where rows have none, or differ in more than the number of images, or
    of their patches, which come one after another in a batch."""
    first, *others = ("none" if tensor is None else str(list(tensor.shape)) for tensor in tensors)
    ends = ["none" if tensor is None else tensor.shape[1:] for tensor in tensors]
    for number, found in enumerate(others, start=2):
        if ends[number - 1] != ends[0]:
            raise PlanError(
                f"row {number}: its images are {found} as {name}, those of the first row {first}; allowed are images "
                "in each row, of one size, as --image-size 448 makes them, or as patches, as processors of Qwen-VL do"
            )
    return [tensor for tensor in tensors if tensor is not None]


def classes_of(labels: Sequence[str]) -> list[str]:
    """The labels in use, sorted; whole numbers by value."""
    return sorted(set(labels), key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))
