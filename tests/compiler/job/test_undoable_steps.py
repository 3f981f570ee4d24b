"""Steps before the norm is known, of stages in DRAM: what is copied so that they may be undone is predicted."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.ir import ops
from penstock.ir.program import persistent_bytes, work_of
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states, zoo_case
from penstock.tests.compiler.reasons import reasons_of

START = "coarsen, partition-balanced{stages=6}, map-round-robin, schedule-pipeline, insert-remat, "
ALIGNMENT = 512  # of each tensor among the copies
# gpt2 adds the two gradients of its table in another order than eager: each addition rounds by at most 2^-24, and
# three clipped steps carry that on.
REORDERED = 5e-6


@pytest.mark.slow
def test_the_copies_of_a_run_are_those_predicted() -> None:
    """In all stages, and in some; the steps that were too early are undone, so that weights are eager's."""
    model, batch = zoo_case("gpt2")
    machine = penstock.Hardware.cpu(1, memory="250kB", dram="1GB")
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 4, "max_grad_norm": 0.1}
    line = START + "insert-fetch{swap=true}, overlap-optimizer{clip=speculative}"
    plan = penstock.compile(model, machine, strategy=line, **options).plan
    copied_bytes = {}
    for clipping in ("speculative", ["stage3", "stage4"]):
        edited = plan.model_copy(deep=True)
        edited.decisions.clipping = clipping
        with penstock.compile(model, machine, plan=edited, **options) as job:
            predicted = job.plan.predicted
            assert predicted is not None
            nodes = [(p, node) for p in job.programs for node in p.ops() if node.target is ops.step]
            early = [node.args[0] for _, node in nodes if node.kwargs.get("speculative")]
            assert clipping == "speculative" or set(early) == set(clipping)
            copied_bytes[len(early)] = predicted.copied_bytes["dram0"]
            assert predicted.copied_bytes["dram0"] == sum(work_of(p, node).copied_bytes for p, node in nodes)
            assert predicted.copied_bytes["dram0"] == persistent_bytes(job.programs[0]).dram["undo"]
            assert "copied a step, so that updates may be undone" in reasons_of(job)
            eager = Eager(model, max_grad_norm=0.1)
            for _ in range(3):
                assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
                assert eager.gradient_norm > 0.1
            assert_same_states(job, eager, REORDERED)
            assert job.last is not None
            counted = job.last.moved_bytes["dram0 -> dram0"]
            tensors = 2 * sum(len(job.programs[0].interface.stages[str(stage)].params) for stage in early)
            assert predicted.copied_bytes["dram0"] <= counted <= predicted.copied_bytes["dram0"] + ALIGNMENT * tensors
    assert len(copied_bytes) == 2 and copied_bytes[2] < max(copied_bytes.values())
