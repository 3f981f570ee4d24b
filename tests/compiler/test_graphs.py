"""One trace serves any number of micro-batches, and plans, prints and trains as a trace of that number does."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler import api
from penstock.compiler.capture import trace as tracing
from penstock.compiler.graphs import Graphs
from penstock.compiler.planning import sharing
from penstock.compiler.search import attempts
from penstock.ir.errors import DoesNotFit
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, assert_same_states, zoo_case
from penstock.tests.shown_elsewhere import slow_but


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each trace, whether sizes were followed."""
    found: list[bool] = []
    record = tracing._record

    def counting(*args: Any) -> Any:
        found.append(args[2].any_rows)
        return record(*args)

    monkeypatch.setattr(tracing, "_record", counting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_auto_traces_once(name: str, traces: list[bool]) -> None:
    model, batch = zoo_case(name)
    plan = penstock.compile(
        model, penstock.Hardware.cpu(2, memory="64MB"), example_inputs=batch, optimizer=SGD, strategy="balanced"
    ).plan
    assert len({rival.micro_batches for rival in plan.rivals} | {plan.micro_batches}) > 1
    assert traces == [True]


@pytest.mark.parametrize(("count", "follows"), [(1, False), (2, True)])
def test_a_number_that_is_said_is_traced_once(count: int, follows: bool, traces: list[bool]) -> None:
    """A whole batch has no other numbers of rows."""
    model, batch = zoo_case("mlp")
    penstock.compile(model, penstock.Hardware.cpu(1), example_inputs=batch, optimizer=SGD, micro_batches=count)
    assert traces == [follows]


class SumOfRows(nn.Module):
    """Its loss is a sum over rows, so that that of a micro-batch is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@pytest.mark.slow
def test_plans_share_a_trace_and_are_those_that_each_makes_alone(traces: list[bool]) -> None:
    """On other machines and with other batches, too; asynchronous micro-batches scale their losses otherwise."""
    model = SumOfRows()

    def texts(num_devices: int, strategy: str, *, rows: int = 8, **options: Any) -> list[str]:
        job = penstock.compile(
            model, penstock.Hardware.cpu(num_devices, memory="64MB"), example_inputs={"x": torch.randn(rows, 4)},
            optimizer=SGD, strategy=strategy, **options,
        )  # fmt: skip
        return [text for _, text in sorted(job.folder.files.items())]

    mini = {"micro_batches": 4}
    cases: list[tuple[int, str, dict[str, Any]]] = [(1, "balanced", {}), (1, "balanced", mini), (2, "async", mini)]
    cases += [(1, "balanced", {"rows": 12}), (1, "balanced", {**mini, "rows": 12})]
    alone = [texts(number, strategy, **options) for number, strategy, options in cases]
    assert traces == [True] * 5
    traces.clear()
    with sharing():
        assert [texts(number, strategy, **options) for number, strategy, options in cases] == alone
        assert texts(2, "balanced") == texts(2, "balanced")
    assert traces == [True]
    assert alone[1] != alone[0] and any("* 4.0" in text for text in alone[1])


def first_and_then(monkeypatch: pytest.MonkeyPatch, first: int, then: int) -> None:
    """Let the first trace be of one number of micro-batches, and the plan of another."""
    monkeypatch.setattr(api, "micro_batch_counts", lambda *_: ([first], []))
    monkeypatch.setattr(attempts, "micro_batch_counts", lambda *_: ([then], []))


@pytest.mark.parametrize("name", slow_but(["gpt2"], ["gpt2", "t5", "vit"]))
def test_the_program_is_that_of_its_own_trace_and_trains_like_eager(
    name: str, traces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding: what feeds several stages adds up in another order than in eager (see job/test_job_parity.py)."""
    options: dict[str, Any] = {"optimizer": SGD, "strategy": "balanced"}
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    model, batch = zoo_case(name)
    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "_graph_of_rows", Graphs._trace)
        said = penstock.compile(model, hardware, example_inputs=batch, micro_batches=MICRO_BATCHES, **options)
    assert {*traces} == {False}
    traces.clear()
    first_and_then(monkeypatch, 1, MICRO_BATCHES)
    job = penstock.compile(model, hardware, example_inputs=batch, **options)
    assert traces == [True] and job.plan.micro_batches == MICRO_BATCHES
    assert job.folder.files == said.folder.files
    eager = Eager(model)
    for _ in range(2):
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
    assert_same_states(job, eager, 5e-6)
    assert_close(job.state_dict(), eager.model.state_dict(), 5e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x) if x.shape[0] > 2 else x.tanh()
        return self.layers(x).mean()


def test_a_plan_of_rows_that_a_shared_trace_does_not_know_has_its_own(traces: list[bool]) -> None:
    model, options = Branches(), {"optimizer": SGD, "strategy": "balanced"}

    def plan(rows: int, **more: Any) -> list[str]:
        example = {"x": torch.randn(rows, 8)}
        job = penstock.compile(model, penstock.Hardware.cpu(1), example_inputs=example, **options, **more)
        return [text for _, text in sorted(job.folder.files.items())]

    alone = plan(4, micro_batches=2)
    with sharing():
        plan(8)
        traces.clear()
        assert plan(4, micro_batches=2) == alone
    assert traces == [False]


def test_a_model_that_branches_on_its_rows_is_traced_for_each_number(
    traces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_and_then(monkeypatch, 1, 4)
    job = penstock.compile(
        Branches(),
        penstock.Hardware.cpu(1),
        example_inputs={"x": torch.randn(4, 8)},
        optimizer=SGD,
        strategy="balanced",
    )
    assert traces == [True, False]
    assert "x.tanh()" in job.folder.files[0] and "torch.tanh(x)" not in job.folder.files[0]


class Wide(nn.Module):
    """Long rows: only few of them fit. `special`: the number of rows of which forward does something else."""

    def __init__(self, special: int) -> None:
        super().__init__()
        self.layer, self.special = nn.Linear(4, 4), special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).repeat(1, 1000)
        for _ in range(10):
            x = x.sin()
        return (x.relu() if len(x) == self.special else x).square().mean()


def test_a_number_that_the_search_chooses_is_looked_at_like_the_first() -> None:
    hardware, batch = penstock.Hardware.cpu(1, memory="500kB"), {"x": torch.randn(8, 4)}
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "strategy": "balanced"}
    with penstock.compile(Wide(special=0), hardware, **options) as job:
        count = job.plan.micro_batches
        assert count > 2  # the first look is at one and two
    with pytest.raises(DoesNotFit, match="Rows of a batch are coupled: the loss depends on how many rows there are"):
        penstock.compile(Wide(special=8 // count), hardware, **options)
