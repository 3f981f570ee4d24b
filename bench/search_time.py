"""Seconds and memory of `compile` given only a model and a machine: a large model, unequal GPUs, 512 GPUs, mixtures of
experts, and machines that are too small, until that is said with what would do.

Every case runs in a process of its own. Run: python bench/search_time.py [CASE]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import penstock
from penstock.bench.peers import rows
from penstock.cli.options import JobOptions
from penstock.compiler.job.job import Job
from penstock.compiler.models.named import find_model
from penstock.ir.errors import DoesNotFit

LIMIT_S, LIMIT_GB = 60.0, 2.0
MIXTURE_LIMIT_S, MIXTURE_LIMIT_GB = 120.0, 8.0
MIXTURES: dict[str, dict[str, Any]] = {  # as options of `penstock plan`, of 8 rows of 1,024 tokens if not said
    "deepseek-v3 on 8 GPUs with 8 SSDs": {
        "model": "deepseek-v3", "hardware": ["rtx4090x8"], "dram": "2TB", "ssd": "8x4TB", "precision": "bf16-true",
    },
    "deepseek-v3 on 8 A100": {
        "model": "deepseek-v3", "hardware": ["a100-80gbx8"], "ssd": "8x4TB", "precision": "bf16-true", "batch": 32,
    },
    "mixtral-8x7b on 2 GPUs": {
        "model": "mixtral-8x7b", "hardware": ["rtx4090x2"], "dram": "1TB", "precision": "bf16-mixed",
    },
    "qwen3-30b-a3b on 1 GPU": {
        "model": "qwen3-30b-a3b", "hardware": ["rtx4090x1"], "dram": "768GB", "precision": "bf16-mixed",
    },
}  # fmt: skip
TOO_SMALL: dict[str, dict[str, Any]] = {  # as options of `penstock plan`
    "llama-8b on 1 GPU with 64 GB": {
        "model": "llama-8b", "hardware": ["rtx3090x1"], "dram": "64GB", "ssd": "0", "batch": 8, "sequence": 1024,
    },
    "llama-70b on a laptop": {"model": "llama-70b", "hardware": ["laptop-16gb"], "batch": 8, "sequence": 1024},
    "llama-8b, 524288 tokens on 1 GPU": {
        "model": "llama-8b", "hardware": ["rtx4090x1"], "dram": "512GB", "batch": 1, "sequence": 524288,
    },
    "mixtral-8x7b on 2 GPUs with 256 GB": {
        "model": "mixtral-8x7b", "hardware": ["rtx3090x2"], "dram": "256GB", "ssd": "0", "batch": 8, "sequence": 1024,
    },
    "gpt3-175b on a 2080 Ti": {"model": "gpt3-175b", "hardware": ["rtx2080ti"], "batch": 8, "sequence": 1024},
    "gpt3-175b on 1 GPU with 64 GB": {
        "model": "gpt3-175b", "hardware": ["rtx4090x1"], "dram": "64GB", "batch": 8, "sequence": 1024,
    },
}  # fmt: skip
CASES = {  # model, the presets from which GPUs are taken (see `machine`), batch, sequence
    "gpt3-175b on mobius-8gpu": ("gpt3-175b", (), 8, 2048),
    "gpt3-175b on 1 GPU with 2 SSDs": ("gpt3-175b", "rtx4090x1", 8, 2048),
    "gpt3-175b on 8 GPUs with 2 SSDs": ("gpt3-175b", "rtx4090x8-2rc", 8, 2048),
    "gpt3-175b on 512 GPUs": ("gpt3-175b", "mics-p4d:64", 1024, 2048),
    "bert-10b on 512 GPUs": ("mics-bert-10b", "mics-p4d:64", 8192, 512),
    "llama-8b on 1 GPU": ("llama-8b", ("rtx3090x1",), 4, 2048),
    "llama-8b on 2 unequal GPUs": ("llama-8b", ("rtx4090x1", "rtx3090x1"), 4, 2048),
    "llama-8b on 4 unequal GPUs": ("llama-8b", ("rtx3090x1", "rtx4090x1", "ftpipe-2080ti", "rtx3090x1"), 8, 2048),
}


def machine(presets: tuple[str, ...] | str) -> penstock.Hardware:
    """A server with 256 GB and one GPU of each preset, alternately under its two root complexes; or one preset with
    256 GB and two SSDs of 3.84 TB; or a cluster; or, for an empty tuple, mobius-8gpu with 4 TB."""
    if isinstance(presets, str) and ":" in presets:
        return penstock.Hardware.preset(presets)
    if isinstance(presets, str):
        return penstock.Hardware.preset(presets, dram="256GB", ssds=0).with_(ssds=2)
    if not presets:
        return penstock.Hardware.preset("mobius-8gpu", dram="4TB")
    document = penstock.Hardware.preset("rtx4090x4-2rc", dram="256GB").model_dump()
    gpus = [penstock.Hardware.preset(name).devices[0].model_dump() for name in presets]
    places = [{"name": f"gpu{i}", "host": 0, "root_complex": i % 2} for i in range(len(gpus))]
    devices = [gpu | place for gpu, place in zip(gpus, places, strict=True)]
    return penstock.Hardware.model_validate({**document, "name": " and ".join(presets), "devices": devices})


def compile_job(case: str) -> Job:
    if case in MIXTURES:
        return JobOptions(**{"batch": 8, "sequence": 1024, **MIXTURES[case]}).compile()
    if case in TOO_SMALL:
        return JobOptions(**TOO_SMALL[case]).compile()
    name, presets, batch, sequence = CASES[case]
    model, inputs, hardware = find_model(name).on_meta(), find_model(name).batch_spec(batch, sequence), machine(presets)
    # With fp16 the gradients of 175B stay in DRAM until their norm is known, and take more than these 256 GB.
    precision = "bf16" if hardware.hosts[0].ssds and name in ("gpt3-175b", "mics-bert-10b") else "fp16"
    return penstock.compile(model, hardware, example_inputs=inputs, precision=precision)


def main() -> None:
    if len(sys.argv) == 1:
        for case in (*CASES, *MIXTURES, *TOO_SMALL):
            subprocess.run([sys.executable, __file__, case], check=True)
        return
    case = sys.argv[1]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    miss, plan = None, None
    try:
        plan = compile_job(case).plan
    except DoesNotFit as error:
        miss = error
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    limit_s, limit_gb = (MIXTURE_LIMIT_S, MIXTURE_LIMIT_GB) if case in MIXTURES else (LIMIT_S, LIMIT_GB)
    measured = {
        "case": case, "took_s": took_s, "cpu_s": cpu_s, "peak_rss_gb": gigabytes,
        "limit_s": limit_s, "limit_gb": limit_gb, "met": cpu_s <= limit_s and gigabytes <= limit_gb,
    }  # fmt: skip
    if case in TOO_SMALL:
        assert miss is not None and plan is None, "it fits"
        rows.save("search_time", {**measured, "refused": str(miss), "nearest": miss.nearest})
        return
    assert plan is not None and plan.predicted is not None, miss
    rows.save(
        "search_time",
        {
            **measured, "precision": plan.precision,
            "passes": plan.passes, "micro_batches": plan.micro_batches, "stages": len(plan.decisions.stages),
            "step_s": plan.predicted.step_s, "bound_s": plan.predicted.bound_s,
            "peak_bytes": plan.predicted.peak_bytes, "notes": plan.notes,
            "not_tried": [r.name for r in plan.rivals if r.reason.startswith("not tried")],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
