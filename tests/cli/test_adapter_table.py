"""Bases and ranks of adapters from the command line: what fits a machine, and how fast."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.compiler.models.named import find_model
from penstock.ir.errors import PlanError

MODEL = "llama-8b:num_hidden_layers=2,hidden_size=256,intermediate_size=512,num_attention_heads=4,"
MODEL += "num_key_value_heads=2,vocab_size=1024"
OPTIONS = ["--model", MODEL, "--hardware", "laptop-16gb", "--batch", "2", "--sequence", "64", "--search-seconds", "0"]


@pytest.mark.slow
def test_a_row_for_each_base_and_rank() -> None:
    ran = CliRunner().invoke(app, ["adapters", *OPTIONS, "--rank", "8", "--json"])
    assert ran.exit_code == 0, ran.output
    rows = {row["base"]: row for row in json.loads(ran.stdout)}
    assert list(rows) == ["bf16", "int8", "nf4"] and all(row["rank"] == 8 for row in rows.values())
    assert all(row["step_s"] >= row["bound_s"] > 0 for row in rows.values())
    peaks = [max(row["peak_bytes"].values()) for row in rows.values()]
    assert peaks[0] > peaks[1] > peaks[2]  # the fewer bits, the less lies on the device


@pytest.mark.slow
def test_what_does_not_fit_says_why() -> None:
    ran = CliRunner().invoke(app, ["adapters", *OPTIONS, "--set", "memory=16MB", "--set", "dram=1MB"])
    assert ran.exit_code == 0 and "does not fit" in ran.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"base": "nf4"}, "--base nf4 without --adapter"),
        ({"base": "int3", "adapter": "lora"}, "allowed are bf16, int8, nf4"),
    ],
)
def test_a_base_that_is_none_is_named(more: dict[str, str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        find_model(MODEL, **more)  # type: ignore[arg-type]


def test_new_weights_are_not_quantised() -> None:
    with pytest.raises(PlanError, match="has no weights here that could be quantised"):
        find_model(MODEL, adapter="lora", base="nf4").load()
