"""The way in which stages run, in words: compiled blocks and CUDA graphs, which run as written instead, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...ir.program import Interface, Program, graph_bytes, graphs_of_stages, reasons_without_graphs
from ...ir.units import format_bytes
from ...runtime.compiled.blocks import CompiledBlocks
from ...runtime.device.file import open_directory
from ...runtime.source.trust import Trust


def find_blocks(directory: str | Path, interface: Interface, trust: Trust) -> dict[str, CompiledBlocks]:
    """The block classes of each stage of a job's files, by stage."""
    found: dict[str, CompiledBlocks] = {}
    for file in open_directory(directory, interface, trust):
        for stage in file.stages:
            if stage not in found:
                found[stage] = CompiledBlocks(file.build(stage))
    return found


def compiled_text(blocks: Mapping[str, CompiledBlocks], eager: Mapping[str, Mapping[str, str]]) -> str:
    """`eager`: what the first step has found, stage -> class -> why it runs eagerly."""
    lines = ["compiled stages: a class of blocks once for all its blocks; what is in no block runs as written"]
    for stage, of in blocks.items():
        reasons = {**of.reasons, **eager.get(stage, {})}
        for name, members in of.blocks.items():
            how = f"eagerly: {reasons[name]}" if name in reasons else "compiled"
            lines.append(f"  {stage}  {name}, {len(members)} block{'s' * (len(members) > 1)}: {how}")
        if not of.blocks:
            lines.append(f"  {stage}  eagerly: it has no repeated blocks")
    return "\n".join(lines)


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
