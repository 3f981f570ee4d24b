"""Programs on the reference runtime against eager PyTorch: bitwise where the order of additions is the same."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from penstock.ir import ops
from penstock.ir.errors import BatchError, BudgetExceeded, PlanError, VerifyError, WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, parse_program, place_frees, print_program, profile_memory
from penstock.ir.verify import verify
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.reference.ops import ReferenceRuntime, StageGrads, Waiting
from penstock.runtime.reference.run import Reference
from penstock.tests.ir.program.two_stages import (
    Eager,
    First,
    Second,
    batch_of,
    buffers_of,
    evaluation,
    interface_of,
    models,
    training,
    weights_of,
)

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
STAGES: dict[str, Any] = {"stage0": First, "stage1": Second}


def reference(programs: list[Program], optimizer: Any = ADAMW, scheduler: Any = None, **fields: Any) -> Reference:
    tied, dtype = fields.pop("tied", False), fields.pop("dtype", torch.float32)
    parts = models(tied, dtype)
    weights = weights_of(*parts)
    if tied:
        weights["head.weight"] = weights["embed.weight"]
    spec = OptimizerSpec.from_callable(optimizer, scheduler) if optimizer else None
    return Reference(programs, STAGES, weights, spec, buffers_of(*parts), **fields)


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == want.keys()
    for name in want:
        if tolerance:
            torch.testing.assert_close(found[name], want[name], **tolerance)
        else:
            assert torch.equal(found[name], want[name]), name


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_three_steps_are_bitwise_those_of_eager(swap: bool, remat: bool) -> None:
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    run = reference(training(interface_of(*models()), swap=swap, remat=remat), scheduler=schedule)
    eager = Eager(*models(), ADAMW, schedule)
    for step in range(3):
        assert torch.equal(run.step(batch_of(step))["loss"], eager.step(batch_of(step)))
        assert_equal(run.grads, eager.grads)
        assert "frozen.weight" not in run.grads
        assert_equal(run.weights(), {name: p.detach() for name, p in eager.params.items()})
    assert_equal(run.buffers(), buffers_of(*eager.parts))


def test_the_seed_decides_on_dropout() -> None:
    programs = training(interface_of(*models()))
    one, two, three = (reference(programs, seed=s).step(batch_of(0))["loss"] for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, three)
    assert torch.equal(one, Eager(*models(), ADAMW).step(batch_of(0), seed=1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_a_parameter_in_two_stages_stays_tied(dtype: torch.dtype, tolerance: float) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    parts = models(tied=True, dtype=dtype)
    run = reference(training(interface_of(*parts, dtype=dtype, tied=True)), sgd, tied=True, dtype=dtype)
    eager = Eager(*parts, sgd)
    for step in range(3):
        got, want = run.step(batch_of(step))["loss"], eager.step(batch_of(step))
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        summed = [run.stage_grads[s][n] for s, n in (("stage0", "embed.weight"), ("stage1", "head.weight"))]
        assert torch.equal(*summed)
        torch.testing.assert_close(summed[0], eager.grads["embed.weight"], atol=tolerance, rtol=tolerance)
        assert "head.weight" not in run.grads and "embed.weight" in run.grads
    masters = {name: state.masters for name, state in run.world.stages.items()}
    assert torch.equal(masters["stage0"]["embed.weight"], masters["stage1"]["head.weight"])
    want = {n: p.detach() for n, p in eager.params.items() if n != "head.weight"}
    assert_equal(run.weights(), want, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_by_the_norm_over_all_devices(max_norm: float, tied: bool) -> None:
    """In float64: two stages add up a tied gradient in another order than one device does."""
    sgd, parts = partial(torch.optim.SGD, lr=0.5), models(tied, dtype=torch.float64)
    programs = training(interface_of(*parts, tied=tied, dtype=torch.float64), max_norm=max_norm, swap=tied)
    run, eager = reference(programs, sgd, tied=tied, dtype=torch.float64), Eager(*parts, sgd)
    for step in range(2):
        run.step(batch_of(step))
        eager.step(batch_of(step), max_norm=max_norm)
        assert_equal(run.grads, {n: g for n, g in eager.grads.items() if n in run.grads}, rtol=1e-12, atol=1e-14)
        total = torch.stack([g.norm() for g in run.grads.values()]).norm()
        assert (total <= max_norm * 1.001) and (max_norm > 1 or total > 0.99 * max_norm)


def test_evaluation_gives_loss_and_logits_and_changes_nothing() -> None:
    interface = interface_of(*models())
    run, eager = reference([*training(interface), *evaluation(interface)]), Eager(*models(), ADAMW)
    run.step(batch_of(0))
    eager.step(batch_of(0))
    before = run.buffers()
    found = run.evaluate(batch_of(1))
    for part in eager.parts:
        part.eval()
    loss, logits = eager.parts[1](*eager.parts[0](batch_of(1)["ids"]), batch_of(1)["labels"])
    torch.testing.assert_close(found["loss"], loss)
    torch.testing.assert_close(torch.cat(found["results"]["logits"]), logits)
    assert_equal(run.buffers(), before)
    assert torch.equal(run.step(batch_of(2))["loss"], reference_after(interface))


def reference_after(interface: Any) -> Tensor:
    run = reference(training(interface))
    run.step(batch_of(0))
    return run.step(batch_of(2))["loss"]


def test_fp16_scales_the_loss_skips_overflows_and_clips_unscaled_gradients() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    interface = interface_of(*models(), dtype=torch.float16, master=True)
    programs = training(interface, max_norm=float("inf"), scaled=True, swap=True)
    run = reference(programs, sgd, precision="fp16")
    before = {name: w.clone() for name, w in run.weights().items()}
    assert run.world.loss_scale is not None
    run.world.loss_scale.scale = 2.0**30
    run.step(batch_of(0))
    assert_equal(run.weights(), before)
    assert run.world.loss_scale.scale == 2.0**29
    run.world.loss_scale.scale = 1024.0
    run.world.step = 0
    loss = run.step(batch_of(0))["loss"]
    eager = Eager(*models(), sgd)
    torch.testing.assert_close(loss, eager.step(batch_of(0)), rtol=5e-3, atol=5e-3)
    assert all(g.dtype == torch.float32 for g in run.grads.values())
    assert_equal(run.grads, eager.grads, rtol=0.05, atol=2e-3)
    with pytest.raises(VerifyError, match="without their norm"):
        reference(training(interface), sgd, precision="fp16").step(batch_of(0))


@pytest.mark.parametrize("swap", [False, True])
def test_the_programs_of_these_tests_pass_the_verifier(swap: bool) -> None:
    interface = interface_of(*models(tied=True), tied=True)
    verify(training(interface, swap=swap, remat=swap, max_norm=1.0), Hardware.cpu(num_devices=2))
    verify(evaluation(interface), Hardware.cpu(num_devices=2))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_measured_peaks_are_those_of_the_profile(swap: bool, remat: bool) -> None:
    programs = training(interface_of(*models()), swap=swap, remat=remat, max_norm=1.0)
    profiles = [profile_memory(p) for p in programs]
    run = reference(programs)
    run.step(batch_of(0))
    for i, profile in enumerate(profiles):
        assert run.accounts[f"device{i}"].peak_bytes == profile.peak_bytes[ops.DEVICE]
    assert run.accounts["dram"].peak_bytes == sum(p.peak_bytes[ops.DRAM] for p in profiles)
    tight = {"device1": profiles[1].peak_bytes[ops.DEVICE]}
    reference(programs, budgets=tight).step(batch_of(0))
    with pytest.raises(BudgetExceeded, match="device1"):
        reference(programs, budgets={"device1": tight["device1"] - 1}).step(batch_of(0))


def test_freed_values_are_gone_from_memory() -> None:
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Watching(ReferenceRuntime):
        def recv(self, like: str, *, src: int, tag: str) -> Tensor:
            value = super().recv(like, src=src, tag=tag)
            alive.append(weakref.ref(value))
            return value

        def step(self, *args: Any, **kwargs: Any) -> None:
            counts.append(sum(ref() is not None for ref in alive))
            super().step(*args, **kwargs)

    run = reference(training(interface_of(*models()), remat=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.runtime.reference.run.ReferenceRuntime", Watching)
        run.step(batch_of(0))
    assert len(alive) == 6 and counts == [0, 0]


def edit(programs: list[Program], device: int, old: str, new: str) -> list[Program]:
    text = print_program(programs[device])
    assert old in text
    changed = parse_program(text.replace(old, new), programs[device].interface, device)
    return [changed if i == device else p for i, p in enumerate(programs)]


def test_use_behind_a_free_is_refused() -> None:
    send = "    rt.send(h_m1, dst=1"
    programs = edit(training(interface_of(*models())), 0, send, f"    rt.free(h_m1)\n{send}")
    with pytest.raises(VerifyError, match=r"`h_m1` is used, but line \d+ \(`rt.free\(h_m1\)`\) ended it"):
        reference(programs).step(batch_of(0))
    programs = edit(training(interface_of(*models())), 1, 'rt.step("stage1", g1_m2', 'rt.step("stage1", g1_m1')
    with pytest.raises(VerifyError, match=r"`g1_m1` is used, but line \d+ \(`.*rt.backward"):
        reference(programs).step(batch_of(0))


def test_a_deadlock_says_who_waits_for_what() -> None:
    programs = edit(training(interface_of(*models())), 0, 'tag="f.m1"', 'tag="f.m7"')
    with pytest.raises(VerifyError, match=r"(?s)deadlock.*device 0, line \d+.*'b.m0'.*device 1, line \d+.*'f.m1'"):
        reference(programs).step(batch_of(0))
    programs = training(interface_of(*models(tied=True), tied=True))
    lines = print_program(programs[1]).splitlines(keepends=True)
    lone = "".join(line for line in lines if "all_reduce" not in line).replace("g_tied", "g1_m2")
    with pytest.raises(VerifyError, match=r"device 0, line \d+.*waits for device 1 to meet in 'tie.embed.weight'"):
        reference([programs[0], parse_program(lone, programs[1].interface, 1)], tied=True).step(batch_of(0))


def test_a_message_that_nobody_receives_is_refused() -> None:
    programs = training(interface_of(*models()))
    old = "    rt.send(h_m1, dst=1"
    programs = edit(programs, 0, old, f'    rt.send(h_m1, dst=1, tag="more")\n{old}')
    with pytest.raises(VerifyError, match="never received: 'more' from device 0 to 1"):
        reference(programs).step(batch_of(0))


def test_members_on_one_device_are_summed_first() -> None:
    """Two members of a group on device 0 and one on device 1: all three hold the total."""
    interface = interface_of(*models())
    names = ("inner.weight", "inner.weight", "inner.weight")
    groups = {"g": ((0, "stage1", names[0]), (1, "stage1", names[1]), (0, "stage1", names[2]))}
    run = reference(training(interface))
    run.world.interface = replace(interface, groups=groups)
    values = [StageGrads({"inner.weight": torch.tensor([float(v)])}, stage="stage1") for v in (1, 2, 4)]
    empty = StageGrads({}, stage="stage1")
    left, right = ReferenceRuntime(0, run.world), ReferenceRuntime(1, run.world)
    with pytest.raises(Waiting):
        left.all_reduce(values[0], values[2], group="g")
    (b,) = right.all_reduce(empty, group="g")
    a, c = left.all_reduce(values[0], values[2], group="g")
    assert [v.tensors["inner.weight"].item() for v in (a, b, c)] == [5, 5, 5]
    assert len({v.tensors["inner.weight"].data_ptr() for v in (a, b, c)}) == 3


def test_bad_batches_and_missing_parts() -> None:
    interface = interface_of(*models())
    run = reference(training(interface))
    with pytest.raises(BatchError, match="lacks 'labels'"):
        run.step({"ids": batch_of(0)["ids"]})
    with pytest.raises(BatchError, match=r"'ids' is torch.int64\[11\], compiled for int64\[12\]"):
        run.step({name: t[:11] for name, t in batch_of(0).items()})
    with pytest.raises(WorkerError, match=r"(?s)device 0: IndexError.*--> .*rt.forward\(.stage0."):
        run.step({name: t + 1000 for name, t in batch_of(0).items()})
    with pytest.raises(PlanError, match="no 'evaluate' programs"):
        run.evaluate(batch_of(0))
    with pytest.raises(PlanError, match=r"stage1 needs a weight 'inner.weight'"):
        Reference(training(interface), STAGES, weights_of(models()[0]), None, buffers_of(*models()))


def test_without_an_optimizer_gradients_come_and_weights_stay() -> None:
    run = reference(training(interface_of(*models())), optimizer=None)
    before = {name: w.clone() for name, w in run.weights().items()}
    run.step(batch_of(0))
    assert_equal(run.weights(), before)
    eager = Eager(*models(), ADAMW)
    eager.step(batch_of(0))
    assert_equal(run.grads, eager.grads)


def test_a_parsed_program_runs_as_the_one_it_was_printed_from() -> None:
    """Text in, text out, same result: what is printed is what runs."""
    interface = interface_of(*models())
    programs = training(interface, swap=True)
    again = [parse_program(print_program(p, comments=True), interface, p.device) for p in programs]
    for program in again:
        place_frees(program)
    left, right = reference(programs), reference(again)
    assert torch.equal(left.step(batch_of(0))["loss"], right.step(batch_of(0))["loss"])
    assert_equal(left.weights(), right.weights())
