"""The arguments of `penstock.compile` that the words of a command line become."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.options import JobOptions
from penstock.errors import PlanError
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec

GPT = "gpt2:n_layer=1,n_embd=32,n_head=2,vocab_size=100,n_positions=32"


def test_weight_decay_and_a_mask_of_it() -> None:
    options = JobOptions(optimizer="AdamW", lr=0.1, weight_decay=0.2, no_decay=["*.bias", "*ln_*"])
    assert options.optimizer_partial().keywords == {"lr": 0.1, "weight_decay": 0.2}
    assert options.param_groups() == [{"params": ["*.bias", "*ln_*"], "weight_decay": 0.0}]
    assert JobOptions().param_groups() is None
    assert JobOptions().optimizer_partial().keywords == {"lr": 5e-5}


@pytest.mark.slow
def test_the_mask_reaches_the_job() -> None:
    options = JobOptions(
        model=GPT, hardware=["cpu"], batch=2, sequence=16, micro_batches=1, strategy="gpipe", weight_decay=0.2,
        no_decay=["*.bias"],
    )  # fmt: skip
    spec = OptimizerSpec.from_json(options.compile().folder.settings.optimizer)
    assert spec.groups[0].options == {"weight_decay": 0.0}
    assert spec.groups[0].names is not None and all(name.endswith(".bias") for name in spec.groups[0].names)
    assert spec.groups[1].names is None and spec.kwargs["weight_decay"] == 0.2


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    options = JobOptions(model=GPT, hardware=["cpu"], sequence=16, no_decay=["*.biass"])
    with pytest.raises(PlanError, match=r"'\*.biass' matches no parameter; near are .*bias"):
        options.compile()


@pytest.mark.slow
def test_the_command_line_has_them() -> None:
    words = ["plan", "--model", GPT, "--hardware", "cpu", "--sequence", "16", "--strategy", "gpipe"]
    found = CliRunner().invoke(app, [*words, "--weight-decay", "0.1", "--no-decay", "*.bias", "--no-decay", "*ln_*"])
    assert found.exit_code == 0, found.output
