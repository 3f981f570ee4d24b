"""One device between and around its steps: its parts, and what a step returns, reports and raises."""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import BudgetExceeded, PenstockError, PlanError, WorkerError
from ...ir.ops import rest_bytes
from ...ir.program import Program, bind_one, largest_values, place_of
from ..accelerator import allocator_figures, current
from ..simulate import Span
from .file import DeviceFile
from .named_streams import Streams
from .pacing import Pacing, route_of
from .peers import PeerLink, group_memories, message_orders
from .prepare import Issues, plan_issues
from .runtime import DeviceRuntime
from .setup import DeviceSetup
from .state import DeviceState
from .streams import Fault


@dataclass
class StepResult:
    """What a program returned, on CPU: per name one tensor per micro-batch, empty lists on devices that return none.

    `report`: `seconds`, `busy_share` per stream (sends and receives include waiting for the other side), `moved_bytes`
    per route ("dram0 -> gpu0"; "dram0 -> dram0" for copies that undo updates), `peak_bytes` per memory as accounted,
    `gradient_norm` (None if the program computes none), `loss_scale` (None except in fp16), `skipped` (a step whose
    gradients were not finite), `eager_blocks` (stage -> class -> why its blocks are not compiled, though asked for).
    """

    values: dict[str, list[Tensor]]
    report: dict[str, Any]


class DeviceSession:
    """One device: its state, streams and pacing, and the programs of its file made ready.

    `link` joins it to the other devices (None when there is only one). `board`: see `Streams`. Raises what
    `DeviceState` does.
    """

    state_kind, streams_kind, pacing_kind, runtime_kind = DeviceState, Streams, Pacing, DeviceRuntime

    def __init__(
        self,
        setup: DeviceSetup,
        file: DeviceFile,
        link: PeerLink | None = None,
        board: MutableSequence[int] | None = None,
    ):
        self.setup, self.file, self.link, self.index, self.spec = setup, file, link, setup.index, setup.spec
        self.device = self._find_device()
        lane, _ = place_of(setup.interface, setup.index)
        programs = {name: bind_one(program, lane) for name, program in file.programs.items()}
        if link is not None:
            link.connect(message_orders(list(programs.values())), group_memories(list(programs.values())))
        self.streams = self.streams_kind(setup, self.device, link, board)
        self.pacing = self.pacing_kind(setup.hardware, setup.index, setup.paces)
        self.plans = {name: self._plan(name, program) for name, program in programs.items()}
        if self.pacing.turns is not None or any(ops.READ in plan.streams for plan in self.plans.values()):
            self.streams.copy_by_thread()
        self.state = self.state_kind(setup, file, programs["step"].interface, self.plans, self.device)
        self.broken: Fault | None = None
        self.spans: list[Span] = []  # of the last step

    def _find_device(self) -> torch.device:
        on_gpu = self.spec.kind == "cuda"
        return torch.device("cuda", self.setup.share.gpu) if on_gpu else torch.device("cpu")

    def _plan(self, name: str, program: Program) -> Issues:
        pooled = self.spec.kind == "cuda"
        plan = plan_issues(program, self.spec.budget_bytes, self.setup.dram_budget_bytes, self.streams.name_of, pooled)
        self.pacing.mark(name, plan)
        return plan

    @property
    def batch_names(self) -> list[str]:
        """The inputs of the batch that this device reads."""
        return sorted({name for plan in self.plans.values() for name in plan.batch_names})

    def close(self) -> None:
        self.streams.close()
        self.state.memory.close()
        if self.device.type == "cuda" and self.link is None:
            # A step that failed may still use memory that goes back now; with peers, one may never answer.
            with contextlib.suppress(RuntimeError):  # a GPU in error has stopped already
                torch.cuda.synchronize(self.device)
                torch._C._cuda_clearCublasWorkspaces()  # one per stream, which torch else keeps for ever

    # --- running a program

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step of this device's part, on the rows of the batch that its lane takes."""
        result = self._run("step", batch)
        self.state.commit()
        return result

    def evaluate(self, batch: Mapping[str, Tensor], loss_only: bool = False) -> StepResult:
        """The forward pass in evaluation mode. With `loss_only` no other output leaves the device."""
        if "evaluate" not in self.plans:
            raise PlanError(f"the file of device {self.index} has no `evaluate`")
        result = self._run("evaluate", batch, loss_only)
        self.state.evaluation_count += 1
        return result

    def _run(self, function: str, batch: Mapping[str, Tensor], loss_only: bool = False) -> StepResult:
        if self.broken is not None:
            raise WorkerError(f"device {self.index} failed before and holds half a step; resume from a checkpoint")
        plan = self.plans[function]
        self.file.step.interface.check_batch(batch, plan.batch_names)
        self.state.memory.grow(ops.DEVICE, plan.arenas[ops.DEVICE])
        results, report = self._execute(function, batch)
        if self.state.step_count == 0:
            self._charge_kept(plan)
        wanted = {name: handles for name, handles in results.items() if name == "loss" or not loss_only}
        values = {name: [handle.box.value.detach().cpu() for handle in handles] for name, handles in wanted.items()}
        self.state.forget_values()
        return StepResult(values, report)

    def _execute(self, function: str, batch: Mapping[str, Tensor]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Issue all ops of the function and wait for their end. Returns the function's results and the report."""
        plan = self.plans[function]
        runtime = self.runtime_kind(self.state, plan, self.streams, self.pacing, self.link)
        for account in self.state.memory.accounts.values():
            account.peak_bytes = account.live_bytes
        for store in self.state.stores.values():
            store.copied_bytes = 0
        start_s = time.perf_counter()
        for stream in runtime.streams.values():
            stream.begin()
        try:
            with current(self.device):
                with self.streams.as_before():
                    results = self.file.functions[function](runtime, dict(batch))
                assert runtime.complete, "the file's function and its parsed text differ"
                self.streams.finish(runtime.streams.values())
                runtime.end()
        except Fault as fault:
            self.broken = self.streams.first_fault(fault)
            if not runtime.accounted and self.broken.label is not None:
                for issue in plan.ops[: self.broken.label.index + 1]:  # so that the error can say what was live
                    runtime.account(issue)
            raise self._located(self.broken) from self.broken.error
        except BaseException as error:
            self.broken = Fault(None, error)
            raise
        if runtime.accounted:
            peaks = {memory: account.peak_bytes for memory, account in self.state.memory.accounts.items()}
            plan.counted = runtime.live_before, peaks
        return results, self._report(runtime, plan, time.perf_counter() - start_s)

    @property
    def waited(self) -> bool:
        """Whether the op that failed waited for another device: then that device is the likelier culprit."""
        return self.broken is not None and self.broken.label is not None and bool(ops.ALL[self.broken.label.op].meets)

    def _located(self, fault: Fault) -> Exception:
        """The error that the caller sees, with the place."""
        issue, error = fault.label, fault.error
        if issue is None:
            return error if isinstance(error, Exception) else WorkerError(str(error), device=self.index)
        place = f"device {self.index} ({self.spec.name}), line {issue.line}: {issue.where}"
        if isinstance(error, PenstockError):
            located = copy.copy(error)  # keeps its fields, such as the file and the missing bytes
            located.args = (f"{place}: {error}{self._line_in_stage(error)}",)
            return located
        if isinstance(error, torch.OutOfMemoryError):
            live = largest_values(self.state.memory.accounts[ops.DEVICE].live)
            return BudgetExceeded(f"{place}: the GPU has no room left: {error}\nAccounted live values:\n{live}")
        message = f"{place}: {type(error).__name__}: {error}{self._line_in_stage(error)}"
        return WorkerError(message, device=self.index, line=issue.text)

    def _line_in_stage(self, error: BaseException) -> str:
        """The line of a stage's forward that raised, on a line of its own; empty where none did."""
        frames = traceback.walk_tb(error.__traceback__)
        lines = [number for frame, number in frames if frame.f_code.co_filename == str(self.file.path)]
        if not lines:
            return ""
        code = self.file.text.splitlines()[lines[-1] - 1].partition("  #")[0].strip()
        return f"\n--> {self.file.path}:{lines[-1]}: {code}"

    def _report(self, runtime: DeviceRuntime, plan: Issues, seconds: float) -> dict[str, Any]:
        self.spans, busy_share = [], {}
        for stream in runtime.streams.values():
            busy_s = 0.0
            for issue, start_s, end_s in stream.spans:
                self.spans.append(Span(self.index, stream.name.split()[0], issue.op, issue.text, start_s, end_s))
                busy_s += end_s - start_s
            busy_share[stream.name] = busy_s / seconds
        norm, skipped = self._gradient_norm(runtime)
        accounts = self.state.memory.accounts
        assert plan.counted is not None
        return {
            "seconds": seconds,
            "busy_share": busy_share,
            "moved_bytes": self._moved_bytes(plan),
            "peak_bytes": {accounts[memory].memory: peak for memory, peak in plan.counted[1].items()},
            "allocator": {self.spec.name: allocator_figures(self.device)} if self.device.type == "cuda" else {},
            "gradient_norm": norm,
            "loss_scale": None if self.state.loss_scale is None else self.state.loss_scale.scale,
            "skipped": skipped,
            "eager_blocks": self.state.eager_blocks(),
        }

    def _gradient_norm(self, runtime: DeviceRuntime) -> tuple[float | None, bool]:
        if runtime.squares is None:
            return None, False
        return self.state.judge_norm(float(runtime.squares.value))

    def _moved_bytes(self, plan: Issues) -> dict[str, int]:
        """The bytes per route between two memories by name. A message counts at its sender."""
        names = {ops.DEVICE: self.spec.name, ops.DRAM: f"dram{self.spec.host}", ops.SSD: f"ssd{self.spec.host}"}
        names |= {f"device{i}": device.name for i, device in enumerate(self.setup.hardware.devices)}
        moved: dict[str, int] = {}
        for issue in plan.ops:
            op = ops.ALL[issue.op]
            if issue.moved_bytes and (op.transfers or not op.meets):
                route = " -> ".join(route_of(issue, self.setup.hardware, self.spec))
                moved[route] = moved.get(route, 0) + issue.moved_bytes
        for store in self.state.stores.values():
            if store.copied_bytes:
                route = " -> ".join(2 * [names[store.home.weights]])
                moved[route] = moved.get(route, 0) + store.copied_bytes
        return moved

    def _charge_kept(self, plan: Issues) -> None:
        """From the second step on, what forward leaves for backward is charged by its measured bytes."""
        plan.counted = None
        for issue in plan.ops:
            if issue.op == "forward" and issue.keeps:
                measured = self.state.stores[issue.stages[0]].runner.kept_bytes
                memory, name, num_bytes = issue.takes[-1]
                issue.takes[-1] = (memory, name, num_bytes if measured is None else measured)
            elif issue.op == "backward_input":
                store, (memory, name, _) = self.state.stores[issue.stages[0]], issue.takes[-1]
                measured = store.runner.kept_bytes
                if measured is not None:
                    issue.takes[-1] = (memory, name, rest_bytes(replace(store.spec, kept_bytes=measured)))
