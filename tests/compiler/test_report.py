"""`explain`: the page that says why this plan. Figures are replaced by #, so that only the words are compared."""

from __future__ import annotations

import re
from typing import Any

import penstock
from penstock.compiler.plan import Rival
from penstock.compiler.report import explain
from penstock.compiler.strategies import STRATEGIES
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


def normalised(text: str) -> str:
    """Figures as "#", runs of spaces as one."""
    text = re.sub(r"plan [0-9a-f]{6}:", "plan #:", text)
    names = re.compile(r"(?<![\w.])" + FIGURE.pattern)
    return "\n".join(
        "  " * line.startswith("  ") + " ".join(names.sub("#", line).split()) for line in text.splitlines()
    )


def job_on(hardware: Any, **options: Any) -> penstock.Job:
    model, batch = zoo_case("gpt2")
    return penstock.compile(
        model, hardware, example_inputs=batch, **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, **options}
    )


def test_the_whole_page(golden: Any, tmp_path: Any) -> None:
    (tmp_path / "machine.yaml").write_text(MACHINE)
    line = STRATEGIES["mobius"].replace("balanced", "balanced{stages=2}")
    job = job_on(tmp_path / "machine.yaml", strategy=line)
    rivals = [
        Rival(name="8 stages, 4 micro-batches", reason="cpu0 has 1.00 MiB and needs 2.00 MiB"),
        Rival(name="6 stages, 4 micro-batches", step_s=0.02, reason="100.0% slower (20.0 ms)"),
        Rival(name="4 stages, 4 micro-batches", step_s=0.015, reason="50.0% slower (15.0 ms)"),
    ]
    plan = job.plan.model_copy(update={"rivals": rivals})
    golden(normalised(explain(plan, job.programs, job.hardware, job._records)) + "\n", "explain")


def test_bounds_are_bounds_and_what_if_questions_are_simulated() -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=2, memory="250kB"))
    text = job.explain()
    timeline = job.simulate()
    found = re.search(r"this one takes ([\d.]+)x the larger", text)
    assert found and float(found[1]) >= 1.0
    name, share = timeline.bottleneck()
    assert f"bound by {name}, busy {share:.0%}" in text
    saved = [int(percent) for percent in re.findall(r"a step, (-?\d+)% less", text)]
    assert len(saved) == 3 and saved[0] > 0 and all(-1 <= percent <= 50 for percent in saved)


def test_an_auto_plan_lists_its_rivals_fastest_first() -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=2), micro_batches="auto")
    rows = job.explain().partition("rivals\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == len(job.plan.rivals) >= 3
    slower = [float(found[1]) for row in rows if (found := re.search(r"([\d.]+)% slower", row))]
    assert slower == sorted(slower)


def test_a_loaded_job_explains_itself_without_its_passes(tmp_path: Any) -> None:
    job = job_on(penstock.Hardware.cpu(num_devices=1))
    model, _ = zoo_case("gpt2")
    again = penstock.load(job.write(tmp_path), model).explain()
    assert again == job.explain().partition("\n\npasses")[0]
