"""Data parallelism and ZeRO-3 with offload on real processes: steps, evaluation, states and checkpoints are eager's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_steps_like_eager, zoo_case

# Each device adds up its own micro-batches first: the same four terms in another order, as where stages share a weight.
REORDERED = 5e-6
DEVICES = penstock.Hardware.cpu(num_devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data-parallel", "zero3-offload"])
def test_a_job_is_eagers(strategy: str, tmp_path: Path) -> None:
    """GPT-2 with its tied table and clipping: several steps, evaluation, sync, and a checkpoint gone back to."""
    model, batch = zoo_case("gpt2")
    eager = Eager(model, max_grad_norm=0.5)
    options = {"example_inputs": batch, "optimizer": SGD, "micro_batches": 4, "max_grad_norm": 0.5}
    job = penstock.compile(model, DEVICES, strategy=strategy, **options)
    with job:
        assert_steps_like_eager(job, eager, batch, REORDERED)
        output = job.evaluate(batch)
        assert float(output.loss) == pytest.approx(float(eager.evaluate(batch)), rel=1e-6)
        assert output.logits.shape[0] == batch["input_ids"].shape[0]
        job.save(tmp_path / "saved")
        job.sync()
        assert_close(model.state_dict(), eager.model.state_dict(), REORDERED)
        gone_on = float(job.step(batch))
        job.resume(tmp_path / "saved")
        assert float(job.step(batch)) == gone_on == pytest.approx(float(eager.step(batch)), rel=1e-6)
    with penstock.compile(model, penstock.Hardware.cpu(), strategy="balanced", **options) as alone:
        alone.resume(tmp_path / "saved")  # whatever devices it was saved from
        assert float(alone.step(batch)) == pytest.approx(gone_on, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data-parallel", "zero3-offload"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_one_device(strategy: str, precision: str) -> None:
    """Gradients of half precision are added in another order: losses agree to what that rounds."""
    model, batch = zoo_case("gpt2")
    losses = []
    for name, devices in (("balanced", 1), (strategy, 2)):
        job = penstock.compile(
            model, penstock.Hardware.cpu(num_devices=devices), example_inputs=batch, optimizer=SGD, micro_batches=4,
            strategy=name, precision=precision,
        )  # fmt: skip
        with job:
            losses.append([float(job.step(batch)) for _ in range(3)])
            assert not job.last.skipped
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1][-1] < losses[1][0]


def test_an_optimizer_that_looks_at_whole_parameters_cannot_update_pieces() -> None:
    model, batch = zoo_case("mlp")
    with pytest.raises(penstock.errors.PassError, match=r"Adafactor looks at whole parameters.*torch\.optim\.AdamW"):
        penstock.compile(
            model, DEVICES, example_inputs=batch, optimizer=torch.optim.Adafactor, strategy="zero3-offload",
            micro_batches=4,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adadelta"])
def test_elementwise_optimizers(kind: str) -> None:
    assert OptimizerSpec.from_callable(partial(getattr(torch.optim, kind), lr=0.1)).is_elementwise()


@pytest.mark.slow
def test_a_plan_with_shards_is_saved_edited_and_refused(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    options = {"example_inputs": batch, "optimizer": SGD}
    plan = penstock.compile(model, DEVICES, strategy="zero3-offload", micro_batches=4, **options).plan
    plan.save(tmp_path / "plan.json")
    again = penstock.compile(model, DEVICES, plan=tmp_path / "plan.json", **options).plan
    assert again.decisions == plan.decisions and again.decisions.mesh.shards == 2 and again.hash == plan.hash
    plan.decisions.mesh.shards = 1
    with pytest.raises(penstock.errors.PassError, match="no lanes share their weights"):
        penstock.compile(model, DEVICES, plan=plan, **options)
