"""`insert-ssd`: what the host's DRAM cannot hold persists on its SSDs, and is read ahead of its use (Fuyou 4.3, 4.4).

In: programs whose swapped stages fetch their weights from DRAM. Out: the decision on the contents of SSDs,
for `overlap-optimizer` to read and write back, and programs in which weights on SSD are read into DRAM before they are
fetched. Optimizer states and masters go there before weights: they are used once a step. The stages that go
first are spread over the model, so that disks have work all along the backward pass.

Weights are read some phases before their fetch: enough to keep the disks busy, by the ratio of the two links (Fuyou
4.4), as far as DRAM has room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import Program, infer_all, place_frees, plan_arena
from ...ir.units import format_bytes
from ..base import Pass
from ..decisions import SSD, Decision, OnSsd, StageTiers
from ..draft import Draft
from ..optimizer.dram_peak import weights_reads
from ..optimizer.ssd_room import COMFORTS, MOST_READS_AHEAD, SsdRoom
from ..phases import phases

SSD_TIERS = ("auto", "states", "all")


@dataclass(frozen=True)
class InsertSsd(Pass):
    """`tier`: what SSDs hold: the states of all swapped stages, or all that persists of them; auto: as little as DRAM
    allows. `ahead`: the most phases between a read of weights and their fetch."""

    name: ClassVar[str] = "insert-ssd"
    rank: ClassVar[int] = 65
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers")
    gives: ClassVar[tuple[str, ...]] = ("ssd",)
    precedes: ClassVar[tuple[str, ...]] = ("optimizer",)  # which steps a stage where it persists
    label_rank: ClassVar[int] = 9
    decides: ClassVar[tuple[Decision, ...]] = (SSD,)
    tier: str = "auto"
    ahead: int = MOST_READS_AHEAD

    def __post_init__(self) -> None:
        if self.tier not in SSD_TIERS:
            raise PassError(f"pass {self.name!r}: option tier={self.tier!r} is none of {', '.join(SSD_TIERS)}")
        if not 0 <= self.ahead <= MOST_READS_AHEAD:
            raise PassError(f"pass {self.name!r}: option ahead={self.ahead}; allowed: 0 to {MOST_READS_AHEAD}")

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["reservoir"]

    def plan(self, draft: Draft) -> OnSsd:
        """Raises `DoesNotFit` where DRAM is too small even with all of it on SSD, or the SSDs are too small;
        `PassError` for a tier that asks for SSDs which the machine does not have.
        """
        room = SsdRoom(draft)
        tiers: StageTiers = {}
        ahead = self.ahead
        tier = "all" if draft.sharding is not None and draft.sharding.tier == ops.SSD else self.tier
        for host in room.hosts:
            found, depth = room.choose([host], tier)
            tiers.update(found)
            ahead = min(ahead, depth)
        ahead = ahead if "all" in tiers.values() else min(ahead, 1)  # only reads of weights go ahead
        lacks = max((room.missing([host], {}, *COMFORTS[0]) for host in room.hosts), default=0) if tier == "auto" else 0
        draft.notes[self.name] = _remark(tiers, len(draft.stages), ahead, lacks)
        return OnSsd(
            stages={s.spec.name: tiers[s.spec.name] for s in draft.stages if s.spec.name in tiers}, ahead=ahead
        )

    def rewrite(self, draft: Draft, decision: OnSsd) -> None:
        tiers, ahead = decision.stages, decision.ahead
        able = SsdRoom(draft).able
        for stage, tier in tiers.items():
            if stage not in able:
                raise PassError(f"ssd names {stage!r}; the stages whose weights come from DRAM are {', '.join(able)}")
            if tier not in SSD_TIERS[1:]:
                raise PassError(f"ssd has {tier!r} of {stage} on SSD; allowed: states, all")
            if tier == "states" and draft.stage_of(stage).spec.staying:
                raise PassError(f"ssd has the states of {stage} on SSD; these stay on its device, allowed is all")
        if not 0 <= ahead <= MOST_READS_AHEAD:
            raise PassError(f"ssd reads {ahead} phases ahead; allowed: 0 to {MOST_READS_AHEAD}")
        draft.ssd = decision
        for program in draft.programs:
            read_weights(program, [stage for stage, tier in tiers.items() if tier == "all"], ahead)


def read_weights(program: Program, stages: Collection[str], ahead: int) -> None:
    """Have the weights of these stages read from SSD, `ahead` phases before they are fetched."""
    graph = program.graph
    number = {node: i for i, node in enumerate(graph.nodes)}
    for read in weights_reads(program, phases(program), number, stages, ahead):
        with graph.inserting_before(read.place):
            group: dict[str, Any] = {"group": ops.SHARDS} if program.interface.shards > 1 else {}
            node = graph.call_function(ops.read, (f"{read.stage}.weights",), group)
        node.name = f"{read.fetches[-1].name}_dram"
        for fetch in read.fetches:
            fetch.args = (node, *fetch.args[1:])
    infer_all(program)
    place_frees(program)


def read_within(program: Program, stages: Sequence[str], ahead: int, arena_bytes: int) -> None:
    """`read_weights` as far ahead as the values in DRAM stay within `arena_bytes`, or directly before each fetch."""
    for depth in range(ahead, -1, -1):
        trial = program.copy()
        read_weights(trial, stages, depth)
        if depth == 0 or plan_arena(trial, ops.DRAM)[1] <= arena_bytes:
            read_weights(program, stages, depth)
            return


def _remark(tiers: StageTiers, num_stages: int, ahead: int, lacking_bytes: int) -> str:
    """`lacking_bytes`: of DRAM, if nothing were on SSD; 0 where SSD was asked for."""
    if not tiers:
        return "DRAM holds everything"
    why = f"DRAM lacks {format_bytes(lacking_bytes)} for everything: " if lacking_bytes > 0 else ""
    whole = list(tiers.values()).count("all")
    text = f"{why}on SSD are the optimizer states of {len(tiers)} of {num_stages} stages"
    return text + (f", and the weights of {whole}, read {ahead} phases before their fetch" if whole else "")
