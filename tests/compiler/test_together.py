"""One rank plans for all: what it finds, or why it finds nothing, is what every rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler import together
from penstock.compiler.together import planned_once
from penstock.runtime.errors import DoesNotFit, PassError
from penstock.tests.compiler.fed_by_parts import Net


class Met:
    """The store of two ranks that run one after the other: the first leaves what it said for the second."""

    def __init__(self, said: list[Any]):
        self.said, self.rank, self.left = said, int(bool(said)), False

    def exchange(self, mine: Any) -> list[Any]:
        self.said += [mine]
        return self.said

    def leave(self, why: str) -> None:
        self.left = True


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    said: list[Any] = []
    monkeypatch.setattr(together, "_meet", lambda timeout_s: Met(said))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    return said


def test_the_second_rank_carries_out_what_the_first_has_found(said: list[Any]) -> None:
    example = {"x": torch.zeros(8, 4), "y": torch.zeros(8, 1)}
    given = {"example_inputs": example, "optimizer": torch.optim.SGD}
    hardware = penstock.Hardware.cpu(num_devices=2)
    first = penstock.compile(Net(), hardware, **given)
    assert list(said[0]) == ["plan"]
    second = penstock.compile(Net(), hardware, **given)
    assert said[1] is None  # the second has waited to be told
    assert second.plan.hash == first.plan.hash and second.folder.files == first.folder.files


@pytest.mark.parametrize(
    "error", [DoesNotFit("cpu0 lacks 3 MiB", memory="cpu0", missing_bytes=3 << 20), PassError("no such option")]
)
def test_why_there_is_no_plan_is_said_on_all_ranks(said: list[Any], error: Exception) -> None:
    @planned_once
    def fails(plan: Any = None) -> Any:
        raise error

    found = []
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            fails()
        found.append(raised.value)
    assert found[0] is error and found[1] is not error
    assert str(found[1]) == str(error) and getattr(found[1], "missing_bytes", None) == getattr(
        error, "missing_bytes", None
    )


def test_only_searches_are_shared(said: list[Any]) -> None:
    @planned_once
    def compiled(**given: Any) -> Any:
        return SimpleNamespace(**given)

    assert compiled(strategy="gpipe").strategy == "gpipe" and compiled(plan="plan.json").plan == "plan.json"
    assert not said
