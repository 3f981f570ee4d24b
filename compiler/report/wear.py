"""The wear of SSDs by a plan: bytes written in a step and in a day of training alone, and the days that disks last."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.machine.hardware import Hardware
from ...ir.machine.host import Host
from ..plan import Prediction

SECONDS_A_DAY = 86400.0


@dataclass(frozen=True)
class Wear:
    """The wear of all SSDs of one host together. `endurance_bytes`: the bytes that can be written to them in their
    lives; None unless the hardware document has that of each."""

    memory: str
    read_bytes: int  # a step
    written_bytes: int  # a step
    step_s: float
    endurance_bytes: int | None = None

    @property
    def bytes_per_day(self) -> float:
        return self.written_bytes / self.step_s * SECONDS_A_DAY

    @property
    def days(self) -> float | None:
        """Days until the endurance is used up; None where that is not known or nothing is written."""
        if self.endurance_bytes is None or not self.written_bytes:
            return None
        return self.endurance_bytes / self.bytes_per_day


def wear_of(predicted: Prediction, hardware: Hardware) -> list[Wear]:
    """One row for each host whose SSDs a step reads or writes."""
    rows = []
    for index, host in enumerate(hardware.hosts):
        read, written = (predicted.moved_bytes.get(f"ssd{index}.{way}", 0) for way in ("read", "write"))
        if read or written:
            rows.append(Wear(f"ssd{index}", read, written, predicted.step_s, endurance_of(host)))
    return rows


def endurance_of(host: Host) -> int | None:
    """The bytes that can be written to all SSDs of a host in their lives; None unless the document has that of each."""
    known = [ssd.endurance_bytes for ssd in host.ssds if ssd.endurance_bytes is not None]
    # Files are striped evenly, so the disk with the least endurance is the first to be worn out.
    return len(known) * min(known) if known and len(known) == len(host.ssds) else None
