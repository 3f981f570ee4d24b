"""A rematerialisation leaves out the reference's forward, of which backward needs nothing: counted, and equal to eager
PyTorch; and the reference's hidden values are free once their last reader ran."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import penstock
from penstock.compiler.job.job import Job
from penstock.errors import VerifyError
from penstock.graph.costs.stage_time import stage_seconds
from penstock.ir import ops
from penstock.ir.program import StageSpec, profile_memory
from penstock.runtime.device.file import DeviceFile, open_directory
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states
from penstock.tests.preference_case import adapt, pairs

BEFORE = "drop-masks, chunk-loss, interleave-forwards"
CUT = f"{BEFORE}, coarsen, partition-balanced{{stages=3}}, map-round-robin"
AGAIN = f"{CUT}, schedule-pipeline, insert-remat{{always=true}}, insert-fetch, insert-optimizer"
LOSS = 2e-7  # means over micro-batches, of two fp32 numbers; gradients and weights are the same bits


class ReferenceFirst(nn.Module):
    """A module of one's own that runs the frozen forward first, so that its draws come first at each place."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            base = self.model(input_ids=input_ids).logits
        return (self.model(input_ids=input_ids).logits - base).square().mean()


def job_of(model: nn.Module, strategy: str = AGAIN, batch: Any = None, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory=options.pop("memory", "64MB"), dram="1GB")
    batch = pairs() if batch is None else batch
    fixed = {"optimizer": SGD, "micro_batches": 2, "strategy": strategy}
    return penstock.compile(model, hardware, example_inputs=batch, **{**fixed, **options})


def assert_like_eager(job: Job, model: nn.Module, batch: Any = None) -> None:
    eager, batch = Eager(model, micro_batches=2), pairs() if batch is None else batch
    with job:
        for _ in range(2):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, LOSS)
        assert_same_states(job, eager, 0.0)
        assert_close(job.state_dict(), eager.model.state_dict(), 0.0)


def open_page(job: Job, folder: Path) -> DeviceFile:
    job.folder.write(folder)
    return open_directory(folder)[0]


def flops_of(run: Any, *args: Any, **kwargs: Any) -> int:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch's counter leaves out
    rules = {
        attention: lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda dout, q, k, v, *args, **kwargs: sdpa_backward_flop_count(dout, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=rules) as counter:
        run(*args, **kwargs)
    return counter.get_total_flops()


def runner_of(file: DeviceFile, spec: StageSpec, compiler: str | None = None) -> StageRunner:
    device, draw = torch.device("cpu"), torch.Generator().manual_seed(0)
    runner = StageRunner(spec, file.build(spec.name), device, "fp32", compiler=compiler)
    runner.load_buffers({b.name: torch.ones(b.shape, dtype=getattr(torch, b.dtype)) for b in spec.buffers})
    runner.bind({p.name: torch.randn(p.shape, generator=draw) * 0.1 for p in spec.params})
    return runner


def inputs_of(spec: StageSpec) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(i.shape, generator=draw)
        if i.dtype.startswith("float")
        else torch.ones(i.shape, dtype=getattr(torch, i.dtype))
        for i in spec.inputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_reference_is_not_run_again(kind: str, tmp_path: Path) -> None:
    """FLOPs of each stage's backward, counted as it runs with and without rematerialisation, are those of the plan."""
    job = job_of(penstock.DPO(adapt(kind)))
    file = open_page(job, tmp_path)
    stages = job.folder.interface.stages
    assert [spec.again is not None for spec in stages.values()] == [True, True, False]  # its logits go into the loss
    for spec in stages.values():
        runner, inputs = runner_of(file, spec), inputs_of(spec)
        douts = [torch.ones(o.shape) if o.requires_grad and o.name != spec.loss else None for o in spec.outputs]
        given = [1.0 if o.name == spec.loss else dout for o, dout in zip(spec.outputs, douts)]
        needed = [None if want is None else x for want, x in zip(spec.backward_inputs, inputs)]
        forward_flops = flops_of(runner.forward, inputs, 0, keep=False)
        _, kept = runner.forward(inputs, 0)
        short_flops = flops_of(runner.backward, kept, needed, given, None, 0)
        long_flops = flops_of(runner.backward, None, needed, given, None, 0)
        assert forward_flops == spec.forward_flops
        assert long_flops - short_flops == spec.whole_again.flops
        if spec.again is not None:
            assert spec.again.flops < 0.6 * spec.forward_flops  # adapters are small beside the base


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_forward(tmp_path: Path) -> None:
    job = job_of(penstock.DPO(adapt()))
    spec = job.folder.interface.stages["stage1"]
    runner, inputs = runner_of(open_page(job, tmp_path), spec), inputs_of(spec)
    douts = [torch.randn(o.shape) if o.requires_grad else None for o in spec.outputs]
    assert douts.count(None) == 1
    needed = [None if want is None else x for want, x in zip(spec.backward_inputs, inputs)]
    assert needed.count(None) == 1
    want_inputs, want = runner.backward(runner.forward(inputs, 0)[1], inputs, douts, None, 0)
    found_inputs, found = runner.backward(None, needed, douts, None, 0)
    assert_close(found, want, 0.0)
    assert all(map(torch.equal, found_inputs, want_inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_is_that_of_eager(kind: str) -> None:
    model = penstock.DPO(adapt(kind))
    job = job_of(model)
    assert job.plan.decisions.rematerialise == ["stage0", "stage1", "stage2"]
    assert_like_eager(job, model)


@pytest.mark.slow
def test_draws_keep_their_numbers() -> None:
    """The reference's draws come first at each place, and the policy's are the second ones without them, too."""
    model = ReferenceFirst(adapt("gpt2", dropout=0.2))
    batch = {"input_ids": pairs()["chosen_input_ids"]}
    job = job_of(model, batch=batch)
    assert re.search(r"else:\n +draw_at\(", job.code(0))
    assert_like_eager(job, model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "after",
    [
        "schedule-zero-bubble, insert-remat{always=true}, insert-fetch, insert-optimizer",
        "schedule-pipeline, choose-activations{swap=true, to=dram}, insert-fetch{swap=true}, insert-optimizer",
    ],
)
def test_halves_and_classes(after: str) -> None:
    """A backward in two halves, and one that takes classes of saved tensors, of which the reference has none."""
    model = penstock.DPO(adapt())
    job = job_of(model, f"{CUT}, {after}")
    spec = job.folder.interface.stages["stage1"]
    assert spec.again is not None and spec.again.calls
    assert not set(spec.again.calls) & {call for saved in spec.saved for call in saved.calls}
    assert_like_eager(job, model)


@pytest.mark.slow
def test_the_references_values_are_free_once_they_were_read(tmp_path: Path) -> None:
    """Without rematerialisation, too, nothing waits for a backward but the policy's values; what the plan counts is
    what the run counts."""
    model = penstock.DPO(adapt())
    for strategy in (AGAIN, AGAIN.replace("{always=true}", "")):
        job = job_of(model, strategy)
        step = job.code(0).split("def step(")[1].split("def evaluate(")[0]
        spec = job.folder.interface.stages["stage1"]
        (name,) = (i.name for i, want in zip(spec.inputs, spec.backward_inputs) if want is None)
        forward = next(i for i, line in enumerate(step.splitlines()) if 'rt.forward("stage1"' in line)
        assert f"{name}_m0" in step.splitlines()[forward]
        assert re.search(rf"rt\.free\(.*\b{name}_m0\b", step.splitlines()[forward + 1])
        for call in re.findall(r'rt\.backward\("stage1".*', step):
            assert name not in call and " None, " in call
        with job:
            job.step(pairs())
            counted = job.last.peak_bytes["cpu0"]
        assert counted == profile_memory(open_page(job, tmp_path).step).peak_bytes[ops.DEVICE]


def test_what_a_later_node_needs_is_run_again() -> None:
    """A frozen forward whose values the trained layers read is no reference."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                with torch.no_grad():
                    gate = layer(x)
                x = layer(x).tanh() * gate
            return self.head(x).square().mean()

    job = job_of(Teacher(), AGAIN.replace("stages=3", "stages=2"), {"x": torch.randn(4, 8)})
    assert all(spec.again is None for spec in job.folder.interface.stages.values())
    assert "recomputing" not in job.code(0)


@pytest.mark.slow
def test_a_file_with_another_condition_is_refused(tmp_path: Path) -> None:
    """What stands below `if` in a printed forward runs unless backward needs nothing of it; nothing else may."""
    job = job_of(penstock.DPO(adapt()))
    job.folder.write(tmp_path)
    path = tmp_path / "device0.py"
    text = path.read_text("utf-8")
    assert "if not self.recomputing:" in text
    path.write_text(text.replace("if not self.recomputing:", "if self.recomputing:"), "utf-8")
    with pytest.raises(VerifyError, match="only what backward needs nothing of"):
        open_directory(tmp_path)


@pytest.mark.slow
def test_simulated_time_is_that_of_what_runs() -> None:
    """The same plan with the reference in its rematerialisations, as specs without `again` have it, takes longer."""
    job = job_of(penstock.DPO(adapt()))
    folder = job.folder
    whole = {name: replace(spec, again=None) for name, spec in folder.interface.stages.items()}
    device = folder.hardware.devices[0]
    for name, spec in folder.interface.stages.items():
        found, before = (stage_seconds(each, device, "fp32").rematerialise_s for each in (spec, whole[name]))
        assert (found < before) == (spec.again is not None)
        assert spec.whole_again.workspace_bytes <= whole[name].whole_again.workspace_bytes


@pytest.mark.slow
def test_blocks_run_compiled_with_and_without_the_reference(tmp_path: Path) -> None:
    """Both kinds of calls are compiled before the first step: a rematerialisation hands its blocks None."""
    job = job_of(penstock.DPO(adapt()))
    spec, file = job.folder.interface.stages["stage1"], open_page(job, tmp_path)
    inputs = inputs_of(spec)
    needed = [None if want is None else x for want, x in zip(spec.backward_inputs, inputs)]
    douts = [torch.ones(o.shape) if o.requires_grad else None for o in spec.outputs]
    found = []
    for compiler in (None, "aot_eager"):
        runner = runner_of(file, spec, compiler)
        runner.try_kernels([False])
        runner.forward(inputs, 0, keep=False)
        found.append(runner.backward(None, needed, douts, None, 0)[1])
        assert runner.compiled is None or (runner.compiled.blocks and not runner.compiled.reasons)
    assert_close(found[1], found[0], 1e-5)
