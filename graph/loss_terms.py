"""The terms of a loss, and the counts over the whole batch that it divides by.

In: nothing. Out: the values that capture finds, `explain` prints and a job's folder keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import fx

NUM_ITEMS = "num_items_in_batch"  # transformers' name of the number of targets in the whole batch
WEIGHT = "loss_weight"  # the input that holds each micro-batch's share by the user's own rule


class LossTerm(BaseModel):
    """One summand of the loss.

    kind: "mean": the mean over rows, to which every micro-batch contributes alike. "counted": a sum, divided by what
    the whole batch counts. "weighted": each micro-batch counts as `loss_weight` says. "uncounted": divided by a count
    that is not known before the forward runs, so each micro-batch is divided by its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["mean", "counted", "weighted", "uncounted"]
    source: str = ""  # the user's line
    counts: str = ""  # the divisor, a noun phrase such as "the number of targets other than -100"
    input: str = ""  # the input of the graph that holds the divisor
    of_targets: bool = False  # made of class losses, whose gradients are zero where there is no target


class Divisor(BaseModel):
    """An input of the graph that is computed from counts over the whole batch.

    spread: True where the term is a sum over rows: then the divisor is that of one micro-batch, the whole batch's
    divided by the number of micro-batches, as the step takes the mean over micro-batches.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    input: str
    dtype: str
    spread: bool


class CountRules(BaseModel):
    """The rules that compute the divisors of one step, in the forms that a folder keeps.

    `Counts` of the folder takes `inputs`, the rows of one micro-batch, and gives one number per entry of `means`; those
    numbers are added up over micro-batches, or averaged where `means` says True. `Divisors` makes the `divisors` of
    them, in order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: tuple[str, ...] = ()
    means: tuple[bool, ...] = ()
    divisors: tuple[Divisor, ...] = ()
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()  # of `Counts`: name, shape, dtype
    by_user: bool = False  # the only divisor is the share that `loss_weight` gives
    transforms: bool = False  # the folder has `Divisors`; without it each divisor is the total in its place

    @property
    def names(self) -> tuple[str, ...]:
        """The graph's inputs that no batch of the user has."""
        return tuple(divisor.input for divisor in self.divisors)


@dataclass
class LossRules:
    """The terms of a graph's loss, and the graphs that count: of one micro-batch, and from totals to divisors."""

    terms: list[LossTerm] = field(default_factory=list)
    rules: CountRules = field(default_factory=CountRules)
    counts: fx.GraphModule | None = None
    divisors: fx.GraphModule | None = None  # None: each divisor is the total in its place
