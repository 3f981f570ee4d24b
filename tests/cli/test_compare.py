"""What-if: several machines on one line, those that fit and those that do not, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.compare import MachineRow, price, unpriced_text
from penstock.cli.main import main
from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware

GPT = "gpt2:n_layer=2,n_embd=32,n_head=4,vocab_size=96,n_positions=64"
BATCH, SEQUENCE = 4, 16
MODEL = ["plan", "--model", GPT, "--batch", str(BATCH), "--sequence", str(SEQUENCE), "--strategy", "balanced"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*MODEL, *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def document(path: Path, memory: str, dram: str = "2GB", **host: Any) -> str:
    hardware = Hardware.cpu(num_devices=1, memory=memory, dram=dram)
    fields = hardware.model_dump()
    fields["hosts"][0].update(host)
    Hardware.model_validate({**fields, "name": path.stem}).save(path)
    return str(path)


@pytest.mark.slow
def test_machines_that_fit_and_one_that_does_not(run: Run, tmp_path: Path) -> None:
    bought = document(tmp_path / "bought.yaml", "64MB", price_dollars=2000.0)
    rented = document(tmp_path / "rented.yaml", "64MB", price_dollars_per_hour=7.2)
    small = document(tmp_path / "small.yaml", "64MB", dram="130kB")
    tight = document(tmp_path / "tight.yaml", "20kB")
    machines = [word for path in (bought, rented, small, tight) for word in ("--hardware", path)]
    code, out, err = run(*machines, "--json")
    rows = {row["machine"]: row for row in json.loads(out)}
    assert code == 0 and not err.removeprefix("planning; a large model takes a minute or more\n")
    assert list(rows) == ["bought", "rented", "small", "tight"]
    for name in ("bought", "rented", "small"):
        row = rows[name]
        assert row["fits"] and row["tokens_per_s"] == pytest.approx(BATCH * SEQUENCE / row["step_s"])
        assert 0 < row["peak_bytes"]["cpu0"] <= row["budget_bytes"]["cpu0"]
    rate = rows["bought"]["tokens_per_s"]
    assert rows["bought"]["tokens_per_s_per_1000_dollars"] == pytest.approx(rate / 2)
    assert rows["bought"]["tokens_per_dollar_of_rent"] is None
    assert rows["rented"]["tokens_per_dollar_of_rent"] == pytest.approx(rows["rented"]["tokens_per_s"] * 500)
    assert rows["rented"]["tokens_per_s_per_1000_dollars"] is None
    assert not rows["tight"]["fits"] and rows["tight"]["step_s"] is None and rows["tight"]["nearest"]
    reason = rows["tight"]["reason"]
    assert "needs" in reason and "Tried, and fits: this hardware with --set memory=" in reason


@pytest.mark.slow
def test_the_table(run: Run, tmp_path: Path) -> None:
    bought = document(tmp_path / "bought.yaml", "64MB", price_dollars=2000.0)
    tight = document(tmp_path / "tight.yaml", "20kB")
    code, out, _ = run("--hardware", bought, "--hardware", tight)
    assert code == 0
    for part in ("bought", "2,000 $", "tokens/s per 1000 $", "peak of each memory", "cpu0", "does not fit", "tight"):
        assert part in out, part
    assert "no price is known for tight" in out


@pytest.mark.slow
def test_none_fits(run: Run, tmp_path: Path) -> None:
    paths = [document(tmp_path / f"{name}.yaml", "20kB") for name in ("one", "two")]
    code, out, _ = run("--hardware", paths[0], "--hardware", paths[1])
    assert code == 2 and out.count("Tried, and fits") == 2


@pytest.mark.slow
def test_a_machine_without_the_precision_is_a_row(run: Run) -> None:
    code, out, _ = run("--hardware", "mobius-v100", "--hardware", "mobius-topo4", "--precision", "bf16", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["fits"] for row in rows] == [False, True]
    assert "bf16" in rows[0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hardware", "mobius-topo4", "--hardware", "mobius-topo5x"], "no hardware preset 'mobius-topo5x'"),
        (
            ["--hardware", "cpu", "--hardware", "cpu", "--out", "x"],
            "--out or --dump-passes: for one machine",
        ),
    ],
)
def test_mistakes(run: Run, arguments: list[str], said: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and said in err


def test_other_commands_take_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--model", GPT, "--hardware", "cpu", "--hardware", "mobius-topo4"])
    assert "only `penstock plan`" in capsys.readouterr().err


def test_prices() -> None:
    """The papers' prices; of several hosts the sum, and none where one host does not say."""
    assert price(Hardware.preset("mobius-8gpu")) == (20_000, None)
    assert price(Hardware.preset("mobius-v100")) == (None, 12.24)
    assert price(Hardware.preset("mics-p3dn:2"))[1] == pytest.approx(2 * 31.212)
    assert price(Hardware.preset("rtx4090x4")) == (None, None)
    two = Hardware.preset("mics-p3dn:2").model_dump()
    two["hosts"][1]["price_dollars_per_hour"] = None
    assert price(Hardware.model_validate(two)) == (None, None)
    assert unpriced_text([MachineRow("a", True, price_dollars=1.0), MachineRow("b", True)]).startswith(
        "no price is known for b"
    )
    assert unpriced_text([MachineRow("a", True, price_dollars_per_hour=1.0)]) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"h2d_bandwidth": 0}, "h2d_bandwidth"),
        ({"h2d_bandwidth": float("nan")}, "h2d_bandwidth"),
        ({"d2h_bandwidth": None}, "d2h_bandwidth"),
        ({"root_complex": 3}, "root_complex: found 3"),
        ({"host": 1}, "host: found 1"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth"),
        ({"op_overhead_s": float("nan")}, "op_overhead_s"),
        ({"peak_flops": {"fp32": float("nan")}}, "peak_flops"),
    ],
)
def test_a_device_that_dram_does_not_reach_or_a_rate_that_is_no_number(change: dict[str, Any], said: str) -> None:
    """All that keeps a device from DRAM is a link that is missing, without rate, or on a part that is not there."""
    fields = Hardware.preset("mobius-topo4").model_dump()
    fields["devices"][2].update(change)
    with pytest.raises(HardwareError, match=said):
        Hardware.model_validate(fields)
