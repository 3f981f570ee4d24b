"""Plans: saved, edited, compiled again; the same plan gives the same files; nonsense is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.compiler.plan import Plan
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import PassError, PenstockError, PlanError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, zoo_case

BALANCED = STRATEGIES["balanced"].replace("partition-balanced", "partition-balanced{stages=2}")
OPTIONS: dict[str, Any] = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": BALANCED}
HARDWARE = penstock.Hardware.cpu(num_devices=1, memory="5kB", dram="1GB")


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch = zoo_case("mlp")
    return penstock.compile(model, HARDWARE, example_inputs=batch, **OPTIONS).plan


def test_a_saved_plan_gives_the_same_hash_and_files(tmp_path: Path) -> None:
    model, batch = zoo_case("mlp")
    first = penstock.compile(model, HARDWARE, example_inputs=batch, max_grad_norm=1.0, **OPTIONS)
    first.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == first.plan and loaded.hash == first.plan.hash
    again = penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, plan=tmp_path / "plan.json")
    assert again.plan.hash == first.plan.hash
    assert again.plan.model_copy(update={"rivals": first.plan.rivals}) == first.plan  # only the search is not repeated
    for device, text in first.folder.files.items():
        assert again.code(device) == text
    assert f"plan     {first.plan.hash}" in first.code(0)


def test_the_hash_covers_decisions_only(plan: Plan) -> None:
    assert plan.model_copy(update={"rivals": [], "predicted": None}).hash == plan.hash
    other = plan.decisions.model_copy(update={"rematerialise": []})
    assert plan.model_copy(update={"decisions": other}).hash != plan.hash
    assert plan.model_copy(update={"micro_batches": 2}).hash != plan.hash


def test_an_edited_plan_is_what_runs(plan: Plan) -> None:
    """Weights stay on a larger device, nothing is recomputed: the numbers are the same, the files are not."""
    model, batch = zoo_case("mlp")
    decisions = plan.decisions.model_copy(
        update={"rematerialise": [], "fetch": {}, "optimizer": dict.fromkeys(plan.decisions.optimizer, "device")}
    )
    edited = plan.model_copy(update={"decisions": decisions})
    job = penstock.compile(model, HARDWARE.with_(memory="8MB"), example_inputs=batch, optimizer=SGD, plan=edited)
    assert job.plan.hash == edited.hash
    assert "rt.fetch(" not in job.code(0) and "rt.resident(" in job.code(0)
    eager = Eager(model)
    with job:
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
        assert_close(job.state_dict(), eager.model.state_dict(), 2e-5)
    with pytest.raises(penstock.errors.DoesNotFit):  # on the small device that is refused
        penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, plan=edited)


def renamed_block(document: dict[str, Any]) -> None:
    document["decisions"]["stages"][0][0] = "body.77"


def lost_block(document: dict[str, Any]) -> None:
    document["decisions"]["stages"][-1].pop()


def no_such_device(document: dict[str, Any]) -> None:
    document["decisions"]["devices"][0] = 5


def too_few_devices(document: dict[str, Any]) -> None:
    document["decisions"]["devices"].pop()


def other_blocks(document: dict[str, Any]) -> None:
    document["decisions"]["blocks"]["body.0"] += 1


def remat_of_nothing(document: dict[str, Any]) -> None:
    document["decisions"]["rematerialise"].append("stage99")


def fetch_of_nothing(document: dict[str, Any]) -> None:
    document["decisions"]["fetch"]["stage99"] = type(document["decisions"]["fetch"]["stage0"])()


def optimizer_of_nothing(document: dict[str, Any]) -> None:
    document["decisions"]["optimizer"].pop("stage0")


def schedule_of_another_pass(document: dict[str, Any]) -> None:
    document["decisions"]["schedule"] = "1f1b"


def unknown_pass(document: dict[str, Any]) -> None:
    document["passes"] = document["passes"].replace("insert-remat", "insert-remate")


@pytest.mark.parametrize(
    "edit",
    [
        renamed_block, no_such_device, too_few_devices, remat_of_nothing, fetch_of_nothing, optimizer_of_nothing,
        schedule_of_another_pass, unknown_pass,
        *(pytest.param(edit, marks=pytest.mark.slow) for edit in (lost_block, other_blocks)),
    ],
)  # fmt: skip
def test_an_edit_that_cannot_be_carried_out(edit: Callable[[dict[str, Any]], None], plan: Plan, tmp_path: Path) -> None:
    """Every one is an error of ours that says what is wrong, never a KeyError from inside."""
    document = json.loads(plan.model_dump_json())
    edit(document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    model, batch = zoo_case("mlp")
    with pytest.raises(PenstockError) as caught:
        penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, plan=tmp_path / "plan.json")
    assert isinstance(caught.value, (PlanError, PassError)), caught.value


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.update(micro_batches=0), r"micro_batches: .*greater than 0"),
        (lambda d: d.update(micro_batch=4), r"micro_batch: .*not permitted"),
        (lambda d: d.pop("decisions"), r"decisions: .*required"),
        (lambda d: d["decisions"].update(schedule="2f2b"), r"decisions\.schedule: .*fill-drain.*2f2b"),
        (lambda d: d["decisions"]["optimizer"].update(stage0="moon"), r"decisions\.optimizer\.stage0.*moon"),
    ],
)
def test_a_document_that_is_no_plan(edit: Callable[[Any], None], said: str, plan: Plan, tmp_path: Path) -> None:
    document = json.loads(plan.model_dump_json())
    edit(document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=rf"plan\.json: .*{said}"):
        Plan.load(tmp_path / "plan.json")


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.from_any(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="No such file"):
        Plan.from_any(tmp_path / "other.json")


@pytest.mark.parametrize(
    "given", [{"micro_batches": 2}, {"precision": "bf16"}, {"max_grad_norm": 2.0}, {"strategy": "gpipe"}]
)
def test_an_argument_against_the_plan(given: dict[str, Any], plan: Plan) -> None:
    model, batch = zoo_case("mlp")
    (name,) = given
    with pytest.raises(PlanError, match=f"{name}=.*but plan=.*has {name}="):
        penstock.compile(model, HARDWARE, example_inputs=batch, plan=plan, **given)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"link_turns": True}, r"decisions\.link_turns is True, which none of its passes makes; add take-turns to"),
        ({"tiles": {"layer": 2}}, r"decisions\.tiles is .*; add tile-sequence to `passes`, or leave tiles out"),
        ({"sums": "two-hop"}, r"decisions\.sums is 'two-hop', .*; add insert-two-hop to `passes`"),
    ],
)
def test_a_decision_that_no_pass_of_the_plan_makes(edit: dict[str, Any], said: str, plan: Plan) -> None:
    """It would be ignored in silence."""
    model, batch = zoo_case("mlp")
    edited = plan.model_copy(update={"decisions": plan.decisions.model_copy(update=edit)})
    with pytest.raises(PlanError, match=said):
        penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, plan=edited)


def test_a_plan_for_another_batch_or_model(plan: Plan) -> None:
    model, batch = zoo_case("mlp")
    three = {key: value[:3] for key, value in batch.items()}
    with pytest.raises(PlanError, match="micro_batches=4 does not divide the batch of 3"):
        penstock.compile(model, HARDWARE, example_inputs=three, optimizer=SGD, plan=plan)
    other, other_batch = zoo_case("custom_function")
    with pytest.raises(PenstockError, match="blocks are not those of this model"):
        penstock.compile(other, HARDWARE, example_inputs=other_batch, optimizer=SGD, plan=plan)


OF_TODAY = """{"model": "WithLoss", "hardware": "cpu", "strategy": "balanced", "micro_batches": 4, "max_grad_norm": 1.0,
 "passes": "drop-masks, chunk-loss, interleave-forwards, coarsen, partition-balanced{stages=2}, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer",
 "precision": "fp32", "gradient_dtype": "fp32", "boundary_dtype": "compute", "decisions": {
  "masks": {}, "vocabulary": {}, "experts": {}, "width": {"team": 1, "regions": []}, "pointwise_again": false,
  "chunks": {}, "interleaved": false, "context": null, "tiles": {}, "planned_for": [0, 0], "mesh": null,
  "blocks": {"body.0": 1, "body.1": 1, "body.2": 1, "body.3": 1, "body.4": 3}, "devices": [0, 0], "copies": {},
  "stages": [["body.0", "body.1", "body.2", "body.3"], ["body.4"]], "schedule": "fill-drain", "sharding": null,
  "rematerialise": ["stage0"], "activations": {}, "fetch": {"stage0": {"backward": 3}, "stage1": {"forward": 1}},
  "sums": null, "ssd": {"stages": {}, "ahead": 1}, "link_turns": false, "staleness": {}, "clipping": "",
  "optimizer": {"stage0": "dram", "stage1": "dram"}}}"""  # noqa: E501


def test_a_file_from_before_residency_was_mixed_gives_its_program(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(OF_TODAY)
    model, batch = zoo_case("mlp")
    job = penstock.compile(model, HARDWARE, example_inputs=batch, optimizer=SGD, plan=tmp_path / "plan.json")
    for fetch in ("stage0.weights", "stage1.weights"):
        assert f'rt.fetch("{fetch}"' in job.code(0)
    assert job.code(0).count("rt.step(") == 2 and job.plan.decisions.optimizer == {"stage0": "dram", "stage1": "dram"}
    document = json.loads(OF_TODAY)
    document["decisions"]["residency"] = {"stage0": "half"}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"plan .*plan\.json: decisions\.residency: .*; leave plan out to search anew"):
        Plan.load(tmp_path / "plan.json")
