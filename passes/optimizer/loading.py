"""The DRAM of a host while its devices' weights are loaded, stage by stage.

Beside what lasts, and what a GPU's pinned arena takes from the start, DRAM then holds one stage as its source gives it,
a second copy in the process of its device if that is another one, one tensor as it is in the files, and the buffer in
which a stage's file is laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.program import Interface, StageHome
from ...runtime.stage.file import staging_bytes
from ...runtime.state.weights import loaded_bytes, reading_bytes


@dataclass(frozen=True)
class LoadedDevice:
    """One device of a host: where its stages persist, and what it takes of DRAM whether it loads or not. `pinned`: its
    arena is locked from the start."""

    interface: Interface
    homes: Mapping[str, StageHome]
    lasting_bytes: int
    arena_bytes: int
    pinned: bool


def loading_bytes(devices: Sequence[LoadedDevice], processes: int) -> int:
    """Bytes of DRAM at the peak of loading. `processes`: of the whole run; one that is alone loads its own stages."""
    taken = passing = 0
    copies = 1 if processes == 1 else 2
    for device in devices:
        staging = staging_bytes(device.interface, device.homes)
        taken += device.lasting_bytes + (max(device.arena_bytes, staging) if device.pinned else staging)
        for stage in device.homes:
            spec = device.interface.stages[stage]
            passing = max(passing, copies * loaded_bytes(spec) + reading_bytes(spec))
    return taken + passing
