"""A candidate: a pipeline of passes that the search may try, and its relatives by exchanging passes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from ...ir import ops
from ...ir.precision import Precision
from ...passes.base import Pass
from ...passes.draft import Options
from ...passes.mapping.map_round_robin import MapRoundRobin
from ...passes.mapping.mapping import Mapping
from ...passes.memory.choose_activations import ChooseActivations
from ...passes.memory.insert_fetch import InsertFetch
from ...passes.memory.insert_remat import InsertRemat
from ...passes.memory.insert_ssd import InsertSsd
from ...passes.memory.keep_stages import KeepStages
from ...passes.optimizer.insert_optimizer import InsertOptimizer
from ...passes.optimizer.overlap_optimizer import OverlapOptimizer
from ...passes.partition.partition import Partition
from ...passes.partition.partition_balanced import PartitionBalanced
from ...passes.rewrite.coarsen import Coarsen
from ...passes.rewrite.fuse_pointwise import FusePointwise
from ...passes.rewrite.graph_pass import GraphPass
from ...passes.rewrite.use_float8 import UseFloat8
from ...passes.schedule.schedule import Schedule
from ...passes.schedule.schedule_pipeline import SchedulePipeline
from ...passes.sharding.insert_shard import InsertShard
from ...passes.sharding.insert_two_hop import AUTO, InsertTwoHop
from ...passes.sharding.mesh import Mesh
from ...passes.table import PASSES
from ..pipeline import parse_pipeline, pipeline_text
from ..strategies import STRATEGIES

P = TypeVar("P", bound=Pass)


@dataclass(frozen=True)
class Candidate:
    """A pipeline of passes that the search may try. `name`: of a strategy, or the text that the user gave; empty for
    candidates that are made from `PLAIN` by exchanging passes."""

    passes: tuple[Pass, ...]
    name: str = ""

    @staticmethod
    def parse(text: str, num_devices: int) -> Candidate:
        """The candidate of a strategy's name or a pipeline's text. Raises `PassError` as `parse_pipeline` does."""
        return Candidate(parse_pipeline(text, num_devices), text)

    def find(self, kind: type[P]) -> P | None:
        """Its pass of this kind."""
        return next((p for p in self.passes if isinstance(p, kind)), None)

    @property
    def mesh(self) -> Mesh | None:
        return self.find(Mesh)

    @property
    def partition(self) -> Partition | None:
        return self.find(Partition)

    @property
    def cut_and_mapping(self) -> set[str]:
        """The names of its partitioner and its mapping."""
        return {p.name for p in self.passes if isinstance(p, Partition | Mapping)}

    @property
    def is_shared(self) -> bool:
        """Whether several devices share each stage; a mesh that chooses how many (0) is written as if they did."""
        return self.mesh is not None and self.mesh.shards != 1

    @property
    def is_slow(self) -> bool:
        return any(p.slow for p in self.passes)

    @property
    def is_synchronous(self) -> bool:
        """Whether it trains as plain PyTorch does with the whole batch."""
        return all(p.synchronous for p in self.passes)

    @property
    def uses_ssd(self) -> bool:
        return self.find(InsertSsd) is not None

    @property
    def moves_activations(self) -> bool:
        """Whether saved tensors may leave their device; shared stages that use SSDs are planned as if they did."""
        return self.find(ChooseActivations) is not None or (self.is_shared and self.uses_ssd)

    @property
    def keeps_stages(self) -> bool:
        """Whether some stages may stay on a device that fetches others."""
        return self.find(KeepStages) is not None

    @property
    def tiering(self) -> Tiering:
        """The options of its passes after the schedule, for stages that no other lane shares."""
        fetch = self.find(InsertFetch)
        return Tiering(
            activations=self.moves_activations,
            reservoir=self.uses_ssd,
            overlap=self.find(OverlapOptimizer) is not None,
            swap=fetch is not None and fetch.swap,
            resident=self.keeps_stages,
        )

    def with_(self, *passes: Pass) -> Candidate:
        """The same candidate with each of `passes` in place of the pass that makes the same decision."""
        by_decision = {p.fields()[0]: p for p in passes}
        return Candidate(tuple(by_decision.get(p.fields()[0], p) for p in self.passes))

    def replace_pass(self, kind: type[Pass], form: Pass | None) -> Candidate:
        """The same candidate with another form of its pass of a kind, or without that pass where `form` is None."""
        passes: tuple[Pass, ...]
        if self.find(kind) is not None:
            forms = ((form,) if isinstance(p, kind) else (p,) for p in self.passes)
            passes = tuple(p for each in forms for p in each if p is not None)
        elif isinstance(form, GraphPass):
            passes = self.with_graph_passes(*self.graph_passes, form).passes
        elif form is None:
            passes = self.passes
        else:
            after = (i for i, p in enumerate(self.passes) if not set(form.precedes).isdisjoint(p.gives))
            place = next(after, len(self.passes))
            passes = (*self.passes[:place], form, *self.passes[place:])
        return self if passes == self.passes else Candidate(passes)

    def fusing(self) -> Candidate:
        """The same candidate with chains of pointwise calls as one kernel each, of what other passes have made."""
        before = [p for p in self.graph_passes if not isinstance(p, FusePointwise)]
        after = (p for p in self.passes if not isinstance(p, GraphPass))
        return dataclasses.replace(self, passes=(*before, FusePointwise(), *after))

    def add_wishes(self, options: Options) -> Candidate:
        """The same candidate with the passes that the user's options ask for, after all others over the op graph."""
        found = self.fusing() if options.kernels == "fused" else self
        return found.use_float8() if Precision.of(options.precision).float8 else found

    def use_float8(self) -> Candidate:
        """The same candidate with products in float8 of what other passes over the op graph have left whole."""
        before = [p for p in self.graph_passes if not isinstance(p, UseFloat8)]
        after = (p for p in self.passes if not isinstance(p, GraphPass))
        return dataclasses.replace(self, passes=(*before, self.find(UseFloat8) or UseFloat8(), *after))

    @property
    def fetches(self) -> bool:
        """Whether stages that no other lane shares come from DRAM for each use where that is decided."""
        return self.find(InsertFetch) is not None

    def ending(self, *passes: Pass) -> Candidate:
        """The same candidate with `passes` after its schedule."""
        head = next(i for i, p in enumerate(self.passes, start=1) if isinstance(p, Schedule))
        return Candidate((*self.passes[:head], *passes))

    @property
    def graph_passes(self) -> tuple[GraphPass, ...]:
        """Its passes over the op graph."""
        return tuple(p for p in self.passes if isinstance(p, GraphPass))

    def with_graph_passes(self, *graph_passes: GraphPass) -> Candidate:
        """The same candidate with these passes over the op graph, and no others."""
        return Candidate((*graph_passes, *(p for p in self.passes if not isinstance(p, GraphPass))))

    def on(self, mesh: Mesh) -> Candidate:
        """The same candidate on each lane of a mesh."""
        layers = next(i for i, p in enumerate(self.passes, start=1) if isinstance(p, Coarsen))
        found = Candidate((*self.passes[:layers], mesh, *self.passes[layers:]))
        return found.ending(*shared_tiers(self.uses_ssd)) if found.is_shared else found

    @property
    def marks(self) -> bool:
        """Whether what is trained of mostly frozen stages stays on its device."""
        return all(p.marks for p in self.passes if isinstance(p, Schedule))

    def travelling(self) -> Candidate:
        """The same candidate, where what is trained of a stage is fetched with the rest of it."""
        return Candidate(
            tuple(dataclasses.replace(p, staying=False) if isinstance(p, Schedule) else p for p in self.passes)
        )

    def with_swap(self, swap: bool) -> Candidate:
        """The same candidate. `swap`: weights come from DRAM though they could stay; of shared stages, all are computed
        again."""
        if self.is_shared:
            return self.with_(InsertRemat(always=swap))
        return self.with_tiering(swap=swap)

    def with_tiering(self, **changes: bool) -> Candidate:
        """The same candidate with other fields of its `tiering`."""
        return self.ending(*dataclasses.replace(self.tiering, **changes).passes)

    def leaving(self) -> Candidate:
        """The same candidate where activations may move; stages are cut as for inputs that leave the device, if its
        partitioner can do that."""
        found, cut = self.with_tiering(activations=True), self.partition
        if cut is None or not inputs_may_leave(type(cut)):
            return found
        return found.with_(dataclasses.replace(cut, inputs_leave=True))  # type: ignore[call-arg]

    def holding(self, hold: bool) -> Candidate:
        """The same candidate. `hold`: shared stages stay whole for all micro-batches as far as there is room."""
        shard = self.find(InsertShard)
        return self if shard is None else self.with_(dataclasses.replace(shard, hold=hold))

    @property
    def text(self) -> str:
        """The pipeline, as `parse_pipeline` reads it."""
        return STRATEGIES.get(self.name, self.name) or pipeline_text(self.passes, short=True)

    @property
    def label(self) -> str:
        """The candidate's name in the table of rivals, which leaves out what is usual."""
        if self.name:
            return self.name
        on_one = self.mesh is not None and self.mesh.depth == 1
        named = [p for p in self.passes if not (on_one and isinstance(p, Mapping))]
        words = [(p.label_rank, word) for p in named for word in p.label(self.passes)]
        lacking = [kind for kind in PASSES.values() if kind.absent and self.find(kind) is None]
        words += [(kind.label_rank, kind.absent) for kind in lacking]
        return ", ".join(word for _, word in sorted(words, key=lambda each: each[0]))

    def title(self, count: int) -> str:
        """The name of a trial with `count` micro-batches."""
        return f"{self.label}, {count} micro-batches"


@dataclass(frozen=True)
class Tiering:
    """The passes after the schedule for stages that no other lane shares. `activations`: each class of them is kept,
    moved or computed again; `reservoir`: SSDs hold what DRAM cannot; `overlap`: stages may be stepped before the
    norm of all gradients is known, as they always may with a reservoir; `swap`: weights come from DRAM though they
    could stay; `resident`: some stages stay where not all of them can."""

    activations: bool = False
    reservoir: bool = False
    overlap: bool = False
    swap: bool = False
    resident: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        tier = "auto" if self.reservoir else "none"
        kept = (KeepStages(tier=tier),) if self.resident else ()
        saved: Pass = InsertRemat(swap=self.swap)
        if self.activations:
            saved = ChooseActivations(swap=self.swap, tier=tier)
        ssd = (InsertSsd(),) if self.reservoir else ()
        update: Pass = OverlapOptimizer() if self.reservoir or self.overlap else InsertOptimizer()
        return *kept, saved, InsertFetch(swap=self.swap), *ssd, update


def inputs_may_leave(kind: type[Partition]) -> bool:
    """Whether a partitioner has an option for pipelines that move what enters a stage until its backward."""
    return any(field.name == "inputs_leave" for field in dataclasses.fields(kind))


def shared_tiers(reservoir: bool) -> tuple[Pass, ...]:
    """The passes after the schedule, for stages that lanes share."""
    if reservoir:
        return InsertRemat(), InsertShard(tier=ops.SSD), InsertSsd(), OverlapOptimizer()
    return InsertRemat(), InsertShard(), InsertTwoHop(every=AUTO), InsertOptimizer()


PLAIN_GRAPH = tuple(kind() for kind in PASSES.values() if kind.everywhere)
PLAIN = Candidate(
    (*PLAIN_GRAPH, Coarsen(), PartitionBalanced(), MapRoundRobin(), SchedulePipeline(), *Tiering().passes)
)
LEAVING = PLAIN.with_tiering(activations=True)
KEEPING = PLAIN.with_tiering(activations=True, resident=True)
RESERVOIR = PLAIN.with_tiering(activations=True, reservoir=True)
