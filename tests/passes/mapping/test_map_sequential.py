"""`map-sequential`: one root complex after the other."""

from __future__ import annotations

from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_sequential import MapSequential
from penstock.tests.passes.running import chain


def cross() -> Hardware:
    """Root complexes 0, 1, 0, 1; the last device is another part."""
    document = Hardware.preset("mobius-topo2+2").model_dump()
    for device, root_complex in zip(document["devices"], (0, 1, 0, 1)):
        device["root_complex"] = root_complex
    return Hardware.model_validate(document)


def test_stages_fill_one_complex_after_the_other() -> None:
    draft = Draft(chain(), cross(), Options(), planned_for=[0, 1, 2, 3, 0, 1, 2])
    assert MapSequential().plan(draft) == [0, 2, 1, 3, 0, 2, 1]


def test_a_device_of_another_kind_keeps_its_stages() -> None:
    document = cross().model_dump()
    document["devices"][2]["memory_bytes"] *= 2
    draft = Draft(chain(), Hardware.model_validate(document), Options(), planned_for=[3, 2, 1, 1])
    assert MapSequential().plan(draft) == [0, 2, 1, 1]
