"""One device between and around its steps: its parts, and what a step returns, reports and raises."""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import BatchError, BudgetExceeded, NonFiniteLoss, PenstockError, PlanError, WorkerError
from ...ir.ops import rest_bytes
from ...ir.program import (
    FIRST_FORM,
    Interface,
    Program,
    bind_one,
    computed_again,
    drain_of,
    graphs_of_stages,
    largest_values,
    no_graphs_text,
    place_of,
    reasons_without_graphs,
    sizes_of,
    takes_turns,
)
from ...ir.units import format_bytes
from ..accelerator import allocator_figures, current, give_back, leave, on_stream
from ..bad_step import BadStep
from ..quantised.libraries import import_libraries
from ..simulate import Span
from ..stage.saver import Saver
from ..stage.warm import warm_up
from ..turns import TurnsLost
from .file import DeviceFile, open_device_file, read_device_file
from .host import trim_memory
from .issuing import Run
from .messages import warm_up_routes
from .named_streams import Streams
from .pacing import Pacing, memory_names, moved_bytes
from .peers import PeerLink, group_memories, group_uses, message_orders
from .prepare import Issues, plan_issues
from .runtime import DeviceRuntime
from .setup import DeviceSetup
from .state import LASTING, DeviceState
from .streams import CudaStream, Fault, Stream, StreamRecord


@dataclass
class StepResult:
    """The results of a program, on CPU: per name one tensor per micro-batch, empty lists on devices that return none.

    `report`: `seconds` (since it began or, if that was later, since the step before ended), `busy_share` per stream
    (sends and receives include waiting for the other side), `moved_bytes` per route ("dram0 -> gpu0"; "dram0 -> dram0"
    for copies that undo updates), `peak_bytes` per memory as accounted, `gradient_norm` (None if the program computes
    none), `learning_rates` (none if the device updates nothing), `loss_scale` (None except in fp16), `skipped` (a step
    whose gradients were not finite), `eager_blocks` (stage -> class -> why its blocks are not compiled, though asked
    for), `ungraphed` (stage -> why it runs from no CUDA graph, though asked for).
    """

    values: dict[str, list[Tensor]]
    report: dict[str, Any]
    refusal: PenstockError | None = None  # why the run is to be undone, as this device has found


@dataclass
class _BeforeSteps:
    """Stands for the op of a task that belongs to none."""

    line: int = 0


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
        bad_step: BadStep | None = None,
    ):
        self.setup, self.file, self.link, self.index, self.spec = setup, file, link, setup.index, setup.spec
        self.device = self._find_device()
        if any(param.dtype == "uint8" for stage in file.stages for param in setup.interface.stages[stage].params):
            import_libraries(file.text)
        lane, _ = place_of(setup.interface, setup.index)
        programs = {name: bind_one(program, lane) for name, program in file.programs.items()}
        if link is not None:
            own = list(programs.values())
            link.connect(message_orders(own), group_memories(own), group_uses(own))
        self.streams = self.streams_kind(setup, self.device, link, board)
        self.pacing = self.pacing_kind(setup.hardware, setup.index, setup.paces)
        self.plans = {name: self._plan(name, program) for name, program in programs.items()}
        self._moved = {name: moved_bytes(plan, setup.hardware, self.spec) for name, plan in self.plans.items()}
        if any(map(takes_turns, programs.values())) or any(ops.READ in plan.streams for plan in self.plans.values()):
            self.streams.copy_by_thread()
        self.bad_step = None if setup.interface.asynchronous else bad_step  # such a step has made some updates already
        if self.bad_step is not None:
            has_losses = any(issue.judges for issue in self.plans["step"].ops)
            self.bad_step.looks_later = self.device.type == "cuda" and has_losses
        self.state = self.state_kind(setup, file, programs["step"].interface, self.plans, self.device, self.bad_step)
        account = self.state.memory.accounts[ops.DRAM]
        self.saver = Saver(self.state.stores, setup.interface.stages, self.device, account, f"{LASTING}copy to save")
        if link is not None and self.device.type == "cuda":
            self._warm_up(list(programs.values()))
        self.drain = drain_of([programs["step"]], setup.precision)
        self._again = computed_again(programs["step"])
        self.bound: dict[str, DeviceRuntime] = {}  # by function, from its first run on
        self.broken: Fault | None = None
        self._records: dict[Stream, StreamRecord] = {}  # of the last run that ended
        self.shares_generators = False
        self.tail: Run | None = None  # the step that has given its results and may still be at work
        self._ended_s = 0.0  # when the last run ended
        self._counters_before: tuple[dict[str, Any], int]  # and of evaluations, before the step that began last
        self._report_of_tail: dict[str, Any] = {}
        self.report_before: dict[str, Any] = {}  # of the step before the one that began last; empty at the first
        self._try_kernels(programs["step"])
        self._to_graph = programs["step"] if self._has_graphs else None  # until the first step, as weights come before

    def _find_device(self) -> torch.device:
        on_gpu = self.spec.kind == "cuda"
        return torch.device("cuda", self.setup.share.gpu) if on_gpu else torch.device("cpu")

    def _plan(self, name: str, program: Program) -> Issues:
        pooled = self.spec.kind == "cuda"
        plan = plan_issues(program, self.spec.budget_bytes, self.setup.dram_budget_bytes, self.streams.name_of, pooled)
        self.pacing.mark(name, plan)
        return plan

    def take_form(self, number: int, path: Path, form: Interface, room: Interface) -> None:
        """Run micro-batches of another form, by the stages of its own file, from now on. `room`: the interface with
        room for all forms."""
        self.finish_step()
        self._unbind()
        lane, role = place_of(room, self.index)
        file = open_device_file(path, form, role, self.setup.trust)
        first = read_device_file(self.file.path, room, role)
        programs = {name: bind_one(program, lane) for name, program in first.programs.items()}
        self.setup, self.state.interface = replace(self.setup, interface=room), programs["step"].interface
        self.plans = {name: self._plan(name, program) for name, program in programs.items()}
        self._moved = {name: moved_bytes(plan, self.setup.hardware, self.spec) for name, plan in self.plans.items()}
        self.state.take_form(number, form, file, self.plans)
        self._try_kernels(programs["step"], number)

    def _warm_up(self, programs: list[Program]) -> None:
        """Load the kernels of all stages, as the first step would, while no message is under way."""
        if not self._computes:
            return
        compute = self.streams.streams_of(self.plans["step"])[ops.COMPUTE]
        assert isinstance(compute, CudaStream)
        with self.streams.issuing(), on_stream(compute.stream):
            arena, setup = self.state.memory.device_arena, self.setup
            warm_up(self.state.stores, self.file.build, arena, programs, setup.precision, setup.optimizer)
            warm_up_routes(programs, self.device)

    def _try_kernels(self, program: Program, form: int = FIRST_FORM) -> None:
        """Compile the blocks of a form's stages, or their chains of calls, where they will run: while no message is
        under way, and no value takes memory."""
        if not self.setup.compile_stages and not any(s.of_forms[form].has_chains for s in self.state.stores.values()):
            return
        keeps: dict[str, list[Any]] = {}
        for node in program.ops():
            if node.target is ops.forward:
                keeps.setdefault(str(node.args[0]), []).append(node.kwargs.get("keep", True))

        def run() -> None:
            for stage, found in keeps.items():
                self.state.stores[stage].of_forms[form].try_kernels(found)

        self._compute(run)

    def _take_room(self) -> None:
        """Take the memory of the states that the first step makes on the GPU before its values do."""

        def run() -> None:
            for store in self.state.stores.values():
                if store.optimizer is not None and store.home.states == ops.DEVICE:
                    store.optimizer.take_room()

        self._compute(run)

    def _make_graphs(self, program: Program) -> None:
        """Make the CUDA graphs of stages, while no message is under way, and no value takes memory."""
        reasons, made = reasons_without_graphs(program), graphs_of_stages(program)

        def run() -> None:
            for stage, graphs in made.items():
                store = self.state.stores[stage]
                store.runner.bind(store.weights)
                reason = store.runner.make_graphs(graphs)
                if reason:
                    reasons[stage] = reason

        self._compute(run)
        if made and made.keys() <= reasons.keys():
            raise PlanError(no_graphs_text(reasons))
        self.state.ungraphed = reasons
        self._check_graphs()

    def _check_graphs(self) -> None:
        """Raises `BudgetExceeded` where graphs hold more memory than the plan counts."""
        found = [store.runner.graphs for store in self.state.stores.values()]
        taken_bytes = sum(each.num_bytes for each in found if each is not None)
        planned_bytes = self.plans["step"].persistent.device.get("graphs", 0)
        if taken_bytes > planned_bytes:
            raise BudgetExceeded(
                f"{self.spec.name}: CUDA graphs hold {format_bytes(taken_bytes)}, of which the plan counts "
                f"{format_bytes(planned_bytes)}. Leave cuda_graphs out"
            )

    @property
    def _computes(self) -> bool:
        """False for a device that the plan leaves idle."""
        return ops.COMPUTE in self.plans["step"].streams

    @property
    def _has_graphs(self) -> bool:
        return self.setup.interface.cuda_graphs and self.device.type == "cuda"

    def _compute(self, run: Callable[[], None]) -> None:
        """Run this on the stream of computation, between steps, and give back the memory that it leaves."""
        if not self._computes:
            return
        stream = self.streams.streams_of(self.plans["step"])[ops.COMPUTE]
        stream.begin()
        try:
            with current(self.device), self.streams.issuing():
                stream.issue(run, [], _BeforeSteps())
                self.streams.end_issue([stream])
                self.streams.wait_end([stream])
                if self.device.type == "cuda":
                    give_back(self.device)
        except Fault as fault:
            raise fault.error from fault

    @property
    def batch_names(self) -> list[str]:
        """The inputs of the batch that this device reads."""
        return sorted({name for plan in self.plans.values() for name in plan.batch_names})

    def close(self, abandon: bool = False) -> None:
        """Stop the device, after its last step; `abandon`: without waiting for that, as a peer may be gone."""
        if not abandon:
            with contextlib.suppress(Exception):  # whoever wants to hear of it has called `finish_step`
                self.finish_step()
        if self.device.type == "cuda" and self.link is None:
            # A step that failed may still use memory that goes back now, and only streams without work are taken again;
            # with peers, one may never answer.
            with contextlib.suppress(RuntimeError):  # a GPU in error has stopped already
                leave(self.device)
        self._unbind()
        self.saver.close()
        self.streams.close()
        self.state.memory.close()

    # --- running a program

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step of this device's part, on the rows of the batch that its lane takes, to its end."""
        values = self.begin_step(batch)
        return StepResult(values, self._finish(self.state.step_count))

    def begin_step(self, batch: Mapping[str, Tensor], stop_on_nan: bool = True) -> dict[str, list[Tensor]]:
        """As `step`, but it returns as soon as results and all forwards are there. The rest of the step goes on while
        the next one begins, which waits for what it needs; at most one step is unfinished. The batch must stay as it
        is.

        What only the end of a step shows holds up the next one: the first step's measured bytes, and what `Drain`
        lists. Where the script `shares_generators`, a step that computes stages again that draw ends before it returns.
        stop_on_nan: False where the loss is NaN as eager's is, and trains nothing.
        """
        self._check(batch, "step")
        self.state.stop_on_nan = self.setup.stop_on_nan and stop_on_nan
        first = self.state.step_count == 0
        if first and self.device.type == "cuda":
            self._take_room()
        if self._to_graph is not None:
            program, self._to_graph = self._to_graph, None
            self._make_graphs(program)
        if self.tail is not None and self.drain is not None:
            self.finish_step()
        before, self.tail = self.tail, None
        self._counters_before = self.state.counters(), self.state.evaluation_count
        if self.bad_step is not None:
            self.bad_step.begin()
        run = self._issue("step", batch, before)
        self.state.count_step()
        if before is not None:
            self._report_of_tail = self._end(before, run.number)
        self.report_before, self.tail = self._report_of_tail, run
        self._wait_for_results(run)
        self.bound["step"].judge_losses(run)
        values = self._values_of(run)
        drawing = any(self.state.stores[stage].runner.draws.may_draw for stage in self._again)
        if first or (self.shares_generators and drawing):
            self._finish(run.number)
        if first:
            self._charge_kept(self.plans["step"])
        return values

    def finish_step(self) -> dict[str, Any]:
        """Wait for the end of the last step, and return its report. Any other use of the device must come after."""
        return self._finish(0)

    def refusal(self) -> PenstockError | None:
        """The reason to undo the last step, or evaluation, if this device has found it bad."""
        if self.bad_step is None or self.bad_step.found is None:
            return None
        issue, error = self.bad_step.found
        if isinstance(error, NonFiniteLoss):
            return error
        located = self._with_place(Fault(issue, error), 0)
        return BatchError(f"{located}\nThe batch was left out: weights, states and step count are as before it")

    def undo_step(self) -> None:
        """Be as before the last step, in which no device has made an update; wait for its end."""
        assert self.bad_step is not None
        self.finish_step()
        counters, evaluations = self._counters_before
        self.state.load_counters(counters)
        self.state.evaluation_count = evaluations
        for store in self.state.stores.values():
            store.runner.put_back_buffers(counters["step"])
        self.bad_step.found = None

    def _finish(self, number: int) -> dict[str, Any]:
        run, self.tail = self.tail, None
        if run is not None and self.broken is None:
            self._report_of_tail = self._end(run, number)
        return self._report_of_tail

    def evaluate(self, batch: Mapping[str, Tensor], loss_only: bool = False) -> StepResult:
        """The forward pass in evaluation mode. With `loss_only` no other output leaves the device."""
        if "evaluate" not in self.plans:
            raise PlanError(f"the file of device {self.index} has no `evaluate`")
        self._check(batch, "evaluate")
        self.finish_step()
        run = self._issue("evaluate", batch)
        report = self._end(run, run.number)
        values = self._values_of(run, loss_only)
        refusal = self.refusal()
        if refusal is not None and self.bad_step is not None:
            self.bad_step.found = None
        else:
            self.state.evaluation_count += 1
        return StepResult(values, report, refusal)

    def _check(self, batch: Mapping[str, Tensor], function: str) -> None:
        if self.broken is not None:
            raise WorkerError(f"device {self.index} failed before and holds half a step; resume from a checkpoint")
        interface = self.setup.interface
        own = interface.micro_batches_of(place_of(interface, self.index)[0])
        interface.check_batch(batch, self.plans[function].batch_names, own)

    def _values_of(self, run: Run, loss_only: bool = False) -> dict[str, list[Tensor]]:
        """The results of a run, on CPU; the device releases them."""
        wanted = {name: handles for name, handles in run.bound.results.items() if name == "loss" or not loss_only}
        values = {name: [run.value(handle).detach().cpu() for handle in handles] for name, handles in wanted.items()}
        run.boxes.clear()
        self.state.forget_values()
        return values

    def _bind(self, function: str) -> DeviceRuntime:
        """A program bound to this device, anew if its memory had to grow."""
        plan = self.plans[function]
        if plan.arenas[ops.DEVICE] > self.state.memory.device_arena.bytes:
            self._unbind()
            self.state.memory.grow(ops.DEVICE, plan.arenas[ops.DEVICE])
        if function not in self.bound:
            file = self.file.functions[function]
            self.bound[function] = self.runtime_kind(self.state, plan, self.streams, self.pacing, self.link, file)
        return self.bound[function]

    def _unbind(self) -> None:
        """Let go of the programs, which hold places in memory; calls and runtime hold each other."""
        for runtime in self.bound.values():
            runtime.calls.clear()
        self.bound.clear()

    def _issue(self, function: str, batch: Mapping[str, Tensor], before: Run | None = None) -> Run:
        """Issue all ops of a function, after those of the run `before`."""
        bound, number = self._bind(function), self.state.step_count + 1
        run = Run(bound, batch, sizes_of(self.setup.interface.sizes, batch), number, before)
        for account in self.state.memory.accounts.values():
            account.peak_bytes = account.live_bytes
        if before is None:
            for store in self.state.stores.values():
                store.copied_bytes = 0
        run.begun_s = time.perf_counter()
        for stream in bound.streams.values():
            stream.begin(number)
        with self._breaking(run, number), self.streams.issuing():
            bound.issue(run)
            self.streams.end_issue(bound.streams.values())
        run.records = {stream: stream.record for stream in bound.streams.values()}
        if run.accounted:
            peaks = {memory: account.peak_bytes for memory, account in self.state.memory.accounts.items()}
            bound.plan.counted = run.live_before, peaks
        return run

    def _wait_for_results(self, run: Run) -> None:
        """Wait for what a step returns, and for the first forward of each micro-batch on each stage: so a device whose
        forwards fail or hang does not seem to be done."""
        makers = [handle.maker for handles in run.bound.results.values() for handle in handles]
        needed = [number for number in (*makers, *run.bound.plan.forwards) if number is not None]
        events = [run.events[number] for number in needed]
        with self._breaking(run, run.number):
            self.streams.wait(run.records, [event for event in events if event is not None])

    def _end(self, run: Run, number: int) -> dict[str, Any]:
        """Wait for the end of a run, and return its report. `number`: see `_breaking`."""
        with self._breaking(run, number):
            self.streams.wait_end(run.records)
            run.end()
        # by the last op, not by this moment: the next step may have been issued, and run, before it
        ends_s = [end_s for record in run.records.values() for _, _, end_s in record.spans]
        end_s = max(ends_s, default=time.perf_counter())
        seconds, self._ended_s = end_s - max(run.begun_s, self._ended_s), end_s
        report = self._report(run, seconds)
        if run.bound.plan.trains:
            self.state.commit()
            if self.state.trimmer is not None:
                self.state.trimmer = None
                trim_memory()
        return report

    @contextlib.contextmanager
    def _breaking(self, run: Run, number: int) -> Iterator[None]:
        """After an error in the body half a step is there; it is raised with its place. `run`: that which the body
        waits for; `number`: of the step in which the caller would look for the error."""
        try:
            with current(self.device):
                yield
        except Fault as fault:
            self.broken, self.tail = self.streams.first_fault(fault), None
            if not run.accounted and self.broken.label is not None:
                for issue in run.bound.issues[: self.broken.label.index + 1]:  # so that the error can say what was live
                    run.bound.account(issue)
            raise self._with_place(self.broken, number) from self.broken.error
        except BaseException as error:
            self.broken, self.tail = Fault(None, error), None
            raise

    @property
    def waited(self) -> bool:
        """Whether the op that failed waited for another device, or for its turn, which another process hands out: then
        that is the likelier culprit."""
        if self.broken is None or self.broken.label is None:
            return False
        return isinstance(self.broken.error, TurnsLost) or bool(ops.ALL[self.broken.label.op].meets)

    def _with_place(self, fault: Fault, number: int) -> Exception:
        """The error that the caller sees, with the place; with its step if that is not `number`."""
        issue, error = fault.label, fault.error
        if issue is None:
            return error if isinstance(error, Exception) else WorkerError(str(error), device=self.index)
        step = "" if fault.step in (None, number) else f"the end of step {fault.step}: "
        place = f"{step}device {self.index} ({self.spec.name}), line {issue.line}: {issue.where}"
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

    def _report(self, run: Run, seconds: float) -> dict[str, Any]:
        self._records, busy_share = run.records, {}
        for stream, record in run.records.items():
            busy_s = sum(end_s - start_s for _, start_s, end_s in record.spans)
            busy_share[stream.name] = min(1.0, busy_s / seconds)  # it may begin before the step before has ended
        norm, skipped = self._gradient_norm(run)
        plan, accounts = run.bound.plan, self.state.memory.accounts
        assert plan.counted is not None
        return {
            "seconds": seconds,
            "busy_share": busy_share,
            "moved_bytes": self._moved_bytes("step" if plan.trains else "evaluate"),
            "peak_bytes": {accounts[memory].memory: peak for memory, peak in plan.counted[1].items()},
            "allocator": {self.spec.name: allocator_figures(self.device)} if self.device.type == "cuda" else {},
            "gradient_norm": norm,
            "learning_rates": list(run.learning_rates),
            "loss_scale": None if self.state.loss_scale is None else self.state.loss_scale.scale,
            "skipped": skipped,
            "eager_blocks": self.state.eager_blocks(),
            "ungraphed": dict(self.state.ungraphed),
        }

    def _gradient_norm(self, run: Run) -> tuple[float | None, bool]:
        if run.squares is None:
            return None, False
        return self.state.judge_norm(float(run.squares), run.scales)

    @property
    def spans(self) -> list[Span]:
        """The ops of the last run that ended."""
        return [
            Span(self.index, stream.name.split()[0], issue.op, issue.text, start_s, end_s)
            for stream, record in self._records.items()
            for issue, start_s, end_s in record.spans
        ]

    def _moved_bytes(self, function: str) -> dict[str, int]:
        """The bytes per route between two memories by name, with copies that undo updates."""
        moved = dict(self._moved[function])
        for store in self.state.stores.values():
            if store.copied_bytes:
                route = " -> ".join(2 * [memory_names(self.setup.hardware, self.spec)[store.home.weights]])
                moved[route] = moved.get(route, 0) + store.copied_bytes
        return moved

    def _charge_kept(self, plan: Issues) -> None:
        """From the second step on, what forward leaves for backward is charged by its measured bytes."""
        plan.counted = None
        for issue in plan.ops:
            if issue.op == "forward" and issue.keeps:
                measured = self.state.stores[issue.stages[0]].runner.kept_bytes
                memory, name, num_bytes = issue.takes[-1]
                in_graph = self.setup.interface.cuda_graphs and not num_bytes
                issue.takes[-1] = (memory, name, num_bytes if measured is None or in_graph else measured)
            elif issue.op == "backward_input":
                store, (memory, name, _) = self.state.stores[issue.stages[0]], issue.takes[-1]
                measured = store.runner.kept_bytes
                if measured is not None:
                    issue.takes[-1] = (memory, name, rest_bytes(replace(store.spec, kept_bytes=measured)))
