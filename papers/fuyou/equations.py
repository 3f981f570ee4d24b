"""Equations 1 to 12 of Fuyou (2024, section 4.5): a step's time if every resource overlaps perfectly.

The equations count bytes and FLOPs of a whole model and know neither stages nor memories, so they check the simulator
independently. Units are s, bytes, bytes/s and FLOP/s. A parameter and its gradient have 2 bytes each, its master and
Adam's states 12 together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ir.machine.hardware import Hardware


@dataclass(frozen=True)
class Rates:
    """The rates of a machine with one GPU. `read` and `write` are those of all its SSDs together, which are simplex."""

    link: float  # bytes/s between GPU and DRAM, per direction
    read: float
    write: float
    flops: float
    params_per_s: float  # of the CPU's optimizer

    @classmethod
    def of(cls, hardware: Hardware, precision: str) -> Rates:
        device, host = hardware.devices[0], hardware.hosts[0]
        return cls(
            min(device.h2d_bandwidth, device.d2h_bandwidth),
            *host.ssd_bandwidths,
            device.achieved_flops(precision),
            host.optimizer_params_per_s,
        )


@dataclass(frozen=True)
class Swappable:
    """The activations of one layer: their bytes, and the FLOPs of forward that moving them out saves in backward."""

    bytes: float
    flops: float

    @property
    def benefit(self) -> float:
        """Equation 12 per byte, as the paper's swap time is proportional to bytes."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Load:
    """A model and a batch. `boundary_bytes` are those of one checkpoint per transformer block, the paper's D_start."""

    params: float
    forward_flops: float
    boundary_bytes: float
    swappable: Sequence[Swappable] = ()


@dataclass(frozen=True)
class Step:
    """Seconds by resource of the forward, and of backward with optimizer; `swapped_bytes` is the paper's D_f."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    swapped_bytes: float
    coefficient: float  # swapped bytes over those of all activations inside blocks

    @property
    def step_s(self) -> float:
        """Equations 1, 2 and 5."""
        return max(self.forward_s.values()) + max(self.backward_s.values())

    @property
    def bound(self) -> str:
        """The resource that bounds backward and optimizer."""
        return max(self.backward_s, key=lambda name: self.backward_s[name])


def step(rates: Rates, load: Load, swapped: Sequence[Swappable] = ()) -> Step:
    """Equations 2 to 8, with the activations of `swapped` moved out besides the checkpoints.

    Activations move to SSD; the others of a block are recomputed.
    """
    inside = sum(layer.bytes for layer in load.swappable)
    moved = sum(layer.bytes for layer in swapped)
    d_f, weights = load.boundary_bytes + moved, 2 * load.params
    forward_s = load.forward_flops / rates.flops
    again_s = (load.forward_flops - sum(layer.flops for layer in swapped)) / rates.flops
    forward = {
        "computation": forward_s,
        "GPU link": max(weights, d_f) / rates.link,  # eq. 3
        "SSD": weights / rates.read + d_f / rates.write,  # eq. 4
    }
    backward = {
        "computation": 2 * forward_s + again_s,  # eq. 8
        "CPU optimizer": load.params / rates.params_per_s,
        "GPU link": (weights + d_f) / rates.link,  # eq. 6, for fetches, which are the larger of the two directions
        "SSD": (7 * weights + d_f) / rates.read + 7 * weights / rates.write,  # eq. 7
    }
    return Step(forward, backward, d_f, moved / inside if inside else 0.0)


def curve(rates: Rates, load: Load) -> Iterator[Step]:
    """Steps with one more layer moved out each time, in order of benefit, as section 4.5 chooses them."""
    order = sorted(load.swappable, key=lambda layer: -layer.benefit)
    for count in range(len(order) + 1):
        yield step(rates, load, order[:count])


def most_swapped_bytes(rates: Rates, load: Load) -> float:
    """Equations 9 to 11: the most bytes that are worth swapping; at least those of the checkpoints."""
    start = step(rates, load)
    hidden_s = start.backward_s["computation"] - max(start.backward_s["GPU link"], start.backward_s["SSD"])
    return max(load.boundary_bytes, hidden_s * min(rates.link, rates.read, rates.write))


def best(rates: Rates, load: Load) -> Step:
    """The shortest step of the curve within equation 11; of equally short ones, the one that moves least."""
    most = most_swapped_bytes(rates, load)
    return min(
        (found for found in curve(rates, load) if found.swapped_bytes <= max(most, load.boundary_bytes)),
        key=lambda found: found.step_s,
    )


def apart_s(rates: Rates, load: Load) -> float:
    """Seconds of a step without overlap of backward and optimizer (section 4.3); gradients wait on SSD in between."""
    weights, d_f = 2 * load.params, load.boundary_bytes
    together = step(rates, load)
    backward_s = max(
        together.backward_s["computation"],
        together.backward_s["GPU link"],
        (weights + d_f) / rates.read + weights / rates.write,
    )
    optimizer_s = max(together.backward_s["CPU optimizer"], 7 * weights / rates.read + 7 * weights / rates.write)
    return max(together.forward_s.values()) + backward_s + optimizer_s


@dataclass(frozen=True)
class Serial:
    """Seconds of a step in which nothing overlaps: transfers of forward and backward, computation, and the optimizer
    stage."""

    moved_s: float
    computed_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.moved_s + self.computed_s + self.optimizer_s


def serial(rates: Rates, load: Load, pageable: float, on_ssd: bool = True) -> Serial:
    """A step in which nothing overlaps, as section 3.2 observes of ZeRO-Infinity. Weights come twice from SSD and over
    the link, gradients go to DRAM and SSD; in the optimizer stage gradients and states are read, updated and written.
    Checkpoints go to DRAM and back at `pageable` bytes/s, as section 5.5 says. ZeRO-Offload is the same without disks
    (`on_ssd` false)."""
    weights = 2 * load.params
    moved_s = 3 * weights / rates.link + 2 * load.boundary_bytes / pageable
    optimizer_s = load.params / rates.params_per_s
    if on_ssd:
        moved_s += 2 * weights / rates.read + weights / rates.write
        optimizer_s += 7 * weights / rates.read + 7 * weights / rates.write
    return Serial(moved_s, 4 * load.forward_flops / rates.flops, optimizer_s)
