"""The report as a file: what is in it, and where it can be written."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.report.page import write
from penstock.compiler.report.page.kinds import KINDS as OP_KINDS
from penstock.compiler.report.page.machine import machine_facts
from penstock.compiler.report.page.spent import KINDS, spent_seconds
from penstock.ir.errors import PlanError
from penstock.ir.ops.table import ALL
from penstock.runtime.simulate import Span, Timeline
from penstock.tests.browser.report_pages import job_of

CHARTS = Path(write.__file__).parent / "charts"
BUILT = "e22c5b8148bea03b82c42428292a33d51ff1afc52383d0d52849162f8b7f36c9"  # by `make charts`


@pytest.fixture(scope="module")
def job() -> penstock.Job:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    hardware = penstock.Hardware.cpu(num_devices=2, memory="1MB", dram="1GB")
    return penstock.compile(
        model, hardware, example_inputs=torch.ones(4, 16), loss_fn=lambda out, batch: out.square().mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1), strategy="mobius", micro_batches=2,
    )  # fmt: skip


def facts_in(path: Path) -> dict[str, Any]:
    packed = re.search(r'id="facts">([^<]*)<', path.read_text())
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))  # type: ignore[no-any-return]


def test_texts_about_other_plans_may_be_spelled_anew(job: penstock.Job, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    plain = facts_in(job.report(path, what_if=False))["rivals"]
    assert facts_in(job.report(path, what_if=False, spell=str))["rivals"] == str(plain)


def test_it_holds_the_plan_and_every_span(job: penstock.Job, tmp_path: Path) -> None:
    facts = facts_in(job.report(tmp_path / "report.html", what_if=False))
    timeline = job.simulate()
    assert facts["verdict"]["step_s"] == timeline.step_s
    assert facts["verdict"]["plan"] == job.plan.hash
    assert len(facts["predicted"]["line"]) == len(timeline.spans)
    texts = [line.strip() for role in facts["roles"] for line in role["lines"]]
    for span, line in zip(timeline.spans, facts["predicted"]["line"]):
        assert texts[line].startswith(span.text)
    assert facts["measured"] is None
    assert {row["name"] for row in facts["memory"]} == set(timeline.memory)


def test_what_an_op_reads_is_made_before_it(job: penstock.Job, tmp_path: Path) -> None:
    facts = facts_in(job.report(tmp_path / "report.html", what_if=False))
    spans = facts["predicted"]
    end = {line: start + length for line, start, length in zip(spans["line"], spans["start"], spans["length"])}
    start = dict(zip(spans["line"], spans["start"]))
    assert len(facts["producers"]) > 4
    for line, before in facts["producers"].items():
        for other in before:
            assert end[other] <= start[int(line)] + 2, (line, other)  # units, to which times are rounded


@pytest.mark.slow
def test_what_lies_in_a_memory_adds_up_to_its_bytes(tmp_path: Path) -> None:
    job, _ = job_of(width=64, memory="1MB")
    memory = facts_in(job.report(tmp_path / "report.html", what_if=False))["memory"]
    assert any(each["lasting"]["arena"] for each in memory)
    for each in memory:
        for (begin, num), (end, _) in zip(each["points"], each["points"][1:]):
            if end - begin > 1000:  # units: between changes, which at one time come one after another
                now = (begin + end) / 2
                held = sum(
                    value for text, value, first, last in each["values"] if first <= now <= last and "arena" not in text
                )
                assert held + sum(each["lasting"].values()) == num, (each["name"], now)


def test_the_parts_of_a_step_add_up_to_it(job: penstock.Job, tmp_path: Path) -> None:
    facts = facts_in(job.report(tmp_path / "report.html", what_if=False))
    for row in facts["spent"]:
        assert sum(row[kind] for kind in KINDS) == pytest.approx(facts["verdict"]["from_rest_s"])


def test_every_op_that_takes_time_has_one_kind() -> None:
    told = [op for members in OP_KINDS.values() for op in members]
    assert sorted(op.name for op in told) == sorted(op.name for op in ALL.values() if op.streams)


def test_covered_time_counts_once() -> None:
    spans = [
        Span(0, "compute", "forward", "", 0.0, 2.0), Span(0, "h2d", "fetch", "", 1.0, 4.0),
        Span(0, "cpu", "step", "", 3.0, 5.0),
    ]  # fmt: skip
    assert spent_seconds(spans, 1, 7.0) == [
        {"computation": 2.0, "optimizer": 2.0, "exposed transfers": 1.0, "bubble": 2.0}
    ]


def test_nothing_is_loaded_from_anywhere(job: penstock.Job, tmp_path: Path) -> None:
    page = job.report(tmp_path / "report.html", what_if=False).read_text()
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"'](?!data:)[^\"']*", page) == []
    assert "default-src 'none'" in page
    assert "<!--" not in page


def test_other_machines_stand_in_it(job: penstock.Job, tmp_path: Path) -> None:
    machines = [{"machine": "larger", "step_s": 1.0, "price_dollars_per_hour": 2.0}]
    facts = facts_in(job.report(tmp_path / "report.html", what_if=False, machines=machines))
    assert facts["machines"] == machines


def test_a_price_is_told_where_the_hardware_has_none(job: penstock.Job, tmp_path: Path) -> None:
    facts = facts_in(job.report(tmp_path / "report.html", what_if=False, price_per_hour=1.5))
    assert facts["verdict"]["price_per_hour"] == 1.5


@pytest.mark.parametrize(("used", "shown"), [("ssd0", ["ssd0"]), ("ssd0.1", ["ssd0.0", "ssd0.1"]), (None, ["ssd0"])])
def test_disks_stand_in_the_picture_once(used: str | None, shown: list[str]) -> None:
    hardware = penstock.Hardware.preset("rtx4090x2").with_(ssds=2)
    moved = {} if used is None else {f"{used}.read": 5}
    timeline = Timeline([], ["gpu0", "gpu1"], moved_bytes=moved)
    nodes = [node["name"] for node in machine_facts(hardware, timeline, None)["nodes"]]
    assert [name for name in nodes if name.startswith("ssd")] == shown


@pytest.mark.parametrize("name", ["", "missing/report.html", "file/report.html"])
def test_a_path_that_cannot_be_written(job: penstock.Job, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"report: .* (is a folder|cannot be written)"):
        job.report(tmp_path / name)


def test_what_is_no_file_is_left_alone(job: penstock.Job) -> None:
    with pytest.raises(PlanError, match="/dev/null cannot be written: it is no file"):
        job.report("/dev/null", what_if=False)


def test_a_link_leads_to_the_page(job: penstock.Job, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("page.html")
    job.report(tmp_path / "link.html", what_if=False)
    assert (tmp_path / "link.html").is_symlink() and facts_in(tmp_path / "page.html")


def test_a_full_disk_leaves_the_old_page(job: penstock.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanError, match="No space left"):
        job.report(path, what_if=False)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_the_charts_are_those_that_were_built() -> None:
    assert hashlib.sha256((CHARTS / "charts.js").read_bytes()).hexdigest() == BUILT
    assert "Apache License" in (CHARTS / "LICENSE").read_text()
    assert "zrender" in (CHARTS / "NOTICE").read_text()
