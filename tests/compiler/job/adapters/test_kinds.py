"""Every kind of adapter that PEFT has trains as in eager PyTorch, and its files are those of PEFT; or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.compiler.capture.refuse.adapter_kinds import REFUSALS
from penstock.compiler.job.job import Job
from penstock.errors import CaptureError, PlanError
from penstock.tests.compiler.eager_baseline import Eager, assert_close
from penstock.tests.compiler.job.adapters.adapted_models import compile_job, llama
from penstock.tests.compiler.job.adapters.kinds import (
    ALL,
    BASES,
    DRAWS,
    KINDS,
    LOADED_OTHERWISE,
    NEEDS,
    REFUSED,
    UNMERGED,
    UNWRITTEN,
    batch_of,
)
from penstock.tests.compiler.job.adapters.test_merge import load
from penstock.tests.shown_elsewhere import slow_but

TOLERANCE = 1e-5  # of the largest entry: stages add gradients of one tensor in another order
MERGED_TOLERANCE = 5e-5  # W x + B (A x) against (W + B A) x in fp32
TRAINED = [name for name in ALL if name not in REFUSED]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, about its own defaults
        yield


def make(name: str, directory: Path) -> Any:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return ALL[name](directory)


def start(model: Any, name: str, micro_batches: int, num_devices: int) -> Job:
    strategy = "gpipe" if num_devices > 1 else "balanced"
    return compile_job(
        model, batch=batch_of(name), micro_batches=micro_batches, num_devices=num_devices, strategy=strategy
    )


def assert_trains(job: Job, eager: Eager, name: str) -> None:
    batch = batch_of(name)
    for _ in range(2):
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, TOLERANCE)
    assert_close(job.state_dict(), eager.model.state_dict(), TOLERANCE)


def assert_writes_what_peft_does(job: Job, model: Any, name: str, directory: Path) -> None:
    """`job.save_pretrained`, before the model has what was trained, against PEFT's own after it."""
    if name in UNWRITTEN:
        with pytest.raises(PlanError, match="PEFT writes no files of a PeftMixedModel"):
            job.save_pretrained(directory / "adapter")
        job.sync()
        return
    job.save_pretrained(directory / "adapter")
    job.sync()
    model.save_pretrained(directory / "expected")
    found, expected = (
        {str(path.relative_to(at)): path for path in at.rglob("*") if path.is_file()}
        for at in (directory / "adapter", directory / "expected")
    )
    assert found.keys() == expected.keys()
    for key, path in expected.items():
        if path.suffix == ".safetensors":
            tensors, wanted = load_file(found[key]), load_file(path)
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(tensors[each], wanted[each]) for each in wanted), key
        elif path.suffix == ".json":
            assert found[key].read_text() == path.read_text()


def logits(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return model.eval()(**{key: value for key, value in batch_of(name).items() if key != "labels"}).logits


def assert_loads(model: Any, name: str, directory: Path) -> None:
    base = BASES.get(name, llama)()
    found = logits(peft.PeftModel.from_pretrained(base, str(directory / "adapter")), name)
    assert_close({"logits": found}, {"logits": logits(model, name)}, TOLERANCE)


def assert_merges(job: Job, model: Any, name: str, directory: Path) -> None:
    if name in UNMERGED:
        with pytest.raises(PlanError, match=r"leave merge out|PeftMixedModel"):
            job.save_pretrained(directory / "merged", merge=True)
        assert not (directory / "merged").exists()
        return
    job.save_pretrained(directory / "merged", merge=True)
    found = logits(load(directory / "merged", model), name)
    assert_close({"logits": found}, {"logits": logits(model, name)}, MERGED_TOLERANCE)


def assert_resumes(job: Job, name: str, directory: Path, devices: int) -> None:
    """A second job goes on where the first was saved, by the same loss and weights."""
    job.save(directory / "checkpoint")
    with start(make(name, directory), name, 2, devices) as other:
        other.resume(directory / "checkpoint")
        assert_close(other.state_dict(), job.state_dict(), 0.0)
        assert float(other.step(batch_of(name))) == float(job.step(batch_of(name)))


def test_every_kind_of_peft_is_in_the_table() -> None:
    """A kind that a new PEFT brings needs a row in `kinds.py` and one in docs/adapters.md."""
    known = {kind.name for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
    assert known == KINDS.keys()
    assert {each.kind for each in REFUSALS} <= known


def test_the_page_says_what_becomes_of_every_kind() -> None:
    trained = [kind for kind in sorted(KINDS) if kind not in REFUSED]
    wanted = [
        f"Trained and merged: {', '.join(kind for kind in trained if kind not in UNMERGED)}.",
        f"Trained, not merged: {', '.join(kind for kind in trained if kind in UNMERGED)}.",
        *(f"| {each.kind} | {each.option or 'all'} | {each.why} | {each.instead} |" for each in REFUSALS),
    ]
    page = " ".join((Path(__file__).resolve().parents[4] / "docs" / "adapters.md").read_text("utf-8").split())
    assert [text for text in wanted if text not in page] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_no_program_can_train_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=REFUSED[name]):
        start(make(name, tmp_path), name, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_one_device_trains_as_in_eager(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    with start(model, name, 1, 1) as job:
        assert_trains(job, Eager(make(name, tmp_path), micro_batches=1), name)


@pytest.mark.multi
@pytest.mark.parametrize("name", slow_but([], TRAINED))
def test_a_kind_trains_and_is_written_loaded_merged_and_resumed(name: str, tmp_path: Path) -> None:
    model, devices = make(name, tmp_path), 1 if name in DRAWS else 2
    modes = {module: module.training for module in model.modules()}
    with start(model, name, 2, devices) as job:
        assert_trains(job, Eager(make(name, tmp_path), micro_batches=2), name)
        assert_writes_what_peft_does(job, model, name, tmp_path)
        if name not in LOADED_OTHERWISE | UNWRITTEN:
            assert_loads(model, name, tmp_path)
        assert_merges(job, model, name, tmp_path)
        for module, training in modes.items():
            module.training = training
        assert_resumes(job, name, tmp_path, devices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LOHA", "P_TUNING", "VBLORA"])
def test_files_before_sync_have_what_was_trained(name: str, tmp_path: Path) -> None:
    """Factors of a layer, what an encoder computes, and a tensor that all layers share."""
    model = make(name, tmp_path)
    with start(model, name, 1, 1) as job:
        job.step(batch_of(name))
        assert_writes_what_peft_does(job, model, name, tmp_path)
        assert_loads(model, name, tmp_path)


@pytest.mark.slow  # tests/compiler/test_stale.py has it of a layer alone
def test_ranks_that_follow_from_gradients_are_refused_while_the_job_runs(tmp_path: Path) -> None:
    model = make("ADALORA", tmp_path)
    with start(model, "ADALORA", 1, 1) as job:
        job.step(batch_of("ADALORA"))
        with pytest.raises(PlanError, match=r"AdaLoraModel\.update_and_allocate reads the gradients of the model"):
            model.base_model.update_and_allocate(1)
    model(**batch_of("ADALORA")).loss.backward()
    model.base_model.update_and_allocate(1)
