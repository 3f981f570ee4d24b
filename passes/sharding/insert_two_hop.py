"""`insert-two-hop`: gradients of shared stages are added up in two hops (MiCS 3.4).

In: programs of a lane whose stages are shared with other lanes. Out: programs in which the first hop is taken with
every micro-batch and stays inside the group that shares the weights (`reduce_scatter`, added to what the micro-batches
before gave), and the second once a step: the devices that hold the same piece add up their sums (`all_reduce`). No
device ever holds more of a stage's gradients than one micro-batch's and its own piece.

For comparison `every=micro-batch` takes the second hop with every micro-batch, too, as a plain ZeRO does; and
`every=step` adds up a lane's micro-batches on the device first and takes both hops once, which moves the fewest bytes
where the gradients of all stages fit. `every=all-reduce` does so, too, but brings the whole sum to every device, which
keeps its own piece: twice the bytes, as Mobius says of DeepSpeed (eq. 2). `every=auto` is `step` where that fits, else
`two-hop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...ir.errors import PassError
from ..base import Pass
from ..decisions import Decision
from ..draft import Draft
from .gathering import peak_bytes
from .gradient_sums import MICRO_BATCH, STEP, TWO_HOP, WAYS, sum_gradients
from .insert_shard import require_shards

AUTO = "auto"


@dataclass(frozen=True)
class InsertTwoHop(Pass):
    """`every`: see above; default two-hop. Raises `PassError` where no lanes share their weights."""

    name: ClassVar[str] = "insert-two-hop"
    rank: ClassVar[int] = 64
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers", "mesh")
    gives: ClassVar[tuple[str, ...]] = ("sums",)
    precedes: ClassVar[tuple[str, ...]] = ("optimizer",)  # which reads the sums
    # how shared stages' gradients add up
    decides: ClassVar[tuple[Decision, ...]] = (
        Decision("sums", Literal["step", "two-hop", "micro-batch", "all-reduce"] | None, None, hashed=True),
    )
    every: str = TWO_HOP

    def __post_init__(self) -> None:
        if self.every not in (AUTO, *WAYS):
            raise PassError(f"pass {self.name!r}: option every={self.every!r} is none of {', '.join((AUTO, *WAYS))}")

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return []

    def plan(self, draft: Draft) -> str:
        """One of `WAYS`."""
        self._check(draft)
        if self.every != AUTO:
            return self.every
        budgets = [draft.lane_hardware.devices[program.device].budget_bytes for program in draft.programs]
        fits = all(peak_bytes(program.copy(), STEP) <= budget for program, budget in zip(draft.programs, budgets))
        return STEP if fits else TWO_HOP

    def rewrite(self, draft: Draft, every: str) -> None:
        self._check(draft)
        if every not in WAYS:
            raise PassError(f"sums is {every!r}; allowed: {', '.join(WAYS)}")
        if every == MICRO_BATCH and draft.mesh.micro_batches:
            raise PassError(
                f"{self.name}: replicas with unequal numbers of micro-batches cannot add up after each of them; use "
                f"every={TWO_HOP}, or mesh without by_speed"
            )
        for program in draft.programs:
            sum_gradients(program, every, self._scatters_by_host(draft))

    def _scatters_by_host(self, draft: Draft) -> bool:
        """Whether scatters go in a hierarchy as gathers do. Between GPUs, NCCL chooses the way."""
        on_cpus = all(device.kind == "cpu" for device in draft.lane_hardware.devices)
        return on_cpus and draft.sharding is not None and draft.sharding.hierarchical

    def _check(self, draft: Draft) -> None:
        require_shards(self, draft)
        if draft.sharding is None:
            raise PassError(f"{self.name}: the stages are not spread over their group yet; put insert-shard before it")
