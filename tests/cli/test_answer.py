"""`penstock plan` answers on one screen."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from penstock.cli.answer import alternatives, answer, parse_tokens, print_answer
from penstock.cli.options import JobOptions, natural_precision
from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware

SMALL = "gpt2:n_layer=2,n_embd=128,n_head=4,vocab_size=512"


def options(**changes: object) -> JobOptions:
    given: dict[str, object] = {"model": SMALL, "hardware": ["4090"], "batch": 4, "sequence": 64, "search_seconds": 1.0}
    return JobOptions(**{**given, **changes})  # type: ignore[arg-type]


def printed(lines: list[str]) -> list[str]:
    screen = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_answer(screen, lines)
    return screen.export_text().splitlines()


def test_it_answers_on_one_screen() -> None:
    chosen = options()
    job = chosen.compile()
    others = list(alternatives(chosen, job, job.hardware))
    lines = printed(answer(chosen, job, parse_tokens("100M"), 0.4, others))
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    parts = ("fits        yes: gpu0", "tokens a second", "bound by", "stages on gpu0", "100M tokens", "0.4 $ an hour")
    for part in (*parts, "$ for 100M tokens", "a batch of 8", "of DRAM", "LoRA, r=16", "--full"):
        assert part in text, part
    rate = float(re.search(r"speed +([\d,]+) tokens", text)[1].replace(",", ""))  # type: ignore[index]
    assert rate == pytest.approx(4 * 64 / job.simulate().step_s, rel=1e-3)
    assert "bf16-mixed" in lines[0]


@pytest.mark.slow
def test_bf16_is_offered_where_it_was_left_out() -> None:
    chosen = options(precision="fp32")
    job = chosen.compile()
    names = [other.name for other in alternatives(chosen, job, job.hardware)]
    assert names[0] == "bf16-mixed"


@pytest.mark.slow
def test_more_dram_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options()
    job = chosen.compile()
    monkeypatch.setattr("penstock.cli.answer.tokens_per_s", lambda found, wish: 100.0 if found is job else 95.0)
    rates = {other.name: other.tokens_per_s for other in alternatives(chosen, job, job.hardware)}
    assert [rate for name, rate in rates.items() if "of DRAM" in name] == [100.0]
    assert rates["LoRA, r=16"] == 95.0


def test_without_a_price_it_asks_for_one() -> None:
    job = options().compile()
    assert "--price DOLLARS_AN_HOUR" in "\n".join(answer(options(), job, None, None, []))


@pytest.mark.parametrize(("text", "count"), [("100M", 1e8), ("2.5B", 2.5e9), ("1_000", 1e3), ("3k", 3e3), ("1e9", 1e9)])
def test_numbers_of_tokens(text: str, count: float) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["many", "", "-3M", "0", "5X"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--tokens"):
        parse_tokens(text)


def test_the_precision_is_that_of_the_parts() -> None:
    assert natural_precision(Hardware.from_any("4090x2")) == "bf16-mixed"
    assert natural_precision(Hardware.from_any("rtx2080tix2")) == "fp32"
    assert natural_precision(Hardware.cpu(2)) == "fp32"
    assert options(precision="fp16-mixed").precision_on(Hardware.from_any("4090")) == "fp16-mixed"


def test_dram_and_ssds_by_option() -> None:
    found = options(dram="48GB", ssd="2x1TB").machine()
    assert found.hosts[0].dram_bytes == 48 * 10**9
    assert [disk.size_bytes for disk in found.hosts[0].ssds] == [10**12] * 2
    assert found.hosts[0].ssds[0].read_bandwidth == Hardware.from_any("4090").hosts[0].ssds[0].read_bandwidth
    assert options(ssd="0").machine().hosts[0].ssds == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dram": "64"}, "--dram 64: without a unit that is 64 bytes; say --dram 64GB"),
        ({"ssd": "2"}, "--ssd 2: without a unit"),
        ({"ssd": "twox1TB"}, "--ssd 'twox1TB': allowed are a size"),
    ],
)
def test_amounts_of_another_form(changes: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        options(**changes).machine()
