"""Trained state can be taken out of a job and put back: sync, state dicts, transformers' files, checkpoints."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.job.state import sync_model
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import CheckpointError, PlanError
from penstock.ir.program import StageSpec
from penstock.runtime.state.checkpoint import open_checkpoint
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, assert_close, zoo_case
from penstock.tests.shown_elsewhere import slow_but

OPTIONS: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=1e-2),
    "lr_scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10),
    "micro_batches": MICRO_BATCHES,
    "strategy": "balanced",
}


def job_of(model: nn.Module, batch: Any, num_devices: int = 1, memory: str = "64MB", **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    return penstock.compile(model, hardware, example_inputs=batch, **{**OPTIONS, **options})


def batches(name: str, count: int) -> list[dict[str, Tensor]]:
    """Different global batches: the rows of one, rotated."""
    _, batch = zoo_case(name)
    return [{key: value.roll(i, 0) for key, value in batch.items()} for i in range(count)]


def test_sync_gives_the_model_what_was_trained(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    parameters = dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    with job_of(model, batch) as job:
        job.step(batch)
        assert_close(model.state_dict(), before, 0.0)  # the user's model is left alone until then
        state = job.state_dict()
        job.sync()
    assert list(state) == list(before)
    assert_close(model.state_dict(), state, 0.0)
    assert dict(model.named_parameters()) == parameters  # the very same objects
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(state["lm_head.weight"], before["lm_head.weight"])


class Adapted(nn.Module):
    """A frozen layer, and a trained one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x)).square().mean()  # type: ignore[no-any-return]


def test_a_frozen_weight_that_no_file_has_is_not_drawn_at_random(tmp_path: Path) -> None:
    weights = Adapted().state_dict()
    save_file({"base.weight_packed": weights.pop("base.weight"), **weights}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Adapted()
    batch, said = {"x": torch.randn(4, 4)}, r"no file has base\.weight \(1 frozen weights\); .* base\.weight_packed"
    job = job_of(model, batch, weights=tmp_path, strategy="balanced")
    with job, pytest.raises(CheckpointError, match=said):
        job.step(batch)


def test_an_expanded_buffer_is_replaced_as_nothing_can_be_copied_into_it() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.ones(1).expand(3))
    sync_model(model, {}, [(StageSpec("stage0", (), (), ()), {}, {"scale": torch.full((3,), 2.0)})], None)
    assert torch.equal(model.scale, torch.full((3,), 2.0))


@pytest.mark.slow
def test_parameters_outside_the_computation_stay_in_the_state_dict() -> None:
    model, batch = zoo_case("bert")
    model.spare = nn.Linear(2, 2)
    with job_of(model, batch) as job:
        job.step(batch)
        assert list(job.state_dict()) == list(model.state_dict())
        model.load_state_dict(job.state_dict())


@pytest.mark.slow
def test_a_model_on_meta_is_trained_from_a_directory_and_made_real(tmp_path: Path) -> None:
    import transformers

    model, batch = zoo_case("gpt2")
    model.save_pretrained(tmp_path / "weights")
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(model.config).train()
    losses = {}
    for name, (job_model, weights) in {"real": (model, None), "meta": (empty, tmp_path / "weights")}.items():
        with job_of(job_model, batch, weights=weights) as job:
            losses[name] = [job.step(batch) for _ in range(2)]
            job.sync()
    assert losses["real"] == losses["meta"]
    assert not any(t.is_meta for t in (*empty.parameters(), *empty.buffers()))
    assert empty.lm_head.weight is empty.transformer.wte.weight
    assert_close(empty.state_dict(), model.state_dict(), 0.0)
    with torch.device("meta"):
        job = job_of(transformers.GPT2LMHeadModel(model.config).train(), batch)  # whatever the default device is
    with pytest.raises(PlanError, match="weights=DIRECTORY"):
        job.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["gpt2"], ["gpt2", "t5", "bert"]))
def test_save_pretrained_is_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    model, batch = zoo_case(name)
    with job_of(model, batch, memory="250kB") as job:
        job.step(batch)
        job.save_pretrained(tmp_path / "out")
        state = job.state_dict()
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_close(again.state_dict(), state, 0.0)


FOUR, TWO = (STRATEGIES["balanced"].replace("balanced", f"balanced{{stages={n}}}") for n in (4, 2))
RESUMED: dict[str, dict[str, Any]] = {
    "the same": {"strategy": FOUR},
    "another partition": {"strategy": TWO},
    "weights in DRAM": {"strategy": FOUR, "memory": "250kB"},
    "two devices": {"strategy": TWO, "num_devices": 2},
}
SELDOM_RESUMED = {how: [pytest.mark.slow] for how in ("the same", "weights in DRAM")}
SELDOM_RESUMED["two devices"] = [pytest.mark.slow, pytest.mark.multi]


@pytest.mark.parametrize(
    "how",
    ["another partition", *(pytest.param(how, marks=marks) for how, marks in SELDOM_RESUMED.items())],
)
def test_resume_goes_on_bit_for_bit(how: str, tmp_path: Path) -> None:
    """Losses, weights, optimizer, schedule, dropout, the script's generators and its place in the data.

    Another partition adds up the parts of the tied table in another order, and nothing else (SGD here: AdamW would
    divide the rounding errors of gradients that are zero by themselves).
    """
    exact = RESUMED[how]["strategy"] == FOUR
    model, _ = zoo_case("gpt2", dropout=0.1 if exact else 0.0)
    options: dict[str, Any] = {"seed": 5} if exact else {"seed": 5, "optimizer": SGD}
    data = batches("gpt2", 5)
    with job_of(copy.deepcopy(model), data[0], strategy=FOUR, **options) as job:
        for batch in data[:2]:
            job.step(batch)
        saved = job.save(tmp_path / "checkpoint", data={"next": 2, "epoch": 1.5})
        drawn = (torch.rand(3), random.random())
        losses = {i: job.step(data[i]) for i in (2, 3, 4)}
        wanted = job.state_dict()
    torch.rand(7), random.random()
    with job_of(copy.deepcopy(model), data[0], **options, **RESUMED[how]) as job:
        assert job.resume(saved) == {"next": 2, "epoch": 1.5}
        assert job.step_count == 2
        assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]
        again = {i: job.step(data[i]) for i in (2, 3, 4)}
        assert_close(again, losses, 0.0 if exact else 1e-6)
        assert_close(job.state_dict(), wanted, 0.0 if exact else 2e-5)
    assert len({float(loss) for loss in losses.values()}) == 3


FRESH = """
import sys, torch, penstock
from penstock.tests.compiler.job.test_job_state import batches, job_of
from penstock.tests.compiler.eager_baseline import zoo_case

torch.manual_seed(99)
with job_of(zoo_case("gpt2", dropout=0.1)[0], batches("gpt2", 1)[0]) as job:
    job.resume(sys.argv[1])
    print("losses", *(float(job.step(batch)).hex() for batch in batches("gpt2", 3)[1:]))
"""


@pytest.mark.slow
def test_a_fresh_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, _ = zoo_case("gpt2", dropout=0.1)
    data = batches("gpt2", 3)
    with job_of(model, data[0]) as job:
        job.step(data[0])
        job.save(tmp_path / "checkpoint")
        losses = [float(job.step(batch)).hex() for batch in data[1:]]
    command = [sys.executable, "-c", FRESH, str(tmp_path / "checkpoint")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1].split() == ["losses", *losses]


@pytest.mark.slow
def test_resume_starts_a_model_on_meta_without_other_weights(tmp_path: Path) -> None:
    import transformers

    model, batch = zoo_case("gpt2")
    with job_of(model, batch) as job:
        job.step(batch)
        job.save(tmp_path / "checkpoint")
        wanted = job.step(batch)
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(model.config).train()
    with job_of(empty, batch) as job:
        job.resume(tmp_path / "checkpoint")
        assert job.step(batch) == wanted
        job.save_pretrained(tmp_path / "out")


def test_a_checkpoint_replaces_the_one_before_and_is_no_pickle(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        for step in (1, 2):
            job.step(batch)
            job.save(tmp_path / "checkpoint")
            assert open_checkpoint(tmp_path / "checkpoint", verify=True).progress.step == step
    assert {path.suffix for path in (tmp_path / "checkpoint").iterdir()} == {".json", ".safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # no temporary directory is left


@pytest.mark.slow
def test_resume_refuses_another_model(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.save(tmp_path / "checkpoint")
    other, other_batch = zoo_case("in_place")
    with job_of(other, other_batch) as job:
        with pytest.raises(CheckpointError, match="another model"):
            job.resume(tmp_path / "checkpoint")
        job.step(other_batch)  # nothing was touched
        with pytest.raises(CheckpointError, match="no such checkpoint"):
            job.resume(tmp_path / "chekpoint")


@pytest.mark.slow
def test_buffers_travel_too(tmp_path: Path) -> None:
    """BatchNorm's statistics, its counters of micro-batches, and a counter of the user's own, of steps."""
    for name, counter, count in (("wide_resnet", "num_batches_tracked", 2 * MICRO_BATCHES), ("in_place", "calls", 2)):
        model, batch = zoo_case(name)
        with job_of(copy.deepcopy(model), batch, optimizer=SGD, lr_scheduler=None) as job:
            job.step(batch)
            job.save(tmp_path / name)
            job.step(batch)
            wanted = job.state_dict()
        with job_of(copy.deepcopy(model), batch, optimizer=SGD, lr_scheduler=None) as job:
            job.resume(tmp_path / name)
            job.step(batch)
            assert_close(job.state_dict(), wanted, 0.0)
        assert {int(value) for key, value in wanted.items() if key.endswith(counter)} == {count}
