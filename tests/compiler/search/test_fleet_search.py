"""The search on many devices: layouts, their bounds, documents of a plan, and time and memory it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.compiler.plan import Plan
from penstock.compiler.search.candidate import PLAIN, Candidate
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.layouts import diverse_layouts, estimates, layouts
from penstock.ir.errors import PlanError
from penstock.passes.decisions import Lanes, regular_lanes
from penstock.passes.draft import Options
from penstock.passes.sharding.mesh import Mesh
from penstock.tests.compiler.eager_baseline import SGD, Eager, zoo_case
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.compiler.search.search_process import searched

SMALL = "gpt2:n_layer=6,n_embd=256,n_head=4,vocab_size=1000"
FAST_S = 10.0  # of computation


def test_layouts_divide_the_devices() -> None:
    for name, most in (("mobius-8gpu", 8), ("mics-p4d:64", 40)):
        hardware = penstock.Hardware.preset(name)
        found = layouts(hardware, 100)
        assert len(set(found)) == len(found) and Mesh(1, 1) in found
        assert all(hardware.num_devices % (row.shards * row.depth) == 0 for row in found)
        assert all(row.depth < hardware.num_devices for row in found) and len(found) >= most
    assert layouts(penstock.Hardware.cpu(num_devices=1), 10) == []


@pytest.mark.parametrize(
    ("count", "shards", "depth", "words"),
    [
        (512, 8, 1, "64 replicas of 8 shards"), (512, 1, 8, "64 replicas of pipelines of 8"),
        (16, 2, 4, "2 replicas of 2 shards of pipelines of 4"), (4, 1, 4, "a pipeline of 4"), (4, 1, 1, "4 replicas"),
    ],
)  # fmt: skip
def test_words_for_lanes(count: int, shards: int, depth: int, words: str) -> None:
    lanes = Lanes(lanes=regular_lanes(count, shards, depth), shards=shards)
    assert lanes.describe() == f"{count} devices: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("machine", [pytest.param("mics-p4d:2", marks=pytest.mark.slow), "mobius-topo2+2"])
def test_bounds_of_layouts_are_no_higher_than_the_simulation(machine: str) -> None:
    """The layout's own, before any stage is cut, and that of its stages."""
    named, hardware = find_model(SMALL), penstock.Hardware.preset(machine)
    count = hardware.num_devices
    spec = micro_batch_spec(named.batch_spec(4 * count, 64), count)
    compiler = CandidateCompiler(trace(named.on_meta(), spec), hardware, Options(micro_batches=count))
    checked = 0
    for row in diverse_layouts(estimates(compiler.lane(PLAIN), [count]), 6):
        end = "insert-shard, insert-two-hop" if row.mesh.shards > 1 else "insert-fetch"
        cut = f"partition-balanced{{stages={max(2, row.mesh.depth)}}}, map-round-robin, schedule-1f1b, insert-remat"
        line = f"coarsen, {row.mesh.text()}, {cut}, {end}, insert-optimizer"
        placed = compiler.place(Candidate.parse(line, count))
        step_s = compiler.finish(placed).step_s
        assert 0 < row.bound_s <= step_s * (1 + 1e-9), row
        assert 0 < placed.bound().seconds <= step_s * (1 + 1e-9), (row, placed.bound())
        checked += 1
    assert checked >= 4


def test_a_mesh_is_a_line_of_a_document_and_comes_back() -> None:
    for shards, depth, nearest in ((8, 1, "shards"), (1, 8, "shards"), (2, 4, "pipeline"), (2, 4, "shards")):
        mesh = Lanes(lanes=regular_lanes(512, shards, depth, nearest), shards=shards)
        text = mesh.model_dump_json()
        assert len(text) < 80 and Lanes.model_validate_json(text) == mesh
    odd = Lanes(lanes=[[0, 3], [1, 2]])
    assert Lanes.model_validate_json(odd.model_dump_json()) == odd and "lanes" in json.loads(odd.model_dump_json())
    with pytest.raises(ValueError, match="multiple of depth times shards"):
        Lanes.model_validate({"devices": 6, "depth": 4})


@pytest.mark.slow
def test_a_fleet_is_planned_once_for_devices_that_are_alike(tmp_path: Any) -> None:
    """64 GPUs: one file a role, a page of text, and the same plan from its document."""
    named, hardware = find_model(SMALL), penstock.Hardware.preset("mics-p4d:8")
    options: dict[str, Any] = {"example_inputs": named.batch_spec(256, 64), "optimizer": SGD}
    job = penstock.compile(named.on_meta(), hardware, search_s=FAST_S, **options)
    mesh = job.plan.decisions.mesh
    assert mesh is not None and job.plan.micro_batches % len(mesh.lanes) == 0
    assert len(job.folder.files) == len(mesh.lanes[0]) <= 8
    job._pages.replanner = None
    text = job.explain(full=True)
    assert mesh.describe() in text and len(text.partition("\nrivals\n")[0].splitlines()) < 100
    assert any(rival.step_s and "mesh" in rival.name for rival in job.plan.rivals)
    job.plan.save(tmp_path / "plan.json")
    again = penstock.compile(named.on_meta(), hardware, plan=Plan.load(tmp_path / "plan.json"), **options)
    assert again.plan.hash == job.plan.hash and again.folder.files == job.folder.files
    assert again.simulate().step_s == pytest.approx(job.simulate().step_s)


@pytest.mark.slow
def test_replicas_of_pipelines_train_as_eager_and_are_loaded_again(tmp_path: Any) -> None:
    """Two lanes of two CPU devices, in processes of their own; their files run after they were written."""
    model, batch = zoo_case("gpt2")
    line = (
        "coarsen, mesh{depth=2}, partition-balanced{stages=2}, map-round-robin, schedule-1f1b, insert-remat, "
        "insert-fetch, insert-optimizer"
    )
    hardware = penstock.Hardware.cpu(num_devices=4)
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy=line, micro_batches=4)
    assert "4 devices: 2 replicas of pipelines of 2" in reasons_of(job)
    job.write(tmp_path / "job")
    with penstock.load(tmp_path / "job", model) as loaded:
        losses = [float(loaded.step(batch)) for _ in range(2)]
    eager = Eager(model)
    assert losses == pytest.approx([float(eager.step(batch)) for _ in range(2)], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt3-175b on 512 GPUs", "bert-10b on 512 GPUs"])
def test_512_gpus_in_2_gb(case: str, tmp_path: Path) -> None:
    _, peak_gb = searched(case, tmp_path)
    assert peak_gb < 2


def test_a_batch_that_no_lanes_can_share() -> None:
    with pytest.raises(PlanError, match="does not divide the batch"):
        penstock.compile(
            find_model(SMALL).on_meta(),
            penstock.Hardware.preset("mics-p4d:8"),
            example_inputs=find_model(SMALL).batch_spec(64, 64),
            micro_batches=48,
        )
