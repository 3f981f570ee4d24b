"""A directory of generated files, read back: programs parsed, stage classes defined, both from the very same text.

In: the directory of `write_directory`, perhaps edited by a person, perhaps written by a stranger. Out: per device one
`ProgramFile`, of which nothing has run, or one `DeviceFile`, whose classes were verified before they ran. A wrong edit
raises `VerifyError` with the file and the line.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.documents import Unreadable, read_text
from ...ir.errors import CheckpointError, VerifyError
from ...ir.program import (
    Interface,
    Program,
    StageSpec,
    first_micro_batches,
    parse_program,
    program_lines,
)
from ..source.file import run_verified
from ..source.trust import ONLY_VERIFIED, Trust
from ..state.tensor_file import CODES, TensorFile

INTERFACE_FILE = "interface.json"
CONSTANTS_FILE = "constants.safetensors"
StageClass = Callable[[], nn.Module]


@dataclass(frozen=True)
class ProgramFile:
    """One device's file as data: its text and the programs it holds."""

    device: int
    path: Path
    text: str
    programs: Mapping[str, Program]

    @property
    def step(self) -> Program:
        return self.programs["step"]

    @property
    def evaluate(self) -> Program | None:
        return self.programs.get("evaluate")


@dataclass(frozen=True)
class DeviceFile(ProgramFile):
    """One device's file that has run: also its functions, and the classes of the stages that the device runs."""

    functions: Mapping[str, Callable[..., Any]]
    stages: Mapping[str, StageClass]

    def build(self, stage: str) -> nn.Module:
        """The stage's module on the meta device: names and shapes, no memory."""
        with torch.device("meta"):
            return self.stages[stage]()

    def constants(self, spec: StageSpec) -> dict[str, Tensor]:
        """The values of a stage's constants, from the directory's file of them. Raises `VerifyError` naming that file
        where it lacks one."""
        return read_constants(self.path.parent, [spec])


def read_constants(folder: Path, specs: Iterable[StageSpec]) -> dict[str, Tensor]:
    """The values of all constants of these stages. Raises `VerifyError` where the folder's file lacks one of them or
    has it in another shape or dtype."""
    wanted = {row.name: row for spec in specs for row in spec.constants}
    if not wanted:
        return {}
    try:
        file = TensorFile(folder / CONSTANTS_FILE)
        for row in wanted.values():
            found = file.entries.get(row.name)
            if found is None or (found.shape, CODES.get(found.code)) != (row.shape, getattr(torch, row.dtype)):
                has = "nothing of that name" if found is None else f"{found.code}{list(found.shape)}"
                raise VerifyError(
                    f"{file.path}: the programs use {row.name!r}, {row.dtype}{list(row.shape)}; the file holds {has}"
                )
        return {name: file.read(name) for name in wanted}
    except CheckpointError as error:
        raise VerifyError(f"the programs use {', '.join(wanted)}: {error}") from error


def read_directory(directory: str | Path, interface: Interface) -> list[ProgramFile]:
    """Every device's programs, in order; nothing is run. Raises VerifyError as `open_directory` does, and where a file
    of lanes with fewer micro-batches has other ops than the device's own."""
    paths = [Path(directory, device_file_name(i)) for i in range(interface.num_devices)]
    found = [read_device_file(path, interface, device) for device, path in enumerate(paths)]
    for file in found:
        for smaller in smaller_files(file, interface):
            _check_share(file, smaller)
    return found


def smaller_files(file: ProgramFile, interface: Interface) -> list[ProgramFile]:
    """The files beside a device's own that lanes with fewer micro-batches run."""
    paths = [share_file(file.path, interface, share) for share in interface.smaller_shares]
    shares = zip(paths, interface.smaller_shares)
    return [read_device_file(path, replace(interface, micro_batches=n), file.device) for path, n in shares]


def _check_share(file: ProgramFile, smaller: ProgramFile) -> None:
    share = next(iter(smaller.programs.values())).interface.micro_batches
    for name, program in file.programs.items():
        wanted = program_lines(first_micro_batches(program, share))
        own = smaller.programs.get(name)
        lines = [] if own is None else program_lines(own)
        if wanted != lines:
            line = next((text for text, other in zip_longest(lines, wanted) if text != other), None)
            raise VerifyError(
                f"{smaller.path}: `{name}` is not that of {file.path.name} with its first {share} micro-batches only: "
                f"{(line or 'it ends').strip()}. Change both files alike",
                device=file.device,
            )


def open_directory(
    directory: str | Path, interface: Interface | None = None, trust: Trust | None = None
) -> list[DeviceFile]:
    """Every device's file, in order. `interface` defaults to the directory's own interface.json, `trust` to trust in
    what this process has imported.

    Raises VerifyError if a file is missing, is not a program of this interface, or goes beyond what `trust` allows.
    """
    folder = Path(directory)
    if interface is None:
        interface = _interface(folder / INTERFACE_FILE)
    read = read_directory(folder, interface)
    if trust is None:
        trust = Trust.here(file.text for file in read)
    for file in read:
        for smaller in smaller_files(file, interface):
            _run(smaller, interface, trust)
    return [_run(file, interface, trust) for file in read]


def _interface(path: Path) -> Interface:
    if not path.is_file():
        raise VerifyError(f"{path.parent} holds no {path.name}: it is not a directory that a job has written")
    try:
        return Interface.from_json(read_text(path))
    except Unreadable as error:
        raise VerifyError(f"{path}: not an interface: {error}") from error


def read_device_file(path: str | Path, interface: Interface, device: int) -> ProgramFile:
    """One device's programs. Raises VerifyError with the file and the line if they are not what `interface` needs."""
    path = Path(path)
    try:
        text = read_text(path)
    except Unreadable as error:
        raise VerifyError(f"device {device}: {path}: {error}", device=device) from error
    return ProgramFile(device, path, text, _parse(path, text, interface, device))


def open_device_file(path: str | Path, interface: Interface, device: int, trust: Trust = ONLY_VERIFIED) -> DeviceFile:
    """One device's file. Raises VerifyError with the file and the line if it is not what `interface` needs, or goes
    beyond what `trust` allows."""
    return _run(read_device_file(path, interface, device), interface, trust)


def _run(file: ProgramFile, interface: Interface, trust: Trust) -> DeviceFile:
    path, text, device = file.path, file.text, file.device
    try:
        scope = _execute(path, text, device) if trust.whole else run_verified(path, text, trust)
    except VerifyError as error:
        if error.device is not None:
            raise
        raise _with_place(path, error, device) from error
    stages = _stages(path, text, scope, interface, device)
    functions = {name: scope[name] for name in file.programs}
    return DeviceFile(device, path, text, file.programs, functions, stages)


def _with_place(path: Path, error: VerifyError, device: int) -> VerifyError:
    place = f"{path}:{error.line}" if error.line else str(path)
    return VerifyError(f"{place}: {error}", device=device, line=error.line)


def open_stages(path: str | Path, interface: Interface, trust: Trust = ONLY_VERIFIED) -> Mapping[str, StageClass]:
    """The classes of a file without programs. Raises VerifyError if it cannot be read, lacks a class or a buffer, or
    goes beyond what `trust` allows."""
    path = Path(path)
    try:
        text = read_text(path)
    except Unreadable as error:
        raise VerifyError(f"{path}: {error}") from error
    found = _run(ProgramFile(0, path, text, {}), interface, trust).stages
    if missing := interface.stages.keys() - found.keys():
        raise VerifyError(f"{path}: STAGES lacks {', '.join(sorted(missing))}")
    return found


def device_file_name(device: int) -> str:
    return f"device{device}.py"


def share_file(path: Path, interface: Interface, share: int) -> Path:
    """The file beside a device's `path` that a lane runs which has `share` micro-batches: the same one, if no lane has
    more."""
    return path if share == interface.micro_batches else path.with_name(f"{path.stem}_share{share}.py")


def _parse(path: Path, text: str, interface: Interface, device: int) -> dict[str, Program]:
    try:
        programs = {"step": parse_program(text, interface, device)}
        if any(isinstance(f, ast.FunctionDef) and f.name == "evaluate" for f in ast.parse(text).body):
            programs["evaluate"] = parse_program(text, interface, device, "evaluate")
    except VerifyError as error:
        raise _with_place(path, error, device) from error
    return programs


def _execute(path: Path, text: str, device: int) -> dict[str, Any]:
    """Import the text itself, not a bytecode cache of it, as a module with a name of its own."""
    digest = hashlib.sha256(f"{path.resolve()}\n{text}".encode()).hexdigest()
    name = f"penstock_generated_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise _failure(path, error, device, "importing the file") from error
    return vars(module)


def _failure(path: Path, error: Exception, device: int, doing: str, at: int | None = None) -> VerifyError:
    """`at`: the line to name if the error did not arise in the file's own lines."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = frames[-1].lineno if frames else at
    place = f"{path}:{line}" if line else str(path)
    code = f"\n-->   {frames[-1].line}" if frames and frames[-1].line else ""
    return VerifyError(f"{place}: {doing} failed: {type(error).__name__}: {error}{code}", device=device, line=line)


def _stages(
    path: Path, text: str, scope: Mapping[str, Any], interface: Interface, device: int
) -> dict[str, StageClass]:
    table = scope.get("STAGES")
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
        raise _failure(path, error, device, f"building {title}", line) from error
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
