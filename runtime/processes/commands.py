"""The commands that a driver can give a device, by name: each takes and returns plain data and tensors.

Workers serve them over their channel; drivers that have the device in their own process call them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ir.errors import CheckpointError, error_from_data, error_to_data
from ...ir.program import Interface, RowPart
from ..device.host import Trimmer, trim_memory
from ..device.session import DeviceSession, StepResult
from ..stage.store import StagePart
from ..state import checkpoint
from ..state.base_identity import BaseIdentity
from ..state.manifest import RunPosition, ShardRecord, TensorRecord
from ..state.plain_json import decode
from ..state.tensor_file import Reads

Tensors = Mapping[str, Tensor]
Answer = tuple[dict[str, Any], dict[str, Tensor]]
SEPARATOR = "/"  # between the kind of a tensor and its dotted name
STAGE_SEPARATOR = ":"  # between a stage and the name of one of its tensors


def run_step(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """One training step on the batch `tensors`. See `pack_result`."""
    return pack_result(session.step(tensors))


def begin_step(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """As `run_step`, but the report is that of the step before; this one's comes from `finish_step`, or with the next
    step. See `DeviceSession.begin_step`."""
    values = session.begin_step(tensors, args.get("stop_on_nan", True))
    return pack_result(StepResult(values, session.report_before, session.refusal()))


def undo_step(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    session.undo_step()
    return {}, {}


def finish_step(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The report of the last step, at its end."""
    return pack_result(StepResult({}, session.finish_step()))


def take_form(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """See `DeviceSession.take_form`."""
    form, room = (Interface.from_json(args[name]) for name in ("form", "room"))
    session.take_form(args["number"], Path(args["path"]), form, room)
    return {"batch_names": session.batch_names}, {}


def run_evaluate(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The forward pass; with `loss_only` only the loss comes back."""
    return pack_result(session.evaluate(tensors, args.get("loss_only", False)))


def load_stage(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Set weights and buffers of `stage`, and reset its optimizer."""
    session.state.load_stage(args["stage"], _take_kind("weights", tensors), dict(_take_kind("buffers", tensors)))
    return {}, {}


def add_kind(kind: str, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors under names that begin with their kind, each read when it is asked for."""
    front = f"{kind}{SEPARATOR}"
    return Reads((front + name for name in named), lambda key: named[key.removeprefix(front)])


def _take_kind(kind: str, tensors: Tensors) -> Mapping[str, Tensor]:
    """The reverse of `add_kind`."""
    front = f"{kind}{SEPARATOR}"
    names = (key.removeprefix(front) for key in tensors if key.startswith(front))
    return Reads(names, lambda name: tensors[front + name])


def end_loading(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    trim_memory()
    return {}, {}


def stage_state(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Weights, buffers and, with `optimizer` true, the optimizer's states of `stage`."""
    return pack_state(session.state.stage_state(args["stage"]), args.get("optimizer", True))


def load_stage_state(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The reverse of `stage_state`."""
    session.state.load_stage_state(args["stage"], unpack_state(args, tensors))
    return {}, {}


def write_shard(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Write the state of `stage` into the unfinished checkpoint `temporary`; see `checkpoint.write_shard`. `given` and
    `tensors` are the header and tensors of the whole state if this device has only a shard of it."""
    stage = args["stage"]
    state = unpack_state(args["given"], tensors) if "given" in args else session.state.state_to_write(stage)
    found = state.optimizer or {"group": {}, "scheduler": {}}
    record = checkpoint.write_shard(
        Path(args["temporary"]),
        session.state.interface.stages[stage],
        state.weights,
        state.buffers,
        state.optimizer_rows(),
        args.get("ties"),
        args["with_frozen"],
    )
    return {"record": asdict(record), "group": found["group"], "scheduler": found["scheduler"]}, {}


def need_of_save(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The memory that a save of `stages` in the background needs, and the data that a manifest needs beside them: see
    `Saver.needs`."""
    needs = {stage: session.saver.needs(stage, args["with_frozen"]) for stage in args["stages"]}
    return {"needs": needs, "counters": session.state.counters()}, {}


def begin_save(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Copy `stages`, and write them into the unfinished checkpoint `temporary` while steps go on: see `Saver.begin`.
    `given` has the headers of stages of which this device has only a shard, `tensors` their tensors, as "stage:name".
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        stage, _, name = key.partition(STAGE_SEPARATOR)
        parts.setdefault(stage, {})[name] = tensor
    given = {stage: unpack_state(header, parts.get(stage, {})) for stage, header in args["given"].items()}
    session.saver.begin(
        args["number"], Path(args["temporary"]), args["stages"], given, args["ties"], args["with_frozen"]
    )
    return {}, {}


def read_shard(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Load the state of `stage` from the checkpoint `directory`; `group` and `scheduler` are the manifest's, `tensors`
    the frozen weights that the checkpoint does not hold."""
    stage = args["stage"]
    found = checkpoint.open_checkpoint(args["directory"]).read_later(session.state.interface.stages[stage])
    frozen, trimmer = _take_kind("weights", tensors), Trimmer()

    def weight(name: str) -> Tensor:
        trimmer.trim()
        return frozen[name] if name in frozen else found.weights[name]

    def states_of(name: str) -> dict[str, Any]:
        trimmer.trim()
        return found.optimizer[name]

    states = Reads(found.optimizer, states_of)
    optimizer = {"states": states, "scalars": {}, "group": args["group"], "scheduler": args["scheduler"]}
    weights = Reads([*frozen, *found.weights], weight)
    session.state.load_stage_state(stage, StagePart(weights, found.buffers, optimizer))
    return {}, {}


def begin_checkpoint(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Make the temporary directory into which every device writes its shards."""
    return {"temporary": str(checkpoint.begin(args["directory"], args["need_bytes"]))}, {}


def commit_checkpoint(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Finish a checkpoint. `shards` are the records of `write_shard`, `progress` is a `RunPosition` as plain JSON,
    `base` a `BaseIdentity` or None."""
    shards = [shard_record(row) for row in args["shards"]]
    progress = RunPosition(**decode(args["progress"], "progress"))
    base = None if args["base"] is None else BaseIdentity(**args["base"])
    path = checkpoint.commit(Path(args["temporary"]), args["directory"], shards, progress, args["ties"], base)
    return {"path": str(path)}, {}


def abort_checkpoint(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    checkpoint.abort(Path(args["temporary"]))
    return {}, {}


def shard_record(row: Mapping[str, Any]) -> ShardRecord:
    """The record that `asdict` made plain."""
    rows = tuple(TensorRecord(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in row["tensors"])
    parts = {name: RowPart(**part) for name, part in row["parts"].items()}
    return ShardRecord(**{**row, "tensors": rows, "parts": parts})


def counters(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The number of steps, the seed and the loss scale."""
    return session.state.counters(), {}


def load_counters(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    session.state.load_counters(args)
    return {}, {}


def options(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The options of each parameter group of `stage`, as its next step has them."""
    return {"groups": session.state.optimizer_of(args["stage"]).options()}, {}


def set_option(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """Set the option `key` of the parameter group number `group` of `stage`."""
    session.state.optimizer_of(args["stage"]).set_option(args["group"], args["key"], args["value"])
    return {}, {}


def spans(session: DeviceSession, args: Mapping[str, Any], tensors: Tensors) -> Answer:
    """The time span of each op of the last step, as fields of `timeline.Span`."""
    return {"spans": [[s.device, s.stream, s.op, s.text, s.start_s, s.end_s] for s in session.spans]}, {}


COMMANDS: dict[str, Callable[[DeviceSession, Mapping[str, Any], Tensors], Answer]] = {
    f.__name__: f
    for f in (
        run_step, begin_step, finish_step, undo_step, take_form, run_evaluate, load_stage, end_loading, stage_state,
        load_stage_state, write_shard, need_of_save, begin_save,
        read_shard, begin_checkpoint, commit_checkpoint, abort_checkpoint, counters, load_counters,
        options, set_option, spans,
    )
}  # fmt: skip


def pack_result(result: StepResult) -> Answer:
    """The result's values as tensors named "name/micro-batch"."""
    tensors = {f"{name}{SEPARATOR}{m}": v for name, values in result.values.items() for m, v in enumerate(values)}
    refusal = None if result.refusal is None else error_to_data(result.refusal)
    return {"report": result.report, "names": list(result.values), "refusal": refusal}, tensors


def unpack_result(header: Mapping[str, Any], tensors: Tensors) -> StepResult:
    values: dict[str, list[Tensor]] = {name: [] for name in header["names"]}
    for key, tensor in tensors.items():  # in order of the micro-batches
        values[key.rpartition(SEPARATOR)[0]].append(tensor)
    refusal = None if header["refusal"] is None else error_from_data(header["refusal"], "a device", None)
    return StepResult(values, dict(header["report"]), refusal)


def pack_state(state: StagePart, with_optimizer: bool = True) -> Answer:
    tensors = {f"weights{SEPARATOR}{n}": t for n, t in state.weights.items()}
    tensors |= {f"buffers{SEPARATOR}{n}": t for n, t in state.buffers.items()}
    header: dict[str, Any] = {"optimizer": None}
    if with_optimizer and state.optimizer is not None:
        header["optimizer"] = {key: state.optimizer[key] for key in ("scalars", "group", "scheduler")}
        for name, row in state.optimizer["states"].items():
            tensors |= {f"states{SEPARATOR}{name}{SEPARATOR}{key}": t for key, t in row.items()}
    return header, tensors


def unpack_state(header: Mapping[str, Any], tensors: Tensors) -> StagePart:
    parts = split(tensors)
    optimizer = None
    if header.get("optimizer") is not None:
        states: dict[str, dict[str, Tensor]] = {}
        for key, tensor in parts.get("states", {}).items():
            name, _, state = key.rpartition(SEPARATOR)
            states.setdefault(name, {})[state] = tensor
        optimizer = {**header["optimizer"], "states": states}
    return StagePart(parts.get("weights", {}), parts.get("buffers", {}), optimizer)


def split(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Tensors by kind ("weights", "buffers", "states"), under the rest of their names."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, found, name = key.partition(SEPARATOR)
        if not found:
            raise CheckpointError(f"tensor {key!r} is of no known kind")
        parts.setdefault(kind, {})[name] = tensor
    return parts
