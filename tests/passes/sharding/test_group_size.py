"""`mesh{shards=auto}`: as few devices share the model as can hold it."""

from __future__ import annotations

import pytest

from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.passes.sharding.group_size import _sizes, smallest_group
from penstock.passes.sharding.mesh import Mesh
from penstock.tests.passes.running import chain, draft_of


def group(memory: str, devices: int = 8, depth: int = 1, dram: str = "2GB") -> int:
    draft = draft_of(chain(depth=8, width=64), Hardware.cpu(devices, memory, dram=dram), micro_batches=devices)
    run_passes(draft, parse_pipeline("coarsen, partition-balanced", 1)[:1])
    return smallest_group(draft, depth)


def test_less_memory_takes_more_devices() -> None:
    """The model's states are 16 bytes for each of 135 thousand parameters, 2.2 MB; a few blocks are whole at a time."""
    sizes = [group(memory) for memory in ("8MB", "1.5MB", "1MB", "800kB")]
    assert sizes == sorted(sizes) and sizes[0] == 2 and sizes[-1] == 8
    assert group("1MB", depth=2) <= group("1MB")
    assert group("100kB") == 2  # on no device: in DRAM, which is large
    assert group("100kB", dram="1MB") == 8
    assert group("8MB", devices=3) == 3 and group("8MB", devices=1) == 1


def test_groups_part_no_host_and_no_rack() -> None:
    """Five hosts of 8: no groups of 5, 10 or 20. Racks of three hosts: a group of two hosts would lie in two racks."""
    assert _sizes(Hardware.preset("mics-p3dn:5"), 1) == [2, 4, 8, 40]
    assert _sizes(Hardware.preset("mics-p3dn:5"), 2) == [2, 4, 20]
    assert _sizes(Hardware.preset("mics-p3dn:6-rack3"), 1) == [2, 4, 8, 24, 48]


@pytest.mark.parametrize("memory", ["8MB", "1.5MB"])
def test_the_programs_fit(memory: str) -> None:
    draft = draft_of(chain(depth=8, width=64), Hardware.cpu(8, memory), micro_batches=8)
    decisions, _ = run_passes(draft, parse_pipeline("mics", 8))
    assert decisions["mesh"].shards == group(memory)
    assert decisions["sharding"].tier == "device"
    peak = profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE]
    assert peak <= draft.lane_hardware.devices[0].budget_bytes


def test_the_option_is_written_auto() -> None:
    (mesh,) = [p for p in parse_pipeline("mics", 8) if isinstance(p, Mesh)]
    assert mesh.shards == 0
