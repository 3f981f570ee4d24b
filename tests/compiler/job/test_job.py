"""A job's members beside training: reports, evaluation, timelines, files, its life from start to close."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import HardwareError, PlanError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, part_of, zoo_case
from penstock.tests.compiler.reasons import reasons_of

OPTIONS: dict[str, Any] = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced"}


def job_of(model: nn.Module, batch: Any, memory: str = "64MB", **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory=memory, dram="1GB")
    return penstock.compile(model, hardware, example_inputs=batch, **{**OPTIONS, **options})


@pytest.mark.slow
def test_the_report_of_a_step() -> None:
    model, batch = zoo_case("gpt2")
    with job_of(model, batch, "250kB", max_grad_norm=10.0) as job:
        assert job.last is None
        for step in (1, 2):
            loss = job.step(batch)
            last = job.last
            assert last is not None and last.step == step == job.step_count
            assert last.loss == float(loss) and loss.shape == () and not loss.requires_grad
            assert last.seconds > 0 and last.predicted_s == job.plan.predicted.step_s  # type: ignore[union-attr]
            assert last.gradient_norm is not None and last.gradient_norm > 0
            assert last.moved_bytes["dram0 -> cpu0"] > 0 and last.moved_bytes["cpu0 -> dram0"] > 0
            assert 0 < last.peak_bytes["cpu0"] <= job.hardware.budget_bytes("cpu0")
            assert all(0 <= share <= 1.01 for row in last.busy_share.values() for share in row.values())
        timeline = job.timeline()
        assert 0 < timeline.step_s <= 1.5 * last.seconds
        assert {"fetch", "forward", "backward", "offload", "step"} <= {span.op for span in timeline.spans}


def test_what_a_loop_does_with_a_loss(tmp_path: Path) -> None:
    """Its backward is refused in any arithmetic; all else is a tensor's."""
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        loss = job.step(batch)
        value = loss.item()
        for call in (loss.backward, (loss / 2 + 1).backward, torch.stack([loss, loss]).mean().backward):
            with pytest.raises(PlanError, match=r"loss\.backward\(\): job\.step has taken backward and the"):
                call()
        with pytest.raises(PlanError, match=r"requires_grad = True: job\.step has taken"):
            loss.requires_grad_()
        assert not loss.requires_grad and float(loss) == value and f"{loss:.3f}" == f"{value:.3f}"
        torch.save({"loss": loss}, tmp_path / "loss.pt")
        for plain in (loss.detach(), copy.deepcopy(loss), torch.load(tmp_path / "loss.pt")["loss"]):
            assert type(plain) is torch.Tensor and plain.item() == value
        assert repr(loss) == repr(loss.detach()) and loss.numpy() == value
        loss.detach().requires_grad_().backward()


@pytest.mark.slow
def test_predicted_peaks_are_the_accounted_ones() -> None:
    model, batch = zoo_case("gpt2")
    for memory in ("64MB", "250kB"):
        with job_of(model, batch, memory) as job:
            for _ in range(2):
                job.step(batch)
            predicted = job.plan.predicted
            assert job.last is not None and predicted is not None
            for name, peak in job.last.peak_bytes.items():
                assert peak == pytest.approx(predicted.peak_bytes[name], rel=0.05), f"{name} with {memory}"


def test_evaluate_gives_loss_and_outputs_of_the_whole_batch_and_trains_nothing() -> None:
    model, batch = zoo_case("gpt2", dropout=0.3)
    eager = Eager(model)
    with job_of(model, batch, "250kB") as job:
        out = job.evaluate(batch)  # also before the first step
        assert_close({"loss": out.loss}, {"loss": eager.evaluate(batch)}, 1e-6)
        with torch.no_grad():
            twin = eager.model.eval()
            parts = [twin(**part_of(batch, m, MICRO_BATCHES)).logits for m in range(MICRO_BATCHES)]
        assert_close({"logits": out["logits"]}, {"logits": torch.cat(parts)}, 1e-6)
        assert_close(job.evaluate(batch, outputs=False), {"loss": out.loss}, 0.0)
        with pytest.raises(AttributeError, match="logits"):
            out.hidden_states  # noqa: B018
        with pytest.raises(KeyError, match="no output 1; there are loss, logits"):
            out[1]  # type: ignore[index]
        before = job.state_dict()
        job.evaluate(batch)
        assert_close(job.state_dict(), before, 0.0)
        assert job.step_count == 0


def test_a_model_that_evaluates_differently_says_what_to_do() -> None:
    """Control flow that depends on `self.training` cannot be one program; sync and evaluate the model then."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            return (self.other(h) if self.training else torch.softmax(h, -1)).square().mean()

    batch = {"x": torch.randn(8, 4)}
    with job_of(Doubled(), batch) as job:
        job.step(batch)
        with pytest.raises(PlanError, match=r"cannot be evaluated.*job\.sync"):
            job.evaluate(batch)
        job.step(batch)


def test_nothing_starts_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and asking what a plan is like touches no device."""

    def started(*_: Any) -> None:
        raise AssertionError("a device was started")

    monkeypatch.setattr("penstock.compiler.job.run.start_driver", started)
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)
    model, batch = zoo_case("mlp")
    shapes = {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in batch.items()}
    job = penstock.compile(model, "mobius-topo2+2", example_inputs=shapes, **OPTIONS)
    assert reasons_of(job) and job.code(3) and job.simulate().step_s > 0
    with pytest.raises(PlanError, match="device=4; there are 0 to 3"):
        job.code(4)
    job.close()
    with pytest.raises(AssertionError, match="was started"):
        job_of(model, batch).step(batch)


def test_a_plan_for_gpus_does_not_start_without_them() -> None:
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.preset("mobius-topo4", num_devices=1 + torch.cuda.device_count())
    job = penstock.compile(model, hardware, example_inputs=batch, **OPTIONS)
    for use in (lambda: job.step(batch), job.state_dict):
        with pytest.raises(HardwareError, match=r"GPUs? on a host.*hardware='cpu'"):
            use()


def test_writing_over_an_earlier_job(tmp_path: Path) -> None:
    """Files of devices that the new plan does not have would be misleading."""
    model, batch = zoo_case("mlp")
    for num_devices in (3, 1):
        hardware = penstock.Hardware.cpu(num_devices=num_devices)
        job = penstock.compile(model, hardware, example_inputs=batch, **OPTIONS)
        job.write(tmp_path)
        assert len(list(tmp_path.glob("device*.py"))) == num_devices
    assert penstock.load(tmp_path, model).plan == job.plan


def test_half_precision_skips_a_step_that_overflows() -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch, precision="fp16") as job:
        first = job.step(batch)
        assert job.last is not None and job.last.loss_scale == 65536.0
        before = job.state_dict()
        job.step({**batch, "x": batch["x"] * 1e30})  # no error: that is what the scaling is there for
        assert job.last.skipped and job.last.loss_scale == 32768.0
        assert_close(job.state_dict(), before, 0.0)
        assert job.step(batch) < first and not job.last.skipped


def test_close_ends_a_run_and_only_a_checkpoint_goes_on(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        for _ in range(2):
            job.step(batch)
        job.save(tmp_path / "checkpoint")
        state = job.state_dict()
    job.close()  # twice is fine
    assert job.last is not None and job.step_count == 2  # what it did can still be read
    late = tmp_path / "late"
    for use in (lambda: job.step(batch), job.state_dict, job.sync, lambda: job.evaluate(batch), lambda: job.save(late)):
        with pytest.raises(PlanError, match=r"the job was closed.*before job\.close"):
            use()
    job.resume(tmp_path / "checkpoint")
    assert_close(job.state_dict(), state, 0.0)
    job.close()


def test_a_run_goes_on_from_what_sync_left() -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.step(batch)
        job.sync()
        wanted = job.step(batch)
    with job_of(model, batch) as job:
        assert job.step(batch) == wanted


def test_a_job_that_never_ran_closes_too() -> None:
    model, batch = zoo_case("mlp")
    job = job_of(model, batch)
    job.close()
    with pytest.raises(PlanError, match=r"the job was closed.*penstock\.compile"):
        job.step(batch)


def test_bits_do_not_depend_on_an_earlier_run_or_the_scripts_generators() -> None:
    """Dropout draws from the job's seed; the script's own generators are left as they were."""
    model, batch = zoo_case("mlp", dropout=0.5)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(losses))
        with job_of(copy.deepcopy(model), batch, seed=seed) as job:
            state = torch.get_rng_state()
            losses.append(job.step(batch))
            assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_a_device_that_holds_the_others_up_is_named(tmp_path: Path) -> None:
    """One device's file is edited to compute slowly; local workers and their timeline show it."""
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=3, memory="64MB")
    job = penstock.compile(model, hardware, example_inputs=batch, **OPTIONS)
    folder = job.write(tmp_path / "files")
    path = folder / "device1.py"
    text = re.sub(r"( +def forward\(self.*\n)", r"\1        __import__('time').sleep(0.05)\n", path.read_text())
    path.write_text(text)
    with penstock.load(folder, model, trust=True) as slow:
        for _ in range(2):
            slow.step(batch)
        found = slow.stragglers()
    assert [(row.device, row.stream) for row in found][:1] == [(1, "compute")], found
    assert found[0].ratio > 2 and found[0].held_up > 0.3 and str(found[0]).startswith("cpu1 took ")
