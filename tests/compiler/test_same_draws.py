"""Any plan draws the same random numbers: losses, gradients and weights are those of the user's own module, whose draws
are seeded by their places. Random models under random plans are in `tests/passes/test_random_plans.py`, all layouts of
four devices in `test_fleet_matrix.py`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.check.eager import Eager, module_runner
from penstock.compiler.strategies import PIPELINE
from penstock.ir.documents import Unreadable
from penstock.ir.errors import VerifyError
from penstock.ir.program import Interface
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.tests.compiler.fleet_matrix import SGD, in_process, with_counts
from penstock.tests.shown_elsewhere import slow_but

MICRO_BATCHES, SEED = 4, 3
# Gradients of a shared layer are added up per stage first: other orders of at most 6 terms in fp64.
TOLERANCE = 1e-12
LOSS = 2e-7  # the mean over micro-batches is in fp32


class Noise(torch.autograd.Function):
    """Draws in its own forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(noise := torch.rand_like(x))
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Block(nn.Module):
    """Several kinds of draws, two of them at one place."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.up(x)), 0.25, self.training)
        h = Noise.apply(h) + 0.1 * torch.rand_like(h)
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.2 * self.training)[:, 0]
        return x + self.drop(self.down(h))


class Rounds(nn.Module):
    """Two blocks in two rounds, so that each place draws in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Block(6) for _ in range(2))
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.inlet(x)
        for _ in range(2):
            for layer in self.layers:
                h = layer(h)
        h = self.head(self.lstm(h)[0].mean(1))
        return {"loss": F.cross_entropy(h, target), "noisy": h * torch.rand(())}


class Turn(nn.Module):
    """Its product is turned before it is dropped out, here and by the next layer."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(self.linear(F.dropout(h, 0.5, self.training)).transpose(1, 2), 0.5, self.training)


class Turned(nn.Module):
    """Draws masks for values that are not contiguous. The CPU draws a mask in the order of memory, so that a copy in
    another order gets another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 6)
        self.turns = nn.ModuleList(Turn(width) for width in (6, 5, 6, 5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.inlet(x)
        for turn in self.turns:
            h = turn(h)
        return {"loss": F.cross_entropy(self.head(h).mean(1), target)}


class Images(nn.Module):
    """Computes in the memory format channels_last, from its first layer on or as its weights say."""

    def __init__(self, as_weights: bool = False) -> None:
        super().__init__()
        self.format = torch.contiguous_format if as_weights else torch.channels_last
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = x[:, None, :, :3].transpose(1, 3).contiguous(memory_format=self.format)
        for layer in self.layers:
            h = layer(F.dropout2d(F.dropout(torch.tanh(h), 0.3, self.training), 0.2, self.training))
        return {"loss": F.cross_entropy(self.head(h.mean((2, 3))), target)}


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5, 4, dtype=torch.float64), "target": torch.randint(3, (8,))}
    return Rounds().double(), batch


def job_of(model: nn.Module, batch: Any, devices: int, strategy: str, memory: str = "64MB") -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory=memory, dram="1GB", ssd="1GB")
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy=strategy, seed=SEED
    )


def by_eager(steps: int, model: nn.Module | None = None) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the gradients of the first step and the weights at the end."""
    made, batch = model_and_batch()
    model = made if model is None else copy.deepcopy(model)
    run = module_runner(model, "fp32", SEED)
    eager = Eager(model, run, OptimizerSpec.from_callable(SGD), micro_batches=MICRO_BATCHES)
    losses = [eager.step(batch) for _ in range(steps)]
    return losses, eager.gradients, {name: p.detach() for name, p in eager.masters.items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


CUT = PIPELINE.replace("partition-balanced", "partition-balanced{stages=5}")
PLANS = {
    "one stage": (1, PIPELINE.replace("partition-balanced", "partition-balanced{stages=1}")),
    "from DRAM, rematerialised": (
        2,
        CUT.replace("insert-remat, insert-fetch", "insert-remat{always=true}, insert-fetch{swap=true}"),
    ),
    "inside of blocks": (
        2,
        PIPELINE.replace("coarsen, partition-balanced", "coarsen{level=operator}, partition-mixed"),
    ),
    "activations on SSD": (
        1,
        "coarsen, partition-balanced{stages=3}, map-round-robin, schedule-pipeline, "
        "choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer",
    ),
    "split backwards": (4, "zero-bubble"),
    "replicas": (4, "data-parallel"),
    "shards": (2, "zero3-offload"),
}


MOST_TELLING = ("shards",)


@pytest.mark.parametrize("plan", slow_but(MOST_TELLING, PLANS))
def test_losses_gradients_and_weights_are_those_of_the_module_itself(plan: str) -> None:
    devices, strategy = PLANS[plan]
    model, batch = model_and_batch()
    job = job_of(model, batch, devices, strategy)
    machine, batch = in_process(job, model, seed=SEED), with_counts(job, batch)
    losses, gradients, weights = by_eager(steps=2)
    assert float(machine.step(batch)["loss"]) == pytest.approx(losses[0], rel=LOSS)
    assert_close(machine.grads, gradients)
    assert float(machine.step(batch)["loss"]) == pytest.approx(losses[1], rel=LOSS)
    assert_close(machine.weights(), weights)


OFFLOADED = (
    "coarsen, partition-balanced{stages=3}, map-round-robin, schedule-pipeline, "
    "choose-activations{swap=true, to=dram, share=1}, insert-fetch{swap=true}, overlap-optimizer"
)
LAID_OUT = {name: PLANS[name] for name in ("one stage", "from DRAM, rematerialised")}
LAID_OUT |= {"kept classes in DRAM": (1, OFFLOADED), "sent to devices": (4, CUT.replace("=5", "=4"))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", slow_but(("one stage", "kept classes in DRAM"), LAID_OUT))
@pytest.mark.parametrize("kind", [Turned, pytest.param(Images, marks=pytest.mark.slow)])
def test_masks_do_not_depend_on_where_a_value_that_is_not_contiguous_is_cut(kind: type[nn.Module], layout: str) -> None:
    devices, strategy = LAID_OUT[layout]
    torch.manual_seed(1)
    model, (_, batch) = kind().double(), model_and_batch()
    losses, gradients, weights = by_eager(2, model)
    job = job_of(model, batch, devices, strategy)
    machine, rows = in_process(job, model, seed=SEED), with_counts(job, batch)
    found = [float(machine.step(rows)["loss"])]
    assert_close(machine.grads, gradients)
    found.append(float(machine.step(rows)["loss"]))
    assert found == pytest.approx(losses, rel=LOSS)
    assert_close(machine.weights(), weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but([Images], [Turned, Images]))
def test_a_device_that_moves_activations_draws_the_same_masks_again(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model, (_, batch) = kind().double(), model_and_batch()
    losses, _, weights = by_eager(2, model)
    with job_of(model, batch, 1, OFFLOADED) as job:
        assert [float(job.step(batch)) for _ in losses] == pytest.approx(losses, rel=LOSS)
        assert_close({name: job.state_dict()[name] for name in weights}, weights)


@pytest.mark.slow
def test_an_interface_says_the_layout_and_a_wrong_one_is_refused() -> None:
    torch.manual_seed(1)
    model, (_, batch) = Turned().double(), model_and_batch()
    interface = job_of(model, batch, 4, LAID_OUT["sent to devices"][1]).programs[0].interface
    text = interface.to_json()
    assert Interface.from_json(text) == interface
    orders = [value.order for spec in interface.stages.values() for value in spec.inputs]
    assert (0, 2, 1) in orders and () in orders
    document = json.loads(text)
    for spec in document["stages"].values():
        for value in spec["inputs"]:
            value["order"] = [0, 2, 2] if value["order"] else []
    with pytest.raises(Unreadable, match=r"has the order \[0, 2, 2\]"):
        Interface.from_json(json.dumps(document))


@pytest.mark.slow
def test_the_layout_of_weights_is_the_same_in_all_plans() -> None:
    torch.manual_seed(1)
    model = Images(as_weights=True).double().to(memory_format=torch.channels_last)
    _, batch = model_and_batch()
    gradients = []
    for devices, strategy in LAID_OUT.values():
        job = job_of(model, batch, devices, strategy)
        machine = in_process(job, model, seed=SEED)
        machine.step(with_counts(job, batch))
        gradients.append(machine.grads)
    for found in gradients[1:]:
        assert_close(found, gradients[0])


@pytest.mark.slow
def test_evaluation_draws_the_same_on_any_devices_and_anew_each_time() -> None:
    rows = []
    for devices, strategy in ((1, "balanced"), (2, CUT)):
        model, batch = model_and_batch()
        with job_of(model, batch, devices, strategy) as job:
            rows.append([job.evaluate(batch)["noisy"] for _ in range(2)])
    assert torch.equal(rows[0][0], rows[1][0]) and torch.equal(rows[0][1], rows[1][1])
    assert not torch.equal(rows[0][0], rows[0][1])


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_draws_on_another_number_of_devices(tmp_path: Path) -> None:
    losses, _, weights = by_eager(steps=3)
    model, batch = model_and_batch()
    with job_of(model, batch, 1, "balanced") as job:
        found = [float(job.step(batch))]
        job.save(tmp_path / "checkpoint")
        job.step(batch)  # lost
    with job_of(model, batch, 2, "gpipe") as job:
        job.resume(tmp_path / "checkpoint")
        found += [float(job.step(batch)) for _ in range(2)]
        assert_close({name: job.state_dict()[name] for name in weights}, weights)
    assert found == pytest.approx(losses, rel=LOSS)


@pytest.mark.slow
def test_the_number_of_micro_batches_is_part_of_what_is_drawn() -> None:
    model, batch = model_and_batch()
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB")
    losses = []
    for count in (2, 4):
        job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=count, seed=SEED)
        losses.append(float(in_process(job, model, seed=SEED).step(with_counts(job, batch))["loss"]))
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_written_file_that_does_not_say_where_it_draws_is_refused(tmp_path: Path) -> None:
    model, batch = model_and_batch()
    job_of(model, batch, 1, "balanced").write(tmp_path)
    path = tmp_path / "device0.py"
    lines = [line for line in path.read_text().splitlines() if "draw_at(" not in line]
    path.write_text("\n".join(lines))
    with (
        penstock.load(tmp_path, model, trust=True) as job,
        pytest.raises(VerifyError, match=r"does not say where.*compile.*anew"),
    ):
        job.step(batch)


@pytest.mark.slow
def test_blocks_in_a_loop_say_where_they_draw_once() -> None:
    model, batch = model_and_batch()
    text = job_of(model, batch, 1, PLANS["one stage"][1]).folder.files[0]
    assert text.count('draw_at(self, "drop")') == 1 and "for i in range(" in text and "super().__init__()" in text
    parts = job_of(model, batch, 2, CUT).folder.files
    assert any('super().__init__(draws={"layers.' in part.replace("'", '"') for part in parts.values())


def test_a_copy_of_the_model_is_not_changed_by_its_seeded_run() -> None:
    model, batch = model_and_batch()
    twin, before = copy.deepcopy(model), torch.get_rng_state()
    module_runner(twin, "fp32", SEED)(batch, 0, 1, 0)
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
