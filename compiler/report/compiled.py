"""Compiled stages in words: which classes of blocks `torch.compile` runs, and which run eagerly, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...ir.program import Interface
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
