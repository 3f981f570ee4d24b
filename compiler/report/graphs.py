"""CUDA graphs in words: which stages are graphed, what their graphs hold, and which stages run as written, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir.program import Program, graph_bytes, graphs_of_stages, reasons_without_graphs
from ...ir.units import format_bytes


def graphs_text(programs: Sequence[Program], found: Mapping[str, str]) -> str:
    """`found`: what the first step has found, stage -> why it runs as written."""
    lines = ["CUDA graphs: forward and backward of a stage are launched as one each"]
    for program in programs:
        reasons = {**reasons_without_graphs(program), **found}
        for stage, graphs in graphs_of_stages(program).items():
            slots = graphs.slots + graphs.again
            if stage not in reasons:
                lines.append(f"  {stage}  graphed, {slots} slot{'s' * (slots > 1)}")
        lines += [f"  {stage}  as written: {reason}" for stage, reason in reasons_without_graphs(program).items()]
        lines += [f"  {stage}  as written: {found[stage]}" for stage in graphs_of_stages(program) if stage in found]
        if graph_bytes(program):
            lines.append(f"  device {program.device} counts {format_bytes(graph_bytes(program))} for graphs, for good")
    return "\n".join(lines)
