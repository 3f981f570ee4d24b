"""The search keeps some stages on devices that cannot hold all of theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import penstock
from penstock.ir.errors import DoesNotFit
from penstock.tests.compiler.eager_baseline import assert_trains_like_eager
from penstock.tests.compiler.reasons import raises_misfit
from penstock.tests.zoo import zoo

ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)  # which divides no rounding errors by themselves


def compile_gpt2(memory: str, dram: str, **options: Any) -> tuple[penstock.Job, Any]:
    torch.manual_seed(0)
    model, batch = zoo()["gpt2"](num_layers=6, dropout=0.0)
    machine = penstock.Hardware.cpu(1, memory=memory, dram=dram, h2d="8MB/s", d2h="8MB/s")
    return penstock.compile(model, machine, example_inputs=batch, optimizer=ADAMW, micro_batches=2, **options), batch


@pytest.mark.slow
def test_the_best_plan_over_slow_links_keeps_stages() -> None:
    job, _ = compile_gpt2("900kB", "200MB")
    resident, fetched = set(job.plan.decisions.resident), set(job.plan.decisions.fetch)
    assert resident and fetched and not resident & fetched
    assert "keep-stages: cpu0 has room for" in job.explain(full=True)
    assert job.plan.predicted is not None
    without = [r.step_s for r in job.plan.rivals if r.step_s is not None and "keep-stages" not in r.passes]
    assert job.plan.predicted.step_s < 0.9 * min(without)


@pytest.mark.slow
def test_devices_and_dram_hold_together_what_neither_holds() -> None:
    job, batch = compile_gpt2("900kB", "1200kB")
    assert job.plan.decisions.resident and job.plan.decisions.fetch
    assert_trains_like_eager(job, batch, 2e-5, optimizer=ADAMW, micro_batches=1)  # the whole batch
    with pytest.raises(DoesNotFit, match=r"weights 345 KiB, masters 0\.00 B, states 660 KiB"):
        compile_gpt2("900kB", "1200kB", strategy="mobius")


@pytest.mark.slow
def test_resident_stages_make_room_for_what_waits_in_dram() -> None:
    """DRAM holds what lasts, not what moves beside it."""
    with raises_misfit("read and offloaded values"):
        compile_gpt2("900kB", "1380kB", strategy="mobius")
    job, _ = compile_gpt2("900kB", "1380kB", search_s=0.1)
    assert job.plan.decisions.resident
