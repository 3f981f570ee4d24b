"""One device between and around its steps: streams, memories, the state of its stages, and what a step reports.

On a CPU device a stream is a thread; a program that uses no stream beside compute runs on the calling thread instead,
as there is nothing to overlap. On a CUDA device a stream is a CUDA stream, except for what works on host memory.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import ops
from ...ir.errors import BatchError, BudgetExceeded, PenstockError, PlanError, WorkerError
from ...ir.machine.hardware import Hardware
from ...ir.ops import rest_bytes
from ...ir.precision import PRECISIONS
from ...ir.program import Interface, Program, StageHome, bind_one, largest_values, place_of
from ..optimizer.gradients import LossScale
from ..optimizer.stage_optimizer import OptimizerSpec, Workspace
from ..simulate import Span
from ..stage.store import StagePart, StageStore
from .cores import available_cores, optimizer_cores
from .file import DeviceFile
from .issuing import Box
from .memories import LASTING, SessionMemory
from .pacing import LinkClient, TurnClient
from .peers import PeerLink, group_members, group_memories, message_orders
from .prepare import Issue, Issues, plan_issues
from .runtime import DeviceRuntime
from .streams import CudaStream, Fault, InlineStream, Stream, ThreadStream

HOST_STREAMS = (ops.CPU, ops.READ, ops.WRITE, f"{ops.COMM} host")  # threads on every kind of device
UNSEEN_BYTES = 256 << 20  # at least this for what no account sees, also on a GPU described as very small
STREAM_SLOTS = (*ops.STREAMS, f"{ops.COMM} host")  # the board has one place for each


@dataclass
class StepResult:
    """What a program returned, on CPU: per name one tensor a micro-batch, empty lists on devices that have none.

    `report`: `seconds`, `busy_share` per stream (sends and receives include waiting for the other side), `moved_bytes`
    per route ("dram0 -> gpu0"), `peak_bytes` per memory as accounted, `gradient_norm` (None where the program computes
    none), `loss_scale` (None but in fp16), `skipped` (a step whose gradients were not finite).
    """

    values: dict[str, list[Tensor]]
    report: dict[str, Any]


class DeviceSession:
    """One device: its streams, memories and stages.

    `link` joins it to the other devices (None when there is only one). `num_threads` of a CPU device's computation:
    None takes the calling thread's. `board` is where streams write the line they are at. `dram_budget_bytes` is this
    device's share of its host's DRAM; None takes all of it. `link_server` times the transfers that share links with
    others where links are held down; `shared` gives, per program, their ops' numbers there, `collective_s` what
    collectives take at least. `ssd_dirs`: where files go, one directory per SSD; `ssd_verify` checks all that is read.
    `turns`: who says when the next chunk of weights may come, where fetches are ordered.

    Raises `BudgetExceeded` where what persists is already too much, `HardwareError` for directories that cannot be
    used, `DoesNotFit` where the disks have not the room.
    """

    def __init__(
        self,
        index: int,
        file: DeviceFile,
        hardware: Hardware,
        *,
        optimizer: OptimizerSpec | None = None,
        precision: str = "fp32",
        seed: int = 0,
        link: PeerLink | None = None,
        num_threads: int | None = None,
        board: MutableSequence[int] | None = None,
        dram_budget_bytes: int | None = None,
        link_server: LinkClient | None = None,
        shared: Mapping[str, Mapping[int, int]] | None = None,
        collective_s: Mapping[str, Mapping[int, float]] | None = None,
        ssd_dirs: Sequence[str] = (),
        ssd_verify: bool = False,
        turns: TurnClient | None = None,
    ):
        self.index, self.hardware, self.optimizer = index, hardware, optimizer
        self.precision, self.seed, self.file, self.link = precision, seed, file, link
        self.link_server, self._shared, self._collective_s = link_server, shared or {}, collective_s or {}
        lane, _ = place_of(file.step.interface, index)
        self.programs = {name: bind_one(program, lane) for name, program in file.programs.items()}
        self.interface: Interface = self.programs["step"].interface
        self.spec = hardware.devices[index]
        self.device = self._find_device()
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        self.step_count = 0
        self.loss_scale = LossScale() if PRECISIONS[precision].scales_loss else None
        self.turns = turns
        self.board = [0] * len(STREAM_SLOTS) if board is None else board
        self.broken: Fault | None = None
        self.spans: list[Span] = []  # of the last step
        self._notices: SimpleQueue[Any] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        whole_bytes = hardware.dram_budget_bytes(self.spec.host)
        self.dram_budget_bytes = whole_bytes if dram_budget_bytes is None else dram_budget_bytes
        programs = list(self.programs.values())
        if link is not None:
            link.connect(message_orders(programs), group_memories(programs))
        self.throttled = hardware.throttled and self.spec.kind == "cpu"
        self.plans = {name: self._plan(name, program) for name, program in self.programs.items()}
        # Where copies wait for turns or for disks, a thread issues them: else these waits would hold up computation.
        waiting = turns is not None or any(ops.READ in plan.streams for plan in self.plans.values())
        on_gpu = self.spec.kind == "cuda" and self.device.type != "meta"
        self.copies = torch.cuda.Stream(self.device) if waiting and on_gpu else None
        self.memory = self._take_memory()
        self._workspaces = {ops.COMPUTE: Workspace(self.device), ops.CPU: Workspace(torch.device("cpu"))}  # of steps
        try:
            self.memory.take_files(ssd_dirs, ssd_verify)
            self.stores = {stage: self._make_store(stage) for stage in self._homes()}
        except BaseException:
            self.memory.close()
            raise
        shards = {name for name, home in self._homes().items() if home.group}  # as they are, until they are gathered
        self.resident = {n: Box(None, store.flat if n in shards else store.weights) for n, store in self.stores.items()}
        self._growth_before = self._stop_growth()

    # --- set-up

    def _take_memory(self) -> SessionMemory:
        return SessionMemory(self.spec, self.hardware, self.dram_budget_bytes, self.plans, self.device)

    def _find_device(self) -> torch.device:
        on_gpu = self.spec.kind == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _issues(self, program: Program) -> Issues:
        return plan_issues(program, self.spec.budget_bytes, self.dram_budget_bytes, self._stream_of)

    def _plan(self, name: str, program: Program) -> Issues:
        plan, shared, collective_s = self._issues(program), self._shared.get(name, {}), self._collective_s.get(name, {})
        if self.throttled:
            for issue in plan.ops:
                issue.least_s = collective_s.get(issue.index, self._transfer_s(issue))
                issue.shared = shared.get(issue.index)
        return plan

    def _stream_of(self, node: fx.Node, work: ops.Work) -> str:
        if self.spec.kind == "cuda" and work.group:
            on_device = work.source == ops.DEVICE and (self.link is None or self.link.on_device(work.group))
            return ops.COMM if on_device else f"{ops.COMM} host"
        return work.stream

    def _transfer_s(self, issue: Issue) -> float:
        """What a transfer takes on the described hardware; a receive is held down by its send."""
        if not ops.ALL[issue.op].transfers:
            return 0.0
        route = self._route(issue)
        return issue.moved_bytes / self.hardware.bandwidth(*route) + self.hardware.latency_s(*route)

    def _stop_growth(self) -> float | None:
        """Hold torch's allocator to the GPU's memory as described; returns what it was held to before.

        The account holds values to the budget, which leaves a part of that memory to what no account sees: workspaces
        of cuBLAS, the allocator's rounding and gaps.
        """
        if self.device.type != "cuda":
            return None
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        _, total_bytes = torch.cuda.mem_get_info(self.device)
        most_bytes = max(self.spec.memory_bytes, self.spec.budget_bytes + UNSEEN_BYTES)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total_bytes), self.device)
        return before

    def _homes(self) -> dict[str, StageHome]:
        homes: dict[str, StageHome] = {}
        for plan in self.plans.values():
            for stage, home in plan.homes.items():
                if homes.setdefault(stage, home).weights != home.weights:
                    raise PlanError(f"device {self.index}: {stage} lies in different memories in the file's functions")
        return homes

    def _make_store(self, stage: str) -> StageStore:
        with torch.device("meta"):
            module = self.file.stages[stage]()
        home = self._homes()[stage]
        trained = home.states is not None
        if trained and self.optimizer is None:
            raise PlanError(f"device {self.index}: the program updates {stage}, but there is no optimizer")
        return StageStore(
            self.interface.stages[stage],
            module,
            self.device,
            home,
            self.precision,
            self.interface,
            optimizer=self.optimizer if trained else None,
            piece=self._piece(stage),
            folder=self.memory.folder,
            staging=self.memory.staging,
            workspace=self._workspaces[ops.COMPUTE if home.weights == ops.DEVICE else ops.CPU],
        )

    def _piece(self, stage: str) -> tuple[int, int] | None:
        """Which of how many shards of a stage is here; None where it is whole."""
        group = self._homes()[stage].group
        if not group:
            return None
        members = self.interface.members(group)
        return members.index(self.index), len(members)

    def _stream(self, name: str) -> Stream:
        """The stream of that name, made at its first use."""
        if name not in self._streams:
            key, _, inline = name.partition("/")
            slot = STREAM_SLOTS.index(key)
            if inline:
                self._streams[name] = InlineStream(key, self.board, slot)
            elif self.spec.kind == "cuda" and key not in HOST_STREAMS and not (key == ops.H2D and self.copies):
                self._streams[name] = CudaStream(key, self.device, self.board, slot)
            else:
                num_threads = self.num_threads if key in (ops.COMPUTE, ops.CPU) else 1
                gpu = self.device if self.spec.kind == "cuda" else None
                cores = self._optimizer_cores() if gpu is not None and key == ops.CPU else []
                num_threads = len(cores) or num_threads
                self._streams[name] = ThreadStream(key, self._notices, self.board, slot, num_threads, gpu, cores)
        return self._streams[name]

    def _optimizer_cores(self) -> list[int]:
        beside = [i for i, other in enumerate(self.hardware.devices) if other.host == self.spec.host]
        return optimizer_cores(available_cores(), beside.index(self.index), len(beside))

    def _streams_for(self, plan: Issues) -> dict[str, Stream]:
        alone = self.spec.kind == "cpu" and plan.streams <= {ops.HOST, ops.COMPUTE}
        found = {}
        for name in plan.streams:
            inline = self.spec.kind == "cpu" and (name == ops.HOST or alone)
            found[name] = self._stream(f"{name}/inline" if inline else name)
        return found

    # --- state

    def load_weights(self, source: Callable[[str], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> None:
        """Fill every stage with what `source(stage name)` gives: weights and buffers by name."""
        for name in self.stores:
            self.load_stage(name, *source(name))

    def load_stage(self, stage: str, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set a stage's weights and buffers to copies of these."""
        self.stores[stage].load(weights, buffers)
        self._settle()

    def stage_state(self, stage: str) -> StagePart:
        return self.stores[stage].state()

    def load_stage_state(self, stage: str, state: StagePart) -> None:
        self.stores[stage].load_state(state)
        self._settle()

    def _settle(self) -> None:
        """Between steps only: what was loaded on the default stream is in place before any other reads it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def counters(self) -> dict[str, Any]:
        """What a checkpoint needs beside the stages."""
        scale = None if self.loss_scale is None else [self.loss_scale.scale, self.loss_scale.good_steps]
        return {"step": self.step_count, "seed": self.seed, "loss_scale": scale}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self.step_count, self.seed = counters["step"], counters["seed"]
        if self.loss_scale is not None and counters.get("loss_scale"):
            self.loss_scale.scale, self.loss_scale.good_steps = counters["loss_scale"]

    @property
    def batch_names(self) -> list[str]:
        """The inputs of the batch that this device reads."""
        return sorted({name for plan in self.plans.values() for name in plan.batch_names})

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self.memory.close()
        if self._growth_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._growth_before, self.device)
            self._growth_before = None
            if self.link is None:  # a step that failed may still use memory that goes back now; peers may never answer
                with contextlib.suppress(RuntimeError):  # a GPU in error has stopped already
                    torch.cuda.synchronize(self.device)
                    torch._C._cuda_clearCublasWorkspaces()  # one per stream, else kept for ever

    # --- running a program

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step of this device's part, on the rows of the batch that its lane takes."""
        result = self._run("step", batch)
        for store in self.stores.values():
            store.commit()
        self.step_count += 1
        return result

    def evaluate(self, batch: Mapping[str, Tensor]) -> StepResult:
        """The forward pass in evaluation mode."""
        if "evaluate" not in self.plans:
            raise PlanError(f"the file of device {self.index} has no `evaluate`")
        return self._run("evaluate", batch)

    def _run(self, function: str, batch: Mapping[str, Tensor]) -> StepResult:
        if self.broken is not None:
            raise WorkerError(f"device {self.index} failed before and holds half a step; resume from a checkpoint")
        plan = self.plans[function]
        check_batch(batch, self.file.step.interface, plan.batch_names)
        self.memory.grow(ops.DEVICE, plan.arenas[ops.DEVICE])
        runtime = DeviceRuntime(self, plan, self._streams_for(plan))
        results, report = self._execute(runtime, function, batch)
        if self.step_count == 0:
            self._charge_kept(plan)
        values = {name: [handle.box.value.detach().cpu() for handle in handles] for name, handles in results.items()}
        self._forget_results()
        return StepResult(values, report)

    def _execute(
        self, runtime: DeviceRuntime, function: str, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Issue all ops of the function and wait for their end: what it returned, and the report."""
        for account in self.memory.accounts.values():
            account.peak_bytes = account.live_bytes
        start_s = time.perf_counter()
        for stream in runtime.streams.values():
            stream.begin()
        try:
            results = self.file.functions[function](runtime, dict(batch))
            self._finish(runtime)
        except Fault as fault:
            self.broken = self._first_fault(fault)
            raise self._located(self.broken) from self.broken.error
        except BaseException as error:
            self.broken = Fault(None, error)
            raise
        return results, self._report(runtime, self.plans[function], time.perf_counter() - start_s)

    def _finish(self, runtime: DeviceRuntime) -> None:
        """Wait until every stream is done, or one has failed."""
        assert runtime.complete, "the file's function and its parsed text differ"
        streams = sorted(runtime.streams.values(), key=lambda stream: stream.is_cuda)  # threads may still feed the GPU
        for stream in streams:
            stream.finish(self._notices)
        for _ in streams:
            notice = self._notices.get()
            if isinstance(notice, Fault):
                raise notice

    def interrupt(self, error: Exception) -> None:
        """Called from another thread: the function that runs ends with this error, whatever its streams wait for."""
        self._notices.put(Fault(None, error))

    def raise_fault(self) -> None:
        """Raise the `Fault` of a stream, if there is one."""
        if not self._notices.empty():
            notice = self._notices.get()
            if isinstance(notice, Fault):
                raise notice

    def _first_fault(self, fault: Fault) -> Fault:
        """Of several faults the first in time: the others follow from it."""
        while not self._notices.empty():
            notice = self._notices.get()
            if isinstance(notice, Fault) and notice.time_s < fault.time_s:
                fault = notice
        return fault

    def _located(self, fault: Fault) -> Exception:
        """The error that the caller sees, with the place."""
        issue, error = fault.label, fault.error
        if issue is None:
            return error if isinstance(error, Exception) else WorkerError(str(error), device=self.index)
        place = f"device {self.index} ({self.spec.name}), line {issue.line}: {issue.where}"
        if isinstance(error, PenstockError):
            located = copy.copy(error)  # with what it knows: the file, the bytes that are missing
            located.args = (f"{place}: {error}",)
            return located
        if isinstance(error, torch.OutOfMemoryError):
            live = largest_values(self.memory.accounts[ops.DEVICE].live)
            return BudgetExceeded(f"{place}: the GPU has no room left: {error}\nAccounted live values:\n{live}")
        return WorkerError(f"{place}: {type(error).__name__}: {error}", device=self.index, line=issue.text)

    def _forget_results(self) -> None:
        for account in self.memory.accounts.values():
            for name in [name for name in account.live if not name.startswith(LASTING)]:
                account.give(name)

    def _report(self, runtime: DeviceRuntime, plan: Issues, seconds: float) -> dict[str, Any]:
        self.spans, busy_share = [], {}
        for stream in runtime.streams.values():
            busy_s = 0.0
            for issue, start_s, end_s in stream.spans:
                self.spans.append(Span(self.index, stream.name.split()[0], issue.op, issue.text, start_s, end_s))
                busy_s += end_s - start_s
            busy_share[stream.name] = busy_s / seconds
        norm, skipped = self._gradient_norm(runtime)
        return {
            "seconds": seconds,
            "busy_share": busy_share,
            "moved_bytes": self._moved_bytes(plan),
            "peak_bytes": {account.memory: account.peak_bytes for account in self.memory.accounts.values()},
            "gradient_norm": norm,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.scale,
            "skipped": skipped,
        }

    def _moved_bytes(self, plan: Issues) -> dict[str, int]:
        """Per route between two memories by name. What is received counts with its sender, a collective's bytes with
        the library that moves them in a ring."""
        moved: dict[str, int] = {}
        for issue in plan.ops:
            op = ops.ALL[issue.op]
            if issue.moved_bytes and (op.transfers or not op.meets):
                route = " -> ".join(self._route(issue))
                moved[route] = moved.get(route, 0) + issue.moved_bytes
        return moved

    def _route(self, issue: Issue) -> tuple[str, str]:
        """The machine's names of the memories that an op moves bytes between."""
        source, target = issue.route
        return self._memory_names[source], self._memory_names[target]

    @cached_property
    def _memory_names(self) -> dict[str, str]:
        names = {ops.DEVICE: self.spec.name, ops.DRAM: f"dram{self.spec.host}", ops.SSD: f"ssd{self.spec.host}"}
        return names | {f"device{i}": device.name for i, device in enumerate(self.hardware.devices)}

    def _charge_kept(self, plan: Issues) -> None:
        """From the second step on, what forward leaves for backward is charged by its measured bytes."""
        for issue in plan.ops:
            if issue.op == "forward" and issue.keeps:
                measured = self.stores[issue.stages[0]].runner.kept_bytes
                memory, name, num_bytes = issue.takes[-1]
                issue.takes[-1] = (memory, name, num_bytes if measured is None else measured)
            elif issue.op == "backward_input":
                store, (memory, name, _) = self.stores[issue.stages[0]], issue.takes[-1]
                measured = store.runner.kept_bytes
                if measured is not None:
                    issue.takes[-1] = (memory, name, rest_bytes(replace(store.spec, kept_bytes=measured)))

    def _gradient_norm(self, runtime: DeviceRuntime) -> tuple[float | None, bool]:
        if runtime.squares is None:
            return None, False
        squares = float(runtime.squares.value)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        finite = squares < float("inf")
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return squares**0.5 / scale, self.loss_scale is not None and not finite


def check_batch(batch: Mapping[str, Tensor], interface: Interface, names: Sequence[str]) -> None:
    """Raises `BatchError` where an input among `names` is missing or is not what was compiled."""
    for name in names:
        want, found = interface.batch[name], batch.get(name)
        shape = (want.shape[0] * interface.micro_batches, *want.shape[1:])
        if found is None:
            raise BatchError(f"batch: {name!r} is missing; found {', '.join(batch) or 'nothing'}")
        dtype = str(found.dtype).removeprefix("torch.")
        if (tuple(found.shape), dtype) != (shape, want.dtype):
            raise BatchError(f"batch: {name!r} is {dtype}{list(found.shape)}, compiled for {want.dtype}{list(shape)}")


def device_groups(interface: Interface) -> dict[str, list[int]]:
    """The groups of devices that a `PeerLink` must know."""
    return group_members(interface.groups)
