"""The user's dotted names as Python: `transformer.h.3.mlp` is `self.transformer.h[3].mlp`."""

from __future__ import annotations

import keyword


def member(owner: str, base: str, name: str) -> str:
    """The expression that reaches the dotted `name` from `owner`, which stands for the dotted path `base`."""
    text = owner
    for part in local(base, name).split("."):
        text += access(part)
    return text


def access(part: str) -> str:
    """The text that reaches one part of a dotted name: `.mlp`, `[3]`, `["a-b"]`."""
    if part.isdigit():
        return f"[{part}]"
    return f".{part}" if part.isidentifier() and not keyword.iskeyword(part) else f'["{part}"]'


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
