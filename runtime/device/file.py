"""A directory of generated files, read back: programs parsed, stage classes imported, both from the very same text.

In: the directory of `write_directory`, perhaps edited by a person. Out: one `DeviceFile` per device. A wrong edit
raises `VerifyError` with the file and the line.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...ir.documents import Unreadable, read_text
from ...ir.errors import VerifyError
from ...ir.program import Interface, Program, StageSpec, parse_program

INTERFACE_FILE = "interface.json"
FUNCTIONS = ("step", "evaluate")
StageClass = Callable[[], nn.Module]


@dataclass(frozen=True)
class DeviceFile:
    """One device's file: its text, the programs it holds, its functions, and the classes of the stages that it runs."""

    device: int
    path: Path
    text: str
    programs: Mapping[str, Program]
    functions: Mapping[str, Callable[..., Any]]
    stages: Mapping[str, StageClass]

    @property
    def step(self) -> Program:
        return self.programs["step"]

    @property
    def evaluate(self) -> Program | None:
        return self.programs.get("evaluate")

    def build(self, stage: str) -> nn.Module:
        """The stage's module on the meta device: names and shapes, no memory."""
        with torch.device("meta"):
            return self.stages[stage]()


def open_directory(directory: str | Path, interface: Interface | None = None) -> list[DeviceFile]:
    """Every device's file, in order. `interface` defaults to the directory's own interface.json.

    Raises VerifyError if a file is missing or is not a program of this interface.
    """
    folder = Path(directory)
    if interface is None:
        interface = _interface(folder / INTERFACE_FILE)
    return [open_device_file(folder / device_file_name(i), interface, i) for i in range(interface.num_devices)]


def _interface(path: Path) -> Interface:
    if not path.is_file():
        raise VerifyError(f"{path.parent} holds no {path.name}: it is not a directory that a job has written")
    try:
        return Interface.from_json(read_text(path))
    except Unreadable as error:
        raise VerifyError(f"{path}: not an interface: {error}") from error


def open_device_file(path: str | Path, interface: Interface, device: int) -> DeviceFile:
    """One device's file. Raises VerifyError with the file and the line if it is not what `interface` needs."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"device {device}: cannot read {path}: {error}", device=device) from error
    programs = _parse(path, text, interface, device)
    module = _execute(path, text, device)
    stages = _stages(path, text, module, interface, device)
    functions = {name: getattr(module, name) for name in programs}
    return DeviceFile(device, path, text, programs, functions, stages)


def device_file_name(device: int) -> str:
    return f"device{device}.py"


def _parse(path: Path, text: str, interface: Interface, device: int) -> dict[str, Program]:
    try:
        programs = {"step": parse_program(text, interface, device)}
        if any(isinstance(f, ast.FunctionDef) and f.name == "evaluate" for f in ast.parse(text).body):
            programs["evaluate"] = parse_program(text, interface, device, "evaluate")
    except VerifyError as error:
        place = f"{path}:{error.line}" if error.line else str(path)
        raise VerifyError(f"{place}: {error}", device=device, line=error.line) from error
    return programs


def _execute(path: Path, text: str, device: int) -> ModuleType:
    """Import the text itself, not a bytecode cache of it, as a module with a name of its own."""
    digest = hashlib.sha256(f"{path.resolve()}\n{text}".encode()).hexdigest()
    name = f"penstock_generated_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise _failed(path, error, device, "importing the file") from error
    return module


def _failed(path: Path, error: Exception, device: int, doing: str, at: int | None = None) -> VerifyError:
    """`at`: the line to name if the error did not arise in the file's own lines."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = frames[-1].lineno if frames else at
    place = f"{path}:{line}" if line else str(path)
    code = f"\n-->   {frames[-1].line}" if frames and frames[-1].line else ""
    return VerifyError(f"{place}: {doing} failed: {type(error).__name__}: {error}{code}", device=device, line=line)


def _stages(path: Path, text: str, module: ModuleType, interface: Interface, device: int) -> dict[str, StageClass]:
    table = getattr(module, "STAGES", None)
    if not isinstance(table, dict):
        raise VerifyError(f'{path}: no STAGES = {{"stage0": Stage0, ...}} at the end of the classes', device=device)
    lines = _lines_of(text)
    line = lines.get("STAGES")
    for name, kind in table.items():
        if name not in interface.stages:
            known = ", ".join(interface.stages)
            raise VerifyError(f"{path}:{line}: STAGES names {name!r}; there are {known}", device=device, line=line)
        if not callable(kind):
            raise VerifyError(f"{path}:{line}: STAGES[{name!r}] is not a class", device=device, line=line)
        _check_members(path, lines, kind, interface.stages[name], device)
    return table


def _check_members(path: Path, lines: Mapping[str, int], kind: StageClass, spec: StageSpec, device: int) -> None:
    """The class must hold exactly the parameters and buffers of the interface, in their shapes."""
    title = getattr(kind, "__name__", spec.name)
    line = lines.get(title) or lines.get("STAGES")
    try:
        with torch.device("meta"):
            stage = kind()
    except Exception as error:
        raise _failed(path, error, device, f"building {title}", line) from error
    if not isinstance(stage, nn.Module):
        raise VerifyError(f"{path}:{line}: {title} makes no module", device=device, line=line)
    found = {name: tuple(p.shape) for name, p in stage.named_parameters(remove_duplicate=False)}
    found |= {name: tuple(b.shape) for name, b in stage.named_buffers(remove_duplicate=False)}
    for wanted in (*spec.params, *spec.buffers):
        shape = found.get(wanted.name)
        if shape != wanted.shape:
            has = f"has it as {list(shape)}" if shape is not None else "lacks it"
            message = f"{wanted.name} of {spec.name} is {list(wanted.shape)}, but {title} {has}"
            raise VerifyError(f"{path}:{line}: {message}", device=device, line=line)


def _lines_of(text: str) -> dict[str, int]:
    """The line on which each module-level name is first defined."""
    found: dict[str, int] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, node.lineno)
    return found
