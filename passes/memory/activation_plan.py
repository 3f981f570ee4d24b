"""The arithmetic of `choose-activations`: the activations to keep for the backward, and their memories.

Fuyou 4.5 for any model, machine and set of memories. A step is a forward half and a backward half that the optimizer
overlaps; each takes as long as its busiest resource (eq. 1, 2, 5): computation, the CPU's updates, the link to the
device, the link from it, the disks, whose reads and writes take turns (eq. 3, 4, 6, 7). Keeping a class of saved
tensors shortens what backward computes again (eq. 8) and lengthens what the links carry. Classes are taken in order of
benefit, the seconds saved per byte (eq. 12); along that order the step is a convex function of the bytes, so the sweep
over it finds the optimum. Kept classes fill device memory first, then DRAM, then SSD (4.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...ir.ops import DEVICE, DRAM, SSD
from ...ir.units import format_bytes, format_seconds
from ..decisions import MemoryName

INPUTS, CLASSES = "inputs", "classes"  # the two parts of a stage that are placed, each in one memory
ClassPlace = tuple[str, str]  # (stage, INPUTS or CLASSES)
GOLDEN = 0.6180339887  # any number of its multiples, modulo 1, is spread evenly
MOST_POINTS = 64  # of a curve, before those around the best
CLOSE = 1.001  # a step that is shorter by less than this factor is not worth more bytes


@dataclass(frozen=True)
class Item:
    """A class of saved tensors of one stage, for all its micro-batches: its bytes, and the seconds of computation that
    keeping it saves."""

    stage: str
    name: str
    bytes: int
    saved_s: float

    @property
    def benefit(self) -> float:
        """Seconds per byte (eq. 12)."""
        return self.saved_s / max(1, self.bytes)


@dataclass(frozen=True)
class Half:
    """The resources that half a step takes whatever is kept: seconds of computation and of the CPU's updates, bytes to
    the device, from it, and from and to the disks."""

    compute_s: float
    cpu_s: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of one device's share of the links. A CPU device copies with the cores that compute:
    `compute_cores` and `copy_cores_s` are what a second of computation and a byte moved take of its share of them."""

    h2d: float
    d2h: float
    read: float
    write: float
    compute_cores: float = 0.0
    copy_cores_s: float = 0.0


@dataclass(frozen=True)
class Room:
    """Bytes of each memory that activations may take. What goes to SSD passes through `passing_bytes` of the DRAM."""

    device_bytes: float
    dram_bytes: float
    ssd_bytes: float
    passing_bytes: float = 0.0


@dataclass(frozen=True)
class ActivationProblem:
    """The problem of one device. `backward` includes computing every stage again without any class. `inputs`: the bytes
    that each stage reads of others, for all micro-batches; some memory must hold them. `memories`: the memories to
    choose from; the first with room is taken."""

    forward: Half
    backward: Half
    rates: LinkRates
    room: Room
    items: tuple[Item, ...]
    inputs: Mapping[str, int]
    stages: tuple[str, ...]
    memories: tuple[MemoryName, ...] = (DEVICE, DRAM, SSD)
    swapped: bool = False  # whether weights come from DRAM

    @cached_property
    def input_sizes(self) -> dict[ClassPlace, int]:
        return {(stage, INPUTS): self.inputs.get(stage, 0) for stage in self.stages}

    @cached_property
    def room_beside_passing(self) -> Room:
        """The room where something goes to SSD."""
        return replace(self.room, dram_bytes=max(0.0, self.room.dram_bytes - self.room.passing_bytes))

    @cached_property
    def orders(self) -> tuple[list[ClassPlace], list[ClassPlace]]:
        """The inputs and classes of all stages: the last stages first, and in an order that spreads stages evenly."""
        number = {stage: i for i, stage in enumerate(self.stages)}
        both = [(stage, what) for stage in self.stages for what in (INPUTS, CLASSES)]
        late_first = sorted(both, key=lambda key: (-number[key[0]], key[1]))
        return late_first, sorted(both, key=lambda key: ((number[key[0]] * GOLDEN) % 1, key[1]))


@dataclass(frozen=True)
class Point:
    """One amount on the curve. `count`: the number of items kept, in order of benefit; `moved_bytes` leave the device
    and come back, `ssd_bytes` of them by way of the disks."""

    count: int
    kept_bytes: int
    moved_bytes: int
    ssd_bytes: int
    step_s: float
    forward_bound: str
    backward_bound: str
    places: Mapping[ClassPlace, MemoryName] = field(default_factory=dict, compare=False)
    fits: bool = True


def sort_by_benefit(items: Sequence[Item], stages: Sequence[str]) -> list[Item]:
    """The best items first; equal ones in an order that spreads stages evenly, so that links are always in use."""
    turn = {stage: (i * GOLDEN) % 1 for i, stage in enumerate(stages)}
    return sorted(items, key=lambda item: (-_round(item.benefit), turn[item.stage], item.name))


def _round(value: float) -> float:
    """A benefit without its last digits: benefits that differ by rounding errors only are equal."""
    return float(f"{value:.6g}")


def sweep(problem: ActivationProblem, share: float = -1.0) -> list[Point]:
    """The curve: for numbers of items taken in order of benefit, the step and the memory of every item. Of many items
    about `MOST_POINTS` numbers are looked at, evenly spread, and all around the best of these (`best`)."""
    items = sort_by_benefit(problem.items, problem.stages)
    stride = -(-len(items) // MOST_POINTS) or 1
    some = _points(problem, items, {*range(0, len(items) + 1, stride), len(items)})
    near = best(some, share).count
    more = {*range(max(0, near - stride), min(near + stride, len(items)) + 1)} - {point.count for point in some}
    return sorted([*some, *_points(problem, items, more)], key=lambda point: point.count)


def _points(problem: ActivationProblem, items: Sequence[Item], counts: Set[int]) -> list[Point]:
    """The points at which these numbers of items are kept."""
    classes = dict.fromkeys(problem.stages, 0)
    kept_bytes, saved_s, found = 0, 0.0, list[Point]()
    for count in range(max(counts, default=-1) + 1):
        if count:
            item = items[count - 1]
            classes[item.stage] += item.bytes
            kept_bytes += item.bytes
            saved_s += item.saved_s
        if count in counts:
            found.append(point_of(problem, count, classes, kept_bytes, saved_s))
    return found


def point_of(
    problem: ActivationProblem, count: int, classes: Mapping[str, int], kept_bytes: int, saved_s: float
) -> Point:
    """The point at which `classes` (stage to bytes) are kept, which saves `saved_s` seconds of computation."""
    places, fits = place(problem, classes)
    dram_bytes = ssd_bytes = 0
    for (stage, what), memory in places.items():
        num_bytes = classes[stage] if what == CLASSES else problem.inputs[stage]
        dram_bytes += num_bytes if memory == DRAM else 0
        ssd_bytes += num_bytes if memory == SSD else 0
    moved = dram_bytes + ssd_bytes
    rates = problem.rates
    forward_s, forward_bound = busiest(problem.forward, rates, d2h=moved, write=ssd_bytes)
    backward_s, backward_bound = busiest(problem.backward, rates, h2d=moved, read=ssd_bytes, saved_s=saved_s)
    step_s = forward_s + backward_s
    return Point(count, kept_bytes, moved, ssd_bytes, step_s, forward_bound, backward_bound, places, fits)


def place(problem: ActivationProblem, classes: Mapping[str, int]) -> tuple[dict[ClassPlace, MemoryName], bool]:
    """A memory for the inputs and the classes of every stage, and whether all of them have room.

    The last stages stay on the device: they are used again first, when there is least time to move them. What then
    goes to DRAM is spread evenly over the others, so that the disks have work all the time. Nothing goes to SSD that
    DRAM holds.
    """
    memories, room = problem.memories, problem.room
    if SSD in memories and len(memories) > 1:
        found, fits = _fill(problem, classes, [m for m in memories if m != SSD], room)
        if fits:
            return found, True
    return _fill(problem, classes, memories, problem.room_beside_passing)


def _fill(
    problem: ActivationProblem, classes: Mapping[str, int], memories: Sequence[MemoryName], room: Room
) -> tuple[dict[ClassPlace, MemoryName], bool]:
    """The first of these memories with room for each; what none has room for goes to the last."""
    sizes = problem.input_sizes | {(stage, CLASSES): size for stage, size in classes.items()}
    late_first, spread = problem.orders
    left = {DEVICE: room.device_bytes, DRAM: room.dram_bytes, SSD: room.ssd_bytes}
    found: dict[ClassPlace, MemoryName] = {}
    for memory in memories:
        for key in late_first if memory == DEVICE else spread:
            size = sizes.get(key, 0)
            if size and key not in found and size <= left[memory]:
                left[memory] -= size
                found[key] = memory
    waiting = [key for key in spread if sizes.get(key) and key not in found]
    found.update(dict.fromkeys(waiting, memories[-1]))
    return found, not waiting


def busiest(
    half: Half,
    rates: LinkRates,
    *,
    h2d: float = 0,
    d2h: float = 0,
    read: float = 0,
    write: float = 0,
    saved_s: float = 0,
) -> tuple[float, str]:
    """Seconds of half a step with these additional bytes and `saved_s` less computation, and its bound (eq. 2, 5)."""
    compute_s = half.compute_s - saved_s
    down, up, out, back = half.h2d_bytes + h2d, half.d2h_bytes + d2h, half.write_bytes + write, half.read_bytes + read
    took_s = {
        "compute": compute_s,
        "optimizer": half.cpu_s,
        "h2d": down / rates.h2d,
        "d2h": up / rates.d2h,
        "ssd": back / rates.read + out / rates.write,
        "cores": (compute_s + half.cpu_s) * rates.compute_cores + (down + up + out + back) * rates.copy_cores_s,
    }
    bound = max(took_s, key=lambda name: took_s[name])
    return took_s[bound], bound


def best(points: Sequence[Point], share: float = -1.0) -> Point:
    """Of the points that have room and a step about as short as the shortest, the one with the fewest bytes on SSD, of
    equals the one that moves the fewest, and of these the one that keeps the most; the first point where none has room.
    With `share` in 0 to 1, the point that keeps that share of all class bytes, as nearly as classes are cut."""
    if share >= 0:
        wanted = share * points[-1].kept_bytes
        return min(points, key=lambda point: abs(point.kept_bytes - wanted))
    able = [point for point in points if point.fits]
    if not able:
        return points[0]
    least_s = min(point.step_s for point in able)
    about = [point for point in able if point.step_s <= least_s * CLOSE]
    return min(about, key=lambda point: (point.ssd_bytes, point.moved_bytes, -point.kept_bytes))


def table(points: Sequence[Point], chosen: Point, rows: int = 8) -> str:
    """The curve as text: evenly spread amounts and, marked, the chosen one."""
    shown = {points[round(i * (len(points) - 1) / max(1, rows - 1))].count for i in range(rows)} | {chosen.count}
    return "\n".join(_lines([point for point in points if point.count in shown], chosen))


def _lines(points: Sequence[Point], chosen: Point) -> Iterator[str]:
    yield f"  {'kept':>10} {'moved':>10} {'on SSD':>10} {'step':>9}  bound by (forward, backward)"
    for point in points:
        sizes = " ".join(f"{format_bytes(n):>10}" for n in (point.kept_bytes, point.moved_bytes, point.ssd_bytes))
        bounds = f"{point.forward_bound}, {point.backward_bound}" + ("" if point.fits else "; does not fit")
        yield f"{'*' if point.count == chosen.count else ' '} {sizes} {format_seconds(point.step_s):>9}  {bounds}"
