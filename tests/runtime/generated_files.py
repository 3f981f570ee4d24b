"""Files such as the runtime imports, written for programs that tests build by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.ir.program import Program, print_program

CHAIN = '''
import time

import torch
from torch import nn


class Middle(nn.Module):
    """One weight under the name `layer{index}.weight`; sleeps first, to be slow on purpose."""

    def __init__(self, index, width, seconds):
        super().__init__()
        setattr(self, f"layer{index}", nn.Linear(width, width, bias=False))
        self.index, self.seconds = index, seconds

    def inner(self, x):
        if self.seconds:
            time.sleep(self.seconds)
        return getattr(self, f"layer{self.index}")(x)

    def forward(self, x):
        return (torch.tanh(self.inner(x)),)


class Last(Middle):
    def forward(self, x):
        return (self.inner(x).square().mean(),)


class Failing(Middle):
    """Raises at its third call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise ValueError("no third time")
        return (torch.tanh(self.inner(x)),)
'''


def write_files(folder: Path, programs: Sequence[Program], head: str, stages: Mapping[str, str]) -> list[Path]:
    """One file per device. `stages`: per stage name the expression for its class, for files that name its weights."""
    files = []
    for device in sorted({program.device for program in programs}):
        own = [print_program(program, comments=True) for program in programs if program.device == device]
        here = {name: text for name, text in stages.items() if any(f'"{name}.weights"' in text for text in own)}
        rows = "".join(f'    "{name}": {text},\n' for name, text in here.items())
        files.append(folder / f"device{device}.py")
        files[-1].write_text(f"{head}\n\nSTAGES = {{\n{rows}}}\n\n\n" + "\n\n".join(own))
    return files


def write_chain(
    folder: Path, programs: Sequence[Program], width: int, seconds: float = 0.0, failing: str = ""
) -> list[Path]:
    """Files for the programs of `handmade.pipeline`; the stage named `failing` raises."""
    count = len(programs[0].interface.stages)
    stages = {}
    for i in range(count):
        kind = "Failing" if failing == f"stage{i}" else "Last" if i == count - 1 else "Middle"
        stages[f"stage{i}"] = f"lambda: {kind}({i}, {width}, {seconds})"
    return write_files(folder, programs, CHAIN, stages)
