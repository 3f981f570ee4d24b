"""Models that do not fit are refused at once, and only these; the nearest that fits is found in few tries."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.compiler import api
from penstock.compiler.search.attempts import Attempts, Wishes
from penstock.compiler.search.candidate import Candidate
from penstock.compiler.search.compiled import CandidateCompiler, CompiledCandidate
from penstock.compiler.search.nearest import Growth
from penstock.compiler.search.search import Sweep, attempt_smallest
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.ir.units import parse_bytes
from penstock.passes.draft import Options
from penstock.tests.passes.running import traced_model

ADAM = partial(torch.optim.AdamW, lr=1e-3)
WIDTH, BATCH = 32, {"x": torch.zeros(8, 32), "y": torch.zeros(8, 32)}


class Net(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Refused(Exception):
    """The model does not fit, and nothing else is asked."""


def refuse(*args: object) -> None:
    raise Refused


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.integers(2_000, 60_000), st.integers(2_000, 60_000), st.sampled_from([None, 10_000, 40_000]), st.booleans(),
    st.sampled_from(["fp32", "bf16-mixed"]),
)  # fmt: skip
def test_nothing_that_fits_is_refused_before_it_is_tried(
    memory: int, dram: int, ssd: int | None, frozen: bool, precision: str
) -> None:
    """Where weights, masters and states exceed all memories together, no candidate of the search fits, either."""
    options: dict[str, Any] = {"ssd": ssd} if ssd else {}
    hardware = Hardware.cpu(1, memory=memory, dram=dram, **options)
    asked: list[bool] = []

    def instead(*args: Any) -> int:
        try:
            return check(*args)
        except DoesNotFit:
            asked.append(True)
            return 0

    with pytest.MonkeyPatch.context() as patch:
        check = api.check_states_fit
        patch.setattr(api, "check_states_fit", instead)
        patch.setattr(api, "with_nearest", refuse)
        try:
            penstock.compile(Net(frozen), hardware, example_inputs=BATCH, optimizer=ADAM, precision=precision)
        except Refused:
            return
    assert not asked, "a plan fits that would have been refused"


@pytest.mark.slow
def test_a_large_model_has_few_tries_for_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with a large graph: two numbers of micro-batches, and the bases that need the least memory."""
    for module in ("search", "nearest"):
        monkeypatch.setattr(f"penstock.compiler.search.{module}.LARGE_GRAPH_NODES", 2)
    looked: list[tuple[int, str]] = []
    attempt = Attempts.attempt
    monkeypatch.setattr(
        Attempts, "attempt", lambda self, count, c: (looked.append((count, c.label)), attempt(self, count, c))[1]
    )
    short = DoesNotFit("too small", memory="cpu0", missing_bytes=1)
    monkeypatch.setattr(api, "search", lambda *args: (_ for _ in ()).throw(short))
    hardware = Hardware.cpu(2, memory="2kB", dram="1GB")
    with pytest.raises(DoesNotFit, match=r"Tried, and fits: this hardware with memory=") as caught:
        penstock.compile(Net(False), hardware, example_inputs=BATCH, optimizer=ADAM)
    assert set(caught.value.nearest) == {"memory"}
    assert {count for count, _ in looked} == {2, 8} and len(looked) <= 16, looked


def test_of_candidates_that_need_little_memory_none_is_made_after_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are layers weighed against devices for tiles of sequences where there are no sequences."""
    monkeypatch.setattr(Sweep, "has_large_layers", refuse)
    wishes = Wishes(None, None, 8, Options(state_bytes_per_param=8), search_s=0.0)
    graph = traced_model(Net(False), [{key: value[:1] for key, value in BATCH.items()}])[0]
    made: list[Candidate] = []
    lane = CandidateCompiler.lane
    monkeypatch.setattr(CandidateCompiler, "lane", lambda self, c: (made.append(c), lane(self, c))[1])
    found = attempt_smallest(lambda count: graph, Hardware.cpu(2, memory="1GB"), wishes)
    assert isinstance(found, CompiledCandidate) and len(made) == 1
    missed = attempt_smallest(lambda count: graph, Hardware.cpu(2, memory="2kB"), wishes)
    assert isinstance(missed, DoesNotFit) and len(made) > 2


def test_memories_grow_by_what_is_missing_then_by_shares_that_double() -> None:
    growth = Growth()
    assert [growth.next_size_bytes("dram", *row) for row in ((160, 16), (176, 1), (187, 1))] == [176, 187, 209]
    assert growth.next_size_bytes("dram", 209, 500) == 709 and growth.next_size_bytes("memory", 160, 3) == 163


@pytest.mark.slow
def test_dram_gets_more_of_the_memory_that_it_shares_with_the_device() -> None:
    """The refusal names the memory, and the part of the device with which a plan fits."""
    pool = Hardware.cpu(1, memory="60kB", dram="64kB", ssd="1MB").with_(shared_memory=True)
    with torch.device("meta"):
        model = Net(False)
    batch = {name: value.to("meta") for name, value in BATCH.items()}
    with pytest.raises(DoesNotFit, match=r"cpu0 and dram0 are one memory of 62\.5 KiB") as refused:
        penstock.compile(model, pool, example_inputs=batch, optimizer=ADAM)
    (change,) = refused.value.nearest.items()
    assert change[0] == "memory" and parse_bytes(change[1]) < 60_000
    penstock.compile(model, pool.with_(memory=change[1]), example_inputs=batch, optimizer=ADAM)
