"""A compiled job as files: one Python file per device, and what is needed to run them again.

device0.py ...   the programs        interface.json   what their names refer to
plan.json        the decisions       hardware.yaml    the machine they are for
settings.json    optimizer, precision, seed, batch, terms of the loss
counts.py        what is counted over a batch, and checked in it, if anything is
constants.safetensors   tensors that the model uses but does not register, if there are any
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pydantic
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor, fx

from ..codegen.counts_file import write_counts
from ..codegen.file import Header, write_directory, write_file
from ..codegen.imports import Imports, trust_in
from ..graph.follow.rows import MEAN_OVER_ROWS, RowFacts
from ..graph.loss_terms import CountRules, LossRules, LossTerm
from ..graph.tables.picked_rows import PickRules
from ..ir import ops
from ..ir.documents import Unreadable, other_fields, plain_errors, read_json, read_text
from ..ir.errors import PlanError
from ..ir.machine.hardware import Hardware
from ..ir.program import Interface, Program, first_micro_batches, members_of, shown
from ..ir.units import format_bytes, format_seconds
from ..passes.draft import Draft
from ..runtime.device.file import CONSTANTS_FILE, INTERFACE_FILE, device_file_name, read_constants, share_file
from ..runtime.source.trust import Trust
from ..runtime.state.tensor_file import write_tensors
from .batches.sizes import BatchSizes
from .plan import Plan, PrecisionName


def _dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("not the name of a dtype of torch")
    return name


Size = Annotated[int, Field(gt=0, lt=1 << 40)]
BatchRow = tuple[str, tuple[Size, ...], Annotated[str, AfterValidator(_dtype)]]

COUNTS_FILE = "counts.py"
MOST_NAMES = 8  # of devices in a header


class Settings(BaseModel):
    """The arguments of `compile` that the programs do not contain."""

    model_config = ConfigDict(extra="forbid")
    optimizer: str  # OptimizerSpec as JSON
    precision: PrecisionName
    seed: int
    stop_on_nan: bool = True
    batch: Annotated[list[BatchRow], Field(min_length=1)]  # every leaf of the global batch
    flags: dict[str, str] = {}  # the batch's other leaves as text
    weights: str | None = None  # directory of safetensors
    ssd_dirs: list[str] = []  # one directory per SSD; empty: those of the hardware document
    ssd_verify: bool = False
    compile_stages: bool = False  # blocks are run by torch.compile
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0  # until a silent device counts as lost
    evaluation: str | None = None  # why there is no `evaluate`; None if there is
    loss: list[LossTerm] = []
    counts: CountRules = CountRules()
    picks: PickRules = PickRules()  # what is checked in each batch
    rows: RowFacts = MEAN_OVER_ROWS  # how the loss depends on the rows of a batch
    one_document: str = ""  # what is said of a packed batch, where the example was none and rows hold one document
    comparison: str = ""  # of the op graph with the model in eager: what was compared, or why nothing was
    reads: list[str] = []  # the inputs whose values forward reads; what it makes of them is in `batch`
    sizes: BatchSizes | None = None  # those that differ from step to step; `batch` then has the most of each


@dataclass
class Folder:
    """Everything that `Job.write` writes."""

    plan: Plan
    hardware: Hardware
    interface: Interface
    settings: Settings
    files: dict[int, str]
    smaller: dict[str, str] = field(default_factory=dict)  # the files of lanes with fewer micro-batches, by name
    counts: str = ""  # the text of `COUNTS_FILE`
    constants: dict[str, Tensor] = field(default_factory=dict)  # none that are on meta

    def write(self, directory: str | Path) -> Path:
        """Write all files, and delete programs of an earlier job's other devices. Raises `OSError` where that fails."""
        folder = Path(directory)
        own = {device_file_name(device) for device in self.files} | self.smaller.keys()
        if (folder / INTERFACE_FILE).is_file():
            for path in folder.glob("device*.py"):
                if path.name not in own:
                    path.unlink()
        extras = {
            INTERFACE_FILE: self.interface.to_json() + "\n",
            "plan.json": self.plan.model_dump_json(indent=1) + "\n",
            "settings.json": self.settings.model_dump_json(indent=1) + "\n",
            **self.smaller,
        }
        if self.counts:
            extras[COUNTS_FILE] = self.counts
        else:
            (folder / COUNTS_FILE).unlink(missing_ok=True)
        write_directory(folder, self.files, extras)
        (folder / CONSTANTS_FILE).unlink(missing_ok=True)
        if self.constants:
            write_tensors(folder / CONSTANTS_FILE, self.constants)
        self.hardware.save(folder / "hardware.yaml")
        return folder

    @staticmethod
    def read(directory: str | Path) -> Folder:
        """Raises `PlanError` naming the file that is missing or malformed."""
        folder = Path(directory)
        names = ("plan.json", "settings.json", "hardware.yaml", INTERFACE_FILE)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise PlanError(f"{folder} lacks {', '.join(missing)}; it is not a directory that Job.write made")
        interface = _read_interface(folder / INTERFACE_FILE)
        files, smaller = {}, {}
        for device in range(interface.num_devices):
            path = folder / device_file_name(device)
            files[device] = _read_program(path, device)
            for share in interface.smaller_shares:
                other = share_file(path, interface, share)
                smaller[other.name] = _read_program(other, device)
        try:
            settings = Settings.model_validate(read_json(folder / "settings.json"))
        except Unreadable as error:
            raise PlanError(f"{folder / 'settings.json'}: {error}") from error
        except pydantic.ValidationError as error:
            also = other_fields(error) and f"{other_fields(error)}; compile the job again"
            raise PlanError(f"{folder / 'settings.json'}: {plain_errors(error)}{also}") from error
        plan, hardware = Plan.load(folder / "plan.json"), Hardware.load(folder / "hardware.yaml")
        constants = read_constants(folder, interface.stages.values())
        return Folder(plan, hardware, interface, settings, files, smaller, _read_counts(folder, settings), constants)


def _read_program(path: Path, device: int) -> str:
    if not path.is_file():
        raise PlanError(f"{path.parent} lacks {path.name}, the program of device {device}")
    return path.read_text(encoding="utf-8")


def _read_counts(folder: Path, settings: Settings) -> str:
    if not (settings.counts.means or settings.picks.bounds):
        return ""
    if not (folder / COUNTS_FILE).is_file():
        raise PlanError(f"{folder} lacks {COUNTS_FILE}, which says what is counted and checked in a batch")
    return (folder / COUNTS_FILE).read_text(encoding="utf-8")


def _read_interface(path: Path) -> Interface:
    try:
        return Interface.from_json(read_text(path))
    except Unreadable as error:
        raise PlanError(f"{path}: not the interface of a job: {error}") from error


@dataclass(frozen=True)
class Printed:
    """The text of a plan's stages and programs, and the values that these hold."""

    interface: Interface
    files: dict[int, str]
    smaller: dict[str, str]
    constants: dict[str, Tensor]
    trust: Trust  # in the user's own code in the text

    def is_in(self, folder: Folder) -> bool:
        """Whether this is what the folder has."""
        own, there = self.constants, folder.constants
        return (
            (self.interface.to_json(), self.files, self.smaller, own.keys())
            == (folder.interface.to_json(), folder.files, folder.smaller, there.keys())
        ) and all(torch.equal(own[name], there[name]) for name in own)


def print_all(draft: Draft, evaluation: Sequence[Program], plan: Plan) -> Printed:
    """The stages and programs of a plan, as text and tensors."""
    interface, used = draft.programs[0].interface, list[Imports]()
    return Printed(
        interface,
        print_files(draft, evaluation, plan, used),
        print_smaller(draft, evaluation, plan, used),
        _values(draft.graph.constants, interface),
        trust_in(used),
    )


def _values(constants: Mapping[str, Tensor], interface: Interface) -> dict[str, Tensor]:
    """Copies of the constants that stages use, so that a later change of the user's tensors changes no program."""
    used = {row.name for spec in interface.stages.values() for row in spec.constants}
    return {name: t.detach().to("cpu", copy=True) for name, t in constants.items() if name in used and not t.is_meta}


def print_files(draft: Draft, evaluation: Sequence[Program], plan: Plan, used: list[Imports]) -> dict[int, str]:
    """The text of each device's file, by device. `used`: the imports of the files are added to it."""
    files = {}
    for program in draft.programs:
        stages = {stage.spec.name: stage.graph for stage in draft.stages_on(program.device)}
        predict = evaluation[program.device] if evaluation else None
        used.append(Imports())
        files[program.device] = write_file(program, predict, stages, _header(draft, program, plan), used[-1])
    return files


def print_smaller(draft: Draft, evaluation: Sequence[Program], plan: Plan, used: list[Imports]) -> dict[str, str]:
    """The text of the files of lanes that have fewer micro-batches than others, by name. `used`: as above."""
    interface, found = draft.programs[0].interface, {}
    for share in interface.smaller_shares:
        lane = interface.lane_micro_batches.index(share)
        for program in draft.programs:
            stages = {stage.spec.name: stage.graph for stage in draft.stages_on(program.device)}
            predict = first_micro_batches(evaluation[program.device], share) if evaluation else None
            path = share_file(Path(device_file_name(program.device)), interface, share)
            header = _header(draft, program, plan, lane)
            used.append(Imports())
            found[path.name] = write_file(first_micro_batches(program, share), predict, stages, header, used[-1])
    return found


def print_counts(loss: LossRules, picks: fx.GraphModule | None, imports: Imports) -> str:
    """The text of `COUNTS_FILE`; "" where nothing is counted or checked. `imports`: where its own are noted."""
    graphs = {"counts": loss.counts, "divisors": loss.divisors, "picks": picks}
    there = {name: graph for name, graph in graphs.items() if graph is not None}
    return write_counts(there, imports) if there else ""


def _header(draft: Draft, program: Program, plan: Plan, lane: int = 0) -> Header:
    """`lane`: the first of those that run the file."""
    programs, hardware = shown(draft.programs, draft.machine)
    first = draft.mesh.lanes[lane][program.device] if len(programs) > len(draft.programs) else program.device
    device = hardware.devices[first]
    share = program.interface.micro_batches_of(lane)
    lanes = [i for i in range(len(draft.mesh.lanes)) if program.interface.micro_batches_of(i) == share] or [0]
    predicted = plan.predicted
    assert predicted is not None
    rows = draft.graph.inputs.values()
    size = next(iter(rows)).shape[0]
    memories = [device.name, f"dram{device.host}"]
    peaks = ", ".join(
        f"{name} {format_bytes(predicted.peak_bytes[name])} of {format_bytes(predicted.budget_bytes[name])}"
        for name in memories
    )
    return Header(
        model=plan.model,
        hardware=plan.hardware,
        device_name=f"{device.name}, root complex {device.root_complex}",
        passes=tuple(part.strip() for part in plan.passes.split(", ")),
        plan=f"{plan.hash}, micro-batches {plan.micro_batches} x {size}, {plan.precision}{_staleness(program, plan)}",
        predict=f"{format_seconds(predicted.step_s)} a step; {peaks}; bound by {predicted.bottleneck}",
        lanes=len(lanes),
        run_by=_names(draft, [draft.mesh.lanes[i][program.device] for i in lanes]) if len(lanes) > 1 else "",
        groups=_groups(draft, program, lane),
    )


def _groups(draft: Draft, program: Program, lane: int) -> str:
    """The groups that a program names in which other devices are, too, with all of them, as a lane has them."""
    interface, found = program.interface, []
    devices = draft.mesh.lanes[lane] if interface.lanes else range(interface.num_devices)
    for group in sorted({str(node.kwargs["group"]) for node in program.ops() if node.kwargs.get("group")}):
        if group in interface.groups:
            members = [devices[role] for role in interface.members(group)]
        elif interface.lanes:
            members = members_of(interface, lane, program.device, group)
        else:
            members = list(devices)
        if len(members) > 1:
            found.append(f"{group} ({_names(draft, members)})")
    whose = f"as {draft.machine.devices[devices[program.device]].name} has them: " if interface.lanes and found else ""
    return whose + ", ".join(found)


def _names(draft: Draft, devices: Sequence[int]) -> str:
    """The names of devices of the machine; of many, the first."""
    names = [draft.machine.devices[device].name for device in devices[:MOST_NAMES]]
    names += [f"{len(devices) - MOST_NAMES} more"] if len(devices) > MOST_NAMES else []
    return ", ".join(names)


def _staleness(program: Program, plan: Plan) -> str:
    """For each stage that an asynchronous program updates, the most updates that its forward lacks, as text."""
    here = dict.fromkeys(str(node.args[0]) for node in program.ops() if node.target is ops.step)
    found = [f"{stage} {plan.decisions.staleness[stage]}" for stage in here if stage in plan.decisions.staleness]
    return f", asynchronous, staleness {', '.join(found)}" if found else ""
