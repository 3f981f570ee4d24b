"""The device runtime: what `rt` is in a generated `step(rt, batch)` on a real device.

The function runs once, and binds every op to its stream, stage and operands. A run issues them one after another, fast,
on the calling thread; each starts on its stream when its inputs are ready. Memory is taken and given back in issue
order under the budgets of the device and of DRAM, so an op that would exceed one raises, whatever has run so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...ir.errors import NonFiniteLoss, PenstockError
from ...ir.program import FIRST_FORM, holders
from ..optimizer.gradients import Grads, Verdict, clip_factor, judge, speculative_factor, sum_of_squares
from ..optimizer.hooks import run_hooks
from ..stage.file import Staged
from ..stage.kept import Kept
from ..stage.runner import StageRunner
from ..stage.split_backward import Rest
from ..stage.store import StageStore
from .issuing import Handle, Run, join_calls
from .messages import Messages
from .prepare import Issue
from .streams import CudaEvent, CudaStream
from .transfers import Transfers
from .versions import Versions

Made = TypeVar("Made")
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 1e-3  # between two looks at what a host waits for


class DeviceRuntime(Transfers, Messages, Versions):
    """One program, bound to a device; its methods are the ops, which the program's file calls once."""

    # --- ops: compute

    def forward(
        self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int, keep: bool = True
    ) -> tuple[Handle, ...]:
        issue, store = self._next("forward"), self.stores[stage]
        number, runner_of, let_go = number_of(issue), self._runner_of(stage, micro_batch), self.interface.asynchronous
        undo, losses = self.bad_step is not None, issue.losses if self._looks_at_losses else ()
        notes = any(form.stages[stage].noted_buffers(undo) for form in self.state.forms.values())

        def work(run: Run, bound: dict[str, Tensor], *values: Tensor) -> list[Any]:
            runner, seed = runner_of(run), run.seeds[number]
            runner.bind(bound)
            if notes:
                runner.prepare_buffers(run.step_count, undo)
            try:
                made = runner.forward(values, seed, keep)
            except Exception as error:
                made = self._forward_zeros(run, issue, values, error, lambda zeros: runner.forward(zeros, seed, keep))
            outputs, kept = made
            if losses and run.stop_on_nan:
                self._look_at_losses(run, issue, outputs)
            if let_go:
                self._let_go(store, bound)
            return [*outputs, kept] if keep else outputs

        return self._launch(issue, inputs, work, weights=(weights,))

    def _forward_zeros(
        self,
        run: Run,
        issue: Issue,
        values: Sequence[Tensor],
        error: Exception,
        forward: Callable[[Sequence[Tensor]], Made],
    ) -> Made:
        """The result of a forward that its inputs made fail, if the step can be undone: that of zeros. All devices come
        to the end of the step, and none has waited in vain. `error`, of any kind, is what the user's lines raised."""
        if self.bad_step is None or isinstance(error, (PenstockError, torch.OutOfMemoryError)):
            raise error
        self.bad_step.note(run.judged_as, issue, error)
        run.zeroed.add((issue.stage, issue.micro_batch))
        try:
            return forward([torch.zeros_like(value) for value in values])
        except Exception:  # a check of the model's own refuses zeros, too
            raise error from None

    @property
    def _looks_at_losses(self) -> bool:
        """Whether losses tell a bad step. In fp16 the gradients do, as the scale of the loss is judged by them."""
        return self.bad_step is not None and self.state.loss_scale is None

    def _look_at_losses(self, run: Run, issue: Issue, outputs: Sequence[Tensor]) -> None:
        """Note the step as bad where a loss is not finite: now, or on a GPU later, by a copy in host memory."""
        for i in issue.losses:
            if outputs[i].is_cuda:
                place = self.state.memory.dram_arena.once(("loss", issue.index, i), partial(_host_place, outputs[i]))
                run.losses.append((issue, place.copy_(outputs[i], non_blocking=True)))
            else:
                self._judge(run, issue, outputs[i])

    def _judge(self, run: Run, issue: Issue, loss: Tensor) -> None:
        if self.bad_step is not None and not bool(torch.isfinite(loss)):
            self.bad_step.note(run.judged_as, issue, NonFiniteLoss(f"the loss is {float(loss)}"))

    def judge_losses(self, run: Run) -> None:
        """Wait for the losses of a GPU, note the step as bad where a loss is not finite, and tell the other devices."""
        if self.bad_step is None:
            return
        events = [event for issue, _ in run.losses if (event := run.events[issue.index]) is not None]
        self._wait_on_host(run, lambda: all(event.done for event in events))
        for issue, loss in run.losses:
            self._judge(run, issue, loss)
        run.losses.clear()
        self.bad_step.pass_losses(run.judged_as)

    def _await_verdict(self, run: Run) -> None:
        """Before an update of a GPU is issued, wait until all devices have looked at their losses. What backward has
        still to do keeps the GPU busy meanwhile."""
        bad_step = self.bad_step
        if bad_step is not None and bad_step.verdict(run.judged_as) is None:
            self._wait_on_host(run, lambda: bad_step.verdict(run.judged_as) is not None)

    def _is_bad(self, run: Run) -> bool:
        """Whether no update is to be made in this step."""
        if self.bad_step is None:
            return False
        while (is_bad := self.bad_step.verdict(run.judged_as)) is None:  # a thread of a GPU's host
            time.sleep(LONGEST_PAUSE_S)
        return is_bad

    def _wait_on_host(self, run: Run, is_over: Callable[[], bool]) -> None:
        """Let the thread that issues ops wait. As the end of a step does (`streams.follow`), show on the board how far
        the GPU is, by which other processes tell a slow device from one that hangs."""
        pause_s, shown = SHORTEST_PAUSE_S, 0
        while not is_over():
            self.all_streams.raise_fault()
            shown = self._show_place(run, shown)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _show_place(self, run: Run, first: int) -> int:
        """Show the first op on the GPU's streams, from this one on, that is not over. Returns its number."""
        board, count = self.all_streams.board, len(run.events)
        for stream in self.streams.values():
            if isinstance(stream, CudaStream):
                board[stream.slot] = -abs(board[stream.slot])
        for index in range(first, count):
            event = run.events[index]
            if isinstance(event, CudaEvent):
                board[event.stream.slot] = -self.issues[index].line
                if not event.done:
                    board[event.stream.slot] = self.issues[index].line
                    return index
        return count

    def evaluate(self, stage: str, weights: Handle, *inputs: Handle, micro_batch: int) -> tuple[Handle, ...]:
        issue, store = self._next("evaluate"), self.stores[stage]
        number, runner_of = number_of(issue), self._runner_of(stage, micro_batch)

        def work(run: Run, bound: dict[str, Tensor], *values: Tensor) -> list[Any]:
            runner, seed = runner_of(run), run.seeds[number]
            runner.bind(bound)
            runner.prepare_buffers(run.evaluation)
            try:
                outputs = runner.evaluate(values, seed)
            except Exception as error:
                outputs = self._forward_zeros(run, issue, values, error, lambda zeros: runner.evaluate(zeros, seed))
            return outputs if runner is store.runner else store.pick_outputs(outputs, runner.spec)

        return self._launch(issue, inputs, work, weights=(weights,))

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
        issue, store = self._next("backward"), self.stores[stage]
        number, runner_of, let_go = number_of(issue), self._runner_of(stage, micro_batch), self.interface.asynchronous
        entering, scale_numbers = self._output_gradients(issue, douts)
        stays, end = issue.adds_on and len(store.of_forms) == 1, len(inputs)

        def work(
            run: Run, bound: dict[str, Tensor], graph: Kept | None, before: Grads | None, *values: Tensor | None
        ) -> list[Any]:
            runner = runner_of(run)
            so_far, flats, places = self._sum_so_far(store, before)
            runner.bind(bound)
            given, entered = self._inputs_again(run, issue, values[:end]), scale_numbers(run, values[end:])
            dinputs, total = runner.backward(
                graph, given, entered, so_far, run.seeds[number], places, stays, unpack_once
            )
            if let_go:
                self._let_go(store, bound)
            return [*dinputs, Grads(total, flats=flats)]

        over = () if grads is None else (grads,)
        handles = self._launch(issue, (kept, grads, *inputs, *entering), work, over, gone=over, weights=(weights,))
        if issue.judges:
            self.calls[-1] = join_calls(self.calls[-1], self.judge_losses)
        return handles

    def _inputs_again(self, run: Run, issue: Issue, values: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The inputs on which a backward runs forward again: those that forward ran on."""
        if run.zeroed and (issue.stage, issue.micro_batch) in run.zeroed:
            return [None if value is None else torch.zeros_like(value) for value in values]
        return values

    def _output_gradients(
        self, issue: Issue, douts: Sequence[Handle | float | None]
    ) -> tuple[list[Handle | None], Callable[[Run, Sequence[Any]], Sequence[Any]]]:
        """The gradients of a stage's outputs as operands, and what makes their values of those of the operands: the
        gradients of the loss are numbers, which a run scales."""
        handles = [None if isinstance(dout, float) else dout for dout in douts]
        numbers = [(i, dout) for i, dout in enumerate(douts) if isinstance(dout, float)]
        mini_batch = issue.turn // self.interface.accumulate
        if not numbers:
            return handles, lambda run, values: values

        def scale_numbers(run: Run, values: Sequence[Any]) -> Sequence[Any]:
            scale, found = run.loss_scale if run.scales is None else run.scales.scale_of(mini_batch), list(values)
            for i, number in numbers:
                found[i] = number * scale
            return found

        return handles, scale_numbers

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
        number, runner_of, end = number_of(issue), self._runner_of(stage, micro_batch), len(inputs)
        entering, scale_numbers = self._output_gradients(issue, douts)

        def work(run: Run, bound: dict[str, Tensor], graph: Kept | None, *values: Tensor | None) -> list[Any]:
            runner = runner_of(run)
            runner.bind(bound)
            given, entered = self._inputs_again(run, issue, values[:end]), scale_numbers(run, values[end:])
            dinputs, rest = runner.backward_input(graph, given, entered, run.seeds[number])
            return [*dinputs, rest]

        reads = (kept, *inputs, *entering)
        part_of = [handle for handle in reads if handle is not None]  # autograd saved them, or notes them as they are
        handles = self._launch(issue, reads, work, part_of=part_of, gone=(kept,), weights=(weights,))
        if issue.judges:
            self.calls[-1] = join_calls(self.calls[-1], self.judge_losses)
        return handles

    def backward_weight(
        self, stage: str, weights: Handle, rest: Handle, grads: Handle | None = None, *, micro_batch: int
    ) -> Handle:
        issue, store = self._next("backward_weight"), self.stores[stage]
        runner_of = self._runner_of(stage, micro_batch)

        def work(run: Run, bound: dict[str, Tensor], rest: Rest, before: Grads | None) -> list[Any]:
            runner = runner_of(run)
            runner.bind(bound)
            so_far, flats, places = self._sum_so_far(store, before)
            return [Grads(runner.backward_weight(rest, so_far, places), flats=flats)]

        over = () if grads is None else (grads,)
        return self._launch(issue, (rest, grads), work, over, gone=over, weights=(weights,))[0]

    def _sum_so_far(
        self, store: StageStore, before: Grads | None
    ) -> tuple[dict[str, Tensor] | None, Sequence[Tensor], Mapping[str, Tensor] | None]:
        """A stage's gradients of earlier micro-batches by parameter; and, if they are to be scattered, the flat buffers
        that hold them now or later, and the place of each in them."""
        so_far = None if before is None else before.tensors
        if store.flat_stage is None:
            return so_far, (), None
        if before is not None:
            return so_far, before.flats, store.flat_stage.grad_views(before.flats)
        flats = store.flat_stage.new_grads(self.device)
        return None, flats, store.flat_stage.grad_views(flats)

    def add(self, left: Handle, right: Handle) -> Handle:
        issue = self._next("add")

        def work(run: Run, a: Any, b: Any) -> list[Any]:
            if isinstance(a, Grads):
                for total, more in zip(a.flats, b.flats, strict=True):
                    total.add_(more)
            else:
                a.add_(b)
            return [a]

        return self._launch(issue, (left, right), work, (left,), gone=(left,))[0]

    def _runner_of(self, stage: str, micro_batch: int) -> Callable[[Run], StageRunner]:
        """The runner of a stage for the form that a micro-batch has in a run."""
        runners = self.stores[stage].of_forms
        first = runners[FIRST_FORM]
        return lambda run: runners[run.form_of(micro_batch)] if run.sizes else first

    # --- ops: update

    def norm(self, *grads: Handle) -> Handle:
        issue = self._next("norm")
        specs = [self.interface.stages[stage] for stage in issue.stages]
        of_each = holders(self.interface, self.index)

        def work(run: Run, *values: Grads) -> list[Any]:
            parts = ((spec, value.tensors) for spec, value in zip(specs, values, strict=True))
            return [sum_of_squares(parts, of_each)]

        return self._launch(issue, grads, work)[0]

    def hook(self, grads: Handle) -> Handle:
        issue = self._next("hook")
        params = self.interface.stages[issue.stage].params

        def work(run: Run, given: Grads) -> list[Any]:
            run_hooks(params, given.tensors, run.loss_scale)
            return [given]

        return self._launch(issue, (grads,), work, (grads,), gone=(grads,))[0]

    def clip(self, grads: Handle, norm: Handle, *, max_norm: float) -> Handle:
        issue = self._next("clip")

        def work(run: Run, given: Grads, squares: Tensor) -> list[Any]:
            run.squares = squares
            scale = run.loss_scale if run.scales is None else run.scales.scale_of(issue.turn)
            given.scale(clip_factor(squares, max_norm, scale))
            return [given]

        return self._launch(issue, (grads, norm), work, (grads,), gone=(grads,))[0]

    def step(
        self,
        stage: str,
        grads: Handle,
        norm: Handle | None = None,
        states: Handle | None = None,
        *,
        speculative: bool = False,
    ) -> Handle | None:
        issue, store = self._next("step"), self.stores[stage]

        def work(run: Run, given: Grads, squares: Tensor | None, staged: Staged | None) -> list[Any]:
            self._note_rates(run, store, given.part)
            finite = True
            if squares is not None:
                run.squares, finite = squares, bool(torch.isfinite(squares))
                if run.scales is not None:
                    run.scales.note(issue.turn, finite)
            if finite and not self._is_bad(run):
                factor = speculative_factor(run.loss_scale) if speculative else None
                store.update(given, staged, factor, self._draw(run, stage, given.part))
            else:
                store.skip(staged)
            return [] if staged is None else [staged]

        made = self._launch(issue, (grads, norm, states), work, gone=(states,))
        if self.streams[issue.stream].is_cuda:
            self.calls[-1] = join_calls(self._await_verdict, self.calls[-1])
        return made[0] if made else None

    def _note_rates(self, run: Run, store: StageStore, part: str) -> None:
        """Note the learning rates of an update that is about to be made, unless it takes those of an earlier one."""
        if store.optimizer is not None and part != "shared":
            run.learning_rates = store.optimizer.learning_rates or run.learning_rates

    def _draw(self, run: Run, stage: str, part: str) -> tuple[int, ...]:
        """The key of the random numbers of an update: seed, step, and its number in the step if it is asynchronous."""
        number = run.updates.get((stage, part), 0)
        run.updates[stage, part] = number + 1
        return self.state.seed, run.step_count, number

    def redo(self, stage: str, grads: Handle, norm: Handle, *, max_norm: float) -> None:
        issue, store, scales = self._next("redo"), self.stores[stage], self.state.loss_scale is not None

        def work(run: Run, given: Grads, squares: Tensor) -> list[Any]:
            run.squares = squares
            verdict = judge(squares, max_norm, run.loss_scale if scales else None)
            if verdict is not Verdict.KEEP and not self._is_bad(run):
                clipped = verdict is Verdict.REDO
                store.redo(given, clip_factor(squares, max_norm, run.loss_scale) if clipped else None)
            return []

        self._launch(issue, (grads, norm), work)


def number_of(issue: Issue) -> int:
    """The number of an op's micro-batch in the whole batch; the file counts micro-batches within its lane."""
    assert issue.micro_batch is not None
    return issue.micro_batch


def _host_place(loss: Tensor) -> Tensor:
    """Page-locked memory for a loss, which the host reads before the next step begins."""
    return torch.empty_like(loss, device="cpu", pin_memory=True)
