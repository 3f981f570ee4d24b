"""A generated file, opened: its module imported, its functions read back as programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .errors import VerifyError
from .program import Interface, Program
from .text import parse_program

FUNCTIONS = ("step", "evaluate")


@dataclass(frozen=True)
class DeviceFile:
    """What a device runs: stage classes, functions, and the programs that the functions' texts hold."""

    stages: Mapping[str, type[nn.Module]]
    functions: Mapping[str, Callable[..., Any]]
    programs: Mapping[str, Program]


def open_device_file(path: str | Path, interface: Interface, device: int) -> DeviceFile:
    """Import the file and parse its text. Each call makes a module of its own, not listed in `sys.modules`.

    Raises `VerifyError` where the text is no program or the file lacks `STAGES` or `step`. What the import raises
    is passed on.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("STAGES", "step"):
        if not hasattr(module, name):
            raise VerifyError(f"{path}: no `{name}`; the file of a device has STAGES, step and, optionally, evaluate")
    text = path.read_text()
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    programs = {name: parse_program(text, interface, device, name) for name in functions}
    return DeviceFile(module.STAGES, functions, programs)
