"""Written files run again, also after a person edited them; edits that cannot work are refused with file and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.ir.errors import PlanError, VerifyError, WorkerError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, zoo_case


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a swapping plan for two devices whose memory is used to the last byte."""
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=2, memory="250kB")
    options: dict[str, Any] = {
        "example_inputs": batch,
        "optimizer": SGD,
        "micro_batches": MICRO_BATCHES,
        "strategy": "balanced",
    }
    plan = penstock.compile(model, hardware, **options).plan
    assert plan.predicted is not None and plan.decisions.fetch
    peaks = plan.predicted.peak_bytes
    devices = [device.model_copy(update={"memory_bytes": peaks[device.name]}) for device in hardware.devices]
    job = penstock.compile(model, hardware.model_copy(update={"devices": devices}), plan=plan, **options)
    return job.write(tmp_path_factory.mktemp("written"))


def line_with(lines: list[str], *parts: str, after: int = 0) -> int:
    """Index of the first line from `after` on that holds all parts."""
    return next(i for i, line in enumerate(lines) if i >= after and all(part in line for part in parts))


def move(lines: list[str], source: int, target: int) -> list[str]:
    """The line `source` put in front of what is now line `target`."""
    line = lines.pop(source)
    lines.insert(target - (source < target), line)
    return lines


def no_colon(lines: list[str]) -> list[str]:
    at = line_with(lines, "def step")
    return [*lines[:at], "def step(rt, batch)", *lines[at + 1 :]]


def unknown_op(lines: list[str]) -> list[str]:
    return [line.replace("rt.fetch(", "rt.fetsch(") for line in lines]


def value_lost(lines: list[str]) -> list[str]:
    del lines[line_with(lines, "rt.free(", after=line_with(lines, "# backward"))]
    return lines


def used_after_free(lines: list[str]) -> list[str]:
    free = line_with(lines, "rt.free(add_7_m0", after=line_with(lines, "# backward"))
    return move(lines, free, line_with(lines, "rt.backward(", "micro_batch=0"))


def message_renamed(lines: list[str]) -> list[str]:
    at = line_with(lines, "rt.send(", 'tag="grad add_7.m0"')
    lines[at] = lines[at].replace("grad add_7.m0", "grad add_7.m9")
    return lines


def step_left_out(lines: list[str]) -> list[str]:
    del lines[line_with(lines, "rt.step(")]
    return lines


def same_micro_batch_twice(lines: list[str]) -> list[str]:
    at = line_with(lines, "rt.forward(", "micro_batch=1")
    lines[at] = lines[at].replace("micro_batch=1", "micro_batch=0")
    return lines


def freed_too_late(lines: list[str]) -> list[str]:
    """The inputs of the first micro-batch and its gradient stay until the second one's are there: one too much."""
    second = line_with(lines, "rt.backward(", "micro_batch=1")
    for name in ("rt.free(add_7_m0", "rt.free(d_add_7_m0"):
        move(lines, line_with(lines, name, after=line_with(lines, "# backward")), second + 1)
    return lines


def backward_before_the_last_forward(lines: list[str]) -> list[str]:
    """On device 0: it waits for a gradient whose device waits for this device's last forward."""
    forward = line_with(lines, "rt.forward(", f"micro_batch={MICRO_BATCHES - 1}")
    backward = line_with(lines, "rt.backward(", "micro_batch=0")
    recv = line_with(lines, "rt.recv(", 'tag="grad add_7.m0"')
    chosen = [line for i, line in enumerate(lines) if recv <= i <= backward and "rt.free" not in line]
    left = [line for i, line in enumerate(lines) if not (recv <= i <= backward and "rt.free" not in line)]
    return [*left[:forward], *chosen, *left[forward:]]


def member_left_out(lines: list[str]) -> list[str]:
    at = line_with(lines, "class Stage1")
    del lines[line_with(lines, "ln_f", after=at)]
    return lines


def other_shape(lines: list[str]) -> list[str]:
    at = line_with(lines, "LayerNorm((32,)")
    lines[at] = lines[at].replace("(32,)", "(33,)")
    return lines


@pytest.mark.parametrize(
    ("device", "edit", "said"),
    [
        (1, no_colon, "expected ':'"),
        (1, unknown_op, "fetsch"),
        (1, value_lost, "(?i)free"),
        (1, used_after_free, "add_7_m0"),
        (1, message_renamed, "grad add_7.m"),
        (1, step_left_out, "stage1"),
        (1, same_micro_batch_twice, "micro.batch"),
        (1, freed_too_late, "cpu1.*(?i:budget|memory|KiB)"),
        (0, backward_before_the_last_forward, "(?i)wait"),
        (1, member_left_out, "`self.transformer.ln_f` is no member"),
        (1, other_shape, r"33|\[32\]"),
    ],
)
def test_an_edit_that_cannot_work_is_refused(
    device: int, edit: Callable[[list[str]], list[str]], said: str, written: Path, tmp_path: Path
) -> None:
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / f"device{device}.py"
    before = file.read_text()
    file.write_text("\n".join(edit(before.splitlines())) + "\n")
    assert file.read_text() != before
    model, _ = zoo_case("gpt2")
    with pytest.raises(VerifyError) as caught:
        penstock.load(tmp_path, model)
    message = str(caught.value)
    found = re.match(rf"{re.escape(str(tmp_path))}/device[01]\.py:(\d+): ", message)
    assert found, message
    assert 1 <= int(found[1]) <= len(file.read_text().splitlines())
    assert re.search(said, message, re.DOTALL), message


def test_unedited_files_are_the_job_again(written: Path, tmp_path: Path) -> None:
    model, _ = zoo_case("gpt2")
    job = penstock.load(written, model)
    again = job.write(tmp_path / "again")
    for path in written.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert job.explain(full=True) and job.simulate().step_s == pytest.approx(job.plan.predicted.step_s)  # type: ignore[union-attr]


def test_an_edited_computation_is_what_runs(tmp_path: Path) -> None:
    """On a resident plan: a line moved, a comment added, and one activation replaced in the class."""
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1MB")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced"}
    job = penstock.compile(model, hardware, example_inputs=batch, **options)
    out = job.write(tmp_path / "out")
    text = (out / "device0.py").read_text()
    assert text == job.code(0)
    lines = text.splitlines()
    loads = [i for i, line in enumerate(lines) if "rt.load(" in line][:2]
    move(lines, loads[1], loads[0])
    lines.insert(loads[0], "    # a comment of my own")
    (out / "device0.py").write_text("\n".join(lines) + "\n")
    eager = Eager(model)
    with penstock.load(out, model) as job:
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0)
        assert_close(job.state_dict(), eager.model.state_dict(), 0.0)

    assert text.count("GELU(") >= 1
    edited = re.sub(r"nn\.GELU\([^)]*\)", "nn.ReLU()", text)
    (out / "device0.py").write_text(edited)
    model.body[1] = torch.nn.ReLU()
    eager = Eager(model)
    with penstock.load(out, model) as job:
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0)


def test_a_directory_or_model_that_is_not_its_own(written: Path, tmp_path: Path) -> None:
    model, _ = zoo_case("gpt2")
    with pytest.raises(PlanError, match=r"lacks plan\.json"):
        penstock.load(tmp_path, model)
    for path in written.iterdir():
        if path.name != "device1.py":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(PlanError, match=r"lacks device1\.py"):
        penstock.load(tmp_path, model)
    (tmp_path / "device1.py").write_bytes((written / "device1.py").read_bytes())
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(PlanError, match=r"settings\.json"):
        penstock.load(tmp_path, model)
    other, _ = zoo_case("bert")
    with pytest.raises(PlanError, match="the files are for gpt2"):
        penstock.load(written, other)


@pytest.mark.parametrize(
    ("statement", "said"), [("a = input_.reshape(5, 5)", "shape"), ("a = input_ @ input_", "mat1")]
)
def test_a_bad_op_in_a_stage_is_reported_at_its_line(statement: str, said: str, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB")
    options: dict[str, Any] = {"loss_fn": lambda out, _: out.mean(), "optimizer": SGD, "micro_batches": 1}
    options["strategy"] = "balanced"
    penstock.compile(model, hardware, example_inputs={"input": x}, **options).write(tmp_path)
    lines = (tmp_path / "device0.py").read_text().splitlines()
    at = line_with(lines, "def forward(self, input_") + 1
    lines.insert(at, f"        {statement}")
    (tmp_path / "device0.py").write_text("\n".join(lines) + "\n")
    with penstock.load(tmp_path, model) as job, pytest.raises(WorkerError, match=said) as caught:
        job.step({"input": x})
    assert f"--> {tmp_path}/device0.py:{at + 1}: {statement}" in str(caught.value)
