"""The device runtime: what `rt` is in a generated `step(rt, batch)` on a real device.

The function runs once, fast, on the calling thread: every op returns handles at once and is issued to its stream, where
it starts when its inputs are ready. Memory is taken and given back in issue order under the budgets of the device and
of DRAM, so an op that would exceed one raises, whatever has run so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ir.errors import NonFiniteLoss, PenstockError
from ...ir.program import holders
from ..optimizer.gradients import Grads, Verdict, clip_factor, judge, speculative_factor, sum_of_squares
from ..optimizer.hooks import run_hooks
from ..stage.draws import evaluation_seed, micro_batch_seed
from ..stage.file import Staged
from ..stage.runner import StageRunner
from ..stage.store import StageStore
from .issuing import Box, Handle
from .messages import Messages
from .prepare import Issue
from .streams import CudaEvent, CudaStream
from .transfers import Transfers
from .versions import Versions

Made = TypeVar("Made")
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 1e-3  # between two looks at what a host waits for


class DeviceRuntime(Transfers, Messages, Versions):
    """One run of one program; its methods are the ops."""

    # --- ops: compute

    def forward(
        self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int, keep: bool = True
    ) -> tuple[Handle, ...]:
        issue = self._next("forward")
        store, bound, boxes = self.stores[stage], weights.box, [h.box for h in inputs]
        runner, seed = self._runner(stage, micro_batch), self._seed(issue)

        def run() -> list[Any]:
            runner.bind(bound.value)
            runner.prepare_buffers(self.step_count, undo=self.bad_step is not None)
            values = [box.value for box in boxes]
            outputs, kept = self._try(issue, values, lambda given: runner.forward(given, seed, keep))
            if issue.losses:
                self._look_at_losses(issue, outputs)
            self._let_go(store, bound.value)
            return [*outputs, kept] if keep else outputs

        return tuple(self._launch(issue, boxes, run))

    def _try(self, issue: Issue, values: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Made]) -> Made:
        """The result of a forward. Where its inputs make it fail and the step can be undone, that of zeros: all devices
        come to the end of the step, and none has waited in vain."""
        if self.bad_step is None:
            return run(values)
        try:
            return run(values)
        except (PenstockError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of any kind, by what the user's lines call
            self.bad_step.note(self.number, issue, error)
            self.zeroed.add((issue.stage, issue.micro_batch))
            try:
                return run([torch.zeros_like(value) for value in values])
            except Exception:  # a check of the model's own refuses zeros, too
                raise error from None

    def _look_at_losses(self, issue: Issue, outputs: Sequence[Tensor]) -> None:
        """Note the step as bad where a loss is not finite: now, or on a GPU later, by a copy in host memory. In fp16
        the gradients tell, as the scale of the loss is judged by them."""
        if self.bad_step is None or not self.stop_on_nan or self.state.loss_scale is not None:
            return
        for i in issue.losses:
            if outputs[i].is_cuda:
                place = self.state.memory.dram_arena.once(("loss", issue.index, i), partial(_host_place, outputs[i]))
                self.losses.append((issue, place.copy_(outputs[i], non_blocking=True)))
            else:
                self._judge(issue, outputs[i])

    def _judge(self, issue: Issue, loss: Tensor) -> None:
        if self.bad_step is not None and not bool(torch.isfinite(loss)):
            self.bad_step.note(self.number, issue, NonFiniteLoss(f"the loss is {float(loss)}"))

    def judge_losses(self) -> None:
        """Wait for the losses of a GPU, note the step as bad where a loss is not finite, and tell the other devices."""
        if self.bad_step is None:
            return
        events = [event for issue, _ in self.losses if (event := self.events[issue.index]) is not None]
        self._wait_on_host(lambda: all(event.done for event in events))
        for issue, loss in self.losses:
            self._judge(issue, loss)
        self.losses.clear()
        self.bad_step.pass_losses(self.number)

    def _await_verdict(self, issue: Issue) -> None:
        """Before an update of a GPU is issued, wait until all devices have looked at their losses. What backward has
        still to do keeps the GPU busy meanwhile."""
        bad_step, stream = self.bad_step, self.streams[issue.stream]
        if bad_step is not None and stream.is_cuda:
            self._wait_on_host(lambda: bad_step.verdict(self.number) is not None)

    @property
    def _is_bad(self) -> bool:
        """Whether no update is to be made in this step."""
        if self.bad_step is None:
            return False
        while (is_bad := self.bad_step.verdict(self.number)) is None:  # a thread of a GPU's host
            time.sleep(LONGEST_PAUSE_S)
        return is_bad

    def _wait_on_host(self, is_over: Callable[[], bool]) -> None:
        """Let the thread that issues ops wait. As the end of a step does (`streams.follow`), show on the board how far
        the GPU is, by which other processes tell a slow device from one that hangs."""
        pause_s, shown = SHORTEST_PAUSE_S, 0
        while not is_over():
            if not self._is_quiet():
                self.all_streams.raise_fault()
            shown = self._show_place(shown)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _show_place(self, first: int) -> int:
        """Show the first op on the GPU's streams, from this one on, that is not over. Returns its number."""
        board, count = self.all_streams.board, self._cursor
        for stream in self.streams.values():
            if isinstance(stream, CudaStream):
                board[stream.slot] = -abs(board[stream.slot])
        for index in range(first, count):
            event = self.events[index]
            if isinstance(event, CudaEvent):
                board[event.stream.slot] = -self.issues[index].line
                if not event.done:
                    board[event.stream.slot] = self.issues[index].line
                    return index
        return count

    def evaluate(self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int) -> tuple[Handle, ...]:
        issue = self._next("evaluate")
        runner, bound, boxes = self._runner(stage, micro_batch), weights.box, [h.box for h in inputs]
        assert issue.micro_batch is not None
        state = self.state
        evaluation, store = (state.step_count, state.evaluation_count), self.stores[stage]
        seed = evaluation_seed(state.seed, *evaluation, issue.micro_batch)

        def run() -> list[Any]:
            runner.bind(bound.value)
            runner.prepare_buffers(evaluation)
            values = [box.value for box in boxes]
            outputs = self._try(issue, values, lambda given: runner.evaluate(given, seed))
            return outputs if runner is store.runner else store.pick_outputs(outputs, runner.spec)

        return tuple(self._launch(issue, boxes, run))

    def backward(
        self,
        stage: str,
        weights: Handle,
        kept: Handle | None,
        inputs: Sequence[Handle | None],
        douts: Sequence[Handle | float | None],
        grads: Handle | None = None,
        *,
        micro_batch: int,
        unpack_once: bool = False,
    ) -> tuple[Handle, ...]:
        issue = self._next("backward")
        store, bound, runner = self.stores[stage], weights.box, self._runner(stage, micro_batch)
        boxes = [None if h is None else h.box for h in inputs]
        given = self._output_gradients(douts)
        number = issue.turn // self.interface.accumulate
        reads = [box for box in (*boxes, *given) if box is not None]
        kept_box = grads_box = None
        if kept is not None:
            kept_box = kept.box
            reads.append(kept_box)
        if grads is not None:
            grads_box = grads.box
            reads.append(grads_box)
            grads.release()
        seed = self._seed(issue)

        def run() -> list[Any]:
            so_far, flats, places = self._sum_so_far(store, grads_box)
            values = [None if box is None else box.value for box in given]
            if self.scales is not None:
                scale = self.scales.scale_of(number)
                values = [d * scale if isinstance(d, float) else value for d, value in zip(douts, values)]
            graph = None if kept_box is None else kept_box.value
            runner.bind(bound.value)
            inputs_now, more = self._inputs_again(issue, boxes), issue.adds_on and len(store.of_forms) == 1
            dinputs, total = runner.backward(graph, inputs_now, values, so_far, seed, places, more, unpack_once)
            self._let_go(store, bound.value)
            return [*dinputs, Grads(total, flats=flats)]

        handles = self._launch(issue, reads, run, () if grads_box is None else (grads_box,))
        if issue.judges:
            self.judge_losses()
        return tuple(handles)

    def _inputs_again(self, issue: Issue, boxes: Sequence[Box | None]) -> list[Tensor | None]:
        """The inputs on which a backward runs forward again: those that forward ran on."""
        found = [None if box is None else box.value for box in boxes]
        if self.zeroed and (issue.stage, issue.micro_batch) in self.zeroed:
            return [None if value is None else torch.zeros_like(value) for value in found]
        return found

    def _output_gradients(self, douts: Sequence[Handle | float | None]) -> list[Box | None]:
        """The gradients of a stage's outputs; those of the loss are numbers, and scaled here, unless the scale is not
        known before the backward begins."""
        found: list[Box | None] = []
        for dout in douts:
            if isinstance(dout, float):
                found.append(Box(None, dout * self.loss_scale if self.scales is None else dout))
            else:
                found.append(None if dout is None else dout.box)
        return found

    def backward_input(
        self,
        stage: str,
        weights: Handle,
        kept: Handle | None,
        inputs: Sequence[Handle | None],
        douts: Sequence[Handle | float | None],
        *,
        micro_batch: int,
    ) -> tuple[Handle, ...]:
        issue = self._next("backward_input")
        runner, bound = self._runner(stage, micro_batch), weights.box
        boxes = [None if h is None else h.box for h in inputs]
        kept_box = Box() if kept is None else kept.box
        given = self._output_gradients(douts)
        seed = self._seed(issue)
        if kept is not None:
            kept.release()

        def run() -> list[Any]:
            runner.bind(bound.value)
            values = [None if box is None else box.value for box in given]
            inputs_now = self._inputs_again(issue, boxes)
            dinputs, rest = runner.backward_input(kept_box.value, inputs_now, values, seed)
            return [*dinputs, rest]

        reads = [box for box in (*boxes, kept_box, *given) if box is not None]
        handles = self._launch(issue, reads, run, part_of=reads)  # autograd saved them, or notes them as they are
        if issue.judges:
            self.judge_losses()
        return tuple(handles)

    def backward_weight(
        self, stage: str, weights: Handle, rest: Handle, grads: Handle | None = None, *, micro_batch: int
    ) -> Handle:
        issue = self._next("backward_weight")
        store, bound, rest_box = self.stores[stage], weights.box, rest.box
        runner = self._runner(stage, micro_batch)
        grads_box = Box() if grads is None else grads.box
        if grads is not None:
            grads.release()

        def run() -> list[Any]:
            runner.bind(bound.value)
            so_far, flats, places = self._sum_so_far(store, grads_box)
            return [Grads(runner.backward_weight(rest_box.value, so_far, places), flats=flats)]

        return self._launch(issue, [rest_box, grads_box], run, [grads_box] if grads is not None else [])[0]

    def _sum_so_far(
        self, store: StageStore, box: Box | None
    ) -> tuple[dict[str, Tensor] | None, Sequence[Tensor], Mapping[str, Tensor] | None]:
        """A stage's gradients of earlier micro-batches by parameter; and, if they are to be scattered, the flat buffers
        that hold them now or later, and the place of each in them."""
        so_far = None if box is None or box.value is None else box.value.tensors
        if store.flat_stage is None:
            return so_far, (), None
        if box is not None and box.value is not None:
            return so_far, box.value.flats, store.flat_stage.grad_views(box.value.flats)
        flats = store.flat_stage.new_grads(self.device)
        return None, flats, store.flat_stage.grad_views(flats)

    def add(self, left: Handle, right: Handle) -> Handle:
        issue = self._next("add")
        a, b = left.box, right.box
        left.release()

        def run() -> list[Any]:
            if isinstance(a.value, Grads):
                for total, more in zip(a.value.flats, b.value.flats, strict=True):
                    total.add_(more)
            else:
                a.value.add_(b.value)
            return [a.value]

        return self._launch(issue, [a, b], run, [a])[0]

    def _runner(self, stage: str, micro_batch: int) -> StageRunner:
        """The runner of a stage for the form of a micro-batch."""
        return self.stores[stage].of_forms[self.form_of(micro_batch)]

    def _seed(self, issue: Issue) -> int:
        """A seed by the micro-batch's number in the whole batch; the file counts micro-batches within its lane."""
        micro_batch = issue.micro_batch
        assert micro_batch is not None
        found = self._seeds.get(micro_batch)
        if found is None:
            found = self._seeds[micro_batch] = micro_batch_seed(self.state.seed, self.step_count, micro_batch)
        return found

    # --- ops: update

    def norm(self, *grads: Handle) -> Handle:
        issue = self._next("norm")
        boxes = [handle.box for handle in grads]
        specs = [self.interface.stages[stage] for stage in issue.stages]
        of_each = holders(self.interface, self.index)

        def run() -> list[Any]:
            parts = ((spec, box.value.tensors) for spec, box in zip(specs, boxes, strict=True))
            return [sum_of_squares(parts, of_each)]

        return self._launch(issue, boxes, run)[0]

    def hook(self, grads: Handle) -> Handle:
        issue = self._next("hook")
        box, params = grads.box, self.interface.stages[issue.stage].params
        grads.release()

        def run() -> list[Any]:
            run_hooks(params, box.value.tensors, self.loss_scale)
            return [box.value]

        return self._launch(issue, [box], run, [box])[0]

    def clip(self, grads: Handle, norm: Handle, *, max_norm: float) -> Handle:
        issue = self._next("clip")
        box, squares = grads.box, norm.box
        grads.release()
        self.squares = squares

        def run() -> list[Any]:
            scale = self.loss_scale if self.scales is None else self.scales.scale_of(issue.turn)
            box.value.scale(clip_factor(squares.value, max_norm, scale))
            return [box.value]

        return self._launch(issue, [box, squares], run, [box])[0]

    def step(
        self,
        stage: str,
        grads: Handle,
        norm: Handle | None = None,
        states: Handle | None = None,
        *,
        speculative: bool = False,
    ) -> Handle | None:
        issue = self._next("step")
        box, squares, store = grads.box, None if norm is None else norm.box, self.stores[stage]
        staged_box = None if states is None else states.box
        factor = speculative_factor(self.loss_scale) if speculative else None
        if squares is not None:
            self.squares = squares
        if states is not None:
            states.release()

        def run() -> list[Any]:
            staged: Staged | None = None if staged_box is None else staged_box.value
            self._note_rates(store, box.value.part)
            finite = squares is None or bool(torch.isfinite(squares.value))
            if squares is not None and self.scales is not None:
                self.scales.note(issue.turn, finite)
            if finite and not self._is_bad:
                store.update(box.value, staged, factor, self._draw(stage, box.value.part))
            else:
                store.skip(staged)
            return [] if staged is None else [staged]

        self._await_verdict(issue)
        made = self._launch(issue, [b for b in (box, squares, staged_box) if b is not None], run)
        return made[0] if made else None

    def _note_rates(self, store: StageStore, part: str) -> None:
        """Note the learning rates of an update that is about to be made, unless it takes those of an earlier one."""
        if store.optimizer is not None and part != "shared":
            self.learning_rates = store.optimizer.learning_rates or self.learning_rates

    def _draw(self, stage: str, part: str) -> tuple[int, ...]:
        """The key of the random numbers of an update: seed, step, and its number in the step if it is asynchronous."""
        number = self.updates.get((stage, part), 0)
        self.updates[stage, part] = number + 1
        return self.state.seed, self.step_count, number

    def redo(self, stage: str, grads: Handle, norm: Handle, *, max_norm: float) -> None:
        issue, box, squares, store = self._next("redo"), grads.box, norm.box, self.stores[stage]
        loss_scale = None if self.state.loss_scale is None else self.loss_scale
        self.squares = squares

        def run() -> list[Any]:
            verdict = judge(squares.value, max_norm, loss_scale)
            if verdict is not Verdict.KEEP and not self._is_bad:
                clipped = verdict is Verdict.REDO
                store.redo(box.value, clip_factor(squares.value, max_norm, self.loss_scale) if clipped else None)
            return []

        self._launch(issue, [box, squares], run)


def _host_place(loss: Tensor) -> Tensor:
    """Page-locked memory for a loss, which the host reads before the next step begins."""
    return torch.empty_like(loss, device="cpu", pin_memory=True)
