"""Chats to tokens, by the tokenizer's own template, with the loss on the assistant's turns only."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from ..compiler.packing.documents import IGNORED
from ..ir.errors import PlanError
from .codec import Codec

ROLES = {  # of ShareGPT's files
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
CALL = "function_call"  # the role there of a turn that calls functions, as JSON
KNOWN = ("system", "developer", "user", "assistant", "tool")
MARK = re.compile(r"\{%-?\s*generation\b")
REFUSED = (KeyError, TypeError, IndexError, ValueError)  # how a template fails on messages that it does not expect

ChatMessage = dict[str, Any]


def messages_of(value: Any, where: str, with_images: bool = False) -> list[ChatMessage]:
    """The messages of a record. Raises `PlanError` for one that has no role and content, or an unknown role, and for
    images unless `with_images`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PlanError(f"{where}: found {str(value)[:60]!r}, allowed: a list of messages")
    found = []
    for number, message in enumerate(value, start=1):
        at = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise PlanError(f'{at}: found {str(message)[:60]!r}, allowed: an object with "role" and "content"')
        own, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = ROLES.get(str(own), own)
        if role not in KNOWN:
            raise PlanError(f"{at}: the role {role!r}; allowed are {', '.join(KNOWN)}")
        more = {key: held for key, held in message.items() if key not in ("role", "from", "content", "value")}
        more = {key: held for key, held in more.items() if held is not None}
        if own == CALL:
            calls = _objects(content, f"{at}: its function_call")
            more["tool_calls"], content = [_wrap(call, at) for call in calls], ""
        elif isinstance(content, list):
            texts = [None if with_images and _is_image(part) else _text_of_part(part, at) for part in content]
            content = content if None in texts else "".join(map(str, texts))
        elif not isinstance(content, str) and not message.get("tool_calls"):
            raise PlanError(f'{at}: its "content" is {str(content)[:40]!r}, allowed: a text, or a list of parts')
        found.append({"role": role, "content": content, **more})
    return found


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _text_of_part(part: Any, at: str) -> str:
    """The text of a part of a content. Raises `PlanError` for a part of another kind."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if _is_image(part):
        raise PlanError(f'{at}: a part of its "content" is an image; allowed for models that see, with their processor')
    raise PlanError(f'{at}: a part of its "content" is {str(part)[:60]!r}, allowed: {{"type": "text", "text": ...}}')


def tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The functions that a chat may call, as templates take them. Raises `PlanError` for what describes none."""
    return [_wrap(tool, where) for tool in _objects(value, f"{where}: its tools")]


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects, or one, which may be written as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    except json.JSONDecodeError as error:
        raise PlanError(f"{what} is not JSON: {error}") from error
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise PlanError(f"{what} is {str(value)[:60]!r}, allowed: a list of objects, or the same as JSON")
    return found


def _wrap(function: dict[str, Any], where: str) -> dict[str, Any]:
    """A function, or a call of one, in the form that templates take."""
    if "function" in function:
        return function
    if "name" not in function:
        raise PlanError(f"{where}: {str(function)[:60]!r} names no function; allowed: an object with a name")
    return {"type": "function", "function": function}


def require_template(codec: Codec) -> None:
    """Raise `PlanError` where there is no template to write chats by."""
    if codec.tokenizer is None:
        raise PlanError(
            "chats need a tokenizer with a chat template, and this model comes with no tokenizer; name a directory "
            "that has one, or use --kind completion"
        )
    if not (codec.processor or codec.tokenizer).chat_template:
        raise PlanError(
            f"the tokenizer in {codec.directory} has no chat template; use the tokenizer of a model that was made for "
            "chats, put a chat_template.jinja beside it, or use --kind completion"
        )


def encode_chat(
    messages: list[ChatMessage], codec: Codec, where: str, tools: list[dict[str, Any]] | None = None
) -> dict[str, list[int]]:
    """Token ids, and labels that are -100 but on the assistant's turns. tools: the functions that they may call.

    Which tokens are the assistant's the template says by `{% generation %}`, or else the difference that a turn makes.
    Raises `PlanError` for a template that refuses these messages, leaves calls out, or rewrites earlier turns.
    """
    require_calls(messages, codec, where, tools)
    if MARK.search(codec.tokenizer.get_chat_template()):
        return _encode_marked_turns(messages, codec, where, tools)
    given = {} if tools is None else {"tools": tools}
    ids = _apply(codec, messages, where, **given)["input_ids"]
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            first = len(_prefix(codec, messages[:number], ids, where, add_generation_prompt=True, **given))
            last = len(_prefix(codec, messages[: number + 1], ids, where, **given))
            mask[first:last] = [1] * (last - first)
    return {"input_ids": ids, "labels": _mask_labels(ids, mask)}


def require_calls(
    messages: list[ChatMessage], codec: Codec, where: str, tools: list[dict[str, Any]] | None = None
) -> None:
    """Raise `PlanError` where the template would leave out functions or their calls without a word."""
    own = codec.processor and codec.processor.chat_template
    template = str(own or codec.tokenizer.get_chat_template(tools=tools))
    calls = any(message.get("tool_calls") for message in messages)
    for is_there, name in ((tools, "tools"), (calls, "tool_calls")):
        if is_there and name not in template:
            raise PlanError(
                f"{where}: the chat template has no place for {name}: functions and their calls would be left out; use "
                "the tokenizer of a model that calls functions, or leave them out of the data"
            )


def _encode_marked_turns(
    messages: list[ChatMessage], codec: Codec, where: str, tools: list[dict[str, Any]] | None
) -> dict[str, list[int]]:
    """As `encode_chat`, by the template's marks. The tokenizer's own mask ends at the end of a chat where a marked text
    ends in a space, hence tokens are found by their places here."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer, given = codec.tokenizer, cast("Any", tools)
    try:
        made: Any = render_jinja_template(
            conversations=[messages], chat_template=tokenizer.get_chat_template(), return_assistant_tokens_mask=True,
            tools=given, **tokenizer.special_tokens_map,
        )  # fmt: skip
    except (TemplateError, *REFUSED) as error:
        raise PlanError(f"{where}: the chat template refuses these messages: {error}") from error
    (text,), (places,) = made
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= first and last <= b for a, b in places)) for first, last in found["offset_mapping"]]
    return {"input_ids": found["input_ids"], "labels": _mask_labels(found["input_ids"], mask)}


def encode_reply(prompt: list[ChatMessage], reply: list[ChatMessage], codec: Codec, where: str) -> dict[str, list[int]]:
    """As `encode_chat`, with the loss on the reply alone."""
    require_calls([*prompt, *reply], codec, where)
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
