"""Planning for up to 10,240 GPUs: seconds and memory against the number of GPUs, and the simulated scaling curve.

Run: python bench/scale.py [NOTE] [--model llama-8b] [--strategy mics] [--gpus 64 1024 4096 10240] [--over 4]

The GPUs are H100s in servers of 8 and racks of 32 servers, whose uplinks have a share of the servers' rates. Each GPU
has the same number of rows, so that with ideal scaling the tokens a second grow with the GPUs (weak scaling). All
plans are made in one process, the smallest machine first: `cpu_s` has no imports in it, and `peak_rss_gb`, the peak of
the process so far, has all of them. `machine_s` is the part of `cpu_s` that it takes to make the hardware document.
`failures` is what one failure in 50,000 hours of each GPU would take, with storage of 100 GB/s.

`python bench/scale.py --chart FILE` draws the newest rows in bench/results/scale.jsonl; the axes of seconds and
tokens are logarithmic.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.compiler.report.failures import failure_report, with_failures

HOSTS_PER_RACK, ROWS_PER_GPU, MICRO_BATCHES_PER_GPU, SEQUENCE = 32, 4, 2, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("note", nargs="*", help="what else ran meanwhile")
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--strategy", default="mics")
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 1024, 4096, 10240])
    parser.add_argument("--over", type=float, default=4.0, help="hosts' rates together, against a rack's uplink")
    parser.add_argument("--chart", type=Path)
    args = parser.parse_args()
    if args.chart is not None:
        draw(args.chart)
        return
    for gpus in sorted(args.gpus):
        row = plan_for(args.model, args.strategy, gpus, args.over)
        rows.save("scale", row | ({"note": " ".join(args.note)} if args.note else {}))


def plan_for(model: str, strategy: str, gpus: int, over: float) -> dict[str, object]:
    named = find_model(model)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    hardware = penstock.Hardware.preset(f"h100x8:{gpus // 8}-rack{HOSTS_PER_RACK}-over{over:g}")
    machine_s = time.process_time() - begin_cpu_s
    batch = ROWS_PER_GPU * gpus
    job = penstock.compile(
        named.on_meta(),
        hardware,
        example_inputs=named.batch_spec(batch, SEQUENCE),
        micro_batches=MICRO_BATCHES_PER_GPU * gpus,
        precision="bf16",
        strategy=strategy,
    )
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    predicted, mesh = job.plan.predicted, job.plan.decisions.mesh
    assert predicted is not None
    tokens_per_s = batch * SEQUENCE / predicted.step_s
    failing = with_failures(hardware, "50000h", "100GB/s")
    report = failure_report(job.plan, job.folder.interface, failing)
    assert report is not None
    return {
        "case": f"{model}, {strategy}", "gpus": gpus, "hardware": hardware.name, "seconds": seconds, "cpu_s": cpu_s,
        "machine_s": machine_s, "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "layout": mesh.describe() if mesh else "", "step_s": predicted.step_s, "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / gpus, "bottleneck": predicted.bottleneck,
        "failures": {
            "mtbf_s": report.run.mtbf_s, "save_every_s": report.interval_s, "useful_share": report.useful_share,
            "drawn_useful_share": report.shares.useful,
        },
    }  # fmt: skip


def draw(path: Path) -> None:
    """A picture of the newest row of each case and number of GPUs: seconds, memory, tokens a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in (rows.RESULTS / "scale.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row["hardware"].rpartition("-over")[2] + " to 1: " + row["case"], row["gpus"]] = row
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    titles = {"cpu_s": "planning, seconds of a core", "peak_rss_gb": "memory of the planner, GB", "tokens_per_s": ""}
    titles["tokens_per_s"] = "simulated tokens a second"
    for axis, (key, title) in zip(axes, titles.items()):
        for case in sorted({case for case, _ in found}):
            gpus = sorted(count for name, count in found if name == case)
            axis.loglog(gpus, [found[case, count][key] for count in gpus], marker="o", label=case)
            if key == "tokens_per_s":
                first = found[case, gpus[0]][key] / gpus[0]
                axis.loglog(gpus, [first * count for count in gpus], linestyle=":", color="gray")
        if key == "cpu_s":
            axis.set_ylim(1, 1000)
        if key == "peak_rss_gb":  # less than a factor of two
            axis.set_yscale("linear")
            axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel("GPUs")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
