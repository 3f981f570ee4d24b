"""The device runtime: executes one device's program on real streams.

A generated `step(rt, batch)` runs once, fast, on the calling thread: every op returns handles at once and is issued to
its stream, where it starts when its inputs are ready. Memory is taken and given back in issue order under the budgets
of the device and of DRAM, so exceeding one raises at the op that would, whatever has run so far.

On a CPU device a stream is a thread; a program that uses no stream beside compute runs on the calling thread instead,
as there is nothing to overlap. On a CUDA device a stream is a CUDA stream, except for what works on host memory.
"""

from __future__ import annotations

import time
from _queue import SimpleQueue
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import ops
from .arena import Arena
from .clipping import Grads, LossScale, clip_factor, sum_of_squares
from .device_file import DeviceFile
from .errors import BatchError, BudgetExceeded, PenstockError, PlanError, WorkerError
from .execute import micro_batch_seed
from .hardware import Hardware
from .issue import Issue, Issues, plan_issues
from .link import Link, group_members, group_memories, message_orders
from .memory import Account
from .optimizer import OptimizerSpec
from .program import Interface, Program
from .reduce import reduce_grads, reduce_norms
from .stage_store import StageState, StageStore
from .streams import CudaStream, Event, Fault, InlineStream, Stream, ThreadStream
from .timeline import Span

HOST_STREAMS = (ops.CPU, f"{ops.COMM} host")  # threads on every kind of device
STREAM_SLOTS = (*ops.STREAMS, f"{ops.COMM} host")  # the board has one place for each


class Box:
    """A value that may not exist yet. Who still needs it holds the box; the last one to let go frees the memory."""

    __slots__ = ("stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None):
        self.stream = stream
        self.value = value


class Handle:
    """What the program's text has a name for; empty once it is freed or taken over."""

    __slots__ = ("box",)

    def __init__(self, box: Box):
        self.box = box

    def release(self) -> None:
        del self.box


@dataclass
class StepResult:
    """What a program returned, on CPU: per name one tensor a micro-batch, empty lists on devices that have none.

    `report`: `seconds`, `busy_share` per stream (sends and receives include waiting for the other side), `moved_bytes`
    per route ("dram0 -> gpu0"), `peak_bytes` per memory as accounted, `gradient_norm` (None where the program computes
    none), `loss_scale` (None but in fp16), `skipped` (a step whose gradients were not finite).
    """

    values: dict[str, list[Tensor]]
    report: dict[str, Any]


class DeviceRuntime:
    """One device: its streams, memories and stages, and the ops as methods.

    `link` joins it to the other devices (None when there is only one). `num_threads` of a CPU device's computation:
    None takes the calling thread's. `board` is where streams write the line they are at. `dram_budget_bytes` is this
    device's share of its host's DRAM; None takes all of it.

    Raises `BudgetExceeded` where what persists is already too much.
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
        link: Link | None = None,
        num_threads: int | None = None,
        board: MutableSequence[int] | None = None,
        dram_budget_bytes: int | None = None,
    ):
        self.index, self.hardware, self.optimizer = index, hardware, optimizer
        self.precision, self.seed, self.file, self.link = precision, seed, file, link
        self.face: Interface = file.programs["step"].interface
        self.spec = hardware.devices[index]
        on_gpu = self.spec.kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        self.step_count = 0
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.board = [0] * len(STREAM_SLOTS) if board is None else board
        self.broken: Fault | None = None
        self.spans: list[Span] = []  # of the last step
        self._notices: SimpleQueue[Any] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._arena = Arena(self.device)
        self._boxes_of_norm: list[Box] = []
        whole_bytes = hardware.dram_budget_bytes(self.spec.host)
        self.dram_budget_bytes = whole_bytes if dram_budget_bytes is None else dram_budget_bytes
        programs = list(file.programs.values())
        if link is not None:
            link.connect(message_orders(programs), group_memories(programs))
        self.plans = {name: self._plan(program) for name, program in file.programs.items()}
        self.accounts = {
            ops.DEVICE: Account(self.spec.name, self.spec.budget_bytes),
            ops.DRAM: Account(f"dram{self.spec.host}", self.dram_budget_bytes),
        }
        self._stop_growth()
        self._reserve(self.plans["step"])
        self.stores = {stage: self._make_store(stage) for stage in self._homes()}
        self._resident = {name: Box(None, store.weights) for name, store in self.stores.items()}

    # --- set-up

    def _plan(self, program: Program) -> Issues:
        plan = plan_issues(program, self.spec.budget_bytes, self.dram_budget_bytes, self._stream_of)
        if self.spec.kind == "cpu" and self.hardware.throttled:
            for issue in plan.ops:
                issue.least_s = self._transfer_s(issue)
        return plan

    def _stream_of(self, node: fx.Node, work: ops.Work) -> str:
        if self.spec.kind == "cuda" and work.group and not (self.link is not None and self.link.on_device(work.group)):
            return f"{ops.COMM} host"
        return work.stream

    def _transfer_s(self, issue: Issue) -> float:
        """What a transfer takes on the described hardware; a receive is held down by its send."""
        own, dram = self.spec.name, f"dram{self.spec.host}"
        routes = {"fetch": (dram, own), "offload": (own, dram)}
        if issue.op == "send":
            routes["send"] = (own, self.hardware.devices[issue.peer].name)
        if issue.op not in routes:
            return 0.0
        route = routes[issue.op]
        return issue.moved_bytes / self.hardware.bandwidth(*route) + self.hardware.latency_s(*route)

    def _stop_growth(self) -> None:
        """Hold torch's allocator on a GPU to the budget."""
        if self.device.type == "cuda":
            _, total_bytes = torch.cuda.mem_get_info(self.device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.spec.budget_bytes / total_bytes), self.device)

    def _reserve(self, plan: Issues) -> None:
        """Charge what persists, and take the arena."""
        for memory, parts in ((ops.DEVICE, plan.persistent.device), (ops.DRAM, plan.persistent.dram)):
            for what, num_bytes in parts.items():
                if num_bytes:
                    self.accounts[memory].take(what, num_bytes, "the state between steps")
        self._grow_arena(plan.arena_bytes)

    def _grow_arena(self, num_bytes: int) -> None:
        if num_bytes > self._arena.bytes:
            account = self.accounts[ops.DEVICE]
            if self._arena.bytes:
                account.give("arena")
            account.take("arena", num_bytes, "the arena of fetched weights")
            self._arena.ensure(num_bytes)

    def _homes(self) -> dict[str, str]:
        homes: dict[str, str] = {}
        for plan in self.plans.values():
            for stage, memory in plan.homes.items():
                if homes.setdefault(stage, memory) != memory:
                    raise PlanError(f"device {self.index}: {stage} is fetched in one function and resident in another")
        return homes

    def _make_store(self, stage: str) -> StageStore:
        with torch.device("meta"):
            module = self.file.stages[stage]()
        trained = stage in self.plans["step"].updated
        if trained and self.optimizer is None:
            raise PlanError(f"device {self.index}: the program updates {stage}, but there is no optimizer")
        return StageStore(
            self.face.stages[stage],
            module,
            self.device,
            self._homes()[stage],
            self.precision,
            master=self.face.master,
            optimizer=self.optimizer if trained else None,
        )

    def _stream(self, name: str) -> Stream:
        """The stream of that name, made at its first use."""
        if name not in self._streams:
            key, _, inline = name.partition("/")
            slot = STREAM_SLOTS.index(key)
            if inline:
                self._streams[name] = InlineStream(key, self.board, slot)
            elif self.spec.kind == "cuda" and key not in HOST_STREAMS:
                self._streams[name] = CudaStream(key, self.device, self.board, slot)
            else:
                num_threads = self.num_threads if key in (ops.COMPUTE, ops.CPU) else 1
                self._streams[name] = ThreadStream(key, self._notices, self.board, slot, num_threads)
        return self._streams[name]

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

    def stage_state(self, stage: str) -> StageState:
        return self.stores[stage].state()

    def load_stage_state(self, stage: str, state: StageState) -> None:
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

    # --- running a program

    def run_step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One training step of this device's part on the global batch."""
        result = self._run("step", batch)
        self.step_count += 1
        return result

    def run_evaluate(self, batch: Mapping[str, Tensor]) -> StepResult:
        """The forward pass in evaluation mode."""
        if "evaluate" not in self.plans:
            raise PlanError(f"the file of device {self.index} has no `evaluate`")
        return self._run("evaluate", batch)

    def _run(self, function: str, batch: Mapping[str, Tensor]) -> StepResult:
        if self.broken is not None:
            raise WorkerError(f"device {self.index} failed before and holds half a step; resume from a checkpoint")
        plan = self.plans[function]
        check_batch(batch, self.face, plan.batch_names)
        self._grow_arena(plan.arena_bytes)
        self._running = self._streams_for(plan)
        self._issues, self._cursor = plan.ops, 0
        self._events: list[Event | None] = [None] * len(plan.ops)
        self._boxes_of_norm = []
        for account in self.accounts.values():
            account.peak_bytes = account.live_bytes
        start_s = time.perf_counter()
        for stream in self._running.values():
            stream.begin()
        try:
            results = self.file.functions[function](self, dict(batch))
            self._finish()
        except Fault as fault:
            raise self._located(fault) from fault.error
        except BaseException as error:
            self.broken = self.broken or Fault(None, error)
            raise
        report = self._report(plan, time.perf_counter() - start_s)
        if self.step_count == 0:
            self._charge_kept(plan)
        values = {name: [handle.box.value.detach().cpu() for handle in handles] for name, handles in results.items()}
        self._forget_results()
        return StepResult(values, report)

    def _finish(self) -> None:
        """Wait until every stream is done, or one has failed."""
        assert self._cursor == len(self._issues), "the file's function and its parsed text differ"
        threads = [s for s in self._running.values() if not s.is_cuda]
        for stream in threads:
            stream.finish(self._notices)
        for _ in threads:
            notice = self._notices.get()
            if isinstance(notice, Fault):
                raise notice
        for stream in self._running.values():
            if stream.is_cuda:
                stream.finish(self._notices)
                self._notices.get()

    def _located(self, fault: Fault) -> Exception:
        """The error that the caller sees. Of several faults the first in time counts: the others follow from it."""
        with suppress(Exception):
            earlier = self._notices.get_nowait()
            fault = earlier if isinstance(earlier, Fault) else fault
        self.broken = fault
        issue, error = fault.label, fault.error
        place = f"device {self.index} ({self.spec.name}), line {issue.line}: {issue.where}"
        if isinstance(error, PenstockError):
            return type(error)(f"{place}: {error}")
        return WorkerError(f"{place}: {type(error).__name__}: {error}", device=self.index, line=issue.text)

    def _forget_results(self) -> None:
        kept = {"arena", *self.plans["step"].persistent.device}
        for account in self.accounts.values():
            for name in [name for name in account.live if name not in kept]:
                account.give(name)

    def _report(self, plan: Issues, seconds: float) -> dict[str, Any]:
        self.spans, busy_share = [], {}
        for stream in self._running.values():
            busy_s = 0.0
            for issue, start_s, end_s in stream.spans:
                self.spans.append(Span(self.index, stream.name.split()[0], issue.op, issue.text, start_s, end_s))
                busy_s += end_s - start_s
            busy_share[stream.name] = busy_s / seconds
        norm, skipped = self._gradient_norm()
        return {
            "seconds": seconds,
            "busy_share": busy_share,
            "moved_bytes": self._moved_bytes(plan),
            "peak_bytes": {account.memory: account.peak_bytes for account in self.accounts.values()},
            "gradient_norm": norm,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.scale,
            "skipped": skipped,
        }

    def _moved_bytes(self, plan: Issues) -> dict[str, int]:
        """Per route between two memories by name. What is received counts with its sender."""
        names = {ops.DEVICE: self.spec.name, ops.DRAM: f"dram{self.spec.host}"}
        names |= {f"device{i}": device.name for i, device in enumerate(self.hardware.devices)}
        moved: dict[str, int] = {}
        for issue in plan.ops:
            if issue.moved_bytes and issue.op not in ("recv", "all_reduce"):
                route = " -> ".join(names[end] for end in issue.route)
                moved[route] = moved.get(route, 0) + issue.moved_bytes
        return moved

    def _charge_kept(self, plan: Issues) -> None:
        """From the second step on, what forward leaves for backward is charged by its measured bytes."""
        for issue in plan.ops:
            if issue.op == "forward" and issue.keeps:
                measured = self.stores[issue.stages[0]].runner.kept_bytes
                memory, name, num_bytes = issue.takes[-1]
                issue.takes[-1] = (memory, name, num_bytes if measured is None else measured)

    def _gradient_norm(self) -> tuple[float | None, bool]:
        if not self._boxes_of_norm:
            return None, False
        squares = float(self._boxes_of_norm[-1].value)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        finite = squares < float("inf")
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return squares**0.5 / scale, self.loss_scale is not None and not finite

    # --- issuing

    def _next(self, op: str) -> Issue:
        """The op that the text has next: give back what it takes over, take what it makes."""
        issue = self._issues[self._cursor]
        assert issue.op == op, f"the file runs {op} where its text has `{issue.text}`"
        if not self._notices.empty():
            notice = self._notices.get()
            if isinstance(notice, Fault):
                raise notice
        self._cursor += 1
        accounts = self.accounts
        for memory, name in issue.gives:
            accounts[memory].give(name)
        try:
            for memory, name, num_bytes in issue.takes:
                accounts[memory].take(name, num_bytes, issue.text)
            if issue.workspace_bytes:
                accounts[ops.DEVICE].take("workspace", issue.workspace_bytes, issue.text)
                accounts[ops.DEVICE].give("workspace")
        except BudgetExceeded as error:
            raise Fault(issue, error) from error
        return issue

    def _launch(self, issue: Issue, reads: Sequence[Box], run: Callable[[], Sequence[Any]]) -> list[Handle]:
        """Issue `run`, which reads the boxes and gives the op's results; return their handles."""
        stream = self._running[issue.stream]
        made = [Box(stream) for _ in issue.results]

        def task() -> None:
            for box, value in zip(made, run(), strict=True):
                box.value = value

        if isinstance(stream, CudaStream):
            for box in reads:
                if box.stream is not stream:
                    stream.hold(box.value)
        events = self._events
        events[issue.index] = stream.issue(task, [e for i in issue.waits if (e := events[i]) is not None], issue)
        return [Handle(box) for box in made]

    def _rest(self, issue: Issue, start_s: float) -> None:
        """Hold a transfer down to the rate of a slower link."""
        rest_s = issue.least_s - (time.perf_counter() - start_s)
        if issue.least_s and rest_s > 0:
            time.sleep(rest_s)

    # --- ops: data and weights

    def load(self, batch: Mapping[str, Tensor], name: str, *, micro_batch: int) -> Handle:
        issue = self._next("load")
        rows = self.face.batch[name].shape[0]
        piece = batch[name][micro_batch * rows : (micro_batch + 1) * rows]
        if self.device.type == "cpu":  # a view: no memory is taken, nothing need be waited for
            return Handle(Box(None, piece))
        return self._launch(issue, [], lambda: [piece.pin_memory().to(self.device, non_blocking=True)])[0]

    def resident(self, name: str) -> Handle:
        self._next("resident")
        return Handle(self._resident[name.partition(".")[0]])

    def fetch(self, name: str) -> Handle:
        issue = self._next("fetch")
        stage = name.partition(".")[0]
        store = self.stores[stage]
        place = self._arena.range(issue.offset_bytes, store.layout.total_bytes)
        views = self._arena.views(stage, store.layout, issue.offset_bytes)

        def run() -> list[Any]:
            start_s = time.perf_counter()
            place.copy_(store.flat, non_blocking=True)
            self._rest(issue, start_s)
            return [views]

        return self._launch(issue, [], run)[0]

    def offload(self, value: Handle) -> Handle:
        issue = self._next("offload")
        box = value.box
        places = self.stores[issue.stages[0]].grad_buffer() if issue.stages else {}

        def run() -> list[Any]:
            start_s = time.perf_counter()
            given: Any = box.value
            moved: Any
            if isinstance(given, Grads):
                tensors = {name: places[name].copy_(grad, non_blocking=True) for name, grad in given.tensors.items()}
                moved = Grads(tensors, given.factor)
            else:
                moved = torch.empty_like(given, device="cpu", pin_memory=given.is_cuda).copy_(given, non_blocking=True)
            self._rest(issue, start_s)
            return [moved]

        return self._launch(issue, [box], run)[0]

    def free(self, *values: Handle) -> None:
        self._next("free")
        for handle in values:
            handle.release()

    # --- ops: compute

    def forward(
        self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int, keep: bool = True
    ) -> tuple[Handle, ...]:
        issue = self._next("forward")
        runner, bound, boxes = self.stores[stage].runner, weights.box, [h.box for h in inputs]
        seed = micro_batch_seed(self.seed, self.step_count, stage, micro_batch)

        def run() -> list[Any]:
            runner.bind(bound.value)
            outputs, kept = runner.forward([box.value for box in boxes], seed, keep)
            return [*outputs, kept] if keep else outputs

        return tuple(self._launch(issue, [bound, *boxes], run))

    def evaluate(self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int) -> tuple[Handle, ...]:
        issue = self._next("evaluate")
        runner, bound, boxes = self.stores[stage].runner, weights.box, [h.box for h in inputs]

        def run() -> list[Any]:
            runner.bind(bound.value)
            return runner.evaluate([box.value for box in boxes])

        return tuple(self._launch(issue, [bound, *boxes], run))

    def backward(
        self,
        stage: str,
        weights: Handle,
        kept: Handle | None,
        inputs: Sequence[Handle],
        douts: Sequence[Handle | float | None],
        grads: Handle | None = None,
        *,
        micro_batch: int,
    ) -> tuple[Handle, ...]:
        issue = self._next("backward")
        runner, bound = self.stores[stage].runner, weights.box
        boxes = [h.box for h in inputs]
        kept_box = Box() if kept is None else kept.box
        grads_box = Box() if grads is None else grads.box
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        given = [d.box if isinstance(d, Handle) else None if d is None else Box(None, d * scale) for d in douts]
        seed = micro_batch_seed(self.seed, self.step_count, stage, micro_batch)
        if grads is not None:
            grads.release()

        def run() -> list[Any]:
            runner.bind(bound.value)
            so_far = None if grads_box.value is None else grads_box.value.tensors
            values = [None if box is None else box.value for box in given]
            dinputs, total = runner.backward(kept_box.value, [box.value for box in boxes], values, so_far, seed)
            return [*dinputs, Grads(total)]

        return tuple(self._launch(issue, [bound, *boxes, kept_box, grads_box, *(b for b in given if b)], run))

    def add(self, left: Handle, right: Handle) -> Handle:
        issue = self._next("add")
        a, b = left.box, right.box
        left.release()
        return self._launch(issue, [a, b], lambda: [a.value.add_(b.value)])[0]

    # --- ops: between devices

    def send(self, value: Handle, *, dst: int, tag: str) -> None:
        issue = self._next("send")
        box, link = value.box, self._link()

        def run() -> list[Any]:
            if issue.least_s:
                time.sleep(issue.least_s)  # before, so that it does not arrive too early
            link.send(box.value.contiguous(), dst, tag)
            return []

        self._launch(issue, [box], run)

    def recv(self, like: str, *, src: int, tag: str) -> Handle:
        issue = self._next("recv")
        stage, _, output = like.partition(".")
        spec, link = self.face.stages[stage].output(output), self._link()

        def run() -> list[Any]:
            into = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
            link.recv(into, src, tag)
            return [into]

        return self._launch(issue, [], run)[0]

    def all_reduce(self, *values: Handle, group: str) -> tuple[Handle, ...]:
        issue = self._next("all_reduce")
        boxes = [handle.box for handle in values]
        for handle in values:
            handle.release()
        members = [(stage, param) for device, stage, param in self.face.groups[group] if device == self.index]

        def run() -> list[Any]:
            found = [box.value for box in boxes]
            if isinstance(found[0], Grads):
                specs = [self.face.stages[stage] for stage, _ in members]
                reduce_grads([g.tensors for g in found], specs, [param for _, param in members], self.link, group)
                return found
            return [reduce_norms(found, self.link, group)] * len(found)

        return tuple(self._launch(issue, boxes, run))

    def _link(self) -> Link:
        if self.link is None:
            raise PlanError(f"device {self.index}: the program sends or receives, but no other device is connected")
        return self.link

    # --- ops: update

    def norm(self, *grads: Handle) -> Handle:
        issue = self._next("norm")
        boxes = [handle.box for handle in grads]
        specs = [self.face.stages[stage] for stage in issue.stages]

        def run() -> list[Any]:
            return [sum_of_squares((spec, box.value.tensors) for spec, box in zip(specs, boxes, strict=True))]

        return self._launch(issue, boxes, run)[0]

    def clip(self, grads: Handle, norm: Handle, *, max_norm: float) -> Handle:
        issue = self._next("clip")
        box, squares = grads.box, norm.box
        grads.release()
        self._boxes_of_norm.append(squares)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale

        def run() -> list[Any]:
            box.value.scale(clip_factor(squares.value, max_norm, scale))
            return [box.value]

        return self._launch(issue, [box, squares], run)[0]

    def step(self, stage: str, grads: Handle, norm: Handle | None = None) -> None:
        issue = self._next("step")
        box, squares, store = grads.box, None if norm is None else norm.box, self.stores[stage]
        if squares is not None:
            self._boxes_of_norm.append(squares)

        def run() -> list[Any]:
            if squares is None or bool(torch.isfinite(squares.value)):
                store.update(box.value)
            return []

        self._launch(issue, [box] if squares is None else [box, squares], run)


def check_batch(batch: Mapping[str, Tensor], face: Interface, names: Sequence[str]) -> None:
    """Raises `BatchError` where an input among `names` is missing or is not what was compiled."""
    for name in names:
        want, found = face.batch[name], batch.get(name)
        shape = (want.shape[0] * face.micro_batches, *want.shape[1:])
        if found is None:
            raise BatchError(f"batch: {name!r} is missing; found {', '.join(batch) or 'nothing'}")
        dtype = str(found.dtype).removeprefix("torch.")
        if (tuple(found.shape), dtype) != (shape, want.dtype):
            raise BatchError(f"batch: {name!r} is {dtype}{list(found.shape)}, compiled for {want.dtype}{list(shape)}")


def device_groups(face: Interface) -> dict[str, list[int]]:
    """The groups of devices that a `Link` must know."""
    return group_members(face.groups)
