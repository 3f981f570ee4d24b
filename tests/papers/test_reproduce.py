"""Paper reproductions: the counting rules on timelines made by hand, and every finding on models of toy size."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.papers.everything import reproduce_all
from penstock.papers.figures import Bars, Curves, draw
from penstock.papers.ftpipe import FineTuning, FtPipe
from penstock.papers.ftpipe.experiments import passing_row_s
from penstock.papers.lab import Lab, SimulatedStep, Transfer, Workload, exposed_share, profile_s, share_of_bytes
from penstock.papers.mobius import Mobius, mobius
from penstock.papers.report import (
    Finding,
    Report,
    markdown,
    paper_module,
    reproduce,
    tables,
    to_json,
    write,
)
from penstock.papers.rule import AGREES, DERIVED, DIFFERS, MEASURED, FigureRow, tally
from penstock.papers.table import AT_LEAST_ONE, FigureTable
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.runtime.simulate import Span, Timeline

GPT = "gpt2:n_layer=4,n_embd=64,n_head=4,vocab_size=512,n_positions=64"
T5 = "t5-small:d_model=32,d_kv=8,d_ff=64,num_layers=2,num_decoder_layers=2,num_heads=4,vocab_size=256"


class ToyMobius(Mobius):
    models = {"toy": (GPT, 2)}
    partitioned = mapped = rented = ("toy",)
    scaled = "toy"
    micro_batches = (1,)
    sequence = 32
    topologies = ("2+2",)
    scaling = ("1+1", "2+1")


class ToyFtPipe(FtPipe):
    large = T5
    shallow = T5.replace("num_layers=2", "num_layers=1").replace("num_decoder_layers=2", "num_decoder_layers=1")
    tasks = {
        "toy": FineTuning(4, 1, 16, 4, 100, 2, 1.5, 1.6, 1.4, 1.1, 2.5, model=T5),
        "plain": FineTuning(24, 3, 16, None, 100, 2, 1.5, 1.5, 1.5, model=GPT, state_bytes=8.0),
    }
    task = balanced = "toy"
    short, mitigated, pipedream = "plain", ("plain",), {2: 12.7}
    preset = "rtx3090x2"
    stages = (2, 4)
    batches = ((2, 1),)
    volume = (1, (16,))
    passing = 8


LINE = mobius("partition-balanced{stages=4}")


def made_by_hand(transfers: list[Transfer], spans: list[Span]) -> SimulatedStep:
    trial = SimulatedStep(Workload(GPT, 1, 2), Hardware.preset("mobius-topo2+2"), params=1)
    trial.timeline, trial.transfers = Timeline(spans, ["gpu0", "gpu1"]), transfers
    return trial


def test_exposed_is_what_moves_while_nothing_is_computed() -> None:
    spans = [
        Span(0, "h2d", "fetch", "", 0.0, 4.0),
        Span(0, "recv", "recv", "", 3.0, 5.0),
        Span(0, "compute", "forward", "", 1.0, 2.0),
        Span(0, "compute", "forward", "", 4.5, 10.0),
        Span(1, "compute", "forward", "", 0.0, 10.0),
        Span(1, "d2h", "offload", "", 2.0, 9.0),
    ]
    # device 0: moves from 0 to 5, of which 1 to 2 and 4.5 to 5 are hidden; device 1: all hidden
    assert exposed_share(made_by_hand([], spans)) == pytest.approx((3.5 + 0.0) / 2 / 10)


def test_a_step_by_eq_3_ends_with_the_last_backward() -> None:
    spans = [
        Span(0, "compute", "forward", "", 0.0, 2.0),
        Span(1, "compute", "backward", "", 2.0, 5.0),
        Span(0, "cpu", "step", "", 5.0, 9.0),
    ]
    trial = made_by_hand([], spans)
    assert (trial.step_s, trial.computed_s) == (9.0, 5.0)


def test_a_row_takes_what_it_takes_while_the_pipeline_is_full() -> None:
    """8 micro-batches of 2 rows, each 3 s apart in the middle, further apart while the pipeline fills and drains."""
    ends = [10.0, 15.0, 18.0, 21.0, 24.0, 27.0, 30.0, 40.0]
    spans = [Span(1, "compute", "backward", "", end - 1, end) for end in ends]
    spans += [Span(0, "compute", "forward", "", 0.0, 1.0)]
    trial = made_by_hand([], spans)
    trial.workload = Workload(GPT, 2, 8)
    assert passing_row_s(trial) == pytest.approx(3.0 / 2)


def test_bytes_count_by_the_rate_of_their_transfer() -> None:
    moved = [Transfer(0, "fetch", 26, 0.0, 2.0), Transfer(0, "send", 6, 0.0, 1.0), Transfer(1, "offload", 8, 1.0, 5.0)]
    trial = made_by_hand(moved, [])
    assert [t.rate for t in moved] == [13.0, 6.0, 2.0]
    assert share_of_bytes(trial, 12.0) == pytest.approx(26 / 40)
    assert share_of_bytes(trial, 0.0, 6.0) == pytest.approx(8 / 40)


def row(value: float | None, **how: Any) -> FigureRow:
    table = FigureTable()
    table.add("", "", value, **how)
    return table[0]


def test_a_ratio_names_both() -> None:
    table = FigureTable()
    assert table.ratio("", "theirs / ours", 3.0, 2.0, AT_LEAST_ONE) == 1.5
    assert table.ratio("", "theirs / ours", None, 2.0, AT_LEAST_ONE) is None
    assert [(r.quantity, r.paper, r.ours) for r in table] == [
        ("theirs / ours (3.00 s / 2.00 s)", "> 1x", "1.50x"),
        ("theirs / ours", "", "does not fit"),
    ]


def test_a_reason_is_given_only_where_something_differs() -> None:
    rows = {verdict: Finding("fig1", "a", "b", "c", [row], "because") for verdict, row in _rows().items()}
    pages = {verdict: markdown(Report("mobius", "title", {}, [finding])) for verdict, finding in rows.items()}
    assert "because" in pages[DIFFERS]
    assert "because" not in pages[AGREES]


def _rows() -> dict[str, Any]:
    return {DIFFERS: row(2.0, claim=1.0), AGREES: row(1.0, claim=1.0)}


@pytest.mark.slow
def test_swapped_weights_are_fetched_for_forward_and_backward() -> None:
    """Equation 1 of Mobius, counted on a model that swapping needs not: two copies down, but for the stages that are
    still there when backward begins; one gradient up; everything else is messages."""
    hardware = Hardware.preset("mobius-topo2+2")
    trial = Lab().trial(Workload(GPT, 2, 4, sequence=32), hardware, LINE.replace("{stages=4}", "{stages=6}"))
    weights = 2 * trial.params
    fetched = sum(t.moved_bytes for t in trial.transfers if t.op == "fetch")
    offloaded = sum(t.moved_bytes for t in trial.transfers if t.op == "offload")
    sent = sum(t.moved_bytes for t in trial.transfers if t.op == "send")
    down, up = trial.device_bytes
    assert weights < fetched < 2.5 * weights  # the tied embedding lies in two stages
    assert weights <= offloaded < 1.6 * weights
    loaded = down - fetched - sent
    assert 0 <= loaded < 0.02 * down  # the micro-batches' tokens
    assert up == pytest.approx(offloaded + sent, rel=0.02)


@pytest.mark.slow
def test_what_does_not_fit_is_a_trial_without_a_timeline() -> None:
    small = Hardware.preset("mobius-topo2+2", memory="100kB")
    trial = Lab().trial(Workload(GPT, 2, 4, sequence=32), small, LINE)
    assert trial.step_s is None
    assert "needs" in trial.misses


def test_equal_trials_are_made_once() -> None:
    said: list[str] = []
    lab, hardware = Lab(said.append), Hardware.preset("mobius-topo2+2")
    first = lab.trial(Workload(GPT, 2, 4, sequence=32), hardware, LINE)
    assert lab.trial(Workload(GPT, 2, 4, sequence=32), hardware.model_copy(), LINE) is first
    assert len(said) == 1


@pytest.mark.slow
def test_profiling_costs_the_distinct_blocks() -> None:
    hardware = Hardware.preset("mobius-topo2+2")
    few, more = (
        profile_s(Lab().draft(Workload(name, 2, 4, sequence=32), hardware, Coarsen()).blocks, hardware, "fp16", 3)
        for name in (GPT, GPT.replace("n_layer=4", "n_layer=8"))
    )
    assert few[0] == pytest.approx(more[0])
    assert more[1] > 1.3 * few[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "setup"), [("mobius", ToyMobius), pytest.param("ftpipe", ToyFtPipe, marks=pytest.mark.slow)]
)
def test_every_finding_of_a_toy(paper: str, setup: Any, tmp_path: Path) -> None:
    said: list[str] = []
    report = reproduce(paper, setup=setup, say=said.append)
    assert [finding.key for finding in report.findings] == [f.__name__ for f in paper_module(paper).FINDINGS]
    assert all(finding.rows and finding.claim and finding.rule for finding in report.findings)
    rows = [row for finding in report.findings for row in finding.rows]
    differing = [row for row in rows if row.verdict == DIFFERS and row.kind != DERIVED]
    assert differing and all(row.why for row in differing)
    assert said and len(list(tables(report))) == len(report.findings) + 2
    written = write(report, tmp_path)
    assert all(path.stat().st_size < 200_000 for path in written)
    charts = [chart.name for finding in report.findings for chart in finding.charts]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["README.md", "rows.json", *(f"{name}.{kind}" for name in charts for kind in ("png", "svg"))]
    )
    text = (tmp_path / "README.md").read_text()
    assert f"penstock reproduce {paper}" in text
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads(json.dumps(to_json(report)))


@pytest.mark.slow
def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    bars = Bars("bars", "t", "y", ["a", "b"], {"paper": [1.0, 2.0], "ours": [1.5, None]}, band=(1.0, 2.0))
    curves = Curves("curves", "t", "x", "y", {"paper: line": [(0, 0), (1, 1)], "ours": [(0, 0), (1, 2)]})
    for chart in (bars, curves):
        first = [path.read_bytes() for path in draw(chart, tmp_path)]
        assert [path.read_bytes() for path in draw(chart, tmp_path)] == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["modius"], "allowed are mobius, ftpipe"),
        (["mobius", "--only", "fig99"], "mobius has table3, fig5"),
        (["all"], "reproduce all with no --out"),
        (["all", "--only", "fig5", "--out", "out"], "reproduce all with --only fig5"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_figures_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    with pytest.raises(PlanError, match=r"penstock\[figures\]"):
        draw(Bars("bars", "t", "y", ["a"], {"ours": [1.0]}), tmp_path)


TOY = {"models": ToyMobius.models, "scaled": "toy", "sequence": ToyMobius.sequence}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "billions"),
    [(TOY, [0.000236928]), ({}, [3.33, 8.27, 12.85, 51.44])],
)
def test_the_command(
    changes: dict[str, Any],
    billions: list[float],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The finding that simulates nothing."""
    for name, value in changes.items():
        monkeypatch.setattr(Mobius, name, value)
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "mobius", "--only", "table3", "--json", "--out", str(tmp_path)])
    assert ended.value.code == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert [row["value"] for row in finding["rows"]] == pytest.approx(billions, rel=1e-3)
    assert (tmp_path / "README.md").is_file()


@pytest.mark.slow
@pytest.mark.multi
def test_all_pages_by_one_command(tmp_path: Path) -> None:
    """The cheapest finding of each paper, each paper in its own process."""
    cheap = {"mobius": ["table3"], "ftpipe": ["granularity"], "fuyou": ["table2"], "mics": ["fig2"]}
    written = reproduce_all(tmp_path, 2, cheap)
    assert {tmp_path / paper / "rows.json" for paper in cheap} | {tmp_path / "README.md"} <= set(written)
    text = (tmp_path / "README.md").read_text()
    assert all(f"]({paper}/README.md)" in text for paper in cheap) and "| **all** |" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("paper", ["mobius", "ftpipe"])
def test_the_papers_themselves(paper: str) -> None:
    rows = [row for finding in reproduce(paper).findings for row in finding.rows]
    counts = tally(rows)
    assert counts.agreeing > counts.measured / 2
    assert all(row.checks for row in rows if row.kind == MEASURED and row.verdict == DIFFERS)
