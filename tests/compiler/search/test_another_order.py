"""Memories so tight that devices would wait for each other for ever: the plan gets another order, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.compiler.pipeline import parse_pipeline
from penstock.compiler.search import compiled
from penstock.compiler.search.candidate import Candidate
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.ir.errors import DoesNotFit
from penstock.ir.verify import verify
from penstock.passes.draft import Options
from penstock.passes.memory import insert_fetch
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states
from penstock.tests.passes.running import Chain

TIGHT = penstock.Hardware.cpu(num_devices=2, memory=29000)
SWAPPED = (
    "coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline, insert-remat{always=true}, "
    "insert-fetch{swap=true}, insert-optimizer"
)


def case() -> tuple[Chain, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(24, 16), "labels": torch.randint(4, (24,))}
    return Chain(6), {"example_inputs": batch, "optimizer": SGD, "micro_batches": 6, "strategy": SWAPPED}


@pytest.mark.slow
def test_a_plan_gets_another_order_and_trains_like_eager_in_real_processes() -> None:
    model, options = case()
    eager = Eager(model, micro_batches=6)
    seen: list[str] = []
    with penstock.compile(model, TIGHT, dump=lambda name, _: seen.append(name), **options) as job:
        assert seen[-1] == "receive-earlier"
        assert "receives come earlier" in job.plan.notes["schedule-pipeline"]
        verify(job.programs, TIGHT)
        for _ in range(2):
            batch = options["example_inputs"]
            assert float(job.step(batch)) == pytest.approx(float(eager.step(batch)), rel=1e-6)
        assert_same_states(job, eager, 0.0)
        job.sync()
        assert_close(model.state_dict(), eager.model.state_dict(), 0.0)
    again = penstock.compile(
        model, TIGHT, plan=job.plan, example_inputs=options["example_inputs"], optimizer=options["optimizer"]
    )
    assert [str(p.graph) for p in again.programs] == [str(p.graph) for p in job.programs]


def test_where_no_order_is_found_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "receive_earlier", lambda programs, hardware: None)
    model, options = case()
    rows = {name: value[:4] for name, value in options["example_inputs"].items()}
    compiler = CandidateCompiler(trace(model, rows), TIGHT, Options(micro_batches=6, state_bytes_per_param=4.0))
    with pytest.raises(DoesNotFit, match="devices would wait for each other for ever"):
        compiler.finish(compiler.place(Candidate(parse_pipeline(SWAPPED, 2))))


@pytest.mark.slow
def test_fetches_are_tried_with_the_offloads_that_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """54 stages on four GPUs of 24 GB: gradients that nothing offloads fill these, and devices wait for ever."""
    trials: list[float | None] = []
    usual = insert_fetch.simulated_s
    monkeypatch.setattr(insert_fetch, "simulated_s", lambda *given: trials.append(usual(*given)) or trials[-1])
    named = find_model("mobius-51b")
    inputs, half = micro_batch_spec(named.batch_spec(8, 512), 4), torch.float16
    graph = trace(named.on_meta(), inputs, autocast=half, device_kind="cuda", param_dtype=half)
    machine = penstock.Hardware.preset("mobius-topo2+2")
    compiler = CandidateCompiler(graph, machine, Options(micro_batches=4, precision="fp16"))
    passes = (
        "coarsen, partition-balanced{stages=54}, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, "
        "insert-optimizer"
    )
    found = compiler.finish(compiler.place(Candidate(parse_pipeline(passes, 4))))
    verify(found.draft.programs, machine)
    assert len(trials) == 2 and None not in trials
