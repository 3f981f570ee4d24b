"""All passes by name, and the strategies by name: a strategy is a pipeline of passes as text."""

from __future__ import annotations

from ..passes.base import Pass
from ..passes.mapping.map_cross import MapCross
from ..passes.mapping.map_replicas import MapReplicas
from ..passes.mapping.map_round_robin import MapRoundRobin
from ..passes.mapping.map_sequential import MapSequential
from ..passes.memory.choose_activations import ChooseActivations
from ..passes.memory.insert_fetch import InsertFetch
from ..passes.memory.insert_remat import InsertRemat
from ..passes.memory.insert_ssd import InsertSsd
from ..passes.memory.take_turns import TakeTurns
from ..passes.optimizer.insert_optimizer import InsertOptimizer
from ..passes.optimizer.overlap_optimizer import OverlapOptimizer
from ..passes.partition.partition_acyclic import PartitionAcyclic
from ..passes.partition.partition_balanced import PartitionBalanced
from ..passes.partition.partition_max_stage import PartitionMaxStage
from ..passes.partition.partition_metis import PartitionMetis
from ..passes.partition.partition_min_stage import PartitionMinStage
from ..passes.partition.partition_pipedream import PartitionPipedream
from ..passes.partition_mip.partition_mip import PartitionMip
from ..passes.partition_mixed.partition_mixed import PartitionMixed
from ..passes.rewrite.chunk_loss import ChunkLoss
from ..passes.rewrite.coarsen import Coarsen
from ..passes.rewrite.drop_masks import DropMasks
from ..passes.rewrite.interleave_forwards import InterleaveForwards
from ..passes.rewrite.recompute_pointwise import RecomputePointwise
from ..passes.rewrite.split_context import SplitContext
from ..passes.rewrite.split_experts import SplitExperts
from ..passes.rewrite.split_vocabulary import SplitVocabulary
from ..passes.rewrite.split_width import SplitWidth
from ..passes.rewrite.tile_sequence import TileSequence
from ..passes.schedule.schedule_1f1b import Schedule1F1B
from ..passes.schedule.schedule_async import ScheduleAsync
from ..passes.schedule.schedule_interleaved import ScheduleInterleaved
from ..passes.schedule.schedule_pipeline import SchedulePipeline
from ..passes.schedule.schedule_zero_bubble import ScheduleZeroBubble
from ..passes.sharding.insert_shard import InsertShard
from ..passes.sharding.insert_two_hop import InsertTwoHop
from ..passes.sharding.mesh import Mesh

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        DropMasks,
        SplitVocabulary,
        SplitExperts,
        SplitWidth,
        RecomputePointwise,
        ChunkLoss,
        InterleaveForwards,
        SplitContext,
        TileSequence,
        Coarsen,
        Mesh,
        PartitionBalanced,
        PartitionMaxStage,
        PartitionMinStage,
        PartitionMip,
        PartitionPipedream,
        PartitionAcyclic,
        PartitionMetis,
        PartitionMixed,
        MapRoundRobin,
        MapCross,
        MapSequential,
        MapReplicas,
        SchedulePipeline,
        Schedule1F1B,
        ScheduleInterleaved,
        ScheduleZeroBubble,
        ScheduleAsync,
        InsertRemat,
        ChooseActivations,
        InsertFetch,
        InsertShard,
        InsertTwoHop,
        InsertSsd,
        InsertOptimizer,
        OverlapOptimizer,
        TakeTurns,
    )
}

# Rematerialisation comes before fetching: only a stage without saved tensors may lose its weights between its forward
# and its backward. The optimizer comes after them: where a stage is stepped follows from where its weights live. Turns
# on links come last, as whole programs show whether they help.
PIPELINE = (
    "coarsen, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"
)
ONE_EACH = PIPELINE.replace("partition-balanced", "partition-balanced{stages=devices}")
LOOPED = PIPELINE.replace("partition-balanced", "partition-balanced{stages=2*devices}")
CROSSED = PIPELINE.replace("map-round-robin", "map-cross")
WITH_SSD = "choose-activations, insert-fetch, insert-ssd, overlap-optimizer"
_AFTER_GRAPH: dict[str, str] = {
    "mobius": f"{CROSSED.replace('partition-balanced', 'partition-mip')}, take-turns",
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
    "ftpipe-async": "coarsen{level=operator}, partition-mixed{asynchronous=true}, map-cross, schedule-async",
}
# What the model computes is put in its best form before blocks are found in it. `chunk-loss` is in all of them: it
# changes nothing where logits are small for a device, and no strategy is about keeping large ones; nor does
# `interleave-forwards` where a step calls the model once. It comes last, as others look for what stands together.
BEFORE_BLOCKS = "drop-masks, chunk-loss, interleave-forwards"
STRATEGIES: dict[str, str] = {name: f"{BEFORE_BLOCKS}, {passes}" for name, passes in _AFTER_GRAPH.items()}
