"""Tables in parts: jobs equal eager PyTorch, on devices that could not hold a table, and whatever is saved is whole."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import DoesNotFit, PassError, PenstockError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, assert_same_states, zoo_case

BALANCED = STRATEGIES["balanced"]


class Tagger(nn.Module):
    """A large table, of which row 3 is padding, and a small head."""

    def __init__(self, rows: int = 4096, width: int = 16, **options: Any):
        super().__init__()
        self.table = nn.Embedding(rows, width, padding_idx=3, **options)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.table(ids)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def tagger(rows: int = 4096, **options: Any) -> tuple[Tagger, dict[str, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, rows, (8, 6), generator=generator)
    ids[:, 2], ids[:, 3], ids[0, 4] = 3, 7, rows - 1  # padding, a row of every micro-batch, and the last one
    return Tagger(rows, **options), {"ids": ids, "labels": torch.randint(0, 5, (8, 6), generator=generator)}


def split(parts: int | str, strategy: str = BALANCED, stages: int = 0) -> str:
    cut = f"partition-balanced{{stages={stages}}}" if stages else "partition-balanced"
    return f"split-vocabulary{{parts={parts}}}, {strategy.replace('partition-balanced', cut)}"


def job_of(model: nn.Module, batch: Any, memory: str = "64MB", num_devices: int = 1, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    return penstock.compile(
        model,
        hardware,
        example_inputs=batch,
        **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": split(3), **options},
    )


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums inside a matrix product depend on the number of threads; a worker has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_trains_like_eager(job: Job, batch: Any, tolerance: float = 0.0, **options: Any) -> None:
    eager = Eager(job.model, **options)
    with job:
        for _ in range(3):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, tolerance and 1e-6)
        assert_same_states(job, eager, tolerance)
        assert_close(job.state_dict(), eager.model.state_dict(), tolerance)


@pytest.mark.parametrize("parts", [2, 5])
def test_an_embedding_in_parts_is_bit_for_bit_the_whole_one(parts: int) -> None:
    """Each row is found in exactly one part, so that no sum has another order; padding's gradient stays zero."""
    model, batch = tagger(64)
    job = job_of(model, batch, strategy=split(parts, stages=4))
    assert [len(rows) - 1 for rows in job.plan.decisions.vocabulary.values()] == [parts]
    assert len(job.plan.decisions.stages) == 4
    assert_trains_like_eager(job, batch)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "mobius"])
def test_a_table_that_no_device_holds_is_trained(strategy: str) -> None:
    """256 KiB of rows on a device of 300 kB, which needs three times as much for the whole table."""
    model, batch = tagger()
    with pytest.raises(DoesNotFit):
        job_of(model, batch, "300kB", strategy=BALANCED)
    job = job_of(model, batch, "300kB", strategy=strategy, search_s=1.0)
    assert list(job.plan.decisions.vocabulary) == ["table.weight"]
    assert job.plan.predicted is not None and job.plan.predicted.peak_bytes["cpu0"] <= 300_000
    assert_trains_like_eager(job, batch)


def test_tables_that_fit_stay_whole() -> None:
    model, batch = tagger()
    job = job_of(model, batch, strategy=split("auto"))
    assert job.plan.decisions.vocabulary == {}
    plain = job_of(model, batch, strategy=BALANCED)
    assert job.code(0).split('"""')[2] == plain.code(0).split('"""')[2]


@pytest.mark.slow
@pytest.mark.multi
def test_in_real_processes_with_weights_in_dram_and_clipping() -> None:
    model, batch = zoo_case("llama", dropout=0.0)
    job = job_of(model, batch, "180kB", num_devices=2, strategy=split(3, stages=6), max_grad_norm=0.5)
    assert job.plan.decisions.fetch
    assert_trains_like_eager(job, batch, 5e-6, max_grad_norm=0.5)  # one norm, summed over stages in another order


def test_a_checkpoint_resumes_with_other_parts_or_none(tmp_path: Path) -> None:
    model, batch = tagger(64)
    with job_of(copy.deepcopy(model), batch, strategy=split(3, stages=4)) as job:
        job.step(batch)
        saved = job.save(tmp_path / "parts")
        wanted = [job.step(batch) for _ in range(2)]
    for strategy in (split(4), BALANCED):
        with job_of(copy.deepcopy(model), batch, strategy=strategy) as job:
            job.resume(saved)
            assert [job.step(batch) for _ in range(2)] == wanted
            whole = job.save(tmp_path / "whole")
            last = job.step(batch)
        with job_of(copy.deepcopy(model), batch, strategy=split(5)) as job:
            job.resume(whole)
            assert job.step(batch) == last


def test_the_model_and_files_have_whole_tables(tmp_path: Path) -> None:
    model, batch = zoo_case("llama")
    eager = Eager(model)
    with job_of(model, batch, strategy=split(3, stages=4)) as job:
        job.step(batch)
        eager.step(batch)
        expected = eager.model.state_dict()
        assert_close(job.state_dict(), expected, 0.0)
        job.save_pretrained(tmp_path / "weights")
        job.sync()
    assert_close(dict(model.state_dict()), expected, 0.0)
    assert_close(load_file(tmp_path / "weights" / "model.safetensors"), expected, 0.0)
    eager = Eager(model)
    with torch.device("meta"):
        empty = type(model)(model.config).train()
    with job_of(empty, batch, strategy=split(4), weights=tmp_path / "weights") as job:  # read by rows
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0)
        job.sync()
    assert_close(dict(empty.state_dict()), eager.model.state_dict(), 0.0)


def test_groups_of_parameters_name_the_whole_table() -> None:
    model, batch = tagger(64)
    groups = [{"params": ["table.*"], "lr": 0.5}]
    job = job_of(model, batch, param_groups=groups)
    before = model.table.weight.detach().clone()
    with job:
        job.step(batch)
        moved = (job.state_dict()["table.weight"] - before).abs().max()
    with job_of(model, batch) as job:
        job.step(batch)
        usual = (job.state_dict()["table.weight"] - before).abs().max()
        assert float(moved) == pytest.approx(10 * float(usual), abs=3e-6)  # weights of 4 round by 2.4e-7


def test_tokens_of_no_row_are_refused_as_eager_refuses_them() -> None:
    model, batch = tagger(64)
    for wrong in (64, -1):
        ids = batch["ids"].clone()
        ids[0, 0] = wrong
        with job_of(model, batch) as job, pytest.raises(PenstockError, match="index out of range"):
            job.step({**batch, "ids": ids})


def test_what_cannot_be_split_is_named() -> None:
    model, batch = tagger(64)
    with pytest.raises(PassError, match=r"table.weight stays whole: its optimizer looks at whole parameters"):
        job_of(model, batch, optimizer=partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(PassError, match=r"table.weight stays whole: it has 64 rows only"):
        job_of(model, batch, strategy=split(65))
    scaled, batch = tagger(64, scale_grad_by_freq=True)
    with pytest.raises(PassError, match="its lookup has scale_grad_by_freq=True, which takes whole tables"):
        job_of(scaled, batch)
    model, batch = zoo_case("wide_resnet")
    with pytest.raises(PassError, match="this model looks no table up"):
        job_of(model, batch)


@pytest.mark.parametrize("rows", [[0, 40, 30, 64], [0, 30, 60], [2, 30, 64], [0, 64]])
def test_an_edited_plan_with_a_gap_or_an_overlap_is_refused(rows: list[int]) -> None:
    model, batch = tagger(64)
    plan = job_of(model, batch).plan
    plan.decisions.vocabulary["table.weight"] = rows
    with pytest.raises(PassError, match=r"table.weight begin at rows .* 64 must end the list"):
        job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)


def test_an_edited_plan_with_other_rows_is_carried_out(tmp_path: Path) -> None:
    model, batch = tagger(64)
    plan = job_of(model, batch, strategy=split(3, stages=5)).plan
    names = {"table[0:21]": "table[0:5]", "table[21:42]": "table[5:60]", "table[42:64]": "table[60:64]"}
    decided = plan.decisions
    decided.vocabulary["table.weight"] = [0, 5, 60, 64]
    decided.blocks = {names.get(name, name): count for name, count in decided.blocks.items()}
    decided.stages = [[names.get(name, name) for name in stage] for stage in decided.stages]
    job = job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)
    job.write(tmp_path)
    assert_trains_like_eager(penstock.load(tmp_path, model), batch)
