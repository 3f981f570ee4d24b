"""A model whose trained weights are on devices says so, once, wherever the old ones are used, copied or saved."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.stale import allow_gradient_readers, mark, unmark
from penstock.errors import PlanError, StaleModelWarning
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case


def job_of(model: nn.Module, batch: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB")
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy="balanced"
    )


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleModelWarning)
        yield


def all_hooks(model: nn.Module) -> list[Any]:
    return [h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._state_dict_pre_hooks.values())]


USES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "forward": lambda model, batch: model(**batch),
    "generate": lambda model, batch: model.generate(batch["input_ids"], max_new_tokens=1, pad_token_id=0),
    "inner module": lambda model, batch: model.transformer(batch["input_ids"]),
    "state_dict": lambda model, batch: model.state_dict(),
    "wrapper's state_dict": lambda model, batch: nn.ModuleDict({"m": model}).state_dict(),
    "deepcopy": lambda model, batch: copy.deepcopy(model),
    "pickle": lambda model, batch: pickle.dumps(model),
}


@pytest.fixture(scope="module")
def stale() -> Iterator[tuple[Job, Any, Any]]:
    model, batch = zoo_case("gpt2")
    with job_of(model, batch) as job:
        yield job, model, batch


@pytest.mark.parametrize("use", USES)
def test_every_use_between_a_step_and_sync_warns_once(use: str, stale: tuple[Job, Any, Any]) -> None:
    job, model, batch = stale
    with silence():
        job.sync()
        USES[use](model, batch)
        job.step(batch)
    with pytest.warns(StaleModelWarning, match=r"GPT2LMHeadModel still has .*job\.sync\(\)") as caught:
        USES[use](model, batch)
    assert len(caught) == 1 and caught[0].filename == __file__  # the line of whoever used it
    with silence():
        USES[use](model, batch)
        job.step(batch)  # still the same time without sync
        USES[use](model, batch)
        job.sync()
        USES[use](model, batch)
    assert all_hooks(model) == []
    job.step(batch)
    with pytest.warns(StaleModelWarning):
        USES[use](model, batch)


@pytest.mark.slow
def test_what_reads_the_devices_does_not_warn(stale: tuple[Job, Any, Any], tmp_path: Path) -> None:
    job, model, batch = stale
    job.sync()
    with silence():
        job.step(batch)
        job.state_dict(), job.evaluate(batch), job.save(tmp_path / "saved"), job.save_pretrained(tmp_path / "model")
        job.explain(full=True)
        again = job_of(model, batch)
        assert again.plan.hash == job.plan.hash and again.code() == job.code()
        again.close()
        job.sync()


@pytest.mark.slow
def test_a_copy_is_a_model_as_any_other_and_needs_nothing_of_ours() -> None:
    model, batch = zoo_case("mlp")
    wanted = model(**batch)["loss"]
    with job_of(model, batch) as job:
        job.step(batch)
        with pytest.warns(StaleModelWarning):
            data = pickle.dumps(model)
        assert b"penstock.compiler" not in data
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
    for other in (pickle.loads(data), twin, torch.load(io.BytesIO(saved.getvalue()), weights_only=False)):
        with silence():
            assert torch.equal(other(**batch)["loss"], wanted)
            assert other.state_dict().keys() == model.state_dict().keys()
            with job_of(other, batch) as job:
                job.step(batch)
                job.sync()


def test_a_model_whose_job_was_closed_without_sync_says_that(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.step(batch)
    with pytest.warns(StaleModelWarning, match=r"was closed before job\.sync"):
        model(**batch)
    with silence(), job_of(model, batch) as job:  # to begin anew is what the user asks for
        job.step(batch)
        job.save(tmp_path / "saved")
        job.sync()
        job.step(batch)
        job.close()
        job.resume(tmp_path / "saved")
    with pytest.warns(StaleModelWarning):
        model(**batch)


def test_a_resumed_job_has_other_weights_than_its_model(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as job:
        job.step(batch)
        job.save(tmp_path / "saved")
        job.sync()
    other, _ = zoo_case("mlp")
    with job_of(other, batch) as job:
        job.resume(tmp_path / "saved")
        with pytest.warns(StaleModelWarning, match=r"job\.sync"):
            other(**batch)


def test_a_second_job_of_a_stale_model_starts_from_the_old_weights_and_is_told() -> None:
    model, batch = zoo_case("mlp")
    with job_of(model, batch) as first, job_of(model, batch) as second:
        first.step(batch)
        with pytest.warns(StaleModelWarning):
            second.step(batch)


class Ranked(nn.Linear):
    """A layer as those of AdaLoRA, whose ranks follow from gradients."""

    def update_and_allocate(self, step: int) -> int:
        return step


def test_a_method_that_reads_gradients_is_refused_until_the_job_ends() -> None:
    model = nn.Sequential(Ranked(2, 2))
    mark(model)
    with pytest.raises(PlanError, match=r"Ranked.update_and_allocate reads the gradients .* rank_pattern of LoRA"):
        model[0].update_and_allocate(1)
    twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [other[0].update_and_allocate(3) for other in (twin, read)] == [3, 3]
    assert twin[0].update_and_allocate.__self__ is twin[0]
    unmark(model)  # by sync, after which there are no gradients either
    with pytest.raises(PlanError):
        model[0].update_and_allocate(1)
    allow_gradient_readers(model)
    assert model[0].update_and_allocate(2) == 2
