"""`explain`: the page that says why this plan. Figures are replaced by #, so that only the words are compared."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.tables import plan_tables
from penstock.compiler.plan import Rival
from penstock.compiler.report.explain import explain
from penstock.compiler.search.candidate import RESERVOIR
from penstock.compiler.search.what_helps import changed_machines
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.program import pooled_bytes, profile_memory
from penstock.ir.units import format_bytes, format_seconds
from penstock.passes.optimizer.overlap_optimizer import EXPLAINED
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.runtime.optimizer.spec import OptimizerSpec
from penstock.runtime.simulate import simulate
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case

FIGURE = re.compile(r"[+-]?\d+(?:\.\d+)?(?:%|x| ?(?:[KMGT]iB|B|us|ms|ns|s)\b)?")

MACHINE = """
name: two small devices
source: made up for this test
hosts:
  - dram_bytes: 2GB
    dram_bandwidth: 10GB/s
    cpu_cores: 2
    optimizer_params_per_s: 1e9
    root_complexes: [{bandwidth_up: 10GB/s, bandwidth_down: 10GB/s}]
devices:
  - {name: left, kind: cpu, memory_bytes: 250kB, <<: &rates {memory_bandwidth: 10GB/s, h2d_bandwidth: 10GB/s,
     d2h_bandwidth: 10GB/s, peak_flops: {fp32: 5e10}, achieved_fraction: 0.5}}
  - {name: right, kind: cpu, memory_bytes: 64MB, <<: *rates}
"""


def normalise(text: str) -> str:
    """Figures as "#", runs of spaces as one."""
    text = re.sub(r"plan [0-9a-f]{6}:", "plan #:", text)
    names = re.compile(r"(?<![\w.])" + FIGURE.pattern)
    return "\n".join(
        "  " * line.startswith("  ") + " ".join(names.sub("#", line).split()) for line in text.splitlines()
    )


def machines_of(hardware: penstock.Hardware) -> dict[str, penstock.Hardware | None]:
    return {change.text: change.machine for change in changed_machines(hardware)}


def job_on(hardware: Any, **options: Any) -> penstock.Job:
    model, batch = zoo_case("gpt2")
    return penstock.compile(
        model, hardware, example_inputs=batch, **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, **options}
    )


def test_the_whole_page(golden: Any, tmp_path: Any) -> None:
    (tmp_path / "machine.yaml").write_text(MACHINE)
    line = STRATEGIES["balanced"].replace("balanced", "balanced{stages=2}")
    job = job_on(tmp_path / "machine.yaml", strategy=line)
    rivals = [
        Rival(name="8 stages, 4 micro-batches", reason="cpu0 has 1.00 MiB and needs 2.00 MiB"),
        Rival(name="6 stages, 4 micro-batches", step_s=0.02, reason="100.0% slower (20.0 ms)"),
        Rival(name="4 stages, 4 micro-batches", step_s=0.015, reason="50.0% slower (15.0 ms)"),
    ]
    plan = job.plan.model_copy(update={"rivals": rivals})
    spec = OptimizerSpec.from_json(job.folder.settings.optimizer)
    golden(normalise(explain(plan, job.programs, job.hardware, job._pages.records, optimizer=spec)) + "\n", "explain")


@pytest.mark.slow
def test_bounds_are_bounds_and_what_if_questions_are_simulated() -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=2, memory="250kB"), strategy="balanced")
    text = job.explain(full=True)
    timeline = job.simulate()
    found = re.search(r"this one takes ([\d.]+)x the larger", text)
    assert found and float(found[1]) >= 1.0
    name, share = timeline.bottleneck()
    assert f"bound by {name}, busy {share:.0%}" in text
    flat = " ".join(text.split())
    floor = re.search(r"no plan for this machine is faster than ([\d.]+) ms \(", flat)
    assert floor and float(floor[1]) <= timeline.from_rest_s * 1e3 * 1.01
    assert re.search(r"could save more than \d+% of a step: at most \d+% by another plan", flat)
    rows = re.findall(r"  (\S.*?) +[\d.]+ \w+ a step, (\d+)% less", text)  # the old plan runs there, too
    saved = {what.strip(): int(percent) for what, percent in rows}
    assert set(saved) == {
        "one more device", "one more root complex", "64 GB more DRAM", "links to DRAM 2x as fast",
        "computation 2x as fast", "optimizer on the host 2x as fast",
    }  # fmt: skip
    assert saved["computation 2x as fast"] > 10 and saved["64 GB more DRAM"] == 0  # which it has already
    assert all(0 <= percent <= 51 for what, percent in saved.items() if what != "one more device")


@pytest.mark.slow
def test_what_would_help_is_planned_anew_once() -> None:
    """The whole page comes from searches on other machines; asking again costs nothing."""
    model, batch = zoo_case("mlp")

    def plan_for(hardware: penstock.Hardware, strategy: str) -> penstock.Job:
        return penstock.compile(
            model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy=strategy
        )

    job = plan_for(penstock.Hardware.cpu(num_devices=2), "balanced")
    assert job._pages.helps is None
    text = job.explain(full=True)
    found = job._pages.helps
    assert found and job.explain(full=True) == text and job._pages.helps is found
    for help in found:
        machine = machines_of(job.hardware)[help.change]
        assert machine is not None and help.step_s is not None
        again = plan_for(machine, job.plan.passes)  # the chosen pipeline is among what was tried
        assert help.step_s <= again.simulate().step_s * 1.0001


@pytest.mark.slow
def test_what_cannot_be_planned_says_why() -> None:
    lonely = penstock.Hardware.cpu(num_devices=1)
    assert machines_of(lonely)["one more root complex"] is None
    job = job_on(lonely, strategy="balanced")
    row = next(line for line in job.explain(full=True).splitlines() if "one more root complex" in line)
    assert "no such change" in row


def test_a_device_whose_memory_is_dram_gets_no_other_beside_it() -> None:
    shared, apart = (machines_of(penstock.Hardware.preset(name)) for name in ("dgx-spark", "gh200"))
    assert apart.keys() - shared.keys() == {"one more GPU"}
    more = shared["64 GB more DRAM"]
    assert more is not None and more.dram_budget_bytes() > 50 * 10**9


def test_changed_machines_are_whole_documents() -> None:
    """More of one thing, and its links with it: what a machine remembers of itself does not come along."""
    hardware = penstock.Hardware.preset("mobius-topo4")
    hardware.links()
    machines = machines_of(hardware)
    more = machines["one more GPU"]
    assert more is not None and more.num_devices == 5 and "gpu4.down" in more.links()
    split = machines["one more root complex"]
    assert split is not None and [d.root_complex for d in split.devices] == [0, 0, 1, 1]
    fast = machines["links to DRAM 2x as fast"]
    assert fast is not None and fast.bandwidth("dram0", "gpu0") == 2 * hardware.bandwidth("dram0", "gpu0")
    dram = machines["64 GB more DRAM"]
    assert dram is not None and dram.hosts[0].dram_bytes - hardware.hosts[0].dram_bytes == 64 * 10**9


@pytest.mark.slow
def test_lines_are_short_and_reasons_whole() -> None:
    """However many links and however long a reason."""
    job = job_on("mobius-8gpu", strategy="balanced")
    reason = "cpu0 has 1.00 MiB and needs 2.00 MiB; " * 8 + "the end"
    rivals = [Rival(name="partition-balanced{stages=8}, 4 micro-batches", reason=reason)]
    plan = job.plan.model_copy(update={"rivals": rivals, "notes": {"partition-mip": "proven within 1.2%"}})
    text = explain(plan, job.programs, job.hardware, helps=[])
    assert max(map(len, text.splitlines())) <= 160
    assert "the end" in text and "partition-mip: proven within 1.2%" in text


@pytest.mark.slow
def test_an_auto_plan_lists_its_rivals_fastest_first() -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=2), micro_batches="auto")
    rows = job.explain(full=True).partition("rivals\n")[2].partition("\n\n")[0].splitlines()
    shown, alike = job.plan.distinct_rivals()
    assert len(shown) + alike == len(job.plan.rivals) and len([r for r in rows if not r.startswith("   ")]) == (
        len(shown) + bool(alike)
    )
    slower = [float(found[1]) for row in rows if (found := re.search(r"([\d.]+)% slower", row))]
    assert slower == sorted(slower)


@pytest.mark.slow
def test_a_loaded_job_explains_itself_without_its_passes(tmp_path: Any) -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=1), strategy="balanced")
    model, _ = zoo_case("gpt2")
    again = penstock.load(job.write(tmp_path), model).explain(full=True)
    assert "with these programs as they are" in again and "computation 2x as fast" in again and "passes" not in again
    own = job.explain(full=True).split("\n\n")
    assert [part for part in again.split("\n\n") if not part.startswith("what would help")] == [
        part for part in own if not part.startswith(("what would help", "passes"))
    ]


SMALL: dict[str, Any] = {"memory": "260kB", "dram": 400_000 + 122_880, "ssd": "20MB"}  # beside the model itself


@pytest.fixture(scope="module")
def reservoir() -> penstock.Job:
    """A plan whose optimizer states lie on SSD, with gradients clipped."""
    hardware = penstock.Hardware.cpu(1, **SMALL)
    more = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "max_grad_norm": 1.0, "micro_batches": 8}
    return job_on(hardware, strategy=RESERVOIR.with_(PartitionBalanced(stages=3)).text, **more)


@pytest.mark.slow
def test_tiers_clipping_and_disks_are_told(reservoir: penstock.Job) -> None:
    plan = reservoir.plan
    assert plan.predicted is not None and plan.decisions.ssd.stages
    text = explain(plan, reservoir.programs, reservoir.hardware, helps=[])
    for stage in reservoir.folder.interface.stages:
        line = next(line for line in text.splitlines() if line.startswith(f"  {stage}"))
        assert ("optimizer states on SSD" in line) == (stage in plan.decisions.ssd.stages)
        assert ("read and fetched" in line) == (plan.decisions.ssd.stages.get(stage) == "all")
        assert ("rematerialised" in line) == (stage in plan.decisions.rematerialise)
    assert plan.decisions.clipping in EXPLAINED and EXPLAINED[plan.decisions.clipping] in text
    written = format_bytes(plan.predicted.moved_bytes["ssd0.write"])
    assert f"and writes {written}" in " ".join(text.split())
    loading, peak = plan.predicted.loading_bytes["dram0"], plan.predicted.peak_bytes["dram0"]
    assert ("while weights are loaded" in text) == (loading > peak)


@pytest.mark.slow
def test_the_curve_of_activations_keeps_its_rows(reservoir: penstock.Job) -> None:
    plan = reservoir.plan.model_copy(update={"notes": {"choose-activations": "the head\n  kept  step\n*  1 B  2 s"}})
    text = explain(plan, reservoir.programs, reservoir.hardware, helps=[])
    assert "  choose-activations: the head\n      kept  step\n    *  1 B  2 s" in text


def test_the_busiest_link_of_a_disk_is_its_reads_and_writes_together(reservoir: penstock.Job) -> None:
    slow = [{"size_bytes": "20MB", "read_bandwidth": 1e6, "write_bandwidth": 1e6}]
    machine = reservoir.hardware.with_(ssds=slow)
    moved = simulate(reservoir.programs, machine).moved_bytes
    seconds = (moved["ssd0.read"] + moved["ssd0.write"]) / 1e6
    text = explain(reservoir.plan, reservoir.programs, machine, helps=[])
    assert f"its busiest link, {format_seconds(seconds)};" in " ".join(text.split())


def test_tables_show_tiers_and_what_disks_bear(reservoir: penstock.Job) -> None:
    stages = list(reservoir.folder.interface.stages.values())
    shown = {table.title: table for table in plan_tables(reservoir.plan, stages, reservoir.hardware)}
    cells = {cell for column in shown["stages"].columns for cell in column._cells}
    assert "ssd" in cells and any(str(cell).startswith(("DRAM, fetched", "SSD, read")) for cell in cells)
    assert shown["SSDs"].row_count == 1


def test_machines_with_ssds_may_have_more_of_them() -> None:
    machines = machines_of(penstock.Hardware.preset("fuyou-4090"))
    # Twelve disks together reach a share of their rates.
    more, fast = machines["one more SSD"], machines["SSDs 2x as fast"]
    assert more is not None and len(more.hosts[0].ssds) == 13 and "ssd0.12.read" in more.links()
    assert fast is not None and fast.bandwidth("ssd0", "dram0") == pytest.approx(2 * 12 * 6.5e9 * 0.39)
    assert not [text for text in machines_of(penstock.Hardware.cpu(1)) if "SSD" in text]


@pytest.mark.slow
def test_gpus_whose_streams_may_hold_more_than_the_budget_are_named() -> None:
    job = job_on("rtx4090x2", strategy="zero-bubble")
    program = max(job.programs, key=lambda p: pooled_bytes(p) - profile_memory(p).peak_bytes["device"])
    held_bytes, name = pooled_bytes(program), job.hardware.devices[program.device].name
    least_bytes = profile_memory(program).peak_bytes["device"]
    assert held_bytes > least_bytes

    def tell(budget_bytes: int) -> str:
        document = job.hardware.model_dump(mode="json")
        document["devices"][program.device] |= {"memory_bytes": budget_bytes, "usable_fraction": 1.0, "reserve": None}
        return explain(job.plan, job.programs, penstock.Hardware.from_any(document), helps=[])

    over = format_bytes(held_bytes - least_bytes)
    line = f"{name} its streams may come to hold {format_bytes(held_bytes)}, {over} more than the budget"
    assert line in " ".join(tell(least_bytes).split())
    assert "its streams" not in tell(held_bytes)
