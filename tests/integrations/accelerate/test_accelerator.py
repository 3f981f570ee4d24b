"""A loop with `Accelerator` trains the same where Penstock prepares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.utils.data import DataLoader
from transformers import get_scheduler

from penstock.compiler.api import _model_name
from penstock.errors import PlanError
from penstock.integrations import launch
from penstock.integrations.accelerate import PenstockAccelerator
from penstock.integrations.transformers.loss import TracedLoss
from penstock.ir.machine.hardware import Hardware
from penstock.tests.integrations.transformers.runs import TOLERANCE, causal, classifier, llama, padding
from penstock.tests.shown_elsewhere import slow_but

OURS: dict[str, Any] = {
    "hardware": Hardware.cpu(1, memory="8GB"), "compile_options": {"strategy": "mobius", "micro_batches": 2}
}  # fmt: skip


def loop(
    accelerator: Any, make: Any, clip: float | None = None, rows: int = 30
) -> tuple[list[float], list[float], Any]:
    """Two epochs of batches of 4, the last of which has 2; an evaluation after each."""
    model, data = make()
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "weight_decay": 0.1}], lr=3e-3)
    loader = DataLoader(data[:rows], batch_size=4, collate_fn=padding if make is llama else None)
    held_out = DataLoader(data[:7], batch_size=4, collate_fn=padding if make is llama else None)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=16)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    losses, evaluated = [], []
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(float(loss.detach()))
                accelerator.backward(loss / accelerator.gradient_accumulation_steps)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                outputs = model(**batch)
            evaluated += [float(outputs.loss), float(accelerator.gather(outputs.logits).mean())]
    model = accelerator.unwrap_model(model)
    accelerator.end_training()
    return losses, evaluated, model


@pytest.mark.filterwarnings("error::penstock.errors.StaleModelWarning")
@pytest.mark.parametrize("make", slow_but([classifier], [causal, llama, classifier]))
def test_the_same_run(make: Any) -> None:
    """Of batches of several lengths, too, and of evaluations of 4 and 3 rows."""
    losses, evaluated, model = loop(PenstockAccelerator(cpu=True, max_grad_norm=0.5, **OURS), make, 0.5)
    expected, others, plain = loop(Accelerator(cpu=True), make, 0.5)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-4, atol=TOLERANCE)
    torch.testing.assert_close(torch.tensor(evaluated), torch.tensor(others), rtol=2e-4, atol=TOLERANCE)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_a_loss_of_ones_own_is_named_by_its_model() -> None:
    model, _ = llama()
    assert _model_name(TracedLoss(model, lambda net, batch: net(**batch))) == _model_name(model)


@pytest.mark.slow
def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    def run(steps: int, state: Path | None = None, save: Path | None = None) -> list[float]:
        accelerator = PenstockAccelerator(cpu=True, **OURS)
        model, data = causal()
        loader = DataLoader(data[:16], batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
        if state is not None:
            accelerator.load_state(str(state))
        found = []
        for batch in list(loader)[4 - steps if state else 0 :][:steps]:
            loss = model.train()(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            found.append(float(loss.detach()))
        if save is not None:
            accelerator.save_state(str(save))
        accelerator.end_training()
        return found

    whole = run(4)
    assert run(2, save=tmp_path / "state") == whole[:2]
    assert run(2, state=tmp_path / "state") == pytest.approx(whole[2:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
     ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"), ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism_config")],
)  # fmt: skip
def test_another_plug_in_beside_it_is_refused(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(PlanError, match=f"{name}.*{variable}"):
        PenstockAccelerator(cpu=True)


def test_accumulation_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"gradient_accumulation_steps=2.*batch_size"):
        PenstockAccelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator = PenstockAccelerator(cpu=True, **OURS)
    accelerator.gradient_accumulation_steps = 2
    model, data = classifier()
    model, _ = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters()))
    with accelerator.accumulate(model), pytest.raises(PlanError, match=r"gradient_accumulation_steps=2.*batch_size"):
        model(**next(iter(DataLoader(data[:4], batch_size=4))))


@pytest.mark.slow
def test_a_norm_that_was_not_said_before_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--max-grad-norm 0\.5"):
        loop(PenstockAccelerator(cpu=True, **OURS), causal, 0.5)


@pytest.mark.slow
def test_a_loss_of_the_script_is_refused() -> None:
    accelerator = PenstockAccelerator(cpu=True, **OURS)
    model, rows = causal()
    loader = DataLoader(rows[:4], batch_size=4)
    model, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    loss = model.train()(**next(iter(loader))).loss
    with pytest.raises(PlanError, match="not the one that the prepared model returned"):
        accelerator.backward(2 * loss)
    accelerator.end_training()


def begin() -> tuple[Any, Any, Any, Any]:
    accelerator = PenstockAccelerator(cpu=True, **OURS)
    model, rows = causal()
    loader = DataLoader(rows[:4], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    return accelerator, model.train(), optimizer, next(iter(loader))


@pytest.mark.slow
def test_gradients_that_a_script_reads_are_refused() -> None:
    accelerator, model, optimizer, batch = begin()
    accelerator.backward(model(**batch).loss)
    with pytest.raises(PlanError, match=r"accelerator\.clip_grad_norm_ for torch\.nn\.utils"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PlanError, match="a gradient is read"):
        next(model.parameters()).grad.norm()
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    accelerator.end_training()


def test_a_step_whose_backward_or_update_is_left_out_is_refused() -> None:
    accelerator, model, optimizer, batch = begin()
    loss = model(**batch).loss
    with pytest.raises(PlanError, match=r"a second forward in training before accelerator\.backward"):
        model(**batch)
    accelerator.backward(loss)
    with pytest.raises(PlanError, match=r"before optimizer\.step.*batch_size"):
        model(**batch)
    optimizer.step()
    assert float(model(**batch).loss) < float(loss)
    accelerator.end_training()


def test_compilation_and_handlers_are_left_aside_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    AcceleratorState._reset_state(reset_partial_state=True)  # all accelerators of a process share it
    PenstockAccelerator(cpu=True, dynamo_backend="inductor", kwargs_handlers=handlers)
    AcceleratorState._reset_state(reset_partial_state=True)
    told = " ".join(caplog.messages)
    assert "dynamo_backend='INDUCTOR' is left aside: compile_options=" in told
    assert "DistributedDataParallelKwargs is left aside: the plan divides the work" in told


def run_script(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run a script by the launcher in this process, which is as it was afterwards."""
    monkeypatch.setattr(accelerate, "Accelerator", Accelerator)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text(text)
    launch.main([*options, str(tmp_path / "script.py")])


MAKE = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [(MAKE, "FSDP"), ("kind = 'accelerate'\n", "script.py ran without Penstock"), ("\n", "ran without Penstock")],
)
def test_the_launcher_ends_with_a_sentence(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        run_script(text, tmp_path, monkeypatch, "--hardware", "cpu")
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in printed and "Traceback" not in printed and "launch.py" not in printed
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))  # as torchrun reports it
    assert told in ChildFailedError("script.py", {0: failure}).format_msg()


def test_the_launcher_changes_figures_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{MAKE}print('DEVICES', accelerator.hardware.num_devices)\n"
    run_script(text, tmp_path, monkeypatch, "--hardware", "cpu", "--set", "num_devices=3")
    assert "DEVICES 3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_script(text, tmp_path, monkeypatch, "--hardware", "cpu", "--set", "cards=3")
    assert "--set cards: with --hardware cpu there are num_devices" in capsys.readouterr().err


SCRIPT = """
import sys, torch
from accelerate import Accelerator
from penstock.tests.integrations.accelerate.test_accelerator import causal, loop
losses, _, _ = loop(Accelerator(cpu=True), causal)
print("LOSSES", type(Accelerator()).__mro__[1].__name__, losses[-1])
"""


@pytest.mark.slow
def test_accelerate_launch_of_an_unchanged_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    told = []
    for extra in ([], ["-m", "penstock.integrations.launch", "--hardware", "cpu", "--set", "memory=1GB"]):
        ran = subprocess.run([*start, *extra, str(script)], capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        told.append(next(line for line in ran.stdout.splitlines() if line.startswith("LOSSES")).split())
    assert told[1][1] == "PenstockAccelerator" != told[0][1]
    assert float(told[1][2]) == pytest.approx(float(told[0][2]), abs=1e-4)
    assert "planning GPT2LMHeadModel on cpu" in ran.stderr and "bound by" in ran.stderr


RANKS = """
import json, os
from accelerate import Accelerator
from penstock.tests.integrations.accelerate.test_accelerator import causal, loop
from penstock.tests.integrations.transformers.runs import row
even = lambda: (causal()[0], [row(7 * i) for i in range(32)])  # rows with equal numbers of labels
losses, _, model = loop(Accelerator(cpu=True), even, rows=32)
with open(__file__ + os.environ["RANK"], "w") as file:
    json.dump([*losses, float(sum(p.double().square().sum() for p in model.parameters()))], file)
"""


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes_train_as_with_accelerate(tmp_path: Path) -> None:
    """Each loss is the mean of those of the processes, and the weights are the same."""
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ours = ["-m", "penstock.integrations.launch", "--hardware", "cpu", "--set", "memory=1GB", "--set", "num_devices=2"]
    found = []
    for extra in (ours, []):
        ran = subprocess.run([*start, *extra, str(script)], capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        rows = [json.loads(Path(f"{script}{rank}").read_text()) for rank in range(2)]
        found.append(torch.tensor(rows).mean(0))
    torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-5)
