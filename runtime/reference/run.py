"""The reference runtime defines what a program means: it runs all devices in one process on the CPU, without overlap.

Each device executes its program in text order. A device that must wait (for a `recv` whose `send` has not happened, or
a collective that not all members have reached) lets the next device go on; if none can go on, that is a deadlock and an
error. Freed values are gone, and every value is charged to its memory with its real bytes.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...ir import ops
from ...ir.calls import op_of
from ...ir.errors import PenstockError, PlanError, VerifyError, WorkerError
from ...ir.precision import Precision
from ...ir.program import (
    Account,
    ParamSpec,
    Program,
    TeamPart,
    bind,
    donated_operands,
    excerpt,
    homes_of,
    infer_all,
    line_numbers,
    persistent_bytes,
    places_of,
    plan_arena,
    print_node,
    result_index,
    team_of,
    values_of,
    work_of,
)
from ..optimizer.gradients import Grads, LossScale, LossScales
from ..optimizer.stage_optimizer import OptimizerSpec
from ..stage.kept import Kept
from ..stage.shards import whole_of
from ..stage.split_backward import Rest
from ..state.part_params import whole_of_members
from .ops import ReferenceRuntime, Shard, Waiting, Weights, World
from .stage import FULL, ReferenceStage


class Reference:
    """Runs the programs of all devices, step by step, on `weights` (copied) by dotted name.

    `programs` holds one "step" and, for `evaluate`, one "evaluate" program per device; `stages` has a module or a class
    per stage. `budgets` limits "device0", "device1", ..., "dram" and "ssd" in bytes; `accounts` are the last run's.
    `grads` and `stage_grads` are the gradients that the last step's optimizers took. Without `optimizer` the weights do
    not change.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        stages: Mapping[str, nn.Module | type[nn.Module]],
        weights: Mapping[str, Tensor],
        optimizer: OptimizerSpec | None,
        buffers: Mapping[str, Tensor],
        precision: str = "fp32",
        seed: int = 0,
        budgets: Mapping[str, int] | None = None,
    ):
        self.programs: dict[str, list[Program]] = {"step": [], "evaluate": []}
        for program in programs:
            infer_all(program)
        steps = [program for program in programs if program.function == "step"]
        others = [program for program in programs if program.function != "step"]
        programs = [*(bind(steps) if steps else []), *(bind(others) if others else [])]
        for program in programs:
            self.programs[program.function].append(program)
        interface = programs[0].interface
        self.world = World(interface, {}, seed)
        for name, module in stages.items():
            for device, group in _homes(programs, name).items():
                made = _module(module)
                members = interface.members(group) if group else []
                piece = (members.index(device), len(members)) if group else None
                state = ReferenceStage(
                    interface.stages[name],
                    made,
                    weights,
                    buffers,
                    optimizer,
                    precision,
                    piece,
                    interface.rounds,
                    team_of(interface, device).index(device),
                )
                if name in self.world.stages:
                    self.world.replicas[device, name] = state
                self.world.stages.setdefault(name, state)
        self.first_devices = {name: min(_homes(programs, name)) for name in stages if _homes(programs, name)}
        self.homes = {name: _homes(programs, name) for name in stages}
        self.world.loss_scale = LossScale() if Precision.of(precision).scales_loss else None
        self.budgets = dict(budgets or {})
        self.accounts: dict[str, Account] = {}

    def step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run one training step; returns {"loss": mean over micro-batches, "results": what the programs return}."""
        self.world.finite, interface = True, self.world.interface
        if self.world.loss_scale is not None and interface.asynchronous:
            self.world.scales = LossScales(self.world.loss_scale, interface.scale_lag)
        results = self._run("step", batch)
        self.world.step += 1
        self.world.evaluations = 0
        if self.world.scales is not None:
            self.world.loss_scale = self.world.scales.last
        elif self.world.loss_scale is not None:
            self.world.loss_scale.update(self.world.finite)
        return results

    def evaluate(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run the forward alone, in evaluation mode; returns the same as `step`."""
        results = self._run("evaluate", batch)
        self.world.evaluations += 1
        return results

    def weights(self) -> dict[str, Tensor]:
        """The parameters in full precision by dotted name; a tied one has its owner's value."""
        owned = [(s, p) for s in self.world.interface.stages.values() for p in s.params if p.owner]
        return {p.name: self._whole(spec.name, p, "masters") for spec, p in owned if spec.name in self.world.stages}

    def buffers(self) -> dict[str, Tensor]:
        return {name: b for state in self.world.stages.values() for name, b in state.runner.buffers().items()}

    @property
    def stage_weights(self) -> dict[str, dict[str, Tensor]]:
        """For each stage, its parameters in full precision, as its first device has them."""
        specs = [(name, state.spec) for name, state in self.world.stages.items()]
        return {name: {p.name: self._whole(name, p, "masters") for p in spec.params} for name, spec in specs}

    @property
    def stage_grads(self) -> dict[str, dict[str, Tensor]]:
        found = {}
        for name, state in self.world.stages.items():
            params = [p for p in state.spec.params if p.name in state.grads]
            found[name] = {p.name: self._whole(name, p, "grads") for p in params}
        return found

    @property
    def grads(self) -> dict[str, Tensor]:
        owned = {p.name for s in self.world.stages.values() for p in s.spec.params if p.owner}
        return {name: g for grads in self.stage_grads.values() for name, g in grads.items() if name in owned}

    def _whole(self, stage: str, param: ParamSpec, what: str) -> Tensor:
        """A parameter's "masters" or "grads": those of the first device, or put together from the shards."""
        if not isinstance(param.part, TeamPart):
            return self._value_of_member(stage, param, what, self.first_devices[stage])
        team = team_of(self.world.interface, self.first_devices[stage])
        return whole_of_members([self._value_of_member(stage, param, what, device) for device in team], param)

    def _value_of_member(self, stage: str, param: ParamSpec, what: str, device: int) -> Tensor:
        """The value of a device, together with the devices that share the stage with it."""
        group = self.homes[stage].get(device, "")
        sharing = self.world.interface.members(group) if group else [device]
        pieces = [getattr(self.world.stage(other, stage), what)[param.name] for other in sharing]
        return whole_of(pieces, param.shape) if group else pieces[0]

    def _run(self, function: str, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        programs = self.programs[function]
        if not programs:
            raise PlanError(f"there are no {function!r} programs to run")
        self.world.mail.clear()
        self.world.arrived.clear()
        self._charge_persistent(programs)
        devices = [DeviceRun(ReferenceRuntime(p.device, self.world), p, dict(batch), self.accounts) for p in programs]
        waiting = list(devices)
        while waiting:
            moved = [device.advance() for device in waiting]
            waiting = [device for device in waiting if not device.done]
            if waiting and not any(moved):
                raise VerifyError("deadlock: no device can go on\n" + "\n".join(d.where() for d in waiting))
        unread = [f"{tag!r} from device {src} to {dst}" for (src, dst, tag), box in self.world.mail.items() if box]
        if unread:
            raise VerifyError(f"sent but never received: {', '.join(unread)}")
        results: dict[str, list[Tensor]] = {}
        for device in devices:
            said = device.results() if self.world.interface.speaks(device.program.device) else {}
            for name, values in said.items():
                results.setdefault(name, []).extend(values)
        loss = results.get("loss")
        mean = torch.stack([part.float() if part.dtype in FULL else part for part in loss]).mean() if loss else None
        return {"loss": mean, "results": results}

    def _charge_persistent(self, programs: Sequence[Program]) -> None:
        names = [*(f"device{p.device}" for p in programs), ops.DRAM, ops.SSD]
        self.accounts = {name: Account(name, self.budgets.get(name, sys.maxsize)) for name in names}
        for program in programs:
            persistent, device = persistent_bytes(program), f"device{program.device}"
            for what, num_bytes in persistent.device.items():
                self.accounts[device].take(what, num_bytes)
            self.accounts[device].take("arena", plan_arena(program)[1])
            for memory in (ops.DRAM, ops.SSD):
                for what, num_bytes in persistent.parts(memory).items():
                    self.accounts[memory].take(f"{device}.{what}", num_bytes)
                self.accounts[memory].take(f"{device}.arena", plan_arena(program, memory)[1])


def _homes(programs: Sequence[Program], stage: str) -> dict[int, str]:
    """The devices that hold a stage, each with the group over which the stage is sharded ("" if it is whole)."""
    found: dict[int, str] = {}
    for program in programs:
        home = homes_of(program).get(stage)
        if home is not None:
            found.setdefault(program.device, home.group)
    return found or {0: ""}


def _module(given: nn.Module | type[nn.Module]) -> nn.Module:
    """A new module, as each device that holds the stage needs one of its own."""
    if not isinstance(given, type):
        return copy.deepcopy(given)
    with torch.device("meta"):
        return given()


class DeviceRun:
    """The run of one device's program."""

    def __init__(
        self,
        runtime: ReferenceRuntime,
        program: Program,
        batch: dict[str, Tensor],
        accounts: dict[str, Account],
    ):
        self.runtime = runtime
        self.program = program
        self.accounts = accounts
        self.todo = deque(program.ops())
        self.values: dict[fx.Node, Any] = {program.batch: batch}
        self.gone: dict[fx.Node, fx.Node] = {}  # value -> the op that freed it or took over its memory
        self.reason = ""

    @property
    def done(self) -> bool:
        return not self.todo

    def advance(self) -> bool:
        """Execute ops until the end or until the device must wait; returns whether any op was executed."""
        moved = False
        while self.todo:
            node = self.todo[0]
            try:
                self._execute(node)
            except Waiting as wait:
                self.reason = str(wait)
                return moved
            except PenstockError:
                raise
            except Exception as error:
                text = f"device {self.program.device}: {type(error).__name__}: {error}\n{excerpt(self.program, node)}"
                raise WorkerError(text, device=self.program.device, line=print_node(node)) from error
            self.todo.popleft()
            moved = True
        return moved

    def where(self) -> str:
        node = self.todo[0]
        line = line_numbers(self.program)[node]
        return f"device {self.program.device}, line {line}: `{print_node(node)}` {self.reason}"

    def results(self) -> dict[str, list[Any]]:
        """The values that the program returns. Raises `VerifyError` for a value that it has freed."""
        end = next((n for n in reversed(self.program.graph.nodes) if n.op == "output"), None)
        return {} if end is None else fx.node.map_arg(dict(end.args[0]), lambda n: self._value(n, end))

    def _execute(self, node: fx.Node) -> None:
        op = op_of(node)
        args = fx.node.map_arg(node.args, lambda n: self._value(n, node))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self._value(n, node))
        result = getattr(self.runtime, op.name)(*args, **kwargs)
        removed = [n for n in node.args if isinstance(n, fx.Node)] if op is ops.free else donated_operands(node)
        for value in removed:
            self._remove(value, node)
        produced = values_of(node)
        if isinstance(node.meta.get("type"), tuple):
            found = {result_index(item): item for item in produced}
            for i, value in enumerate(result):
                if i in found:
                    self._place(found[i], value, node)
        elif produced:
            self._place(produced[0], result, node)
        work = work_of(self.program, node)
        if work.workspace_bytes and not op.workspace_in_arena:
            memory = ops.DRAM if work.workspace_memory == ops.DRAM else f"device{self.program.device}"
            account, name = self.accounts[memory], f"workspace of {op.name}"
            account.take(name, work.workspace_bytes, str(print_node(node)))
            account.give(name)

    def _value(self, node: fx.Node, user: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        numbers = line_numbers(self.program)
        end = self.gone.get(node)
        how = "before it is produced" if end is None else f"but line {numbers[end]} (`{print_node(end)}`) ended it"
        raise VerifyError(
            f"device {self.program.device}, line {numbers[user]}: `{node.name}` is used, {how}\n"
            f"{excerpt(self.program, user)}",
            device=self.program.device,
            line=numbers[user],
        )

    def _place(self, node: fx.Node, value: Any, source: fx.Node) -> None:
        self.values[node] = value
        kind = node.meta["type"]
        if kind.owned and not places_of(node):
            account, name = self._account(node)
            account.take(name, measured_bytes(value), str(print_node(source)))

    def _remove(self, node: fx.Node, end: fx.Node) -> None:
        if node not in self.values:
            self._value(node, end)
        del self.values[node]
        self.gone[node] = end
        account, name = self._account(node)
        if name in account.live:
            account.give(name)

    def _account(self, node: fx.Node) -> tuple[Account, str]:
        memory = node.meta["type"].memory
        if memory == ops.DEVICE:
            return self.accounts[f"device{self.program.device}"], node.name
        return self.accounts[memory], f"device{self.program.device}.{node.name}"


def measured_bytes(value: Any) -> int:
    """The real bytes of a program's value."""
    if isinstance(value, Kept | Rest):
        return value.num_bytes
    if isinstance(value, Weights | Shard | Grads):
        return sum(t.nbytes for t in value.tensors.values())
    return int(value.nbytes)
