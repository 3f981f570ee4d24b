"""Chats to tokens, by the tokenizer's own template, with the loss on the assistant's turns only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..compiler.packing.documents import IGNORED
from ..ir.errors import PlanError
from .codec import Codec

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # of ShareGPT's files
KNOWN = ("system", "developer", "user", "assistant", "tool")
MARK = re.compile(r"\{%-?\s*generation\b")
REFUSED = (KeyError, TypeError, IndexError, ValueError)  # how a template fails on messages that it does not expect

ChatMessage = dict[str, Any]


def messages_of(value: Any, where: str) -> list[ChatMessage]:
    """The messages of a record. Raises `PlanError` for one that has no role and content, or an unknown role."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PlanError(f"{where}: found {str(value)[:60]!r}, allowed: a list of messages")
    found = []
    for number, message in enumerate(value, start=1):
        at = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise PlanError(f'{at}: found {str(message)[:60]!r}, allowed: an object with "role" and "content"')
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = ROLES.get(str(role), role)
        if role not in KNOWN:
            raise PlanError(f"{at}: the role {role!r}; allowed are {', '.join(KNOWN)}")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise PlanError(f'{at}: its "content" is {str(content)[:40]!r}, allowed: a text')
        more = {key: held for key, held in message.items() if key not in ("role", "from", "content", "value")}
        found.append({"role": role, "content": content, **{k: v for k, v in more.items() if v is not None}})
    return found


def require_template(codec: Codec) -> None:
    """Raise `PlanError` where there is no template to write chats by."""
    if codec.tokenizer is None:
        raise PlanError(
            "chats need a tokenizer with a chat template, and this model comes with no tokenizer; name a directory "
            "that has one, or use --kind completion"
        )
    if not codec.tokenizer.chat_template:
        raise PlanError(
            f"the tokenizer in {codec.directory} has no chat template; use the tokenizer of a model that was made for "
            "chats, put a chat_template.jinja beside it, or use --kind completion"
        )


def encode_chat(messages: list[ChatMessage], codec: Codec, where: str) -> dict[str, list[int]]:
    """Token ids, and labels that are -100 but on the assistant's turns.

    Which tokens are the assistant's the template says by `{% generation %}`, or else the difference that a turn makes.
    Raises `PlanError` for a template that refuses these messages, or rewrites earlier turns.
    """
    if MARK.search(codec.tokenizer.get_chat_template()):
        return _encode_marked_turns(messages, codec, where)
    ids = _apply(codec, messages, where)["input_ids"]
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            first = len(_prefix(codec, messages[:number], ids, where, add_generation_prompt=True))
            last = len(_prefix(codec, messages[: number + 1], ids, where))
            mask[first:last] = [1] * (last - first)
    return {"input_ids": ids, "labels": _mask_labels(ids, mask)}


def _encode_marked_turns(messages: list[ChatMessage], codec: Codec, where: str) -> dict[str, list[int]]:
    """As `encode_chat`, by the template's marks. The tokenizer's own mask ends at the end of a chat where a marked text
    ends in a space, hence tokens are found by their places here."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = codec.tokenizer
    try:
        made: Any = render_jinja_template(
            conversations=[messages], chat_template=tokenizer.get_chat_template(), return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )  # fmt: skip
    except (TemplateError, *REFUSED) as error:
        raise PlanError(f"{where}: the chat template refuses these messages: {error}") from error
    (text,), (places,) = made
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= first and last <= b for a, b in places)) for first, last in found["offset_mapping"]]
    return {"input_ids": found["input_ids"], "labels": _mask_labels(found["input_ids"], mask)}


def encode_reply(prompt: list[ChatMessage], reply: list[ChatMessage], codec: Codec, where: str) -> dict[str, list[int]]:
    """As `encode_chat`, with the loss on the reply alone."""
    ids = _apply(codec, [*prompt, *reply], where)["input_ids"]
    first = len(_prefix(codec, prompt, ids, where, add_generation_prompt=True)) if prompt else 0
    return {"input_ids": ids, "labels": [IGNORED] * first + ids[first:]}


def _prefix(codec: Codec, messages: list[ChatMessage], whole: list[int], where: str, **options: Any) -> list[int]:
    found: list[int] = _apply(codec, messages, where, **options)["input_ids"] if messages else []
    if whole[: len(found)] != found:
        raise PlanError(
            f"{where}: the chat template writes earlier turns otherwise once there are later ones, so that the "
            "assistant's tokens cannot be told; give it a template with {% generation %} around them"
        )
    return found


def _apply(codec: Codec, messages: list[ChatMessage], where: str, **options: Any) -> dict[str, list[int]]:
    from jinja2 import TemplateError

    try:
        found = codec.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except (TemplateError, *REFUSED) as error:
        raise PlanError(f"{where}: the chat template refuses these messages: {error}") from error
    return {name: list(value) for name, value in found.items()}


def _mask_labels(ids: list[int], mask: list[int]) -> list[int]:
    return [token if learned else IGNORED for token, learned in zip(ids, mask, strict=True)]
