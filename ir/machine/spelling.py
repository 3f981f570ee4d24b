"""Machines as people type them: "4090", "2x RTX 4090", "H100 x 8", "a100-80gb" are names of families of presets."""

from __future__ import annotations

import re

from ..errors import HardwareError
from .presets import PARTS, preset_document, preset_names
from .validation import close_names

_BEFORE = re.compile(r"(?P<count>\d+)\s*[x*×]\s*(?P<rest>.+)")
_AFTER = re.compile(r"(?P<rest>.+?)\s*[x*×]\s*(?P<count>\d+)(?P<more>(-[12]rc)?(-pcie[345])?)")
NVIDIA = ("nvidia", "geforce", "amd", "radeon", "instinct", "tesla")


def preset_of(name: str) -> str:
    """The name of the preset that is meant. Raises `HardwareError`, with what it may be, for none or several."""
    if preset_document(name) is not None:
        return name
    text = name.strip().lower()
    for word in NVIDIA:
        text = text.replace(word, "")
    text = text.strip()
    readings = [(text, "1", "")]
    if match := _BEFORE.fullmatch(text):
        readings.append((match["rest"], match["count"], ""))
    if match := _AFTER.fullmatch(text):
        readings.append((match["rest"], match["count"], match["more"]))
    for words, count, more in readings:
        parts = parts_like(words)
        if len(parts) > 1:
            several = " or ".join(f"{part}x{count}" for part in parts)
            raise HardwareError(f"hardware {name!r} may be {several}; say which")
        if parts and preset_document(f"{parts[0]}x{count}{more}") is not None:
            return f"{parts[0]}x{count}{more}"
    raise HardwareError(
        f"no hardware preset {name!r}{close_names(name, preset_names())} A part and a number will do, such as 4090x2, "
        "and so will a YAML document, or 'auto' for this machine"
    )


def parts_like(text: str) -> list[str]:
    """The GPUs that these words may mean: one of that name, else those whose name ends or begins with it."""
    wanted = _plain(text)
    plain = {_plain(part): part for part in PARTS}
    if wanted in plain:
        return [plain[wanted]]
    if len(wanted) < 3:
        return []
    ends = [part for key, part in plain.items() if key.endswith(wanted)]
    return ends or [part for key, part in plain.items() if key.startswith(wanted) or wanted in key]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
