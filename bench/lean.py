"""The worth of pure bf16, attention without masks, the loss in chunks and pointwise results computed again.

Simulated on the meta device: batches of 8 x 2048 tokens of two models of 8B on one RTX 4090 (24 GB) with 256 GB of
DRAM, and Fuyou's GPT-3 13B (its figures 5 to 9) with 32 and 64 rows of 1024 tokens in one micro-batch on Fuyou's
machine. Each setting alone and all together, by one strategy, so that nothing else differs; and what the search finds.
No row is padded, so batches have no `attention_mask`.
Run: python bench/lean.py [CASE]
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.compiler.pipeline import pipeline_text
from penstock.compiler.search.candidate import Candidate
from penstock.ir.errors import DoesNotFit
from penstock.ir.units import format_bytes

DROP, CHUNK, AGAIN = "drop-masks", "chunk-loss", "recompute-pointwise"


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    precision: str
    graph_passes: tuple[str, ...] | None  # None: the search decides


SETTINGS = (
    Setting("before", "bf16-mixed", ()),
    Setting("1: bf16-true", "bf16-true", ()),
    Setting("2: masks dropped", "bf16-mixed", (DROP,)),
    Setting("3: loss in chunks", "bf16-mixed", (CHUNK,)),
    Setting("pointwise again", "bf16-mixed", (AGAIN,)),
    Setting("1, 2 and 3", "bf16-true", (DROP, CHUNK)),
    Setting("1, 2, 3 and pointwise again", "bf16-true", (DROP, CHUNK, AGAIN)),
    Setting("searched", "bf16-true", None),
)
CASES = {  # model, rows, tokens, micro-batches (None: the search's), preset, strategy
    "llama-8b": ("llama-8b", 8, 2048, None, "rtx4090x1", "mobius"),
    "llama-8b in one micro-batch": ("llama-8b", 8, 2048, 1, "rtx4090x1", "mobius"),
    "qwen3-8b": ("qwen3-8b", 8, 2048, None, "rtx4090x1", "mobius"),
    "qwen3-8b in one micro-batch": ("qwen3-8b", 8, 2048, 1, "rtx4090x1", "mobius"),
    "gpt3-13b, 32 rows": ("gpt3-13b", 32, 1024, 1, "fuyou-4090", "fuyou"),
    "gpt3-13b, 64 rows": ("gpt3-13b", 64, 1024, 1, "fuyou-4090", "fuyou"),
}


def main() -> None:
    if len(sys.argv) == 1:
        for case in CASES:
            subprocess.run([sys.executable, __file__, case], check=True)
        return
    case = sys.argv[1]
    for setting in SETTINGS:
        rows.save("lean", {"case": case, **dataclasses.asdict(setting), **plan_for(case, setting)})


def plan_for(case: str, setting: Setting) -> dict[str, Any]:
    """The predicted step and peaks of the case's batch, or what it lacks."""
    name, batch, sequence, micro_batches, preset, strategy = CASES[case]
    found = find_model(name)
    dram = {"dram": "256GB"} if preset == "rtx4090x1" else {}
    text = "auto" if setting.graph_passes is None else with_graph_passes(strategy, setting.graph_passes)
    spec = {name: row for name, row in found.batch_spec(batch, sequence).items() if name != "attention_mask"}
    try:
        plan = penstock.compile(
            found.on_meta(), penstock.Hardware.preset(preset, **dram), example_inputs=spec,
            precision=setting.precision, strategy=text, micro_batches=micro_batches or "auto",
        ).plan  # fmt: skip
    except DoesNotFit as error:
        return {"fits": False, "why": str(error)}
    assert plan.predicted is not None
    gpu = next(iter(plan.predicted.peak_bytes.items()))
    return {
        "fits": True, "step_s": plan.predicted.step_s, "micro_batches": plan.micro_batches,
        "stages": len(plan.decisions.stages), "peak_gpu": format_bytes(gpu[1]), "peak_bytes": plan.predicted.peak_bytes,
        "bound": plan.predicted.bottleneck, "passes": plan.passes,
    }  # fmt: skip


def with_graph_passes(strategy: str, names: tuple[str, ...]) -> str:
    """The strategy's pipeline with these passes over the op graph, and no others."""
    return ", ".join([*names, pipeline_text(Candidate.parse(strategy, 1).with_graph_passes().passes)])


if __name__ == "__main__":
    main()
