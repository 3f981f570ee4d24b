"""The decisions of passes: the fields of a saved plan, and the objects that some of them hold.

A pass declares each field as a `Decision`. Its `plan` returns the fields' values and its `rewrite` takes them, be they
planned or read from a document that a user edited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from ..ir import ops
from ..ir.program import StageSpec

MemoryName = Literal["device", "dram", "ssd"]
PhaseName = Literal["forward", "backward", "forward_ahead", "backward_ahead"]
StageTiers = dict[str, Literal["states", "all"]]  # per stage on SSD: optimizer states, or all that persists
NEAREST = ("shards", "pipeline")  # which devices are neighbours: those that share stages, or those of one pipeline


@dataclass(frozen=True)
class Decision:
    """A field of a saved plan: its name, its type as pydantic reads it, and its value where no pass decides it; `...`
    where every job needs a pass that decides it. `hashed`: a plan's hash covers the default value, too. A field that is
    added later must not be `hashed`, so that earlier plans keep their hash."""

    name: str
    type: Any
    default: Any = ...
    hashed: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is ...


class Lanes(BaseModel):
    """Copies of the computation. `lanes`: per copy its devices, in the order of its pipeline; `shards`: the number of
    lanes, one after the other, that share each stage's weights; `team`: of those that run the same micro-batches
    together; `crossed`: lanes that share stages are of different teams, each in the same place of its own;
    `micro_batches`: the number of each lane, where they are not the same.

    A document may instead give the number of `devices`, the `depth` of a lane and what is `nearest` (see the pass
    `mesh`); regular lanes are saved so.
    """

    model_config = ConfigDict(extra="forbid")
    unhashed: ClassVar[tuple[str, ...]] = ("team", "micro_batches")  # fields that a plan's hash omits at their defaults
    lanes: list[list[int]]
    shards: Annotated[int, Field(ge=1)] = 1
    team: Annotated[int, Field(ge=1)] = 1
    crossed: bool = False
    micro_batches: list[Annotated[int, Field(ge=1)]] = []

    @model_validator(mode="before")
    @classmethod
    def _lanes(cls, document: Any) -> Any:
        if not isinstance(document, dict) or "lanes" in document or not {"devices", "depth"} <= document.keys():
            return document
        short = {"shards": 1, "team": 1, "nearest": NEAREST[0], **document}
        names = ("devices", "depth", "shards", "team", "nearest")
        count, depth, shards, team, nearest = (short.pop(name) for name in names)
        numbers, crossed = (count, depth, shards, team), short.get("crossed") is True
        wrong = any(not isinstance(n, int) or n < 1 for n in numbers)
        if wrong or count % (depth * lanes_beside(shards, team, crossed)) or nearest not in NEAREST:
            raise ValueError(
                f"devices are a multiple of depth times shards and team, nearest is one of {', '.join(NEAREST)}"
            )
        lanes = regular_lanes(count, lanes_beside(shards, team, crossed), depth, nearest)
        return {**short, "lanes": lanes, "shards": shards, "team": team}

    @model_serializer(mode="wrap", when_used="json")
    def _short(self, plain: Callable[[Lanes], dict[str, Any]]) -> dict[str, Any]:
        depth, count, beside = len(self.lanes[0]), self.num_devices, self.lanes_together
        found = plain(self)
        crossed = {"crossed": True} if found.pop("crossed") else {}
        unequal = {"micro_batches": found.pop("micro_batches")} if self.micro_batches else {}
        for nearest in NEAREST if count % (depth * beside) == 0 else ():
            if self.lanes == regular_lanes(count, beside, depth, nearest):
                team = {"team": self.team} if self.team > 1 else {}
                sizes = {"devices": count, "depth": depth, "shards": self.shards, **team, **crossed}
                return {**sizes, "nearest": nearest, **unequal}
        found.pop("micro_batches", None)
        return {**found, **crossed, **unequal}

    @property
    def lanes_together(self) -> int:
        """The number of neighbouring lanes that are one team or more, and share stages among them."""
        return lanes_beside(self.shards, self.team, self.crossed)

    def total_micro_batches(self, most: int) -> int:
        """The different micro-batches of all lanes together, of which the lanes with the most have `most`."""
        return sum(self.micro_batches[:: self.team]) or most * (max(1, len(self.lanes)) // self.team)

    @property
    def num_devices(self) -> int:
        """The number of devices of all lanes together."""
        return sum(map(len, self.lanes))

    def describe(self) -> str:
        """In words: "512 devices: 64 replicas of 8 shards", "16 devices: 2 replicas of 2 shards of pipelines of 4"."""
        depth, beside = len(self.lanes[0]), self.lanes_together
        replicas = self.num_devices // (beside * depth)
        parts = [f"{replicas} replicas"] if replicas > 1 else []
        groups = {"shards": self.shards, "lanes that are a team": self.team}
        if self.shards == self.team > 1 and not self.crossed:
            groups = {"shards that are a team": self.team}
        for most, name in sorted(((count, name) for name, count in groups.items() if count > 1), reverse=True):
            parts.append(f"{most} {name}")
        parts += [f"{'pipelines' if parts else 'a pipeline'} of {depth}"] if depth > 1 or not parts else []
        unequal = f", which run {', '.join(map(str, self.micro_batches))} micro-batches" if self.micro_batches else ""
        return f"{self.num_devices} devices: {' of '.join(parts)}{unequal}"


def lanes_beside(shards: int, team: int, crossed: bool) -> int:
    """The number of lanes that share stages or are a team: of `crossed` ones each shares with one of each team."""
    return shards * team if crossed else max(shards, team)


def regular_lanes(count: int, shards: int, depth: int, nearest: str = NEAREST[0]) -> list[list[int]]:
    """The lanes of `depth` devices that make up `count` devices; lanes that share stages or are a team, `shards` of
    them, come one after the other."""
    if nearest == "shards":
        rows = np.arange(count).reshape(-1, depth, shards).swapaxes(1, 2)
    else:
        rows = np.arange(count).reshape(-1, shards, depth)
    lanes: list[list[int]] = rows.reshape(-1, depth).tolist()
    return lanes


class Width(BaseModel):
    """The division of work inside layers. `team`: the number of members; `regions`: the regions that they divide, each
    by the weight of its first product by rows."""

    model_config = ConfigDict(extra="forbid")
    team: Annotated[int, Field(ge=1)] = 1
    regions: list[str] = []


class Sharding(BaseModel):
    """The spread of stages over the lanes that share them.

    `tier`: the memory of the shards ("ssd": `insert-ssd` moves them there); `ahead`: the number of phases between a
    gather and its use; `hierarchical`: gathers go between hosts first, then inside them; `held`: the stages that are
    gathered once and stay whole for all micro-batches.
    """

    model_config = ConfigDict(extra="forbid")
    tier: MemoryName
    ahead: Annotated[int, Field(ge=0)] = 1
    hierarchical: bool = False
    held: list[str] = []


class Activations(BaseModel):
    """For one rematerialised stage, the classes of saved tensors that it keeps, and the memories that hold these and
    its inputs between forward and backward."""

    model_config = ConfigDict(extra="forbid")
    classes: list[str] = []
    classes_to: MemoryName = "device"
    inputs_to: MemoryName = "device"

    @property
    def is_plain(self) -> bool:
        """Whether the stage is rematerialised from inputs on the device and keeps no classes."""
        return not self.classes and self.inputs_to == ops.DEVICE

    def shape(self, spec: StageSpec) -> Hashable:
        """A key that is equal for equal decisions on stages that differ in names alone."""
        kept = tuple(i for i, saved in enumerate(spec.saved) if saved.name in self.classes)
        return kept, self.classes_to, self.inputs_to

    def rename(self, before: StageSpec, after: StageSpec) -> Activations:
        """The same decision for an equal stage, whose classes come in the same order."""
        names = {old.name: new.name for old, new in zip(before.saved, after.saved)}
        return self.model_copy(update={"classes": [names[name] for name in self.classes]})


# How members of a team meet in attention: each has some heads of all tokens, or keys and values go round; or they do
# not meet, as each has whole rows.
By = Literal["heads", "ring", "rows"]


class TokenSplit(BaseModel):
    """The division of tokens among `team` members, which meet in attention. `experts`: the layers whose experts they
    divide, too, by module path; tokens then go to the members that have their experts. `keep`: keep the keys and
    values that came round a ring until backward, in place of sending them round again."""

    model_config = ConfigDict(extra="forbid")
    team: Annotated[int, Field(ge=2)]
    by: By = "heads"
    experts: list[str] = []
    keep: bool = False


class OnSsd(BaseModel):
    """The contents of SSDs. `stages`: per stage its optimizer states, or all that persists of it; `ahead`: the number
    of phases between the read of weights and their fetch."""

    model_config = ConfigDict(extra="forbid")
    stages: StageTiers = {}
    ahead: Annotated[int, Field(ge=0)] = 1


# What several passes can decide.
SCHEDULE = Decision("schedule", str)  # the `word` of a schedule
# Stages whose trained parameters stay on the device while the frozen rest is fetched; None: none, or in plans that were
# made before this was decided those that `passes/staying.py` chooses.
STAYING = Decision("staying", list[str] | None, None)
REMATERIALISE = Decision("rematerialise", list[str])  # stages
FETCH = Decision("fetch", dict[str, dict[PhaseName, int]])  # see `Early` in `insert_fetch.py`
SHARDING = Decision("sharding", Sharding | None, None, hashed=True)
SSD = Decision("ssd", OnSsd, OnSsd(), hashed=True)
OPTIMIZER = Decision("optimizer", dict[str, MemoryName])  # stage -> tier of its states; resident weights: updated there
