"""The command line: what each command prints, and how mistakes are answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.main import main
from penstock.cli.options import JobOptions
from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware

GPT = "gpt2:n_layer=1,n_embd=32,n_head=4,vocab_size=96,n_positions=64"
CPU = ["--hardware", "cpu", "--set", "num_devices=1", "--batch", "4", "--sequence", "16", "--micro-batches", "2"]
GPIPE = [*CPU, "--strategy", "gpipe"]
COMMANDS = ("plan", "simulate", "explain", "profile", "check", "train", "hardware", "reproduce")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit code, stdout and stderr of a command line."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("penstock.cli.terminal.working.NOTICE_S", 1e6)
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --model gpt2 --gpu 4090", "instead of --gpu: --hardware 4090, or 2x4090"),
        ("train --learning-rate=1e-4", "instead of --learning-rate=1e-4: --lr ..."),
        ("train --load-in-4bit", "instead of --load-in-4bit: --base nf4"),
        ("train --fsdp full_shard", "instead of --fsdp: leave it out: the plan decides this"),
        ("train --config run.yaml", "leave it out: a file is an argument, `penstock train FILE.yaml`"),
        ("plan llama-3-8b", "a model is named by an option: --model llama-3-8b"),
    ],
)
def test_options_of_other_trainers_lead_to_ours(run: Run, words: str, said: str) -> None:
    code, _, error = run(*words.split())
    assert code == 2 and error.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("words", "body", "told"),
    [
        ("train --data none.txt --hardware cpu", "penstock.cli.training.prepare", "reading the data"),
        ("check", "penstock.cli.check_job.check_named", "training by the plan and by plain PyTorch"),
        ("profile", "penstock.cli.profile_table.profile_report", "timing blocks"),
    ],
)
def test_a_command_that_takes_seconds_says_so(
    run: Run, words: str, body: str, told: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def take_seconds(*_: object) -> None:
        said, begun_s = "", time.monotonic()
        while told not in said:
            assert time.monotonic() - begun_s < 10
            time.sleep(0.05)
            said += capsys.readouterr().err
        raise PlanError("enough")

    monkeypatch.setattr("penstock.cli.terminal.working.NOTICE_S", 0.0)
    monkeypatch.setattr(body, take_seconds)
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*words.split(), "--model", GPT)
    assert code == 2 and err == "error: enough\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `penstock plan --out --dump-passes` wrote."""
    out = tmp_path_factory.mktemp("job") / "out"
    with pytest.raises(SystemExit):
        main(["plan", "--model", GPT, *GPIPE, "--out", str(out), "--dump-passes", "--no-alternatives"])
    return out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    example = " ".join(out[out.index("Example: ") :].split())
    assert example.startswith(f"Example: penstock {command}")
    options = [word for word in example.split() if word.startswith("--")]
    assert all(option in out[: out.index("Example: ")] for option in options), options


@pytest.mark.parametrize("command", ["plan", "train", "adapters"])
def test_options_are_in_groups(run: Run, command: str) -> None:
    _, out, _ = run(command, "--help")
    groups = re.split(r"^╭─ (\w+) ─.*$", out, flags=re.MULTILINE)
    sizes = {name: len(re.findall(r"^│ +--\w", text, re.MULTILINE)) for name, text in zip(groups[1::2], groups[2::2])}
    assert {"Model", "Hardware", "Plan", "Optimizer", "Training"} <= sizes.keys()
    assert max(sizes.values()) <= 15, sizes


def test_help_and_mistyped_options_need_no_torch() -> None:
    code = "import sys, penstock.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_the_console_script_is_there_and_finds_this_machine() -> None:
    """Alone in its process: what another test has imported may be missing."""
    script = Path(sys.executable).with_name("penstock")
    listed, here = (
        subprocess.run([script, *words], capture_output=True, text=True) for words in (["--help"], ["hardware", "auto"])
    )
    assert listed.returncode == 0 and all(command in listed.stdout for command in COMMANDS)
    assert here.returncode == 0 and "devices on 1 host" in here.stdout, here.stderr


@pytest.mark.slow
def test_plan_prints_tables(run: Run) -> None:
    code, out, err = run("plan", "--model", GPT, "--hardware", "rtx4090x2", "--batch", "4", "--sequence", "32",
                         "--micro-batches", "2", "--strategy", "gpipe", "--full", "--no-alternatives")  # fmt: skip
    assert (code, err) == (0, "")
    for part in ("stages", "transformer.h.", "memory", "gpu1", "budget", "a step of", "rc0.0.down"):
        assert part in out, part


PROVED = ["plan", "--model", GPT, "--hardware", "rtx4090x2", "--batch", "4", "--sequence", "32", "--micro-batches", "2",
          "--no-alternatives"]  # fmt: skip


@pytest.mark.slow
def test_plan_proves_its_stages_if_asked(run: Run) -> None:
    code, out, _ = run(*PROVED, "--strategy", "mobius")
    assert code == 0 and "gap" not in out
    code, proved, _ = run(*PROVED, "--strategy", "mobius", "--prove", "--full")
    assert code == 0 and "(gap 0.00%) by trying every partition" in next(
        line for line in proved.splitlines() if line.startswith("proof ")
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--strategy", "gpipe"], "only the stages of partition-mip can be proved"),
        (["--hardware", "rtx4090x1"], "--prove: for one machine"),
        (["--plan", "plan.json"], "a plan that is searched"),
    ],
)
def test_plan_refuses_to_prove(run: Run, more: list[str], said: str) -> None:
    code, _, err = run(*PROVED, *more, "--prove")
    assert code == 2 and said in err


def test_plan_as_data(run: Run) -> None:
    """With the figures that words give."""
    asked = ["plan", "--model", GPT, *GPIPE, "--precision", "bf16", "--optimizer", "SGD", "--no-alternatives"]
    asked += ["--tokens", "1M", "--price", "2"]
    code, out, _ = run(*asked, "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["micro_batches"], plan["precision"], len(plan["hash"])) == (2, "bf16-mixed", 6)
    figures = plan["answer"]
    assert figures["step_s"] == plan["predicted"]["step_s"] > 0
    assert figures["items_per_s"] * figures["step_s"] == pytest.approx(figures["items"]) and figures["item"] == "token"
    assert figures["training_s"] * figures["items_per_s"] == pytest.approx(1e6) and figures["dollars_an_hour"] == 2
    assert figures["training_dollars"] == pytest.approx(figures["dollars_a_million"])
    assert figures["training_dollars"] == pytest.approx(2 * figures["training_s"] / 3600)
    assert 0 < figures["busy_share"] < 1.001 and figures["alternatives"] == []
    assert 0 <= figures["savings"]["by_plan"] <= figures["savings"]["in_all"] < 1
    _, said, _ = run(*asked)
    words = re.sub(r"\s+", " ", said)
    for part in (f"{figures['items_per_s']:,.0f} tokens", figures["busiest"].split()[0], "2 $ an hour", "1M tokens"):
        assert part in words, part


@pytest.mark.slow
def test_a_plan_can_be_carried_out_again(run: Run, written: Path, tmp_path: Path) -> None:
    edited = json.loads((written / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    _, out, _ = run("plan", "--model", GPT, *GPIPE, "--plan", str(tmp_path / "plan.json"), "--json")
    again = json.loads(out)
    assert again["decisions"] == edited["decisions"]


@pytest.mark.slow
def test_encoder_decoders_are_planned_over_many_devices(run: Run) -> None:
    code, out, err = run(
        "plan",
        "--model",
        "t5-small:num_layers=2",
        "--hardware",
        "mobius-topo2+2",
        "--batch",
        "4",
        "--sequence",
        "16",
        "--full",
    )
    assert code == 0 and "decoder" in out, err


@pytest.mark.slow
def test_written_passes(written: Path) -> None:
    names = [path.name for path in sorted((written / "passes").iterdir())]
    assert names[:3] == ["01-drop-masks.txt", "02-chunk-loss.txt", "03-interleave-forwards.txt"]
    assert names[-1] == "10-insert-optimizer.txt"
    assert "rt.step(" in (written / "passes" / names[-1]).read_text()


@pytest.mark.slow
def test_dumped_passes_are_printed(run: Run) -> None:
    _, out, _ = run("plan", "--model", GPT, *CPU, "--dump-passes", "--no-alternatives")
    assert out.index("# after coarsen") < out.index("# after insert-optimizer") < out.index("tokens a second")


def test_simulate_a_written_directory(run: Run, written: Path, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    code, out, _ = run("simulate", str(written), "--trace", str(trace))
    assert code == 0
    assert "busiest" in out and "compute" in out
    assert len(json.loads(trace.read_text())["traceEvents"]) > 10
    _, out, _ = run("simulate", str(written), "--json")
    found = json.loads(out)
    plan = json.loads((written / "plan.json").read_text())
    assert found["step_s"] == pytest.approx(plan["predicted"]["step_s"])
    assert found["peak_bytes"] == plan["predicted"]["peak_bytes"]


def test_explain_a_written_directory(run: Run, written: Path) -> None:
    code, out, _ = run("explain", str(written))
    assert code == 0 and len(out.splitlines()) <= 12
    assert out.splitlines()[1].startswith("fits        yes: cpu0") and "rivals" not in out.splitlines()
    code, whole, _ = run("explain", str(written), "--full")
    assert code == 0 and whole.startswith(out[: out.index("more  ")])
    out = whole
    assert "these programs as they are" in out and "computation 2x as fast" in out


@pytest.mark.slow
def test_explain_a_model(run: Run) -> None:
    code, out, _ = run("explain", "--model", GPT, *GPIPE, "--full")
    assert code == 0
    assert "planned anew" in out and "computation 2x as fast" in out


def test_check_a_written_directory(run: Run, written: Path) -> None:
    code, out, _ = run("check", "--job", str(written), "--steps", "1", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"]
    assert {row["what"] for row in report["differences"]} == {"loss", "gradient", "weight"}


@pytest.mark.slow
def test_check_exits_with_1_where_the_plan_differs(run: Run, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.compiler.check.eager.micro_batch_seed", lambda *where: 7)
    code, out, _ = run("check", "--job", str(written), "--steps", "1")
    assert code == 1
    assert "DIFFERS" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--model", "gtp2"], "did you mean gpt2"),
        (["plan"], "name a model: --model"),
        (["plan", "--model", GPT, "--hardware", "mobius-topo"], "mobius-topo2+2"),
        (["plan", "--model", GPT, "--hardware", "gone.yaml"], "cannot read the hardware document gone.yaml"),
        (["plan", "--model", GPT, "--hardware", "rtx4090x2", "--set", "drum=4TB"], "did you mean"),
        (["plan", "--model", GPT, "--set", "dram"], "not of the form key=value"),
        (["plan", "--model", GPT, *CPU, "--set", "ram=1GB"], "with --hardware cpu there are num_devices"),
        (["plan", "--model", GPT, *CPU, "--optimizer", "adamm"], "try adam"),
        (["plan", "--model", GPT, *CPU, "--tokens", "many"], "--tokens 'many': allowed is a number"),
        (["plan", "--model", GPT, *CPU, "--hardware", "4090", "--tokens", "1M"], "--tokens: for one machine"),
        (["plan", "--model", GPT, *CPU, "--hardware", "4090", "--price", "1"], "--price: for one machine"),
        (["plan", "--model", GPT, *CPU, "--precision", "fp4"], "allowed are"),
        (["plan", "--model", GPT, *CPU, "--strategy", "mobios"], "did you mean mobius"),
        (["plan", "--model", GPT, *CPU[:-1], "3"], "does not divide the batch of 4"),
        (["simulate"], "name a model"),
        (["simulate", "nowhere"], "not a directory that Job.write made"),
        (["simulate", "nowhere", "--model", GPT], "choose one"),
        (["check", "--job", "nowhere"], "not what `penstock plan --out` writes"),
        (["train", "--model", GPT], "--data FILE.txt"),
        (["hardware", "rtx4090x2", "--measure"], "it goes with `detect`"),
        (["hardware", "rtx4090x2", "--save", "/dev/null/box.yaml"], "Not a directory: '/dev/null/box.yaml'"),
    ],
)
def test_mistakes_are_one_message_on_stderr(run: Run, arguments: list[str], said: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("error: ") and said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--epochs", "inf"), ("--epochs", "nan"), ("--lr", "inf"), ("--lr", "-1"), ("--weight-decay", "inf"),
        ("--seed", "99999999999999999999999"), ("--batch", "99999999999999999999"),
        ("--price", "inf"),
    ],
)  # fmt: skip
def test_numbers_beyond_their_bounds_are_refused(run: Run, option: str, value: str) -> None:
    command = ["plan"] if option == "--price" else ["train", "--data", "none.txt"]
    code, _, err = run(*command, "--model", GPT, option, value)
    assert code == 2
    assert f"Invalid value for '{option}'" in err and "than or equal to" in err


def test_the_version(run: Run) -> None:
    status, shown, _ = run("--version")
    torch_version = metadata.version("torch")
    assert status == 0 and shown.startswith(f"penstock {penstock.__version__}, torch {torch_version}, Python 3.")


@pytest.mark.slow
def test_an_adapter_on_a_quantised_base_is_planned_without_their_libraries(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
    model = "llama3.2:1b:num_hidden_layers=2,hidden_size=256,intermediate_size=512,vocab_size=512"
    adapter = ("--adapter", "lora:r=64", "--base", "nf4")
    words = ("--hardware", "4090", "--sequence", "64", "--no-alternatives", "--json")
    status, shown, said = run("plan", "--model", model, *adapter, *words)
    assert status == 0, said
    assert json.loads(shown)["precision"] == "bf16-true"


def test_training_on_a_gpu_that_is_not_here_is_refused_before_data_is_read(run: Run, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = ("--data", str(tmp_path / "nothing.txt"), "--hardware", "4090", "--out", str(tmp_path / "out"))
    status, _, said = run("train", "--model", GPT, *arguments)
    assert status == 2 and "rtx4090x1: the plan needs 1 GPU on a host, torch" in said and "sees 0 here" in said


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(PlanError, match="gtp2"):
        main(["plan", "--model", "gtp2", "--debug"])


@pytest.mark.slow
def test_what_does_not_fit_says_what_is_missing(run: Run) -> None:
    machine = ["--hardware", "rtx4090x1", "--set", "memory=480MB", "--set", "dram=220MB", "--set", "ssds=0"]
    code, out, err = run("plan", "--model", "gpt2:n_layer=1", *machine, "--sequence", "64", "--precision", "fp16",
                         "--micro-batches", "1", "--strategy", "mobius", "--no-alternatives")  # fmt: skip
    assert code == 2 and not out
    assert err.startswith("does not fit: what lasts between steps needs 620 MiB (weights 88.6 MiB, masters 177 MiB")
    assert "Tried, and fits: this hardware with --set dram=" in err


def test_a_model_of_python_that_says_what_a_batch_holds(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(8, 8)\n"
        "    def example_inputs(self, rows):\n        return {'x': {'shape': [rows, 3, 8]}}\n"
        "    def forward(self, x):\n        return super().forward(x).square().mean()\n"
    )
    model = ["--model", f"{tmp_path / 'own.py'}:Own", *GPIPE]
    code, out, _ = run("plan", *model, "--no-alternatives")
    assert code == 0 and "own.py:Own on" in out and "4 rows, fp32" in out and "rows a second" in out
    assert run("check", *model, "--steps", "1")[0] == 0
    (tmp_path / "notes.txt").write_text("text")
    code, _, err = run("train", *model, "--data", str(tmp_path / "notes.txt"))
    assert code == 2 and "penstock train reads text" in err and "example_inputs=" in err


def test_hardware(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("hardware", "--list")
    assert code == 0 and "mobius-topo2+2" in out.splitlines()
    path = tmp_path / "box.yaml"
    _, out, _ = run("hardware", "rtx4090x2", "--set", "dram=512GB", "--save", str(path))
    assert "2 x cuda" in out and str(path) in out
    assert Hardware.load(path).hosts[0].dram_bytes == 512 * 10**9
    _, out, _ = run("hardware")
    assert "this-machine" in out


def test_options_that_were_written_are_recalled(tmp_path: Path) -> None:
    options = JobOptions(model=GPT, head="causal-lm", seed=3, dropout=False)
    options.remember(tmp_path)
    found: Any = JobOptions.recall(tmp_path)
    assert (found.model, found.head, found.seed, found.dropout) == (GPT, "causal-lm", 3, False)


@pytest.mark.slow
def test_the_biggest_model_is_planned_in_bounds() -> None:
    from penstock.bench.plan_time import CASES, measure

    _, options, _, limit_gb, exit_code = CASES[0]
    row = measure([sys.executable, "-m", "penstock.cli.main", "plan", *options])
    assert row["exit_code"] == exit_code
    assert row["peak_rss_gb"] <= limit_gb
