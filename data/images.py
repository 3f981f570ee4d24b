"""Chats with images to examples, by the processor of a model that sees, with the loss on the assistant's turns only."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..compiler.packing.documents import IGNORED
from ..ir.errors import PlanError
from .chat import REFUSED, ChatMessage, messages_of, require_calls
from .codec import Codec
from .files import Record

PLACE = "<image>"  # of an image, in texts of ShareGPT's files
Tools = list[dict[str, Any]] | None
OWN = ("image", "path", "url")  # keys of a part that holds its image itself


def encode_images(
    messages: list[ChatMessage], given: Any, codec: Codec, folder: Path, where: str, tools: Tools = None
) -> dict[str, Any]:
    """Token ids, labels and types of tokens as lists, and what the processor makes of images as tensors.

    given: the images that parts {"type": "image"} and texts with "<image>" stand for, in order; folder: of paths.
    Raises `PlanError` for another number of them, for an image that cannot be read, and for a template that rewrites
    turns or leaves functions out.
    """
    require_calls(messages, codec, where, tools)
    images = iter(given if isinstance(given, list) else [] if given is None else [given])

    def read(own: Any) -> dict[str, Any]:
        image = next(images, None) if own is None else own
        if image is None:
            raise PlanError(f'{where}: its messages have more places of images than "images" has images')
        return {"type": "image", "image": _read(image, codec.image_size, folder, where)}

    parts = [{**message, "content": _parts(message, read)} for message in messages]
    if next(images, None) is not None:
        raise PlanError(f"{where}: has more images than its messages have places: {PLACE} in texts, or parts of images")
    more = {} if tools is None else {"tools": tools}
    whole = _process(codec, parts, where, **more)
    ids = whole.pop("input_ids")
    labels = [IGNORED] * len(ids)
    for number, message in enumerate(parts):
        if message["role"] == "assistant":
            first = _prefix(codec, parts[:number], ids, where, add_generation_prompt=True, **more)
            last = _prefix(codec, parts[: number + 1], ids, where, **more)
            labels[first:last] = ids[first:last]
    return {"input_ids": ids, "labels": labels, **whole}


def image_files(record: Record, columns: Mapping[str, str]) -> Iterator[Path]:
    """The files that a chat names as its images."""
    messages = messages_of(record.values[columns["messages"]], record.where, with_images=True)
    given = record.values[columns["images"]] if "images" in columns else []
    images = given if isinstance(given, list) else [given]
    contents = (message["content"] for message in messages if isinstance(message["content"], list))
    for image in (*images, *(_own_image(part) for content in contents for part in content)):
        path = image.get("path") if isinstance(image, dict) and image.get("bytes") is None else image
        if isinstance(path, str):
            yield record.folder / path


def _own_image(part: dict[str, Any]) -> Any:
    """The image that a part holds itself; None for another part."""
    return next((part[name] for name in OWN if part.get(name) is not None), None)


def _parts(message: ChatMessage, read: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a message, each with its image or text."""
    content = message["content"]
    if isinstance(content, list):
        return [read(_own_image(part)) if part["type"] == "image" else part for part in content]
    found: list[dict[str, Any]] = []
    texts = content.split(PLACE)
    for number, text in enumerate(texts):
        if number:
            found.append(read(None))
        text = text.strip("\n") if len(texts) > 1 else text
        if text or len(texts) == 1:
            found.append({"type": "text", "text": text})
    return found


def _read(image: Any, size: tuple[int, int] | None, folder: Path, where: str) -> Any:
    """An image, from the form that a data set has it in. Raises `PlanError` for one that is not here."""
    from PIL import Image

    try:
        if isinstance(image, dict):
            image = io.BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
        if isinstance(image, (str, io.BytesIO)):
            image = Image.open(folder / image if isinstance(image, str) else image)
        found = image.convert("RGB")
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{where}: an image cannot be read ({error}); allowed are images, bytes, files here") from error
    return found if size is None else found.resize((size[1], size[0]))


def _prefix(codec: Codec, messages: list[ChatMessage], whole: list[int], where: str, **options: Any) -> int:
    if not messages:
        return 0
    found = _process(codec, messages, where, **options)["input_ids"]
    if whole[: len(found)] != found:
        raise PlanError(
            f"{where}: the chat template writes earlier turns otherwise once there are later ones, so that the "
            "assistant's tokens cannot be told; leave turns out, or give it another template"
        )
    return len(found)


def _process(codec: Codec, messages: list[ChatMessage], where: str, **options: Any) -> dict[str, Any]:
    """The processor's inputs of one chat: lists of what each token has, and tensors of what each image has."""
    from jinja2 import TemplateError

    try:
        found: Any = codec.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", **options
        )
    except (TemplateError, *REFUSED) as error:
        raise PlanError(f"{where}: the processor refuses these messages: {error}") from error
    tokens = found["input_ids"].shape
    return {
        name: value[0].tolist() if value.shape == tokens else value
        for name, value in found.items()
        if name != "attention_mask" and isinstance(value, torch.Tensor)
    }
