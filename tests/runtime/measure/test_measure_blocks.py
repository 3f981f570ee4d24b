"""Timing stages: what is run, and on what values. No test looks at how long anything took."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.compiler.profile.profile import write_samples
from penstock.graph.profile import distinct, samples
from penstock.ir.program import Interface
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.runtime.device.file import open_device_file
from penstock.runtime.measure import blocks as measure_blocks
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.passes.running import apply, draft_of, trace_case
from penstock.tests.zoo import token_batch, zoo

CPU = torch.device("cpu")


def folder_of(name: str, tmp_path: Path) -> Path:
    graph, _ = trace_case(name)
    blocks = apply(draft_of(graph), Coarsen()).blocks
    write_samples(tmp_path, samples(graph, blocks, distinct(blocks)))
    return tmp_path


NAMES = (
    "gpt2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "mixtral", "wide_resnet")),
    "lstm",
    "in_place",
    "custom_function",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_block_can_be_timed(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    interface = Interface.from_json((folder / "interface.json").read_text())
    rows = json.loads((folder / "rows.json").read_text())
    file = open_device_file(folder / "device0.py", interface, 0, TRUSTED)
    for stage, spec in interface.stages.items():
        found = measure_blocks.time_stage(file, spec, rows[stage], CPU, "fp32", slice_s=0.0)
        assert len(found) == 3 + bool(spec.saved) and all(0 < x < math.inf for x in found)


def test_a_round_is_both_forwards_and_a_backward_that_reaches_every_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("gpt2", tmp_path)
    interface = Interface.from_json((folder / "interface.json").read_text())
    file = open_device_file(folder / "device0.py", interface, 0, TRUSTED)
    forwards: list[bool | list[str]] = []
    grads: list[dict[str, Any]] = []
    forward, backward = StageRunner.forward, StageRunner.backward

    def watched_forward(self: StageRunner, inputs: Any, seed: int, keep: Any = True) -> Any:
        forwards.append(keep)
        found = forward(self, inputs, seed, keep)
        assert all(bool(torch.isfinite(value).all()) for value in found[0])
        return found

    def watched_backward(self: StageRunner, *args: Any) -> Any:
        found = backward(self, *args)
        grads.append(found[1])
        return found

    monkeypatch.setattr(StageRunner, "forward", watched_forward)
    monkeypatch.setattr(StageRunner, "backward", watched_backward)
    spec = interface.stages["stage2"]
    assert spec.title == "transformer.h.0"
    measure_blocks.time_stage(file, spec, {}, CPU, "fp32", slice_s=0.0)
    rounds = 1 + measure_blocks.LEAST_ROUNDS
    assert spec.saved and forwards == [False, True, [saved.name for saved in spec.saved]] * rounds
    assert len(grads) == 2 * rounds and all(own is grads[0] for own in grads)
    assert set(grads[0]) == {param.name for param in spec.params}
    assert all(bool(torch.isfinite(grad).all()) and bool(grad.any()) for grad in grads[0].values())


def test_low_precision_computes_as_its_plan_says(tmp_path: Path) -> None:
    model, _ = zoo()["gpt2"](dropout=0.0)
    low = torch.bfloat16
    graph = trace(model, token_batch(2, 12), autocast=low, param_dtype=low)
    blocks = apply(draft_of(graph, precision="bf16"), Coarsen()).blocks
    write_samples(tmp_path, samples(graph, blocks, distinct(blocks)))
    interface = Interface.from_json((tmp_path / "interface.json").read_text())
    assert {param.dtype for spec in interface.stages.values() for param in spec.params} == {"bfloat16"}
    file = open_device_file(tmp_path / "device0.py", interface, 0, TRUSTED)
    assert len(measure_blocks.time_stage(file, interface.stages["stage2"], {}, CPU, "bf16", slice_s=0.0)) == 4


def test_an_error_names_the_block(tmp_path: Path) -> None:
    folder = folder_of("mlp", tmp_path)
    interface = Interface.from_json((folder / "interface.json").read_text())
    (folder / "rows.json").write_text(json.dumps({name: {} for name in interface.stages}))
    (folder / "trust.json").write_text(json.dumps(asdict(TRUSTED)))
    text = (folder / "device0.py").read_text()
    (folder / "device0.py").write_text(text.replace("def forward(self", "def backwards(self", 1))
    title = next(iter(interface.stages.values())).title
    with pytest.raises(RuntimeError, match=f"block '{title}' cannot be timed on cpu"):
        measure_blocks.time_stages(str(folder), CPU, "fp32")


@pytest.mark.parametrize(("shares_cores", "seconds"), [(False, 3.0), (True, 10.0)])
def test_waits_for_others_do_not_count(shares_cores: bool, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = iter([100.0, 110.0]), iter([5.0, 12.0])
    monkeypatch.setattr(measure_blocks.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure_blocks, "waited_s", lambda: next(waits))
    watch = measure_blocks.Watch(CPU, shares_cores)
    watch.start()
    watch.stop()
    assert watch.seconds() == seconds


@pytest.mark.slow
def test_weights_of_one_block_at_a_time_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("gpt2", tmp_path)
    made: list[weakref.ref[torch.Tensor]] = []
    weights, time_stage = measure_blocks._weights, measure_blocks.time_stage

    def watched_weights(*args: Any) -> torch.Tensor:
        tensor = weights(*args)
        made.append(weakref.ref(tensor))
        return tensor

    def watched_stage(*args: Any, **kwargs: Any) -> list[float]:
        assert not any(reference() is not None for reference in made)
        return time_stage(*args, **kwargs, slice_s=0.0)

    monkeypatch.setattr(measure_blocks, "_weights", watched_weights)
    monkeypatch.setattr(measure_blocks, "time_stage", watched_stage)
    interface = Interface.from_json((folder / "interface.json").read_text())
    assert list(measure_blocks.time_stages(str(folder), CPU, "fp32")) == list(interface.stages)
    assert len(made) == sum(len(spec.params) for spec in interface.stages.values())
    assert not any(reference() is not None for reference in made)
