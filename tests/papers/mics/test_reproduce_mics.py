"""MiCS's evaluation: models, forms, how a lane stands for a fleet, and every finding on a model of toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.compiler.models.named import find_model
from penstock.ir import ops
from penstock.papers.lab import num_params
from penstock.papers.mics import FINDINGS, Mics
from penstock.papers.mics.experiments import FleetRun, MicsModel
from penstock.papers.mics.programs import (
    DEEPSPEED,
    FLAT,
    MICS,
    ONE_HOP,
    OURS,
    STEP_SHARES,
    V100,
    ZERO3,
    Form,
    collective_s,
    effective,
    fits,
    hardware,
    spread,
)
from penstock.papers.report import markdown, reproduce, to_json, write
from penstock.papers.rule import AGREES, DERIVED, DIFFERS
from penstock.papers.wide_resnet import NamedWideResNet
from penstock.runtime.simulate import simulate

BERT = "bert-base:num_hidden_layers=4,hidden_size=256,intermediate_size=1024,num_attention_heads=4,vocab_size=512"
IMAGES = NamedWideResNet((1, 1, 1, 1), 1, image=32)


class Toy(Mics):
    models = {
        "BERT 10B": MicsModel(BERT, 8, sequence=64),
        "BERT 15B": MicsModel(BERT, 16, sequence=64),
        "BERT 20B": MicsModel(BERT, 16, sequence=64),
        "RoBERTa 20B": MicsModel(BERT, 16, sequence=64),
        "image": MicsModel("tiny-images", 8, micro_batches=1, precision="fp32"),
        "100B": MicsModel(BERT, 16, 8, 4, sequence=64),
    }
    unnamed = {"tiny-images": IMAGES}
    strong = {"BERT 10B": (2, 4), "BERT 15B": (2, 4), "BERT 20B": (2,), "RoBERTa 20B": (2, 4)}
    fast = {"BERT 15B": (2, 4), "BERT 20B": (2,)}
    hosts = (2, 4)
    groups = (8, 32)
    grouped = 4
    image = "image"
    huge = {"100B": (2, 4)}
    scales = (1, 2, 4)
    batch = 1024
    sizes = (16e6, 128e6)


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def ran(toy: Toy, form: Form = MICS, hosts: int = 4, shards: int | None = None, each: int | None = None) -> FleetRun:
    found = toy.run("BERT 10B", form, hosts, shards, each=each)
    assert found is not None
    return found


@pytest.mark.slow
def test_models_have_the_sizes_of_the_paper() -> None:
    for name, billions in (("BERT 10B", 10.1), ("BERT 15B", 15.0), ("BERT 20B", 20.3), ("BERT 50B", 50.2)):
        found = num_params(find_model(Mics.models[name].name).on_meta()) / 1e9
        assert found == pytest.approx(billions, rel=0.01), name
    assert num_params(find_model(Mics.models["100B"].name).on_meta()) / 1e9 == pytest.approx(101, rel=0.01)
    images = Mics.unnamed["wide-resnet-3b"]
    assert isinstance(images, NamedWideResNet)
    assert num_params(images.on_meta()) / 1e9 == pytest.approx(3.0, rel=0.02)


@pytest.mark.slow
def test_forms_are_made_of_the_ops_that_the_paper_means(toy: Toy) -> None:
    """Gathers for each stage and micro-batch, forward and backward; one scatter each; sums over groups once or each
    time; ZeRO-3 has one group and gathers in a ring."""

    def count(form: Form, shards: int | None = None, model: str = "BERT 10B") -> dict[str, int]:
        (program,) = toy.programs(model, form, 4, shards) or []
        assert program.interface.size(ops.SHARDS) == (32 if shards == 0 else toy.models[model].shards)
        names = [node.target.name for node in program.ops()]
        plain = [n for n in program.ops() if n.target is ops.all_gather and not n.kwargs.get("hierarchical")]
        return {name: names.count(name) for name in ("all_gather", "reduce_scatter", "all_reduce")} | {
            "ring": len(plain)
        }

    (program,) = toy.programs("BERT 10B", MICS, 4) or []
    stages = sum(bool(spec.params) for spec in program.interface.stages.values())
    # With a loss scale the norm of all gradients is summed over the group.
    two, one, zero = count(MICS), count(ONE_HOP), count(ZERO3, 0)
    assert two["reduce_scatter"] == one["reduce_scatter"] == zero["reduce_scatter"] == 2 * stages
    assert (two["all_reduce"], one["all_reduce"], zero["all_reduce"]) == (stages + 1, 2 * stages + 1, 1)
    # The last stage is whole from its forward to its backward, the first from a backward to the next forward.
    assert two["all_gather"] == zero["all_gather"] == 4 * stages - 3
    assert count(MICS, model="BERT 15B")["ring"] == 0 < count(FLAT, model="BERT 15B")["ring"] == zero["ring"]


@pytest.mark.slow
def test_a_lane_stands_for_any_number_of_hosts(toy: Toy) -> None:
    """A text made for one fleet, spread over another, takes what one made for that takes."""
    machine = hardware(V100, 4)
    made = toy.plan("BERT 10B", MICS, machine, 8)
    moved = spread(toy.plan("BERT 10B", MICS, hardware(V100, 3), 8).programs, 32, 8)
    assert fits(moved, machine)
    assert simulate(moved, machine, precision="fp16").step_s == pytest.approx(made.step_s, rel=1e-9)


@pytest.mark.slow
def test_steps_of_many_micro_batches_are_those_of_few_made_longer(toy: Toy) -> None:
    few, spec = ran(toy, each=6), Toy.models["BERT 10B"]
    trial = toy.plan("BERT 10B", MICS, hardware(V100, 4), 8, 6)
    assert STEP_SHARES[V100] * few.step_s == pytest.approx(trial.step_s, rel=0.01)
    assert few.batch == 6 * 32 * spec.micro_batch and few.rows_s == few.batch / few.step_s


@pytest.mark.slow
def test_forms_rank_as_the_paper_says(toy: Toy) -> None:
    """Small groups before one, gathers ahead before gathers that are due, and our own choice before all."""
    mics, zero3, late = ran(toy), ran(toy, ZERO3, shards=0), ran(toy, DEEPSPEED, shards=0)
    assert mics.step_s < zero3.step_s <= late.step_s
    assert ran(toy, OURS).step_s <= mics.step_s <= ran(toy, ONE_HOP).step_s


def test_one_collective_alone() -> None:
    two = hardware(V100, 2)
    size, hop_s, rate = 128e6, 30e-6 + 2 * 20e-6, 0.946 * 12.5e9
    assert collective_s(two, range(16), size) == pytest.approx(15 * hop_s + 15 / 16 * size / (0.945 * rate), rel=1e-3)
    assert collective_s(two, range(16), size, times=2) == pytest.approx(
        2 * collective_s(two, range(16), size), rel=1e-6
    )
    inside_s = 7 * 5e-6 + 7 / 8 * size / 128e9
    by_host_s = hop_s + size / 2 / (0.986 * rate) + inside_s  # pieces arrive where they stay
    assert collective_s(two, range(16), size, hierarchical=True) == pytest.approx(by_host_s, rel=1e-3)
    assert effective(two, range(16), size) == pytest.approx(15 / 16 * size / collective_s(two, range(16), size))


@pytest.mark.slow
def test_every_finding_of_a_toy() -> None:
    report = reproduce("mics", setup=Toy)
    assert {f.key for f in report.findings} == {f.__name__ for f in FINDINGS}
    for finding in report.findings:
        assert finding.rows, finding.key
        differing = [row for row in finding.rows if row.verdict == DIFFERS and row.kind != DERIVED]
        silent = [row.cells for row in differing if not row.why]
        assert not silent, f"{finding.key} does not say why {silent} differ"
    rows = {(f.key, r.setting, r.quantity): r for f in report.findings for r in f.rows}
    assert all(r.verdict == AGREES for (key, *_), r in rows.items() if key == "traffic"), "bytes are theory's"
    assert "penstock reproduce mics" in markdown(report) and json.dumps(to_json(report))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_paper_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = reproduce("mics")
    assert report.tally.agreeing >= 10 and report.tally.checked
    assert (tmp_path / "README.md") in write(report, tmp_path)


def test_the_network_is_fitted_to_figure_2() -> None:
    """Gathers have what section 3.2 says of the figure: its 11 GB/s and 2.7 by the fit, its 4.9 besides."""
    assert effective(hardware(V100, 8), range(64), 1024e6) == pytest.approx(11e9, rel=0.005)
    for size, ratio in ((128e6, 2.7), (32e6, 4.9)):
        few, many = (effective(hardware(V100, hosts), range(8 * hosts), size) for hosts in (4, 32))
        assert few / many == pytest.approx(ratio, rel=0.005)
