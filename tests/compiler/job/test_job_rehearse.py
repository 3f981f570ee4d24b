"""`Job.rehearse`: printed files of a whole model, run for a machine that is not here."""

from __future__ import annotations

import pytest

import penstock
from penstock.compiler.models.named import find_model


@pytest.mark.slow
def test_tied_weights_over_two_gpus() -> None:
    """Messages, an all_reduce of the embedding's gradient, gradients clipped, weights that come from DRAM."""
    model = find_model("gpt2:n_layer=4")
    job = penstock.compile(
        model.on_meta(),
        penstock.Hardware.preset("mobius-topo2+2", num_devices=2),
        example_inputs=model.batch_spec(4, 1024),
        strategy="balanced",
        micro_batches=2,
        precision="fp16",
        max_grad_norm=1.0,
    )
    ops = {node.target.name for program in job.programs for node in program.ops()}  # type: ignore[union-attr]
    assert {"send", "recv", "all_reduce", "clip", "step"} <= ops
    simulated_s = job.simulate().from_rest_s
    found = [job.rehearse(2.0 / simulated_s) for _ in range(2)]
    assert min(timeline.step_s for timeline in found) == pytest.approx(simulated_s, rel=0.05)
    assert set(found[0].device_names[:2]) == {"gpu0", "gpu1"}
    assert job.step_count == 0 and job._run.live_driver is None  # a rehearsal starts no training
