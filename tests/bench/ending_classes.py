"""Classes of the zoo that end, hang or keep the process that trains them, which imports them by their names."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from penstock.bench.model_zoo.registry import ModelClass


@dataclass(frozen=True)
class Ends(ModelClass):
    """A class whose process ends as soon as it is asked for a loss."""

    @property
    def has_loss(self) -> bool:
        os._exit(3)


@dataclass(frozen=True)
class Hangs(ModelClass):
    @property
    def has_loss(self) -> bool:
        time.sleep(600)
        return True


@dataclass(frozen=True)
class Computes(ModelClass):
    @property
    def has_loss(self) -> bool:
        while True:
            pass
