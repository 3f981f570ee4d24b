"""Fuyou's evaluation: machines, rules of the rivals, counting rules, and every finding on a model of toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.compiler.models.named import find_model
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.machine.hardware import Hardware
from penstock.papers.experiments import step_flops
from penstock.papers.fuyou import FINDINGS, Fuyou
from penstock.papers.fuyou.capacity import NONE, largest_models
from penstock.papers.fuyou.programs import (
    APART,
    COLOSSAL,
    FUYOU,
    ZERO_INFINITY,
    ZERO_OFFLOAD,
    machine,
    optimizer_share,
    pipeline,
    repeated_blocks,
    swap_coefficient,
    with_rates,
)
from penstock.papers.fuyou.tuning import megatron, price
from penstock.papers.lab import SimulatedStep
from penstock.papers.report import markdown, reproduce, to_json, write
from penstock.papers.rule import DERIVED, DIFFERS

GPT = "gpt2:n_layer=4,n_embd=64,n_head=4,vocab_size=512,n_positions=64"


class Toy(Fuyou):
    models = {"toy": GPT}
    usual = large = "toy"
    larger = ("toy",)
    batches = {("toy", "A100"): (2,), ("toy", "4090"): (2,)}
    overlapped = {"toy": {2: 1.1}}
    pipelined = {"4090": {2: 1.5}}
    swapped = {2: True}
    priced = {"4090": 2, "A100": 2}
    drams = ("1MB", "768GB")
    shares = (0.0, 1.0)
    ssds = (3, 6, 12)
    extreme_batch = 2
    sequence = 32


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def trial(toy: Toy, line: str) -> SimulatedStep:
    """On a GPU so slow that a toy's computation is not lost between the latencies of its transfers."""
    return toy.trial("toy", 4, machine("4090").with_(achieved_fraction=1e-5), line)


def begins(found: SimulatedStep, op: str) -> list[float]:
    assert found.timeline is not None
    return [span.start_s for span in found.timeline.spans if span.op == op]


def test_the_papers_server() -> None:
    for gpu, dollars, gib in (("4090", 1_600, 24), ("a100", 14_177, 80)):
        hardware = Hardware.preset(f"fuyou-{gpu}")
        host, device = hardware.hosts[0], hardware.devices[0]
        assert host.price_dollars == 14_098 + dollars + 12 * 308
        assert (host.dram_bytes, host.cpu_cores, device.memory_bytes) == (768e9, 52, gib * 2**30)
        assert (device.h2d_bandwidth, device.d2h_bandwidth, device.kind) == (26e9, 26e9, "cuda")
        disks = [(ssd.size_bytes, ssd.read_bandwidth, ssd.write_bandwidth) for ssd in host.ssds]
        assert disks == [(3.84e12, 6.5e9, 3.4e9)] * 12
        assert host.optimizer_params_per_s == pytest.approx(0.48 * 16 * 8 * 2.933e9 / 28, rel=1e-3)


def test_blocks_run_at_the_rate_that_the_paper_measured() -> None:
    assert machine("4090").devices[0].compute_s(164.15e12, 1e12, "bf16", 1000) == pytest.approx(1, rel=1e-3)
    assert machine("A100").devices[0].compute_s(200e12, 1e12, "bf16", 1000) == pytest.approx(1, rel=1e-3)
    assert machine("A100", block_rate=False) == Hardware.preset("fuyou-a100").with_(dram="768GB", ssds=12)
    half = with_rates(machine("A100"), ssd=0.5, optimizer=0.25)
    assert (half.hosts[0].ssds[0].read_bandwidth, half.hosts[0].ssds[0].write_bandwidth) == (3.25e9, 1.7e9)
    assert half.hosts[0].optimizer_params_per_s == machine("A100").hosts[0].optimizer_params_per_s / 4


@pytest.mark.slow
def test_flops_are_those_of_every_block_computed_again(toy: Toy) -> None:
    """Against the costs of the traced blocks: four forwards of each, and three of the head, which is not one."""
    blocks = toy.blocks(trial(toy, FUYOU).workload, machine("4090"))
    own = sum(block.cost.forward_flops for block in repeated_blocks(blocks))
    whole = sum(block.cost.forward_flops for block in blocks)
    config = find_model(GPT).config
    counted = step_flops(4, 32, config.n_layer, config.n_embd, config.vocab_size)
    assert counted == pytest.approx(4 * own + 3 * (whole - own), rel=1e-3)


def test_the_strategy_is_the_one_that_is_reproduced() -> None:
    assert STRATEGIES["fuyou"] == FUYOU


@pytest.mark.slow
def test_fuyou_keeps_everything_on_ssd_and_steps_under_the_backward(toy: Toy) -> None:
    found = trial(toy, FUYOU)
    assert set(found.decisions["ssd"].stages.values()) == {"all"}
    assert min(begins(found, "step")) < max(begins(found, "backward"))
    apart = trial(toy, APART)
    assert min(begins(apart, "step")) > max(begins(apart, "backward"))
    assert apart.step_s is not None and found.step_s is not None and apart.step_s > found.step_s


def test_zero_infinity_reads_and_fetches_what_is_due(toy: Toy) -> None:
    found = trial(toy, ZERO_INFINITY)
    assert found.decisions["ssd"].ahead == 0 and not any(found.decisions["fetch"].values())
    assert swap_coefficient(found) == 0
    assert {row.inputs_to for row in found.decisions["activations"].values()} == {"dram"}
    assert min(begins(found, "step")) > max(begins(found, "backward"))
    assert 0 < optimizer_share(found) < 1


def test_zero_offload_and_colossal_leave_disks_or_checkpoints_alone(toy: Toy) -> None:
    offload, colossal = trial(toy, ZERO_OFFLOAD), trial(toy, COLOSSAL)
    assert not begins(offload, "read") and begins(offload, "fetch")
    assert offload.timeline is not None and "ssd0" not in offload.timeline.peak_bytes
    assert set(colossal.decisions["ssd"].stages.values()) == {"states"}
    assert not colossal.decisions["activations"]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_swap_coefficient(toy: Toy, share: float) -> None:
    assert swap_coefficient(trial(toy, pipeline(f"share={share}"))) == pytest.approx(share, abs=0.15)


def test_a_step_takes_no_less_than_its_equations(toy: Toy) -> None:
    """The toy's transfers are so short that their latency, which the equations leave out, is most of its step."""
    found = trial(toy, FUYOU)
    load = toy.load(found)
    assert found.step_s is not None
    assert load.params == found.params and load.boundary_bytes == 4 * 4 * 32 * 64 * 2
    assert len(load.swappable) == 4 * 5  # of each block four products and attention


@pytest.mark.slow
def test_rows_that_did_not_fit_are_not_tried_again(toy: Toy) -> None:
    tight = machine("4090").with_(memory="1500kB")
    found = toy.trial("toy", 8, tight)
    assert found.workload.micro_batches > 1 and found.timeline is not None
    tried = set(toy.lab.trials)
    assert toy.trial("toy", 16, tight).timeline is not None
    assert max(work.micro_batch for work, _, _ in set(toy.lab.trials) - tried) <= found.workload.micro_batch


@pytest.mark.slow
def test_the_largest_model_grows_with_dram(toy: Toy) -> None:
    assert largest_models(toy, "4090", FUYOU) == [NONE, "toy"]


def test_prices() -> None:
    assert price("4090", 6, 3448.0).parts == 1000
    assert price("A100", 12, 31_971.0).whole == 1000
    rival, tflops = megatron(1e12)
    assert tflops == pytest.approx(173 / 0.75 * 25_000 / 31_971)
    assert rival.parts == pytest.approx(1000 * tflops / 14_177)


@pytest.mark.slow
def test_every_finding_of_a_toy() -> None:
    said: list[str] = []
    report = reproduce("fuyou", setup=Toy, say=said.append)
    assert [finding.key for finding in report.findings] == [f.__name__ for f in FINDINGS]
    assert all(finding.rows and finding.claim and finding.rule for finding in report.findings)
    assert all(r.why for f in report.findings for r in f.rows if r.verdict == DIFFERS and r.kind != DERIVED)
    text = markdown(report)
    assert "penstock reproduce fuyou" in text and all(f"## {key}:" in text for key in (f.key for f in report.findings))
    assert json.dumps(to_json(report)) and said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_paper_itself(tmp_path: Path) -> None:
    report = reproduce("fuyou")
    assert report.tally.agreeing > report.tally.measured / 2
    charts = [chart.name for finding in report.findings for chart in finding.charts]
    assert {f"{name}.{kind}" for name in charts for kind in ("png", "svg")} < {p.name for p in write(report, tmp_path)}
