"""Whole files: one per device, holding the stages that it runs and its programs, and the directory of a plan.

In: programs, stage graphs and a header. Out: Python source that the runtime imports and runs as it is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from ..ir import ops
from ..ir.calls import op_of
from ..ir.program import Program, line_numbers, program_lines
from ..runtime.device.file import device_file_name
from ..runtime.source.homes import BASES, DRAWING_BASES
from .block_source import BlockLibrary
from .imports import Imports
from .paths import camel_case
from .stage_source import StageSource


@dataclass(frozen=True)
class Header:
    """The docstring of a file. Each field is a piece of text for people; empty ones are left out."""

    model: str  # "gpt2, 12 blocks, 124 M parameters"
    hardware: str  # "mobius-topo2+2"
    device_name: str = ""  # "gpu1, root complex 0"
    passes: tuple[str, ...] = ()
    plan: str = ""  # its hash, then its figures: "9f31c2, micro-batches 4 x 2, fp16"
    predict: str = ""  # "41.2 ms a step; gpu1 1.61 of 22.5 GiB"
    lanes: int = 1  # the number of them that run the file
    run_by: str = ""  # "gpu1, gpu3": the devices of these
    groups: str = ""  # "copies.stage1 (gpu1, gpu2)": who is in those that its programs name

    def text(self, program: Program, stages: Mapping[str, fx.GraphModule]) -> str:
        """The docstring with its quotes."""
        place = f"device {program.device} of {program.interface.num_devices}"
        place += f" of each of {self.lanes} lanes" if self.lanes > 1 else ""
        if self.device_name:
            place += f" ({self.device_name})"
        here = ", ".join(stages) or "none"
        rows = [
            ("passes", ", ".join(self.passes)),
            ("plan", f"{self.plan}; stages here: {here}" if self.plan else f"stages here: {here}"),
            ("predict", self.predict),
            ("run by", self.run_by),
            ("groups", self.groups),
        ]
        lines = [f"{self.model}, on {self.hardware}: {place}"]
        for name, text in rows:
            if text:
                first, rest = f"{name:<9}", " " * 9
                lines += textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
        return '"""' + "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''") + '\n"""'


def write_file(
    program: Program,
    evaluate_program: Program | None,
    stages: Mapping[str, fx.GraphModule],
    header: Header,
    imports: Imports | None = None,
) -> str:
    """The file of one device. `stages`: name to graph, of the stages that the device runs. `imports`: where those of
    the file are noted.

    Raises CaptureError where something in a graph has no form as text (a class that no file can import, for instance).
    """
    imports = imports or Imports()
    library = BlockLibrary(imports)
    sources = [StageSource(program.interface.stages[name], module, library) for name, module in stages.items()]
    library.name_classes([camel_case(name) for name in stages])
    classes = [*library.sources(), *(source.source() for source in sources)]
    table = ", ".join(f'"{name}": {camel_case(name)}' for name in stages)
    programs = [_program_text(program)]
    if evaluate_program is not None:
        programs.append(_program_text(evaluate_program))
    bases = DRAWING_BASES if imports.draws else BASES
    head = "\n\n".join([header.text(program, stages), f"{imports.text()}\n\n{bases}"])
    return "\n\n\n".join([head, *imports.copied.values(), *classes, f"STAGES = {{{table}}}", *programs]) + "\n"


def write_directory(directory: str | Path, files: Mapping[int, str], extras: Mapping[str, str]) -> list[Path]:
    """Write `device0.py`, ... and `extras` (file name to text, such as interface.json). Returns the paths written."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {device_file_name(device): text for device, text in files.items()} | dict(extras)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _program_text(program: Program) -> str:
    """The program with types, and a comment where another phase begins."""
    lines, numbers = program_lines(program, comments=True), line_numbers(program)
    before = {numbers[node]: text for node, text in _phases(program).items()}
    found = []
    for number, line in enumerate(lines, start=1):
        if number in before:
            found.append(f"    # {before[number]}")
        found.append(line.rstrip())
    return "\n".join(found)


def _phases(program: Program) -> dict[fx.Node, str]:
    """The first op of each stretch in which the device works on one stage in one direction, with the phase's name.

    A stretch begins with the ops that bring the operands of its first computation. If forwards and backwards alternate,
    there are no such stretches and no comments.
    """
    nodes = list(program.ops())
    stretches: list[tuple[str, int, int]] = []  # (phase, place of its first op, number of computations)
    start = 0
    for place, node in enumerate(nodes):
        phase = _phase(node)
        if phase is None:
            start = start if op_of(node).prepares else place + 1
            continue
        if stretches and stretches[-1][0] == phase:
            stretches[-1] = (phase, stretches[-1][1], stretches[-1][2] + 1)
        else:
            stretches.append((phase, start, 1))
        start = place + 1
    phases = [phase for phase, _, _ in stretches]
    if len(phases) > 2 * len(set(phases)):
        return {}
    return {nodes[place]: phase for phase, place, _ in stretches}


def _phase(node: fx.Node) -> str | None:
    op = op_of(node)
    if op is ops.step:
        return "update"
    if op.parts:
        stage = str(node.args[0])
        return f"{op.name}, {stage.replace('stage', 'stage ') if stage.removeprefix('stage').isdigit() else stage}"
    return None
