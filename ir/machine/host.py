"""A host of a machine: its DRAM, CPU, root complexes and disks, and the network that joins hosts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .part import Bytes, Dtype, Flops, Fraction, MachinePart, Rate, Seconds, SomeBytes
from .racks import Racks
from .rates import RateTable
from .shares import MessageShares, NumberShares, share_at


class Ssd(MachinePart):
    """One disk. Reads and writes take turns on it.

    `directory` is a writable directory on the disk, for the files of a run; `endurance_bytes` is the number of bytes
    that may be written to the disk in its life (TBW on its datasheet).
    """

    size_bytes: Bytes
    read_bandwidth: Rate
    write_bandwidth: Rate
    latency_s: Seconds = 100e-6
    usable_fraction: Fraction = 0.9
    directory: Annotated[str, Field(min_length=1)] | None = None
    endurance_bytes: Bytes | None = None

    @property
    def budget_bytes(self) -> int:
        return int(self.size_bytes * self.usable_fraction)


class RootComplex(MachinePart):
    """A PCIe root port (or the one uplink of a switch) that the devices below it share, per direction.

    `bandwidth_both` is what both directions reach together when both are busy; None: neither slows the other down.
    """

    bandwidth_up: Rate  # towards DRAM
    bandwidth_down: Rate  # towards the devices
    bandwidth_both: Rate | None = None


class CpuRates(MachinePart):
    """The rates of a CPU device with this number of threads while the host's other cores run such devices too. The
    fields are those of `Device`."""

    threads: Annotated[int, Field(gt=0)]
    peak_flops: Annotated[dict[Dtype, Flops], Field(min_length=1)]
    memory_bandwidth: Rate
    h2d_bandwidth: Rate
    d2h_bandwidth: Rate
    link_latency_s: Seconds
    op_overhead_s: Seconds
    rates: RateTable | None = None


class CommunicatorMemory(MachinePart):
    """The bytes that communicators of NCCL take of a GPU beside a plan's values, as measured.

    `library_bytes`: with the first of a process, once; `rest_bytes`: each, before it is used. A connection for messages
    takes `sender_bytes` of the GPU that sends and `receiver_bytes` of the other, one by which a group gathers and adds
    up `group_bytes`, on average of both ends.
    """

    library_bytes: SomeBytes = 0
    rest_bytes: SomeBytes
    sender_bytes: SomeBytes
    receiver_bytes: SomeBytes
    group_bytes: SomeBytes


class Host(MachinePart):
    """One machine: DRAM, CPU, root complexes, disks.

    `optimizer_params_per_s` is the AdamW rate of the whole host, all cores on fp32 states in DRAM, measured while the
    links of its GPUs are busy; `optimizer_threads` is the number of threads that reached it, those of all GPUs
    together, and None where it was not measured: then all cores that do not feed the GPUs step.
    `nvlink_bandwidth` is per device and direction through a switch that joins all devices of the host; on CPU
    devices it is the loopback between two worker processes. `nvlink_message_shares` is the share of it that messages
    reach by their bytes, besides their latency; `ssd_shares` the share of the sum of rates that N disks reach together.
    `communicators` has the bytes of a GPU that NCCL takes; without it they are the most by NCCL's source.
    `staged_bandwidth` is the most that messages of one GPU reach through DRAM, without P2P and NVLink.
    With `shared_memory` the devices have no memory of their own: what they may use is part of the usable DRAM, and the
    rest of it is the budget of DRAM, so that both together stay within `dram_usable_fraction` of the one memory.
    `model_bytes` is what the script's own copy of the model takes of the usable DRAM; `compile` sets it, on devices
    too.
    """

    dram_bytes: Bytes
    model_bytes: SomeBytes = 0
    dram_usable_fraction: Fraction = 0.9
    shared_memory: bool = False
    dram_bandwidth: Rate
    cpu_cores: Annotated[int, Field(gt=0)]
    optimizer_params_per_s: Annotated[float, Field(gt=0)]
    optimizer_threads: Annotated[int, Field(gt=0)] | None = None
    root_complexes: Annotated[list[RootComplex], Field(min_length=1)]
    ssds: list[Ssd] = []
    ssd_shares: NumberShares | None = None
    ssd_uplink_bandwidth: Rate | None = None  # shared by all disks of the host, per direction
    p2p: bool = False
    staged_bandwidth: Rate | None = None  # None: that of the links on the way
    nvlink_bandwidth: Rate | None = None
    nvlink_latency_s: Seconds = 5e-6
    nvlink_message_shares: MessageShares | None = None
    communicators: CommunicatorMemory | None = None
    cpu_rates: list[CpuRates] = []  # as measured; `with_` gives CPU devices those of the threads that they will have
    price_dollars: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # to buy, devices included
    price_dollars_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # to rent

    @property
    def usable_bytes(self) -> int:
        """The bytes of DRAM that plans and the script's own copy of the model may use."""
        return int(self.dram_bytes * self.dram_usable_fraction)

    @property
    def ssd_bandwidths(self) -> tuple[float, float]:
        """Bytes/s that all disks together read, and write; 0 without disks."""
        share = share_at(self.ssd_shares, len(self.ssds)) if self.ssds else 0.0
        return share * sum(s.read_bandwidth for s in self.ssds), share * sum(s.write_bandwidth for s in self.ssds)


class Network(MachinePart):
    """The network between the hosts: rate per host and direction, the time of an empty message, and the racks of
    hosts.

    `message_shares` is the share of the rate that messages reach by their bytes, besides their latency, and
    `host_shares` the share that a collective reaches over N hosts; the product of both counts. `gpu_direct`: network
    cards read and write GPU memory themselves (GPUDirect RDMA), so that messages between GPUs of different hosts pass
    no DRAM and wait for no copy to begin.
    """

    bandwidth: Rate
    latency_s: Seconds = 20e-6
    gpu_direct: bool = False
    racks: Racks | None = None  # None: all hosts reach each other at their full rate
    message_shares: MessageShares | None = None
    host_shares: NumberShares | None = None

    def bandwidth_at(self, message_bytes: float, num_hosts: int = 2) -> float:
        """Bytes/s per host and direction of messages of this size, between `num_hosts` hosts."""
        return self.bandwidth * share_at(self.message_shares, message_bytes) * share_at(self.host_shares, num_hosts)
