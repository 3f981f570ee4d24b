"""Optimizers whose states have few bits through whole jobs: the library's own in eager PyTorch, bit for bit, and the
bytes that the plan counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.compiler.job.state import whole_state
from penstock.errors import PassError
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.every_optimizer_job import (
    STRATEGIES,
    Case,
    assert_is_itself,
    assert_same,
    train_eagerly,
    train_job,
)
from penstock.tests.compiler.job.test_every_optimizer_job import MUON
from penstock.tests.runtime.optimizer.low_bits import LOW_BITS
from penstock.tests.runtime.ssd.on_disk import directories

MIXED = Case(LOW_BITS["bitsandbytes AdamW8bit"], {("*.mlp.*.weight",): MUON})
CASES = {**{name: Case(optimizer) for name, optimizer in LOW_BITS.items()}, "Muon and AdamW8bit": MIXED}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.slow
def test_states_of_4_bits_on_ssd_saved_and_resumed(tmp_path: Path) -> None:
    assert_is_itself(CASES["torchao AdamW4bit"], "ssd", directories(tmp_path)[0], steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Muon and AdamW8bit"])
def test_the_plan_counts_the_bytes_that_are_found(name: str) -> None:
    model, batch = zoo_case("gpt2")
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=batch, optimizer=CASES[name].optimizer,
        param_groups=CASES[name].param_groups, strategy="mobius", micro_batches=1,
    )  # fmt: skip
    with job:
        job.step(batch)
        interface = job.folder.interface
        for spec in interface.stages.values():
            states = whole_state(job.driver, spec).optimizer["states"]
            found = sum(t.nbytes for row in states.values() for key, t in row.items() if t.dim() and "qmap" not in key)
            assert found == interface.state_bytes(spec)
        assert sum(interface.state_bytes(spec) for spec in interface.stages.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_is_itself_wherever_its_states_lie(name: str, where: str, tmp_path: Path) -> None:
    assert_is_itself(CASES[name], where, directories(tmp_path)[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_undone_and_clipped_leaves_no_trace(name: str, precision: str, tmp_path: Path) -> None:
    """Speculative steps on SSD, each done again, against those that wait for the norm."""
    model, batch = zoo_case("gpt2")
    exact = STRATEGIES["ssd"].replace("speculative", "exact")
    runs = []
    for strategy, disk in zip((exact, STRATEGIES["ssd"]), directories(tmp_path, 2)):
        options = {"max_norm": 0.05, "precision": precision, "strategy": strategy}
        runs.append(train_job(model, batch, CASES[name], 3, "ssd", disk, **options))
    assert_same(runs[0], runs[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_steps_are_those_of_eager(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    with torch.compiler.set_stance("default"):
        case = CASES["torchao AdamW8bit"]
        want = train_eagerly(model, batch, case, steps=2)
        assert_same(train_job(model, batch, case, 2, "dram", tmp_path, resume_at=1), want)


def test_blocks_are_not_cut_in_pieces() -> None:
    model, batch = zoo_case("mlp")
    with pytest.raises(PassError, match=r"AdamW8bit looks at whole parameters, or at blocks.*torch\.optim\.AdamW"):
        penstock.compile(
            model, penstock.Hardware.cpu(num_devices=2), example_inputs=batch, strategy="zero3-offload",
            optimizer=LOW_BITS["bitsandbytes AdamW8bit"], micro_batches=4,
        )  # fmt: skip
