"""The user's dotted names as Python: `transformer.h.3.mlp` is `self.transformer.h[3].mlp`."""

from __future__ import annotations

import keyword
import unicodedata

from ..ir.names import is_index
from ..runtime.source.allowed import is_member


def member(owner: str, base: str, name: str) -> str:
    """The expression that reaches the dotted `name` from `owner`, which stands for the dotted path `base`."""
    text = owner
    for part in local(base, name).split("."):
        text += access(part)
    return text


def access(part: str) -> str:
    """The text that reaches one part of a dotted name: `.mlp`, `[3]`, `["a-b"]`, `["resize"]`."""
    if is_index(part):
        return f"[{part}]"
    as_read = unicodedata.normalize("NFKC", part) == part  # Python reads names in their compatible form
    is_name = part.isidentifier() and not keyword.iskeyword(part) and is_member(part)
    return f".{part}" if is_name and as_read else f"[{quote(part)}]"


def quote(text: str) -> str:
    """A text as Python, in double quotes where no character needs a backslash."""
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else repr(text)


def one_line(text: str) -> str:
    """A text for a comment: a name may hold the end of a line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def local(base: str, name: str) -> str:
    """`name` as seen from the dotted path `base`, which it must be under."""
    assert is_under(base, name), f"{name} is not under {base}"
    return name[len(base) + 1 :] if base else name


def is_under(base: str, name: str) -> bool:
    """Whether the dotted `name` is a member of `base`, at any depth."""
    return not base or name.startswith(f"{base}.")


def owners(name: str) -> list[str]:
    """Every dotted path above `name`, the innermost first: `a.b` and `a` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def camel_case(name: str) -> str:
    """`stage0` and `my_stage` as class names: `Stage0`, `MyStage`."""
    return "".join(part[:1].upper() + part[1:] for part in name.replace("-", "_").split("_"))
