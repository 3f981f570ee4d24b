"""`profile`: the seconds of every distinct block on this machine's own devices, from the cache or measured now.

Missing blocks are printed as stages, in the very text that workers run, and timed by child processes in the environment
of workers (`runtime/measure/blocks.py`): CPU devices at the same time, and one GPU of each kind.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ...codegen.file import Header, write_directory, write_file
from ...codegen.imports import Imports
from ...graph.blocks import Block
from ...graph.costs.stage_time import roofline
from ...graph.opgraph import OpGraph
from ...graph.profile import BlockSample, check_seconds, distinct, samples, with_seconds
from ...graph.turn_seconds import TurnSeconds
from ...ir.errors import HardwareError, PlanError
from ...ir.machine.hardware import Device, Hardware
from ...ir.machine.presets import gpu
from ...ir.program import Interface, Program
from ...ir.units import format_bytes
from ...passes.draft import MeasureBlocks
from ...runtime import scratch
from ...runtime.accelerator import num_gpus, properties_of
from ...runtime.device.file import INTERFACE_FILE
from ...runtime.measure.blocks import ROWS_FILE, STAGE_S, TRUST_FILE
from ...runtime.measure.detect import known_part, run_children, usable_cores
from ...runtime.processes.local import worker_environment
from .cache import EntryKey, ProfileCache

MEMORY_TOLERANCE = 0.15  # drivers keep some of a GPU's memory, and documents round
RATE_TOLERANCE = 1.75  # datasheet and measurement of one part differ less; parts of equal memory differ more
START_S, SLACK = 120.0, 100.0  # of a child: seconds to start, and the limit over the roofline's seconds


@dataclass(frozen=True)
class DeviceKind:
    """Devices of a document that are one kind of device here. `kind`: "cpu" or "cuda"; `number`: of the first GPU."""

    kind: str
    title: str
    devices: tuple[Device, ...]
    number: int = 0

    @property
    def together(self) -> int:
        """The number of devices timed at once, each on cores of its own: the simulator models shared cores."""
        return _num_parallel(len(self.devices), self.devices[0]) if self.kind == "cpu" else 1


RunSamples = Callable[
    [DeviceKind, Sequence[BlockSample], str, float], dict[str, TurnSeconds]
]  # part, samples, precision, roofline seconds -> seconds by block


class Profiler:
    """Called with a graph, its blocks and the hardware, it returns the blocks with their seconds by device name.

    `run` measures the blocks that the cache lacks, on one part. Raises `HardwareError` for a device that is not here.
    """

    def __init__(self, cache: ProfileCache, precision: str, run: RunSamples | None = None):
        self.cache, self.precision = cache, precision
        self.run = run_on_this_machine if run is None else run

    def __call__(self, graph: OpGraph, blocks: list[Block], hardware: Hardware) -> list[Block]:
        measured = {}
        for part in parts_here(hardware):
            entries = self._entries(graph, blocks, part)
            measured.update({device.name: entries for device in part.devices})
        return with_seconds(blocks, measured)

    def _entries(self, graph: OpGraph, blocks: list[Block], part: DeviceKind) -> dict[str, TurnSeconds]:
        first = distinct(blocks)
        keys = {found: EntryKey(found, part.title, self.precision, torch.__version__) for found in first}
        known = {found: seconds for found, key in keys.items() if (seconds := self.cache.load(key)) is not None}
        missing = [found for found in first if found not in known]
        if missing:
            expected_s = sum(_roofline_s(first[found], part.devices[0], self.precision) for found in missing)
            fresh = self.run(part, samples(graph, blocks, missing), self.precision, expected_s)
            for found in missing:
                if found not in fresh:
                    raise PlanError(f"profile: block {first[found].name!r} ({found}) was not measured on {part.title}")
                known[found] = check_seconds(fresh[found], f"block {first[found].name!r} ({found}) on {part.title}")
            for found in missing:
                self.cache.save(keys[found], known[found])
        return known


def make_profiler(profile: bool | str | Path | None, precision: str) -> Profiler | None:
    """The profiler for a value of `profile=`: none, one with the default cache, or one with a directory as cache."""
    if profile is None or profile is False:
        return None
    if profile is not True and not isinstance(profile, (str, Path)):
        raise PlanError(f"profile={profile!r}; it is True, a directory for measured times, or None")
    return Profiler(ProfileCache(None if profile is True else profile), precision)


def for_machines_like(profiler: MeasureBlocks, hardware: Hardware) -> MeasureBlocks:
    """A profiler for plans that are not run: devices of another machine take the seconds of the first device of
    `hardware` with their rates, whatever their memory and links. Raises `HardwareError` for a device without a twin."""

    def profile(graph: OpGraph, blocks: list[Block], machine: Hardware) -> list[Block]:
        twins = {device.name: _twin(device, hardware) for device in machine.devices}
        measured = profiler(graph, blocks, hardware)
        return [replace(b, seconds={name: b.seconds[twin] for name, twin in twins.items()}) for b in measured]

    return profile


def _twin(device: Device, hardware: Hardware) -> str:
    for known in hardware.devices:
        if all(getattr(known, name) == getattr(device, name) for name in ("kind", "threads", *_RATES)):
            return known.name
    raise HardwareError(f"profile: no device of {hardware.name} computes as {device.name} does; leave profile out")


_RATES = ("peak_flops", "achieved_fraction", "memory_bandwidth", "rates", "op_overhead_s")


def _roofline_s(block: Block, device: Device, precision: str) -> float:
    """The roofline's seconds of both forwards and the backward."""
    took = roofline(block.cost, device, precision)
    return 2 * took.forward_s + took.backward_s


# --- which devices are here


def parts_here(hardware: Hardware) -> list[DeviceKind]:
    """The devices by kind. Raises `HardwareError` naming the first device that this machine lacks, and what it has."""
    groups: dict[tuple[str, str], list[tuple[int, Device]]] = {}
    number_of_gpus = 0
    for device in hardware.devices:
        number = number_of_gpus if device.kind == "cuda" else 0
        why = _why_absent(device, number)
        if why:
            raise HardwareError(
                f"profile: {device.name} of {hardware.name} {why}; here is {_what_is_here()}. Measure on a machine "
                "that has it, or leave profile out: times then come from the hardware document"
            )
        number_of_gpus += device.kind == "cuda"
        title = _gpu_title(number) if device.kind == "cuda" else f"{cpu_model()}, {device.threads} threads"
        groups.setdefault((device.kind, title), []).append((number, device))
    cpus = [device for device in hardware.devices if device.kind == "cpu"]
    beside = f", {usable_cores()} cores, {_num_parallel(len(cpus), cpus[0])} devices at once" if cpus else ""
    return [
        DeviceKind(
            kind, title if kind == "cuda" else title + beside, tuple(device for _, device in members), members[0][0]
        )
        for (kind, title), members in groups.items()
    ]


def _num_parallel(num_devices: int, device: Device) -> int:
    return max(1, min(num_devices, usable_cores() // device.threads))


def _why_absent(device: Device, number: int) -> str:
    """The reason why a device is none of this machine's, or "". `number`: the number of GPUs before it."""
    if device.host:
        return f"is on host {device.host}"
    if device.kind == "cpu":
        cores = usable_cores()
        return f"computes on {device.threads} threads" if device.threads > cores else ""
    if number >= num_gpus():
        return "is a GPU"
    properties = properties_of(number)
    if abs(device.memory_bytes / properties.total_memory - 1) > MEMORY_TOLERANCE:
        return f"is a GPU with {format_bytes(device.memory_bytes)}"
    part = known_part(properties.name)
    figures = gpu(part, 0) if part is not None else None
    if figures is not None and "fp16" in device.peak_flops:
        known = Device.model_validate(figures)
        ratio = device.achieved_flops("fp16") / known.achieved_flops("fp16")
        if not 1 / RATE_TOLERANCE < ratio < RATE_TOLERANCE:
            return f"is a GPU with {ratio:.1f} times the rate of a {properties.name}"
    return ""


def _what_is_here() -> str:
    gpus = [_gpu_title(i) for i in range(num_gpus())]
    return ", ".join([*gpus, f"{cpu_model()} with {usable_cores()} cores" + ("" if gpus else ", no GPU")])


def _gpu_title(number: int) -> str:
    properties = properties_of(number)
    return f"{properties.name}, {format_bytes(properties.total_memory)}"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name with its family and model, as virtual machines give many CPUs the same name."""
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = {key: value for key, value in re.findall(r"^(model name|cpu family|model)\s*:\s*(.*)$", text, re.MULTILINE)}
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} family {found.get('cpu family', '?')} model {found.get('model', '?')}"


# --- measuring


def run_on_this_machine(
    part: DeviceKind, wanted: Sequence[BlockSample], precision: str, expected_s: float
) -> dict[str, TurnSeconds]:
    """Time the samples in `part.together` child processes at once, and return the mean over these.

    Raises `HardwareError` with the error output of a child that fails, for instance where one block alone is larger
    than memory, or that takes a hundred times what the roofline says.
    """
    names = {sample.stage.spec.name: sample.hash for sample in wanted}
    threads, world = part.devices[0].threads, part.together
    device = "cpu" if part.kind == "cpu" else f"cuda:{part.number}"
    with scratch.temporary("profile") as folder:
        write_samples(folder, wanted)
        ranks = [[str(folder), device, precision, str(rank), str(world), str(threads)] for rank in range(world)]
        reports = run_children(
            "blocks",
            ranks,
            threads,
            environment=worker_environment(threads),
            timeout_s=START_S + len(wanted) * 3 * STAGE_S + SLACK * expected_s,
        )
    rows = {names[name]: [report[name] for report in reports] for name in names}
    return {found: TurnSeconds(*map(statistics.fmean, zip(*times))) for found, times in rows.items()}


def write_samples(folder: str | Path, wanted: Sequence[BlockSample]) -> None:
    """Write the input of `runtime/measure/blocks.py`: a device's file with these stages and an empty step, and rows."""
    interface = Interface({sample.stage.spec.name: sample.stage.spec for sample in wanted}, batch={})
    program = Program(0, interface)
    program.returns({})
    graphs = {sample.stage.spec.name: sample.stage.graph for sample in wanted}
    imports = Imports()
    text = write_file(program, None, graphs, Header(model="blocks to be timed", hardware="this machine"), imports)
    rows: Mapping[str, Mapping[str, int]] = {sample.stage.spec.name: sample.rows for sample in wanted}
    trust = json.dumps(asdict(imports.trust()))
    extras = {INTERFACE_FILE: interface.to_json(), ROWS_FILE: json.dumps(rows), TRUST_FILE: trust}
    write_directory(folder, {0: text}, extras)
