"""`penstock plan --html`: the page of one machine with its price, and of several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.ir.machine.hardware import Hardware
from penstock.tests.compiler.report.test_page import facts_in

GPT = "gpt2:n_layer=2,n_embd=32,n_head=4,vocab_size=96,n_positions=64"
PLAN = ["plan", "--model", GPT, "--batch", "4", "--sequence", "16", "--strategy", "balanced", "--no-alternatives",
        "--micro-batches", "2"]  # fmt: skip


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*PLAN, *words])
    return int(ended.value.code or 0)


def machine(path: Path, memory: str) -> str:
    Hardware.cpu(num_devices=1, memory=memory, dram="1GB").model_copy(update={"name": path.stem}).save(path)
    return str(path)


@pytest.mark.slow
def test_one_machine_with_its_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.compiler.search.what_helps.HELP_S", 0.0)
    page = tmp_path / "plan.html"
    assert run("--hardware", machine(tmp_path / "box.yaml", "64MB"), "--price", "1.5", "--html", str(page)) == 0
    assert facts_in(page)["verdict"]["price_per_hour"] == 1.5
    assert "plan.html: open it in a browser" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_several_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large, small = machine(tmp_path / "large.yaml", "64MB"), machine(tmp_path / "small.yaml", "20kB")
    page = tmp_path / "plan.html"
    assert run("--hardware", small, "--hardware", large, "--html", str(page)) == 0
    facts = facts_in(page)
    assert facts["verdict"]["hardware"] == "large"
    assert [(row["machine"], row["fits"]) for row in facts["machines"]] == [("small", False), ("large", True)]
    assert "this hardware with --set memory=" in facts["machines"][0]["reason"]
    assert "plan.html: open it in a browser" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_no_page_where_none_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [machine(tmp_path / f"{name}.yaml", "20kB") for name in ("a", "b")]
    page = tmp_path / "plan.html"
    assert run("--hardware", small[0], "--hardware", small[1], "--html", str(page)) != 0
    assert not page.exists() and "no report: the model fits none" in capsys.readouterr().out
