"""An interface that a stranger has changed is refused where its parts contradict each other."""

from __future__ import annotations

import json

import pytest

from penstock.ir.documents import Unreadable
from penstock.ir.program import Interface
from penstock.tests.ir.program.two_stages import interface_of, models


@pytest.mark.parametrize("field", ["changing_buffers", "repeated_buffers"])
def test_buffers_that_forward_changes_are_of_the_stage(field: str) -> None:
    document = json.loads(interface_of(*models()).to_json())
    document["stages"]["stage0"][field] = ["load"]
    with pytest.raises(Unreadable, match="stage stage0 has no buffer 'load' that its forward could change"):
        Interface.from_json(json.dumps(document))
