"""Advice on the command line names its options, not the arguments of `penstock.compile`."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
from rich.table import Table

from penstock.cli.main import main
from penstock.cli.options import JobOptions
from penstock.cli.tables import console
from penstock.cli.terminal.spelling import OPTIONS, on_command_line, spell, spell_warnings
from penstock.ir.machine.hardware import Hardware

GPT = "gpt2:n_layer=1,n_embd=32,n_head=4,vocab_size=256,n_positions=64"
CPU = ["--model", GPT, "--hardware", "cpu", "--set", "num_devices=2", "--batch", "4", "--sequence", "16"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--micro-batches 3", "--micro-batches 3 does not divide the batch of 4"),
        ("--strategy gpip", "--strategy gpip is neither a strategy"),
        ("--strategy gpip{", "--strategy 'gpip{'"),
        ("--strategy async", "no --micro-batches with --strategy async: in asynchronous training"),
        ("--strategy async", "say, for instance, --micro-batches 4"),
        ("--precision bf15", "--precision bf15; allowed are"),
        ("--gradient-dtype fp64", "--gradient-dtype fp64; it is"),
        ("--boundary-dtype fp64", "--boundary-dtype fp64; it is"),
        ("--max-grad-norm 0", "--max-grad-norm 0.0; it must be a positive number"),
        ("--kernels fusd", "--kernels fusd; it is"),
        ("--compile-stages --kernels fused", "--compile-stages with --kernels fused"),
        ("--sequence 65", "--sequence 65, but gpt2"),
        pytest.param(
            "--set memory=100kB --strategy gpipe --no-alternatives",
            "this hardware with --set memory=",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refusals_of_plan_name_options(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    require_told(["plan", *CPU, *words.split()], told, capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--micro-batches 3", "--micro-batches 3 does not divide the batch of 4"),
        ("--strategy gpip", "--strategy gpip is neither a strategy"),
        ("--precision bf15", "--precision bf15; allowed are"),
    ],
)
def test_refusals_of_train_name_options(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a text of some words " * 40)
    files = ["--data", str(data), "--out", str(tmp_path / "out")]
    require_told(["train", *CPU, *files, *words.split()], told, capsys)


def require_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in said
    assert not [name for name in OPTIONS if f"{name}=" in said]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('such as strategy="gpipe", or freeze', "such as --strategy gpipe, or freeze"),
        ("(micro_batches=1 takes the batch whole)", "(--micro-batches 1 takes the batch whole)"),
        ("or micro_batches=... is possible", "or --micro-batches ... is possible"),
        ('leave micro_batches="auto"; max_grad_norm=None', "leave no --micro-batches; no --max-grad-norm"),
        ("with cuda_graphs=True and compile_stages=False.", "with --cuda-graphs and --no-compile-stages."),
        ("give ssd_dirs=[\"/mnt/a b\", '/mnt/c'], or", "give --ssd-dir '/mnt/a b' --ssd-dir /mnt/c, or"),
        ('with memory="26.7MB", dram="72.6MB".', "with --set memory=26.7MB, --set dram=72.6MB."),
        ("more micro_batches (now 2), or max_grad_norm", "more --micro-batches (now 2), or --max-grad-norm"),
        ("search_s=-1.5; timeout_s=1e3", "--search-seconds -1.5; --timeout 1000.0"),
    ],
)
def test_arguments_become_options(text: str, expected: str) -> None:
    assert on_command_line(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "penstock.compile(..., plan=job.plan)",
        'compile(model, precision="bf16-true", strategy="gpipe")',
        "schedule-async{micro_batches=4} and my_strategy=gpipe",
        "a plan of one batch, whose memory and strategy stay",
        "run.yaml:3: micro_batches: 'x' is no number; no key 'micro_batches'",
        "--set dram=4TB; partition-mip{stages=4}; weights=predict; lora:r=16",
    ],
)
def test_calls_and_options_of_passes_stay(text: str) -> None:
    assert on_command_line(text) == text


def test_a_gpu_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a text of some words " * 40)
    words = ["train", "--model", GPT, "--hardware", "4090x8", "--batch", "4", "--sequence", "16", "--data", str(data)]
    require_told(words, "--hardware auto is this machine, and --hardware cpu has CPU devices", capsys)


def test_warnings_and_tables_name_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = 'compile with micro_batches=1 or strategy="gpipe"'
    with pytest.warns(UserWarning, match="^compile with --micro-batches 1 or --strategy gpipe$"), spell_warnings():
        warnings.warn(text, stacklevel=1)
    table = Table(text, title=text)
    table.add_row(text)
    console().print(table)
    console().print(text)
    assert capsys.readouterr().out.count("with --micro-batches 1 or --strategy gpipe") == 4


def test_plain_data_names_options() -> None:
    data = {"rows": [{"reason": 'fits with memory="26.7MB"', "passes": "mesh{micro_batches=2}", "step_s": None}]}
    assert spell(data) == {"rows": [{**data["rows"][0], "reason": "fits with --set memory=26.7MB"}]}


def test_every_argument_has_its_option() -> None:
    """Of the arguments that the command line passes on to `penstock.compile`, three are made of several options."""
    passed = JobOptions()._wishes(Hardware.cpu(1), None).keys()
    assert passed - OPTIONS.keys() == {"optimizer", "param_groups", "weights"}
    names = {field.name.replace("_", "-") for field in dataclasses.fields(JobOptions)}
    assert set(OPTIONS.values()) <= names
