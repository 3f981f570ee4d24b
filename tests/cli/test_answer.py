"""`penstock plan` answers on one screen."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.answer import (
    alternatives,
    answer,
    or_what_fits,
    parse_tokens,
    print_answer,
    require_tokens,
    what_fits,
)
from penstock.cli.figures import Alternative, SsdWrites, figures_of, items_per_s
from penstock.cli.main import _find_job
from penstock.cli.options import JobOptions, PlanOptions, natural_precision
from penstock.compiler.job.job import Job
from penstock.compiler.plan import Plan
from penstock.ir.errors import DoesNotFit, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.units import time_text

SMALL = "gpt2:n_layer=1,n_embd=64,n_head=4,vocab_size=512"


def options(**changes: object) -> JobOptions:
    given: dict[str, object] = {"model": SMALL, "hardware": ["4090"], "batch": 4, "sequence": 64, "search_seconds": 0.2}
    return JobOptions(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def job() -> Job:
    return options().compile()


def say(asked: JobOptions, job: Job, tokens: float | None, price: float | None, others: list[Alternative]) -> list[str]:
    return answer(asked, job, figures_of(asked, job, tokens, price, others))


def print_screen(lines: list[str]) -> list[str]:
    screen = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_answer(screen, lines)
    return screen.export_text().splitlines()


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning", "error::UserWarning")  # of alternatives that nobody asked for
def test_it_answers_on_one_screen(job: Job) -> None:
    chosen = options()
    tried: list[str] = []
    others, same = alternatives(chosen, job, tried.append)
    assert same is job  # which has nothing in DRAM, and is no faster with more of it
    assert tried == ["with --dram 128GB", "with --batch 8", "with --adapter lora:r=16"]
    assert others[0].items_per_s == 4 * 64 / job.plan.predicted.step_s  # type: ignore[union-attr]
    lines = print_screen(say(chosen, job, parse_tokens("100M"), 0.4, others))
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    parts: tuple[str, ...]
    parts = ("fits        yes: gpu0", "tokens a second", "computation on gpu0", "1 stage on gpu0, 1 micro-batch;")
    parts += ("100M tokens", "0.4 $ an hour", "$ for 100M tokens", "--full", *(other.options for other in others))
    for part in parts:
        assert part in text, part
    rate = float(re.search(r"speed +([\d,]+) tokens", text)[1].replace(",", ""))  # type: ignore[index]
    assert rate == pytest.approx(4 * 64 / job.simulate().step_s, rel=1e-3)
    assert "bf16-mixed" in lines[0]


@pytest.mark.slow
def test_bf16_is_offered_where_it_was_left_out() -> None:
    chosen = options(precision="fp32")
    job = chosen.compile()
    assert alternatives(chosen, job, print)[0][1].options == "--precision bf16-mixed"


@pytest.mark.slow
def test_more_dram_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options()
    job = chosen.compile()
    monkeypatch.setattr("penstock.cli.answer.items_per_s", lambda plan, wish: 100.0 if plan is job.plan else 95.0)
    rates = {other.options: other.items_per_s for other in alternatives(chosen, job, print)[0]}
    assert rates == {"--batch 8": 95.0, "--dram 128GB": 100.0, "--adapter lora:r=16": 95.0}


@pytest.mark.parametrize(
    ("here", "there", "is_better", "promise"),
    [(100.0, 150.0, False, 150.0), (120.0, 150.0, True, 150.0), (120.0, 120.0, True, 120.0)],
    ids=["more DRAM is faster", "both are", "the passes are"],
)
def test_passes_that_suit_more_dram_are_tried_on_the_machine_as_it_is(
    job: Job, monkeypatch: pytest.MonkeyPatch, here: float, there: float, is_better: bool, promise: float
) -> None:
    """They become the plan if they are faster here; more DRAM is worth what it adds to that."""
    asked = options()

    def has_more(hardware: Hardware) -> bool:
        return hardware.hosts[0].dram_bytes > job.hardware.hosts[0].dram_bytes

    def find_plan(self: JobOptions, hardware: Hardware) -> Plan:
        anew = self.strategy == "auto" and has_more(hardware)
        passes = f"{job.plan.passes}, take-turns" if anew else self.strategy
        return job.plan.model_copy(update={"passes": passes, "rivals": [], "hardware": str(has_more(hardware))})

    def compile_job(self: JobOptions, hardware: Hardware) -> Any:
        plan = find_plan(self, hardware)
        return SimpleNamespace(plan=plan, folder=SimpleNamespace(plan=plan), hardware=hardware)

    def rate(plan: Plan, wish: JobOptions) -> float:
        if plan.passes == job.plan.passes or wish.batch != asked.batch:
            return 100.0
        return there if plan.hardware == "True" else here

    monkeypatch.setattr(JobOptions, "find_plan", find_plan)
    monkeypatch.setattr(JobOptions, "compile", compile_job)
    monkeypatch.setattr("penstock.cli.answer.items_per_s", rate)
    others, best = alternatives(asked, job, print)
    assert others[0] == Alternative("--dram 128GB", promise)
    assert (best is not job) == is_better
    if is_better:
        assert best.folder.plan.strategy == job.plan.strategy
        assert best.folder.plan.rivals[0].passes == job.plan.passes


PROMISES: list[dict[str, object]] = [
    {}, {"set": ["memory=8MB"], "dram": "60MB", "ssd": "0"},
    {"hardware": ["4090x2"], "set": ["memory=6MB"], "dram": "200MB", "adapter": "lora:r=4"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", PROMISES, ids=["a roomy card", "a small card", "two small cards"])
def test_what_an_alternative_promises_is_what_it_leads_to(changes: dict[str, object]) -> None:
    asked = options(**{"model": "gpt2:n_layer=4,n_embd=128,n_head=4,vocab_size=512", "search_seconds": 1.0, **changes})
    others, job = alternatives(asked, asked.compile(), print)
    for other in others:
        option, value = other.options.removeprefix("--").split()
        wished = replace(asked, **{option: int(value) if option == "batch" else value})
        assert other.items_per_s is not None
        assert items_per_s(wished.compile().plan, wished) == pytest.approx(other.items_per_s, rel=0.02), other
    assert others[0].items_per_s is not None and others[0].items_per_s >= items_per_s(job.plan, asked)


def test_only_what_is_faster_is_advice(job: Job) -> None:
    rate = 4 * 64 / job.simulate().step_s
    others = [
        Alternative("--batch 8", 1.5 * rate),
        Alternative("--dram 128GB", rate),
        Alternative("--adapter lora:r=16", 3 * rate),
        Alternative("--precision bf16-true", 0.9 * rate),
        Alternative("--batch 16", None, "does not fit"),
    ]
    lines = say(options(), job, None, None, others)[-4:-1]
    assert re.sub(r"[\d,]+ tokens", "N tokens", "\n".join(lines)) == (
        "instead     --adapter lora:r=16  N tokens a second, 3.00 times the speed\n"
        "            --batch 8            N tokens a second, 1.50 times the speed\n"
        "no faster   --dram 128GB; --precision bf16-true; --batch 16 (does not fit); by a short search"
    )


def test_a_card_without_work_and_a_disk_that_will_not_last_are_said(job: Job) -> None:
    figures = figures_of(options(), job, 1e6, None, [])
    assert not any(line.startswith(("not used", "warning")) for line in answer(options(), job, figures))
    two = Hardware.preset("rtx4090x2")
    beside: Any = SimpleNamespace(plan=job.plan, folder=job.folder, model=job.model, hardware=two)
    disks = (SsdWrites("ssd0", 3e15, 2.5), SsdWrites("ssd1", 3e14, 0.25), SsdWrites("ssd2", 3e14, None))
    lines = answer(options(), beside, replace(figures, written=disks))
    said = {line.split("  ")[0]: line for line in lines}
    assert said["not used"].split() == ["not", "used", "gpu1"]
    assert [line.split()[1] for line in lines if line.startswith("warning")] == ["ssd0"]
    assert "250.0% of its life; --dram with more" in said["warning"]


@pytest.mark.slow
def test_what_does_not_fit_is_answered_with_what_would() -> None:
    model = "gpt2:n_layer=4,n_embd=1024,n_head=8,vocab_size=512"
    large = options(model=model, dram="300MB", ssd="0", set=["memory=400MB"])
    with pytest.raises(DoesNotFit) as miss:
        large.compile()
    tried: list[str] = []
    others = what_fits(large, tried.append)
    assert tried == ["with --ssd 2TB", "with --adapter lora:r=16"]
    said = str(or_what_fits(miss.value, large, others))
    assert said.startswith(str(miss.value))
    for other in others:
        assert other.items_per_s is not None
        assert f"{other.options} ({other.items_per_s:,.0f} tokens a second)" in said
    assert or_what_fits(miss.value, large, []).nearest == miss.value.nearest


@pytest.mark.slow
def test_images_are_not_counted_in_tokens() -> None:
    images = options(model="vit-base:num_hidden_layers=2", batch=8)
    job = images.compile()
    lines = say(images, job, None, 1.0, [])
    assert lines[0].startswith("vit-base:num_hidden_layers=2 on rtx4090x1: 8 images, ")
    assert f"speed       {8 / job.simulate().step_s:,.0f} images a second" in lines[2]
    assert "$ a million images" in "\n".join(lines)
    with pytest.raises(PlanError, match=r"--tokens: vit-base.* takes images; leave it out"):
        require_tokens(images)
    require_tokens(options())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(35, "35.0 s"), (1051, "18 minutes"), (64800, "18.0 hours"), (270000, "75.0 hours (3.1 days)")],
)
def test_times_are_said_in_units_that_people_take(seconds: float, said: str) -> None:
    assert time_text(seconds) == said


def test_a_long_label_keeps_its_distance(job: Job) -> None:
    assert re.search(r"^12\.5M tokens \d", "\n".join(say(options(), job, 12.5e6, None, [])), re.MULTILINE)


def test_without_a_price_it_asks_for_one(job: Job) -> None:
    assert "--price DOLLARS_AN_HOUR" in "\n".join(say(options(), job, None, None, []))


@pytest.mark.parametrize(("text", "count"), [("100M", 1e8), ("2.5B", 2.5e9), ("1_000", 1e3), ("3k", 3e3), ("1e9", 1e9)])
def test_numbers_of_tokens(text: str, count: float) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["many", "", "-3M", "0", "5X", "1e400"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--tokens"):
        parse_tokens(text)


def test_the_precision_is_that_of_the_parts() -> None:
    assert natural_precision(Hardware.from_any("4090x2")) == "bf16-mixed"
    assert natural_precision(Hardware.from_any("rtx2080tix2")) == "fp32"
    assert natural_precision(Hardware.cpu(2)) == "fp32"
    assert options(precision="fp16-mixed").precision_on(Hardware.from_any("4090")) == "fp16-mixed"


@pytest.mark.parametrize(("typed", "num_bytes"), [
    ("48gb", 48 * 10**9), ("48G", 48 * 10**9), ("48 GB", 48 * 10**9), ("48gib", 48 * 2**30), ("0.5tb", 5 * 10**11),
])  # fmt: skip
def test_amounts_as_people_type_them(typed: str, num_bytes: int) -> None:
    assert options(dram=typed).machine().hosts[0].dram_bytes == num_bytes


def test_a_key_that_names_bytes_takes_a_number() -> None:
    found = options(set=["memory_bytes=24000000000", "dram_bytes=64000000000"]).machine()
    assert found.devices[0].memory_bytes == 24 * 10**9 and found.hosts[0].dram_bytes == 64 * 10**9


def test_blocks_of_alternatives_are_timed_only_if_asked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = PlanOptions(model=SMALL, hardware=["4090"], batch=4, sequence=64, profile=True)
    monkeypatch.setattr(PlanOptions, "compile", lambda *_: job)
    found, others = _find_job(asked, None, None, print)
    assert found is job and others is None
    (line,) = (each for each in answer(asked, job, figures_of(asked, job, None, None, None)) if "instead" in each)
    assert "not tried, as the blocks of each would be timed, too; --alternatives plans" in line


def test_dram_and_ssds_by_option() -> None:
    found = options(dram="48GB", ssd="2x1TB").machine()
    assert found.hosts[0].dram_bytes == 48 * 10**9
    assert [disk.size_bytes for disk in found.hosts[0].ssds] == [10**12] * 2
    assert found.hosts[0].ssds[0].read_bandwidth == Hardware.from_any("4090").hosts[0].ssds[0].read_bandwidth
    assert options(ssd="0").machine().hosts[0].ssds == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dram": "a lot"}, "--dram 'a lot': allowed is an amount with its unit, such as 64GB"),
        ({"dram": "-5GB"}, "--dram '-5GB': allowed is an amount"),
        ({"dram": "64GBB"}, "--dram '64GBB': allowed is an amount"),
        ({"dram": "64"}, "--dram 64: without a unit that is 64 bytes; say --dram 64GB"),
        ({"ssd": "2"}, "--ssd 2: without a unit"),
        ({"set": ["memory=24"]}, "--set memory=24: without a unit that is 24 bytes; say --set memory=24GB or 24GiB"),
        ({"hardware": ["cpu"], "set": ["dram=1.5"]}, r"--set dram=1.5: without a unit that is 1.5 bytes"),
        ({"ssd": "4x"}, "--ssd '4x': allowed are a size"),
        ({"ssd": "twox1TB"}, "--ssd 'twox1TB': allowed are a size"),
    ],
)
def test_amounts_of_another_form(changes: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        options(**changes).machine()


@pytest.mark.slow
def test_it_says_where_weights_and_activations_wait(job: Job) -> None:
    small = options(strategy="fuyou", batch=64, set=["memory=20MB"])
    plan = small.compile()
    assert any(row.classes_to == "dram" for row in plan.plan.decisions.activations.values())
    line = next(line for line in say(small, plan, None, None, []) if line.startswith("plan "))
    assert "; weights on SSD; optimizer states on SSD; activations" in line and line.endswith(", some wait in DRAM")
    resident = next(line for line in say(options(), job, None, None, []) if line.startswith("plan "))
    assert "; weights on the device;" in resident and "wait" not in resident
