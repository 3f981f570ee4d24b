"""The description of a machine: hosts, devices, memories and the links between them, as a checked document.

A document is YAML or JSON whose keys are the fields below. Amounts are plain numbers (bytes, seconds, bytes/s,
FLOP/s) or text with a unit ("24GB", "13.1GB/s", "142TFLOPS", "10us").
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ..documents import Unreadable, read_yaml
from ..errors import HardwareError
from ..precision import PRECISIONS
from ..units import format_bytes, short_bytes
from .call_mix import FP8, CallMix
from .copies import KEY, copies_in, first_of, multiply, taken_out
from .describe import describe_hardware
from .failures import Failures
from .host import Host, Network
from .links import Link, build_graph, build_links, find_path, goes_direct, unknown_memory
from .overrides import overridden
from .part import DTYPES, Bytes, Dtype, Flops, Fraction, MachinePart, Rate, Seconds, SomeBytes
from .presets import CopyRates, cpu_document, preset_document
from .rates import ConstantRates, RateTable, mix_seconds, peak_seconds, with_numbers
from .spelling import preset_of
from .validation import explain_validation

if TYPE_CHECKING:
    import networkx as nx


def _arithmetic(name: str) -> str:
    """The dtype of a precision's products; a dtype's name stays as it is."""
    return PRECISIONS[name].arithmetic if name in PRECISIONS else name


def _for_every_dtype(value: object, info: ValidationInfo) -> object:
    """A single number as one for each dtype: those that any device may have, and those of its own peaks."""
    known = dict.fromkeys([*DTYPES, *info.data.get("peak_flops", ())])
    return {dtype: value for dtype in known} if isinstance(value, (int, float)) else value


def _numbers(parts: Sequence[MachinePart], without: set[str]) -> list[int]:
    """A number for each part, equal for those with equal fields but these."""
    texts: dict[int, str] = {}  # of parts inside, which many may share; by id, as all of them live meanwhile

    def look(value: Any) -> Hashable:
        if isinstance(value, MachinePart):
            if id(value) not in texts:
                texts[id(value)] = value.model_dump_json()
            return texts[id(value)]
        if isinstance(value, Mapping):
            return tuple(value.items())
        return tuple(map(look, value)) if isinstance(value, list) else value

    known: dict[tuple[Hashable, ...], int] = {}
    rows = (tuple(look(value) for name, value in part if name not in without) for part in parts)
    return [known.setdefault(row, len(known)) for row in rows]


class Reserve(MachinePart):
    """The bytes of a GPU's memory that are not a plan's, part by part.

    `context_bytes` is what the driver takes for a process; `libraries_bytes` are workspaces of cuBLAS and other
    libraries; `messages_bytes` are left for communicators, more of them by a plan that has many; `display_bytes` is
    what other programs hold, such as a display; `gaps_bytes` is what torch's allocator holds for a plan that fills the
    memory and cannot use: its rounding, and gaps between values.
    """

    context_bytes: SomeBytes = 0
    libraries_bytes: SomeBytes = 0
    messages_bytes: SomeBytes = 0
    display_bytes: SomeBytes = 0
    gaps_bytes: SomeBytes = 0

    @property
    def num_bytes(self) -> int:
        parts = (self.context_bytes, self.libraries_bytes, self.messages_bytes, self.display_bytes, self.gaps_bytes)
        return sum(parts)


class Device(MachinePart):
    """A GPU, or a CPU worker process that stands for one with a memory budget of its own.

    `achieved_fraction` of the peak is what large matrix products reach; a single number counts for every dtype. `rates`
    says what calls of each size reach; without it, all run at these constant rates. `op_overhead_s` is the fixed cost
    of one torch call. `threads` matters to CPU devices only.

    A plan may use `usable_fraction` of the memory, and never what belongs to the `reserve`. A device without a reserve
    is part of a GPU, whose rest holds it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    kind: Literal["cuda", "cpu"]
    host: Annotated[int, Field(ge=0)] = 0
    root_complex: Annotated[int, Field(ge=0)] = 0
    memory_bytes: Bytes
    usable_fraction: Fraction = 0.94
    reserve: Reserve | None = None
    peak_flops: Annotated[dict[Dtype, Flops], Field(min_length=1)]
    achieved_fraction: Annotated[dict[Dtype, Fraction], BeforeValidator(_for_every_dtype)]
    memory_bandwidth: Rate
    h2d_bandwidth: Rate
    d2h_bandwidth: Rate
    link_latency_s: Seconds = 20e-6
    op_overhead_s: Seconds = 8e-6
    rates: RateTable | None = None
    threads: Annotated[int, Field(gt=0)] = 1
    model_bytes: SomeBytes = 0

    @property
    def usable_bytes(self) -> int:
        """The bytes of the memory that a plan and the script's own copy of the model may use."""
        most_bytes = int(self.memory_bytes * self.usable_fraction)
        if self.reserve is not None:
            most_bytes = min(most_bytes, self.memory_bytes - self.reserve.num_bytes)
        return max(0, most_bytes)

    @property
    def budget_bytes(self) -> int:
        """The bytes of the memory that a plan may use."""
        return max(0, self.usable_bytes - self.model_bytes)

    @property
    def gaps_bytes(self) -> int | None:
        """The bytes of its memory in which a GPU's allocator may leave gaps: those of the reserve; of a part of a GPU,
        all that a plan may not use. None for a CPU device, whose allocator has the memory of its host."""
        if self.reserve is not None:
            return self.reserve.gaps_bytes
        return self.memory_bytes - int(self.memory_bytes * self.usable_fraction) if self.kind == "cuda" else None

    def achieved_flops(self, dtype: str = "fp32") -> float:
        """FLOP/s of large matrix products in `dtype`, or in that of a precision. Raises HardwareError when the device
        has no rate for it."""
        dtype = _arithmetic(dtype)
        for dtypes in (self.peak_flops, self.achieved_fraction):
            if dtype not in dtypes:
                raise HardwareError(f"{self.name} has no rate for dtype {dtype!r}; it has {', '.join(dtypes)}")
        return self.peak_flops[dtype] * self.achieved_fraction[dtype]  # type: ignore[index]

    def compute_s(
        self, flops: float, num_bytes: float, dtype: str = "fp32", launches: int = 1, mix: CallMix | None = None
    ) -> float:
        """Seconds of many calls one after the other: arithmetic, traffic to memory, overhead of `launches` calls.

        These add up, as calls that only read and write do not overlap with the matrix products of other calls. With a
        table of rates, FLOPs and bytes run at the average rates of the calls in `mix`; where it has no calls, as for an
        optimizer's update, at the constant ones.
        """
        if self.rates is None or mix is None or mix.is_empty:
            arithmetic_s, traffic_s = self._constant_s(flops, dtype, mix), num_bytes / self.memory_bandwidth
        else:
            computing_s, moving_s = mix_seconds(self.rates, self._constant_rates(dtype), mix)
            arithmetic_s = computing_s * flops / mix.flops if mix.flops else flops / self.achieved_flops(dtype)
            traffic_s = moving_s * num_bytes / mix.traffic_bytes if mix.traffic_bytes else 0.0
        return arithmetic_s + traffic_s + launches * self.op_overhead_s

    def arithmetic_s(self, flops: float, dtype: str, mix: CallMix) -> tuple[float, float]:
        """Seconds of the FLOPs of many calls, if all that reads and writes were fused into them: at the rates that
        kernels reach, and at the peak."""
        if not mix.flops:
            return flops / self.achieved_flops(dtype), flops / self.peak_flops[_arithmetic(dtype)]  # type: ignore[index]
        part, constant = flops / mix.flops, self._constant_rates(dtype)
        usual_s = self._constant_s(flops, dtype, mix)
        reached_s = usual_s if self.rates is None else part * mix_seconds(self.rates, constant, mix)[0]
        peak = ConstantRates(tuple(self.peak_flops.items()), self.memory_bandwidth, constant.dtype)
        return reached_s, part * peak_seconds(peak, mix)

    def _constant_s(self, flops: float, dtype: str, mix: CallMix | None) -> float:
        """Seconds of the FLOPs of a mix where no table has rates: products in float8 have one of their own."""
        share = mix.float8_share if mix is not None and FP8 in self.peak_flops else 0.0
        low_s = share * flops / self.achieved_flops(FP8) if share else 0.0
        return (1 - share) * flops / self.achieved_flops(dtype) + low_s

    def _constant_rates(self, dtype: str) -> ConstantRates:
        self.achieved_flops(dtype)  # a dtype without a rate is refused
        return self._rates_of[_arithmetic(dtype)]

    @cached_property
    def _rates_of(self) -> dict[str, ConstantRates]:
        """The constant rates by the dtype of the plan's computation."""
        flops = tuple((name, self.achieved_flops(name)) for name in self.peak_flops if name in self.achieved_fraction)
        return {name: ConstantRates(flops, self.memory_bandwidth, name) for name, _ in flops}


class Detect(Protocol):
    """Describes this machine. Only the runtime can measure, so the package sets `Hardware.detect`."""

    def __call__(self, measure: bool = False) -> Hardware: ...


class Hardware(MachinePart):
    """One or more hosts with their devices. Unequal devices are simply different entries."""

    detect: ClassVar[Detect]
    name: str
    source: str  # where the figures come from
    hosts: Annotated[list[Host], Field(min_length=1)]
    devices: Annotated[list[Device], Field(min_length=1)]
    network: Network | None = None
    failures: Failures | None = None  # None: nothing is said of them
    throttled: bool = False  # the runtime holds transfers of CPU devices down to the rates written here
    fitted_to: dict[str, str] = {}  # a paper and its finding ("mics fig2") -> what here was fitted to it

    # -- checks ----------------------------------------------------------------------------------------------------

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, document: Any, check: ModelWrapValidatorHandler[Hardware]) -> Hardware:
        document, copies = taken_out(document)
        try:
            hardware = multiply(check(document), copies)
        except ValidationError as error:
            raise HardwareError(explain_validation(error, cls)) from None
        hardware._check_references()
        return hardware

    def _check_references(self) -> None:
        seen: dict[str, int] = {}
        for index, device in enumerate(self.devices):
            at = f"devices[{index}]"
            if device.host >= len(self.hosts):
                raise HardwareError(f"{at}.host: found {device.host}, allowed: 0 to {len(self.hosts) - 1}")
            last = len(self.hosts[device.host].root_complexes) - 1
            if device.root_complex > last:
                found = f"found {device.root_complex}, allowed on host {device.host}: 0 to {last}"
                raise HardwareError(f"{at}.root_complex: {found}")
            if device.name in seen:
                raise HardwareError(f"{at}.name: {device.name!r} is already the name of devices[{seen[device.name]}]")
            if device.name in self._own_memories:
                raise HardwareError(f"{at}.name: {device.name!r} is the name of a host's memory; choose another")
            seen[device.name] = index
            for dtype, peak in device.peak_flops.items():
                highest = device.rates.highest(dtype) if device.rates else None
                if highest is not None and highest > peak * (1 + 1e-9):
                    found = f"found {highest:g} FLOP/s in {dtype}, allowed: at most peak_flops, {peak:g}"
                    raise HardwareError(f"{at}.rates: {found}")
        for index, host in enumerate(self.hosts):
            self._check_shared_memory(index, host)
        if len(self.hosts) > 1 and self.network is None:
            raise HardwareError(f"network: missing for {len(self.hosts)} hosts; give bandwidth and latency_s")
        racks = None if self.network is None else self.network.racks
        if racks is not None and racks.rack_of_host and len(racks.rack_of_host) != len(self.hosts):
            found = f"found {len(racks.rack_of_host)} numbers, allowed: one for each of the {len(self.hosts)} hosts"
            raise HardwareError(f"network.racks.rack_of_host: {found}")

    def _check_shared_memory(self, index: int, host: Host) -> None:
        """Refuse devices that may use more than the memory that they share with the CPU."""
        cap_bytes, taken_bytes = host.usable_bytes, self.shared_bytes(index)
        if taken_bytes <= cap_bytes + len(self.devices):  # a lane's part of a host is rounded down
            return
        here = [device for device in self.devices if device.host == index]
        names, most = ", ".join(device.name for device in here), max(device.usable_fraction for device in here)
        nearest_bytes = min(int(cap_bytes / most), host.dram_bytes) // len(here)
        raise HardwareError(
            f"hosts[{index}].shared_memory: {names} may use {format_bytes(taken_bytes)}, allowed: at most "
            f"{format_bytes(cap_bytes)}, which is {host.dram_usable_fraction:g} of the {format_bytes(host.dram_bytes)} "
            f'that CPU and GPU share; nearest: memory="{short_bytes(nearest_bytes, up=False)}"'
        )

    # -- memories, links, routes -----------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def device_by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _own_memories(self) -> dict[str, tuple[int, int]]:
        """Memories that belong to a host, arrays of disks included: name to (host, budget in bytes)."""
        found = {}
        for index, host in enumerate(self.hosts):
            left_bytes = host.usable_bytes - host.model_bytes - self.shared_bytes(index)
            found[f"dram{index}"] = (index, max(0, left_bytes))
            if host.ssds:
                found[f"ssd{index}"] = (index, sum(ssd.budget_bytes for ssd in host.ssds))
            for number, ssd in enumerate(host.ssds):
                found[f"ssd{index}.{number}"] = (index, ssd.budget_bytes)
        return found

    def memories(self) -> dict[str, int]:
        """Every device, DRAM and single disk by name, with its budget in bytes."""
        arrays = {f"ssd{index}" for index in range(len(self.hosts))}
        own = {name: budget for name, (_, budget) in self._own_memories.items() if name not in arrays}
        return {device.name: device.budget_bytes for device in self.devices} | own

    def budget_bytes(self, memory: str) -> int:
        """The bytes of a memory that a plan may use: "gpu0", "dram0", "ssd0.1", or "ssd0" for all disks of host 0."""
        if memory in self.device_by_name:
            return self.device_by_name[memory].budget_bytes
        if memory not in self._own_memories:
            raise unknown_memory(self, memory)
        return self._own_memories[memory][1]

    def shared_bytes(self, host: int) -> int:
        """The bytes of a host's usable DRAM that are its devices' memory; 0 where they have memories of their own."""
        if not self.hosts[host].shared_memory:
            return 0
        return sum(device.usable_bytes for device in self.devices if device.host == host)

    def dram_budget_bytes(self, host: int = 0) -> int:
        return self.budget_bytes(f"dram{host}")

    def ssd_budget_bytes(self, host: int = 0) -> int:
        """The budget of all disks of a host together; 0 if it has none."""
        return sum(ssd.budget_bytes for ssd in self.hosts[host].ssds)

    def ssd_directories(self, host: int = 0) -> list[str]:
        """The directories on a host's disks that the document names for the files of a run."""
        return [ssd.directory for ssd in self.hosts[host].ssds if ssd.directory is not None]

    def host_of(self, memory: str) -> int:
        """Index of the host that a memory belongs to. Raises HardwareError for an unknown name."""
        if memory in self.device_by_name:
            return self.device_by_name[memory].host
        if memory not in self._own_memories:
            raise unknown_memory(self, memory)
        return self._own_memories[memory][0]

    @cached_property
    def device_kinds(self) -> list[int]:
        """A number for each device, equal for those that differ in nothing but name, host and root complex."""
        return _numbers(self.devices, {"name", "host", "root_complex"})

    @cached_property
    def host_kinds(self) -> list[int]:
        """A number for each host, equal for those that differ in nothing but their root complexes."""
        return _numbers(self.hosts, {"root_complexes"})

    @cached_property
    def racks(self) -> list[int]:
        """The rack of each host; empty where the document has none."""
        racks = None if self.network is None else self.network.racks
        return [] if racks is None else racks.racks_of(len(self.hosts))

    @cached_property
    def _links(self) -> dict[str, Link]:
        return build_links(self)

    def links(self) -> dict[str, Link]:
        """Every directed link by name. Do not change the dictionary."""
        return self._links

    def path(self, src: str, dst: str) -> list[str]:
        """Links that a transfer between two memories occupies: dram0 to gpu1 is ["rc0.0.down", "gpu1.down"]."""
        return find_path(self, src, dst)

    def bandwidth(self, src: str, dst: str, message_bytes: float | None = None) -> float:
        """Bytes/s of a transfer that has its whole path to itself: of one of `message_bytes`, else of a large one."""
        links = [self._links[name] for name in self.path(src, dst)]
        if message_bytes is not None:
            links = [link.for_messages(message_bytes) for link in links]
        return min((link.bandwidth for link in links), default=float("inf"))

    def latency_s(self, src: str, dst: str) -> float:
        """Seconds that an empty transfer takes."""
        path = self.path(src, dst)
        return sum(self._links[name].latency_s for name in (path[1:-1] if goes_direct(self, src, dst) else path))

    def graph(self) -> nx.MultiDiGraph:
        """A new networkx graph: memories and switches as nodes, links as edges keyed by name."""
        return build_graph(self)

    # -- ways to get one -------------------------------------------------------------------------------------------

    @classmethod
    def from_any(cls, hardware: Hardware | str | Path | Mapping[str, Any]) -> Hardware:
        """A Hardware as it is, "auto" (detect this machine), a document's path, a mapping, or a preset's name."""
        if isinstance(hardware, Hardware):
            return hardware
        if isinstance(hardware, Mapping):
            return cls.model_validate(dict(hardware))
        if isinstance(hardware, Path) or (
            isinstance(hardware, str) and (hardware.endswith((".yaml", ".yml", ".json")) or "/" in hardware)
        ):
            return cls.load(hardware)
        if not isinstance(hardware, str):
            raise HardwareError(
                f"hardware: found a {type(hardware).__name__}, allowed: Hardware, a preset's name, a path, 'auto'"
            )
        return cls.detect() if hardware == "auto" else cls.preset(hardware)

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read a YAML or JSON document. Raises HardwareError naming the file, and the line or key at fault."""
        try:
            document = read_yaml(path)
        except Unreadable as error:
            raise HardwareError(f"cannot read the hardware document {path}: {error}") from error
        if not isinstance(document, dict):
            keys = ", ".join(cls.model_fields)
            raise HardwareError(f"{path}: found a {type(document).__name__}, allowed: a mapping with the keys {keys}")
        try:
            return cls.model_validate(document)
        except HardwareError as error:
            raise HardwareError(f"{path}: {error}") from None

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Hardware:
        """A machine of the papers or a common one, by name; overrides as in `with_`."""
        document = preset_document(preset_of(name))
        hardware = cls.model_validate(document)
        return hardware.with_(**overrides) if overrides else hardware

    @classmethod
    def cpu(
        cls,
        num_devices: int = 2,
        memory: str | int = "64MB",
        dram: str | int = "2GB",
        ssd: str | int | None = None,
        threads: int = 1,
        ssd_dir: str | Path | None = None,
        hosts: int = 1,
        network: str | float | None = None,
        **rates: str | float | None,
    ) -> Hardware:
        """CPU devices with a memory budget each, all of it usable, on which every plan runs for real.

        Giving any of `h2d`, `d2h` (device to DRAM and back), `link` (device to device) or `network` (between hosts)
        makes the runtime hold transfers down to these rates. The devices are divided over `hosts` in their order; each
        host has a DRAM of that size, and with `ssd` a disk of that size, with its files in `ssd_dir`.
        """
        if ssd is None and ssd_dir is not None:
            raise HardwareError(f'ssd_dir={str(ssd_dir)!r}, but ssd=None: say how much of it, such as ssd="20GB"')
        document = cpu_document(
            num_devices, memory, dram, ssd, threads, hosts=hosts, network=network, rates=CopyRates(**rates)
        )
        if ssd_dir is not None:
            document["hosts"][0]["ssds"][0]["directory"] = str(ssd_dir)
        return cls.model_validate(document)

    def with_(self, **overrides: Any) -> Hardware:
        """A copy with some figures replaced: every host's (`dram="4TB"`, `p2p=True`), every device's
        (`memory="48GB"`), `ssds` (a number of disks, or a list), `root_complex_bandwidth`, `num_devices` on one
        host, or a key of the document. CPU devices of a measured host share its cores anew if their number changes, and
        take the rates that were measured with that number of threads. Raises HardwareError for a name that is none of
        these.
        """
        copies = copies_in(self) if overrides.keys().isdisjoint(("hosts", "devices", "num_devices")) else 1
        document = overridden(first_of(self, copies), overrides)
        return type(self).model_validate(document if copies == 1 else {**document, KEY: copies})

    # -- ways to show one ------------------------------------------------------------------------------------------

    def to_yaml(self) -> str:
        """The document; loading it gives an equal Hardware. Devices with equal rates refer to one table, and hosts that
        are all alike are written once."""
        copies = copies_in(self)
        devices = self.devices[: len(self.devices) // copies]
        document = with_numbers(first_of(self, copies).model_dump(mode="json", exclude_defaults=True))
        if copies > 1:
            document = {"name": document.pop("name"), "source": document.pop("source"), KEY: copies, **document}
        tables = {device.rates: device.rates.document() for device in devices if device.rates is not None}
        for device, written in zip(devices, document["devices"]):
            if device.rates is not None:
                written["rates"] = tables[device.rates]
        return yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_yaml())

    def describe(self) -> str:
        """A few lines of text: devices, hosts, disks, network, source."""
        return describe_hardware(self)
