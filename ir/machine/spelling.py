"""Machines as people type them: "4090", "2x RTX 4090", "8 H100s", "a100-80gb" are names of families of presets,
"4090+3090" is one of each, "DGX H100" a whole server and "2x8xH100" two of them; and their changed figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..errors import HardwareError, PlanError
from .gpu_parts import PARTS, SERVERS
from .presets import is_of_a_part, preset_document, preset_names
from .validation import close_names

_BEFORE = re.compile(r"(?P<count>\d+)(\s*[x*×]\s*|\s+)(?P<rest>.+)")
_HOSTS = re.compile(r"(?P<hosts>\d+)\s*[x*×]\s*(?P<one>\d+\s*[x*×].+)")
_COUNTS = {
    "one": "1", "single": "1", "two": "2", "dual": "2", "double": "2", "three": "3", "four": "4", "quad": "4",
    "eight": "8",
}  # fmt: skip
# Machines that have no preset, and why.
_NONE = (
    (r"(apple|mac|mps).*|m[1-9]( (pro|max|ultra))?", "Apple's GPUs run by MPS; plans are for those of CUDA and ROCm"),
    (r"tpu.*|.*trainium.*|.*inferentia.*|gaudi.*", "it is no GPU; plans are for those of CUDA and ROCm"),
    (r"(gtx|titan|quadro|10[5-8]0).*|(p100|p40|p4|k80|m40)( .*)?",
     "GTX, Titan, Quadro and older cards have no figures here"),
    (r".*(colab|kaggle|runpod|lambda|vast|azure|gcp|aws).*|[a-z]+\d?\w*\.\w*xlarge",
     "name the GPUs of the machine that you rent, as `nvidia-smi -L` lists them"),
)  # fmt: skip
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
    text = _plain_counts(name)
    machines = [known for known in preset_names() if not is_of_a_part(known)]
    hyphened = text.replace(" ", "-")
    begun = [known for known in machines if hyphened == known or known.startswith(f"{hyphened}-")]
    if len(begun) == 1:
        return begun[0]
    if "+" in text:
        machines_named = [preset_of(word.strip()) for word in text.split("+")]
        mixed = "+".join(machines_named)
        if preset_document(mixed) is not None:
            return mixed
        others = [each for each in machines_named if preset_document(f"{each}+rtx4090x1") is None]
        raise HardwareError(
            f"no hardware preset {name!r}: a machine of several kinds has cards for slots, such as 4090 + 3090, and "
            f"{' and '.join(others)} is none; a YAML document describes other machines"
        )
    if match := _HOSTS.fullmatch(text):
        return _fleet_name(name, preset_of(match["one"]), match["hosts"])
    readings = [(text, "1", "")]
    if match := _BEFORE.fullmatch(text):
        readings.append((match["rest"], match["count"], ""))
    if match := _AFTER.fullmatch(text):
        readings.append((match["rest"], match["count"], match["more"]))
    if text.startswith(("dgx ", "hgx ")):
        readings.append((text[4:], "all", ""))
    for words, count, more in readings:
        parts = parts_like(words) or parts_like(re.sub(r"(?<=\d)s\b", "", words))  # "two 3090s"
        parts = [part for part in parts if count != "all" or PARTS[part].server is not None]
        found = [f"{part}x{_gpus(part) if count == 'all' else count}{more}" for part in parts]
        if len(found) > 1:
            raise HardwareError(f"hardware {name!r} may be {' or '.join(found)}; say which")
        if found:
            whole = _gpus(parts[0])
            if count.isdigit() and not more and whole > 1 and int(count) > whole and int(count) % whole == 0:
                return _fleet_name(name, f"{parts[0]}x{whole}", str(int(count) // whole))
            if preset_document(found[0]) is not None:
                return found[0]
    for pattern, why in _NONE:
        if re.fullmatch(pattern, text):
            raise HardwareError(f"no hardware preset {name!r}: {why}. {_ELSE}")
    near = close_names(name, [*PARTS, *machines])
    if not near.endswith("?"):
        near = "; no known GPU has a name like it, and `penstock hardware --list` has all."
    raise HardwareError(f"no hardware preset {name!r}{near} {_ELSE}")


_ELSE = "A part and a number will do, such as 4090x2, and so will a YAML document, or 'auto' for this machine"


def _gpus(part: str) -> int:
    """The number of GPUs of the server that a part is sold in; 1 for a card."""
    server = PARTS[part].server
    return 1 if server is None else SERVERS[server].gpus


def _fleet_name(name: str, one: str, hosts: str) -> str:
    """The preset of several servers. Raises `HardwareError` for machines that are not sold whole."""
    found = one if hosts == "1" else f"{one}:{hosts}"
    if preset_document(found) is None:
        raise HardwareError(
            f"no hardware preset {name!r}: {hosts} machines of {one} have no network that is known; a YAML document "
            "with hosts and network describes them"
        )
    return found


def bare_name(name: str) -> str:
    """A name in lower case, without the words that makers and drivers put around it."""
    return " ".join(_AROUND.sub("", name.lower()).split())


def _plain_counts(name: str) -> str:
    """A bare name with a count as a number, "+" between different cards, and none of a shell's or Slurm's marks."""
    words = bare_name(re.sub(r"[,&]|\band\b", "+", name.lower()).replace("_", " ")).split()
    text = " ".join([*(_COUNTS.get(word, word) for word in words[:1]), *words[1:]])
    if preset_document(text) is None and (match := re.fullmatch(r"(?P<part>[\w-]+):(?P<count>\d+)", text)):
        return f"{match['part']}x{match['count']}"
    return text


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


def key_and_value(option: str, given: str, example: str) -> tuple[str, str]:
    """Both sides of `--option key=value`. Raises `PlanError` for another form."""
    key, equals, text = given.partition("=")
    if not equals:
        raise PlanError(f"--{option} {given!r} is not of the form key=value, such as {example}")
    return key.strip(), text.strip()


def missing_unit(option: str, text: str) -> str:
    """The refusal of an amount of bytes that is typed without its unit, after "--dram " or "--set dram="."""
    return f"{option}{text}: without a unit that is {text} bytes; say {option}{text}GB or {text}GiB"


def each_once(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values by their keys. Raises `PlanError` for a key that comes twice, as one of its values would not count."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"{option}: {key} is given twice; leave one of them out")
        found[key] = value
    return found


def plain_value(text: str) -> Any:
    """The value of a text: numbers, true and false are parsed; anything else, like 4TB, stays text."""
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text
