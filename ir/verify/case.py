"""The base of the verifier's rules: the programs under test, and the text that names the place of an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from torch import fx

from .. import ops
from ..errors import VerifyError
from ..machine.hardware import Hardware
from ..program import Memory, MemoryProfile, Program, line_numbers, print_node, profile_memory


@dataclass
class Case:
    """All devices' programs, and the machine whose budgets they must keep (None: budgets are not checked)."""

    programs: Sequence[Program]
    hardware: Hardware | None = None

    @property
    def function(self) -> str:
        return self.programs[0].function

    @property
    def is_asynchronous(self) -> bool:
        """Whether every micro-batch updates the weights."""
        return self.function == "step" and self.programs[0].interface.asynchronous

    @cached_property
    def program_of(self) -> dict[int, Program]:
        return {program.device: program for program in self.programs}

    @cached_property
    def profiles(self) -> dict[int, MemoryProfile]:
        return {program.device: profile_memory(program) for program in self.programs}

    @cached_property
    def memories(self) -> dict[int, Memory]:
        """Each device's own memory; of its host's DRAM, its peak and an equal part of what all peaks leave."""
        found: dict[int, Memory] = {}
        if self.hardware is None:
            return found
        for device, profile in self.profiles.items():
            owner = self.hardware.devices[device]
            same = [d for d in self.profiles if self.hardware.devices[d].host == owner.host]
            peaks = [self.profiles[d].peak_bytes[ops.DRAM] for d in same]
            left = self.hardware.dram_budget_bytes(owner.host) - sum(peaks)
            dram_bytes = profile.peak_bytes[ops.DRAM] + left // len(peaks)
            found[device] = Memory(profile, owner.budget_bytes, dram_bytes, owner.kind == "cuda")
        return found


def fail(program: Program, node: fx.Node, message: str) -> NoReturn:
    """Raise a VerifyError that shows the program around `node`, with the line numbers of the file it was read from."""
    line = line_of(program, node)
    text = f"device {program.device}, line {line}: {message}\n{_excerpt(program, node)}"
    raise VerifyError(text, device=program.device, line=line)


def line_of(program: Program, node: fx.Node) -> int:
    """Line of a node in the file that the program was read from, else in the program's own text."""
    return _number_lines(program).get(node, 1)


def message_key(program: Program, node: fx.Node) -> tuple[int, int, str]:
    """The key that a send and its receive share: (source, destination, tag)."""
    fields: Any = node.kwargs
    if node.target is ops.send:
        return program.device, fields["dst"], fields["tag"]
    return fields["src"], program.device, fields["tag"]


def where(program: Program, node: fx.Node) -> str:
    """Device, line and text of a node, for messages that name several places."""
    return f"device {program.device}, line {line_of(program, node)}: {print_node(node)}"


def _number_lines(program: Program) -> dict[fx.Node, int]:
    own = line_numbers(program)
    if not all("line" in node.meta for node in own if node.op != "output"):
        return own
    numbers: dict[fx.Node, int] = {}
    last = 0
    for node in own:
        last = node.meta.get("line", last + 1)
        numbers[node] = last
    return numbers


def _excerpt(program: Program, node: fx.Node, around: int = 4) -> str:
    rows = list(_number_lines(program).items())
    place = next((i for i, (other, _) in enumerate(rows) if other is node), 0)
    near = rows[max(0, place - around) : place + around + 1]
    return "\n".join(f"{'-->' if n is node else '   '} {number:5d}     {print_node(n)}" for n, number in near)
