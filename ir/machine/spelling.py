"""Machines as people type them: "4090", "2x RTX 4090", "H100 x 8", "a100-80gb" are names of families of presets, and
"4090+3090" is one of each."""

from __future__ import annotations

import re

from ..errors import HardwareError
from .gpu_parts import PARTS
from .presets import is_of_a_part, preset_document, preset_names
from .validation import close_names

_BEFORE = re.compile(r"(?P<count>\d+)\s*[x*×]\s*(?P<rest>.+)")
_AFTER = re.compile(r"(?P<rest>.+?)\s*[x*×]\s*(?P<count>\d+)(?P<more>(-[12]rc)?(-pcie[345])?)")
_MEMORY = re.compile(r"(?P<rest>.+?)[\s-]+(?P<gib>\d+)\s*gi?b(?P<more>.*)")
# Words that makers and drivers put around the name of a GPU.
_AROUND = re.compile(
    r"nvidia|geforce|amd|radeon|instinct|tesla|\bsxm\d?\b|\bhbm\d\w?\b|\b(gpu|agx|generation|blackwell|graphics)\b"
    r"|(workstation|server) edition|(?<=gh200) 480gb"
)


def preset_of(name: str) -> str:
    """The name of the preset that is meant. Raises `HardwareError`, with what it may be, for none or several."""
    if preset_document(name) is not None:
        return name
    text = bare_name(name)
    machines = [known for known in preset_names() if not is_of_a_part(known)]
    hyphened = text.replace(" ", "-")
    begun = [known for known in machines if hyphened == known or known.startswith(f"{hyphened}-")]
    if len(begun) == 1:
        return begun[0]
    if "+" in text:
        mixed = "+".join(preset_of(word.strip()) for word in text.split("+"))
        if preset_document(mixed) is not None:
            return mixed
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
    near = close_names(name, [*PARTS, *machines])
    raise HardwareError(
        f"no hardware preset {name!r}{near}{'' if near.endswith('?') else '.'} A part and a number will do, such as "
        "4090x2, and so will a YAML document, or 'auto' for this machine"
    )


def bare_name(name: str) -> str:
    """A name in lower case, without the words that makers and drivers put around it."""
    return " ".join(_AROUND.sub("", name.lower()).split())


def parts_like(text: str) -> list[str]:
    """The GPUs that these words may mean: one of that name, else those whose name ends with it, or has it elsewhere.
    A number counts whole: "a10" is no a100."""
    wanted = _plain(text)
    plain = {_plain(part): part for part in PARTS}
    if wanted in plain:
        return [plain[wanted]]
    if len(wanted) < 3:
        return []
    found = re.compile(r"(?<!\d)" + "-?".join(wanted) + r"(?!\d)")
    if inside := [part for part in PARTS if found.search(part)]:
        return [part for part in inside if _plain(part).endswith(wanted)] or inside
    match = _MEMORY.fullmatch(text.strip())
    named = parts_like(match["rest"] + match["more"]) if match else []
    return [part for part in named if match and _has_memory(part, int(match["gib"]))]


def _has_memory(part: str, gib: int) -> bool:
    """Whether a GPU has that much memory, which makers count in GiB or GB."""
    num_bytes = PARTS[part].gib * 2**30
    return gib in (round(num_bytes / 2**30), round(num_bytes / 1e9))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
