"""What is counted over the whole batch before each step, as divisors of terms of the loss.

`Counts` takes the rows of one micro-batch; its results are added up over all micro-batches.

`Picks` takes the rows of one micro-batch and gives the numbers of the rows of tables, and of the classes of
losses, that the step picks: they are checked before it.
"""

import torch
from torch import nn

from penstock.runtime.modules import Scope, Stage


class Counts(Stage):  # no parameters
    def __init__(self):
        super().__init__()

    def forward(self, y):                                                     # i64[4]
        # Net
        ne = y.ne(-100)                                                       # bool[4]
        sum_ = ne.sum()                                                       # i64[]
        return (sum_,)                                                        # sum_1


class Picks(Stage):  # no parameters
    def __init__(self):
        super().__init__()

    def forward(self, y):                                                     # i64[4]
        return (y,)                                                           # y


STAGES = {"counts": Counts, "picks": Picks}
