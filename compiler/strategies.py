"""The strategies by name: a strategy is a pipeline of passes as text."""

from __future__ import annotations

from ..passes.table import PASSES

# Rematerialisation comes before fetching: only a stage without saved tensors may lose its weights between its forward
# and its backward. The optimizer comes after them: where a stage is stepped follows from where its weights live. Turns
# on links come last, as whole programs show whether they help.
PIPELINE = (
    "coarsen, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"
)
ONE_EACH = PIPELINE.replace("partition-balanced", "partition-balanced{stages=devices}")
LOOPED = PIPELINE.replace("partition-balanced", "partition-balanced{stages=2*devices}")
CROSSED = PIPELINE.replace("map-round-robin", "map-cross")
ZERO = (
    "coarsen, mesh{shards=devices}, partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, "
    "insert-shard{tier=device, hold_all=true}"
)
WITH_SSD = "choose-activations, insert-fetch, insert-ssd, overlap-optimizer"
_AFTER_GRAPH: dict[str, str] = {
    "mobius": f"{CROSSED.replace('partition-balanced', 'partition-mip')}, take-turns",
    "mobius-dram": (
        "coarsen, partition-mip, map-cross, schedule-pipeline, choose-activations{to=dram, share=0.0, tier=none}, "
        "insert-fetch, overlap-optimizer, take-turns"
    ),
    "mobius-ssd": f"coarsen, partition-mip, map-cross, schedule-pipeline, {WITH_SSD}, take-turns",
    "fuyou": (
        "coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline, "
        "choose-activations{swap=true, tier=all}, insert-fetch{swap=true}, insert-ssd{tier=all}, overlap-optimizer"
    ),
    "ftpipe": CROSSED.replace("coarsen, partition-balanced", "coarsen{level=operator}, partition-mixed"),
    "balanced": PIPELINE,
    "gpipe": ONE_EACH,
    "looped-bfs": LOOPED,
    "1f1b": ONE_EACH.replace("schedule-pipeline", "schedule-1f1b"),
    "interleaved": LOOPED.replace("schedule-pipeline", "schedule-interleaved"),
    "zero-bubble": ONE_EACH.replace("schedule-pipeline", "schedule-zero-bubble"),
    "data-parallel": (
        "coarsen, mesh, partition-balanced{stages=devices}, map-round-robin, schedule-1f1b, insert-remat, "
        "insert-fetch, insert-optimizer"
    ),
    "zero1": f"{ZERO}, insert-two-hop{{every=step}}, insert-optimizer",
    "zero2": f"{ZERO}, insert-two-hop, insert-optimizer",
    "zero3-offload": (
        "coarsen, mesh{shards=devices}, partition-min-stage, map-round-robin, schedule-pipeline, "
        "insert-remat{always=true}, insert-shard{tier=dram, prefetch=1, hold=false}, insert-optimizer"
    ),
    "mics": (
        "coarsen, mesh{shards=auto}, partition-min-stage, map-round-robin, schedule-1f1b, insert-remat, insert-shard, "
        "insert-two-hop, insert-optimizer"
    ),
    "balanced-cross": CROSSED,
    "balanced-sequential": PIPELINE.replace("map-round-robin", "map-sequential"),
    "max-stage": CROSSED.replace("partition-balanced", "partition-max-stage"),
    "min-stage": CROSSED.replace("partition-balanced", "partition-min-stage"),
    "pipedream": CROSSED.replace("partition-balanced", "partition-pipedream"),
    "acyclic": CROSSED.replace("partition-balanced", "partition-acyclic"),
    "metis": CROSSED.replace("partition-balanced", "partition-metis"),
    "ftpipe-layers": CROSSED.replace("partition-balanced", "partition-mixed"),
    "async": "coarsen, partition-balanced{stages=devices, asynchronous=true}, map-round-robin, schedule-async",
    "ftpipe-async": (
        "coarsen{level=operator}, partition-mixed{asynchronous=true}, map-cross, schedule-async{weights=predict}"
    ),
}
# What the model computes is put in its best form before blocks are found in it.
BEFORE_BLOCKS = ", ".join(name for name, kind in PASSES.items() if kind.everywhere)
STRATEGIES: dict[str, str] = {name: f"{BEFORE_BLOCKS}, {passes}" for name, passes in _AFTER_GRAPH.items()}
