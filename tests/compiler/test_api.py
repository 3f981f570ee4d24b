"""`compile`: what it takes, that it is pure, and that it decides the same each time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.ir.errors import PlanError
from penstock.passes.draft import Draft
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.shown_elsewhere import slow_but


def machine(**figures: Any) -> penstock.Hardware:
    return penstock.Hardware.cpu(**{"num_devices": 2, "memory": "64MB", **figures})


@pytest.mark.slow
def test_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    state, draws = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    for name in ("one", "two"):
        hardware = machine(memory="250kB")
        job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD)
        job.write(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    programs = [f"device{role}.py" for role in range(len(job.programs))]  # one for all devices of a role
    assert files == ["counts.py", *programs, "hardware.yaml", "interface.json", "plan.json", "settings.json"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), draws) and model.training


def test_hardware_by_preset_path_and_default(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    machine().save(tmp_path / "machine.yaml")
    options: dict[str, Any] = {"example_inputs": batch, "strategy": "balanced", "micro_batches": MICRO_BATCHES}
    for given, devices in (("mobius-topo2+2", 4), (tmp_path / "machine.yaml", 2), (str(tmp_path / "machine.yaml"), 2)):
        assert penstock.compile(model, given, **options).hardware.num_devices == devices
    assert penstock.compile(model, **options).hardware.num_devices >= 1


def test_a_model_on_meta_and_shapes_instead_of_tensors() -> None:
    """Planning needs neither weights nor data: a model far too big for this machine."""
    import transformers

    config = transformers.GPT2Config(n_layer=3, n_embd=8192, n_head=64, vocab_size=1000)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    tokens = {"shape": [4, 512], "dtype": "int64"}
    inputs = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    job = penstock.compile(
        model, "mobius-topo4", example_inputs=inputs, precision="fp16", strategy="mobius", micro_batches=4
    )
    assert job.plan.precision == "fp16-mixed" and job.plan.predicted is not None
    assert job.plan.predicted.moved_bytes
    assert any("GPT2Block" in job.code(device) for device in range(4))


@pytest.mark.parametrize("form", slow_but(["tuple", "tensor"], ["dict", "tuple", "tensor"]))
def test_forms_of_a_batch(form: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(8, 4)
    batch = {"dict": {"input": x}, "tuple": (x,), "tensor": x}[form]
    losses = []
    options: dict[str, Any] = {"strategy": "balanced", "loss_fn": lambda output, batch: output.square().mean()}
    with penstock.compile(model, machine(num_devices=1), example_inputs=batch, **options) as job:
        losses = [float(job.step(batch)) for _ in range(2)]
    assert losses[1] < losses[0]


def test_flags_are_part_of_the_programs() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, scale: float = 1.0, square: bool = False) -> torch.Tensor:
            h = self.layer(x) * scale
            return (h * h if square else h).mean()

    batch = {"x": torch.randn(8, 4), "scale": 2.0, "square": True}
    model = Scaled()
    options: dict[str, Any] = {"strategy": "balanced", "micro_batches": 1}
    with penstock.compile(model, machine(num_devices=1), example_inputs=batch, **options) as job:
        assert float(job.step(batch)) == pytest.approx(float(model(**batch)))
        with pytest.raises(penstock.errors.BatchError, match=r"'scale'\] is 3\.0, compiled as 2\.0"):
            job.step({**batch, "scale": 3.0})


@pytest.mark.slow
def test_dump_sees_every_pass_of_every_candidate() -> None:
    model, batch = zoo_case("mlp")
    seen: list[str] = []

    def dump(name: str, draft: Draft) -> None:
        seen.append(name)
        assert bool(draft.programs) == name.startswith(("schedule-", "insert-"))

    job = penstock.compile(model, machine(), example_inputs=batch, micro_batches=MICRO_BATCHES, dump=dump)
    names = [part.split("{")[0] for part in job.plan.passes.split(", ")]
    assert set(names[1:]) <= set(seen)
    timed = [r for r in job.plan.rivals if r.step_s is not None and not r.reason.startswith("the same plan")]
    assert seen.count("insert-optimizer") >= len(timed) + 1
    assert "step " in reasons_of(job).partition("passes")[2]  # then each pass's simulated step is recorded, too


def test_an_optimizer_of_every_kind_is_planned_with_its_states() -> None:
    model, batch = zoo_case("mlp")
    peaks = {}
    for optimizer in (torch.optim.SGD, SGD, torch.optim.AdamW):
        job = penstock.compile(
            model,
            machine(num_devices=1),
            example_inputs=batch,
            optimizer=partial(optimizer, lr=0.1),
            micro_batches=2,
            strategy="balanced",
        )
        assert job.plan.predicted is not None
        peaks[len(peaks)] = job.plan.predicted.peak_bytes["cpu0"]
    assert peaks[0] < peaks[1] < peaks[2]  # no state, one, two for each parameter


@pytest.mark.slow
def test_a_script_on_another_default_device_compiles_alike() -> None:
    model, batch = zoo_case("mlp")
    wanted = penstock.compile(model, machine(), example_inputs=batch).plan
    torch.set_default_device("meta")
    try:
        assert penstock.compile(model, machine(), example_inputs=batch).plan == wanted
    finally:
        torch.set_default_device(None)


def test_errors_can_be_imported_by_name() -> None:
    from penstock.errors import DoesNotFit

    assert DoesNotFit is penstock.errors.DoesNotFit and issubclass(DoesNotFit, penstock.errors.PenstockError)


class Rotation(nn.Module):
    """A complex product, with a complex parameter or with a real one that is read as complex."""

    def __init__(self, complex_parameter: bool):
        super().__init__()
        turn = torch.randn(4, 4, dtype=torch.complex64)
        self.turn = nn.Parameter(turn if complex_parameter else torch.view_as_real(turn))
        self.complex_parameter = complex_parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.turn if self.complex_parameter else torch.view_as_complex(self.turn)
        return (x.to(torch.complex64) @ turn).abs().mean()


def test_a_complex_parameter_is_refused_and_a_real_one_read_as_complex_trains() -> None:
    torch.manual_seed(0)
    x, sgd = torch.randn(2, 4), partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(PlanError, match=r"turn: a complex parameter.*view_as_complex"):
        penstock.compile(Rotation(True), machine(num_devices=1), example_inputs=(x,))
    model = Rotation(False)
    with penstock.compile(model, machine(num_devices=1), example_inputs=(x,), optimizer=sgd, micro_batches=1) as job:
        loss, found = job.step((x,)), job.state_dict()
    expected = model(x)
    expected.backward()
    sgd(model.parameters()).step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found["turn"], model.turn.detach())


def test_sparse_gradients_are_dense_and_that_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    x, sgd = torch.tensor([[1, 2], [2, 3]]), partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"optimizer": sgd, "micro_batches": 1, "loss_fn": lambda out, _: out.square().mean()}
    with pytest.warns(UserWarning, match="sparse=True; its gradients are dense"):
        job = penstock.compile(model, machine(num_devices=1), example_inputs=(x,), **options)
    with job:
        job.step((x,))
        found = job.state_dict()
    model(x).square().mean().backward()
    sgd(model.parameters()).step()
    torch.testing.assert_close(found, dict(model.state_dict()))
