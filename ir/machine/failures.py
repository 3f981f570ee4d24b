"""The rate at which parts of a machine fail, and the cost of a failure and of a checkpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .part import MachinePart, Rate, Seconds

Lifetime = Annotated[Seconds, Field(gt=0)]


class Failures(MachinePart):
    """`device_mtbf_s` is the mean time between failures of one device, and `host_mtbf_s` of the rest of one host:
    whatever ends the run. `restart_s` passes from a failure until steps go on, without the reading of the checkpoint:
    until it is noticed, spares have taken over and processes have started. `storage_bandwidth` is what all hosts
    together write to the directory of the checkpoints; without it, each host writes its part to SSDs of its own.
    """

    device_mtbf_s: Lifetime | None = None
    host_mtbf_s: Lifetime | None = None
    restart_s: Seconds = 300.0
    storage_bandwidth: Rate | None = None

    @model_validator(mode="after")
    def _say_one(self) -> Failures:
        if self.device_mtbf_s is None and self.host_mtbf_s is None:
            raise ValueError("device_mtbf_s or host_mtbf_s, or both; this has neither")
        return self

    def mtbf_s(self, num_devices: int, num_hosts: int) -> float:
        """Mean seconds between failures of the whole machine, whose parts fail independently of each other."""
        rate = num_devices / self.device_mtbf_s if self.device_mtbf_s else 0.0
        rate += num_hosts / self.host_mtbf_s if self.host_mtbf_s else 0.0
        return 1.0 / rate
