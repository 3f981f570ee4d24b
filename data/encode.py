"""Records to examples: the token ids and labels of one row, before it is cut, padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..compiler.packing.documents import IGNORED
from ..ir.errors import PlanError
from .chat import encode_chat, encode_reply, messages_of, require_template, tools_of
from .codec import Codec
from .files import Record
from .images import encode_images

Example = dict[str, Any]  # a list of what each token has, by the names that `layout` knows; tensors of images
Encoder = Callable[[Record, Mapping[str, str], Codec], Example]


def _text_of(record: Record, column: str) -> str:
    value = record.values[column]
    if not isinstance(value, str):
        raise PlanError(f'{record.where}: "{column}" is {str(value)[:60]!r}, allowed: a text')
    return value


def encode_text(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    return {"input_ids": codec.encode(_text_of(record, columns["text"]))}


def encode_labelled(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    """The label is kept apart: `label_of`."""
    return {"input_ids": codec.special(_text_of(record, columns["text"]))}


def label_of(record: Record, columns: Mapping[str, str]) -> str:
    """The class of a record. Raises `PlanError` for what is no class."""
    label = record.values.get(columns["label"])
    if label is None or isinstance(label, (dict, list, float)):
        raise PlanError(
            f'{record.where}: found the label {label!r}, allowed: a text or a whole number under "{columns["label"]}"'
        )
    return str(label)


def encode_messages(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    require_template(codec)
    messages = messages_of(record.values[columns["messages"]], record.where, with_images=codec.processor is not None)
    if "system" in columns and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text_of(record, columns["system"])}, *messages]
    tools = tools_of(record.values[columns["tools"]], record.where) if "tools" in columns else None
    if codec.processor is not None:
        images = record.values[columns["images"]] if "images" in columns else None
        return encode_images(messages, images, codec, record.folder, record.where, tools)
    if "images" in columns:
        raise PlanError(
            f'{record.where}: "{columns["images"]}" has images, and this model reads text; name a directory of a model '
            "that sees, with its processor, or leave the column out"
        )
    return encode_chat(messages, codec, record.where, tools)


def encode_completion(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    """Alpaca's `input` is written below its instruction."""
    prompt = record.values[columns["prompt"]]
    more = record.values[columns["input"]] if "input" in columns else ""
    if more and isinstance(prompt, str):
        prompt = f"{prompt}\n{_text_of(record, columns['input'])}"
    return _encode_answer(record, prompt, columns["completion"], codec)


def encode_pair(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    """Both answers to one prompt, which may be a column of its own or the beginning that both chats share."""
    prompt = record.values[columns["prompt"]] if "prompt" in columns else None
    found: Example = {}
    for side in ("chosen", "rejected"):
        before, column = prompt, columns[side]
        if prompt is None:
            before = _common_beginning(
                record.values[columns["chosen"]], record.values[columns["rejected"]], record.where
            )
            values = {**record.values, column: record.values[column][len(before) :]}
            given = _encode_answer(Record(record.where, values), before, column, codec)
        else:
            given = _encode_answer(record, before, column, codec)
        found |= {f"{side}_{name}": value for name, value in given.items()}
    return found


def _common_beginning(chosen: Any, rejected: Any, where: str) -> Any:
    """The common beginning of two answers. Raises `PlanError` unless both are texts, or both lists."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        found = f"{str(chosen)[:30]!r} and {str(rejected)[:30]!r}"
        raise PlanError(f"{where}: found {found}, allowed: two texts, or two lists of messages")
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]


def _encode_answer(record: Record, prompt: Any, column: str, codec: Codec) -> Example:
    for value in (prompt, record.values[column]):
        if not isinstance(value, (str, list)):
            raise PlanError(f"{record.where}: found {str(value)[:60]!r}, allowed: a text or a list of messages")
    if isinstance(prompt, str) and isinstance(record.values[column], str):
        before = [*codec.begin_ids, *codec.encode(prompt)]
        after = [*codec.encode(record.values[column]), *codec.end_ids]
        return {"input_ids": before + after, "labels": [IGNORED] * len(before) + after}
    require_template(codec)
    asked = messages_of(prompt, record.where) if prompt else []
    return encode_reply(asked, messages_of(record.values[column], record.where), codec, record.where)


def encode_seq2seq(record: Record, columns: Mapping[str, str], codec: Codec) -> Example:
    source, target = (_text_of(record, columns[name]) for name in ("source", "target"))
    if codec.is_bytes:
        return {"input_ids": codec.encode(source), "labels": [*codec.encode(target), *codec.end_ids]}
    return {"input_ids": codec.special(source), "labels": codec.special(target)}


ENCODERS: dict[str, Encoder] = {
    "text": encode_text,
    "classification": encode_labelled,
    "chat": encode_messages,
    "completion": encode_completion,
    "preference": encode_pair,
    "seq2seq": encode_seq2seq,
}
