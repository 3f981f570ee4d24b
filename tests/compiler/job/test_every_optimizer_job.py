"""Every optimizer of torch.optim through whole jobs: eager PyTorch, bit for bit, wherever its states lie."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import PassError, PlanError
from penstock.ir import ops
from penstock.ir.program import Program, work_of
from penstock.runtime.measure.temporaries import step_bytes
from penstock.runtime.optimizer.spec import OptimizerSpec
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.compiler.job.every_optimizer_job import (
    STRATEGIES,
    Case,
    Trained,
    assert_is_itself,
    assert_same,
    train_eagerly,
    train_job,
)
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER
from penstock.tests.runtime.ssd.on_disk import directories
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

MUON = partial(torch.optim.Muon, lr=0.02, weight_decay=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, foreach=True)
MUON_AND_ADAMW = Case(ADAMW, {("*.mlp.*.weight", "*.attn.*.weight"): MUON})
CASES = {
    **{name: Case(optimizer) for name, optimizer in EVERY_OPTIMIZER.items()},
    "Muon and AdamW": MUON_AND_ADAMW,
    "Muon, SGD and NAdam": Case(
        partial(torch.optim.NAdam, lr=1e-2), {("*.mlp.*.weight",): MUON, ("*wpe*",): partial(torch.optim.SGD, lr=0.1)}
    ),
}


@pytest.mark.slow
def test_muon_for_matrices_and_adamw_for_the_rest(tmp_path: Path) -> None:
    assert_is_itself(MUON_AND_ADAMW, "ssd", directories(tmp_path)[0], steps=3)


@pytest.mark.slow
def test_on_two_devices_with_the_hidden_matrices(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    case = Case(ADAMW, {tuple(penstock.hidden_matrices(model)): MUON})
    want = train_eagerly(model, batch, case, steps=3)
    assert_same(train_job(model, batch, case, 3, "device", tmp_path, num_devices=2), want)


@pytest.mark.slow
@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_is_itself_wherever_its_states_lie(name: str, where: str, tmp_path: Path) -> None:
    assert_is_itself(CASES[name], where, directories(tmp_path)[0])


@pytest.mark.slow
@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("name", ["Muon and AdamW", "Adafactor-loop", "ASGD-loop", "Rprop-loop"])
def test_clipped_by_the_norm_of_all_groups(name: str, where: str, tmp_path: Path) -> None:
    """The factor is in fp64 here and in fp32 in torch: a few bits, which Newton-Schulz in bf16 makes larger."""
    model, batch = zoo_case("gpt2")
    want = train_eagerly(model, batch, CASES[name], 3, max_norm=0.1)
    found = train_job(model, batch, CASES[name], 3, where, directories(tmp_path)[0], max_norm=0.1)
    assert_same(found, want, rel=1e-3 if "Muon" in name else 1e-5)


@pytest.mark.slow
def test_whole_parameters_are_not_cut_in_pieces() -> None:
    model, batch = zoo_case("gpt2")
    with pytest.raises(PassError, match=r"Muon looks at whole parameters.*torch\.optim\.AdamW"):
        penstock.compile(
            model, penstock.Hardware.cpu(num_devices=2), example_inputs=batch, optimizer=MUON_AND_ADAMW.optimizer,
            param_groups=MUON_AND_ADAMW.param_groups, strategy="zero3-offload", micro_batches=4,
        )  # fmt: skip


@pytest.mark.slow
def test_shards_of_groups_with_elementwise_optimizers() -> None:
    """Gradients of two lanes are added up in another order than those of one batch: a few bits of fp32."""
    model, batch = zoo_case("mlp")
    adagrad = partial(torch.optim.Adagrad, lr=0.05, foreach=True)
    case = Case(partial(torch.optim.SGD, lr=0.05, foreach=True), {("*.weight",): adagrad})
    want = train_eagerly(model, batch, case, steps=3)
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=2), example_inputs=batch, optimizer=case.optimizer,
        param_groups=case.param_groups, strategy="zero3-offload", micro_batches=2,
    )  # fmt: skip
    with job:
        losses = [float(job.step(batch)) for _ in range(3)]
        interface = job.folder.interface
        assert interface.shards == 2
        for spec in interface.stages.values():
            weights = [p for p in spec.params if p.name.endswith(".weight")]
            assert interface.state_bytes(spec) == sum(4 * p.numel for p in weights)
            pieces = [[p for p in spec.pieces(2, index) if p.name.endswith(".weight")] for index in range(2)]
            each = [sum(4 * p.numel for p in own) for own in pieces]
            assert interface.state_bytes(spec.shard(2)) == max(each) and sum(each) == interface.state_bytes(spec)
        assert_same(Trained(losses, job.state_dict()), want, rel=1e-5)


@pytest.mark.slow
def test_states_of_a_model_in_bf16(tmp_path: Path) -> None:
    """In fp32 precision a model keeps its own types, and the optimizer steps these: AdamW then has bf16 states."""
    model, batch = zoo_case("gpt2")
    model, case = model.to(torch.bfloat16), Case(ADAMW)
    want = train_eagerly(model, batch, case, steps=3)
    assert_same(train_job(model, batch, case, 3, "ssd", directories(tmp_path)[0], resume_at=2), want)
    job = penstock.compile(
        model, penstock.Hardware.cpu(), example_inputs=batch, optimizer=ADAMW, strategy="mobius", micro_batches=1
    )
    stages = job.folder.interface.stages.values()
    assert sum(map(job.folder.interface.state_bytes, stages)) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("where", slow_but(["dram"], ["device", "dram"]))
@pytest.mark.parametrize(
    "name",
    slow_but(("AdamW-fused",), ["AdamW-foreach", "NAdam-loop", "AdamW-fused", "Muon and AdamW"]),
)
def test_what_a_step_takes_is_in_the_account(name: str, where: str) -> None:
    model, batch = zoo()["gpt2"](num_layers=1)
    case = CASES[name]
    job = penstock.compile(
        model, penstock.Hardware.cpu(), example_inputs=batch, optimizer=case.optimizer, micro_batches=1,
        param_groups=case.param_groups, strategy=STRATEGIES[where],
    )  # fmt: skip
    interface, spec = job.folder.interface, OptimizerSpec.from_json(job.folder.settings.optimizer)
    for stage in interface.stages.values():
        params = [(p.name, p.shape, torch.float32) for p in stage.params if p.requires_grad]
        counted = interface.temporary_bytes(stage, where)
        assert counted == step_bytes(spec, params, "cpu")
        assert (counted == 0) == (name == "AdamW-fused")
    found = {work.workspace_bytes for program in job.programs for work in steps_of(program)}
    assert found == {interface.temporary_bytes(stage, where) for stage in interface.stages.values()}


def steps_of(program: Program) -> list[ops.Work]:
    return [work_of(program, node) for node in program.ops() if node.target is ops.step]


def test_refusals_say_what_would_work() -> None:
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu()
    with pytest.raises(PlanError, match=r"LBFGS.*evaluates the model several times a step.*torch\.optim\.AdamW"):
        penstock.compile(model, hardware, example_inputs=batch, optimizer=torch.optim.LBFGS)
    with pytest.raises(PlanError, match=r"SparseAdam.*dense gradients.*torch\.optim\.Adagrad"):
        penstock.compile(model, hardware, example_inputs=batch, optimizer=torch.optim.SparseAdam)
    with pytest.raises(PlanError, match=r"Muon does not work for transformer.*penstock\.hidden_matrices\(model\)"):
        penstock.compile(model, hardware, example_inputs=batch, optimizer=torch.optim.Muon)
    groups = [{"params": penstock.hidden_matrices(model), "optimizer": torch.optim.LBFGS}]
    with pytest.raises(PlanError, match=r"optimizer of a group: torch\.optim:LBFGS.*closure"):
        penstock.compile(model, hardware, example_inputs=batch, param_groups=groups)
    groups = [{"params": penstock.hidden_matrices(model), "optimizer": torch.optim.Muon, "betas": (0.9, 0.9)}]
    with pytest.raises(PlanError, match="no option 'betas'; it has "):
        penstock.compile(model, hardware, example_inputs=batch, param_groups=groups)
