"""`Job`: a compiled training run. No device starts before the first step, or another call that needs the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

from torch import Tensor, nn

from ...ir.errors import PlanError
from ...ir.program import Program
from ...runtime import scratch
from ...runtime.processes.driver import Driver
from ...runtime.processes.interrupt import finishing
from ...runtime.processes.rehearse import rehearse
from ...runtime.processes.torchrun import TorchrunDriver
from ...runtime.simulate import Straggler, Timeline, find_stragglers, slow_devices
from ...runtime.source.trust import ONLY_VERIFIED, Trust
from ...runtime.state import pretrained
from ..export.export import Export, base_directory, complete, require_exportable
from ..folder import Folder
from ..pipeline import PassRecord
from ..planning import fixed_torch
from ..replanner import Replanner
from ..report.lengths import Throughput
from ..report.page.write import frame_of, require_writable, write_page
from ..search.offer import Offer
from ..stale import hide_marks
from .background import BackgroundSave, Saves
from .changes.model import Taken
from .changes.param_groups import GroupOptions, read_groups
from .counts import LossWeight
from .feed import Feed
from .forms import Forms, why_one_form
from .one_call import OneCall, one_call
from .outputs import Outputs
from .pages import Pages
from .preflight import own_device
from .run import JobRun
from .sampler import RankSampler
from .state import Held, state_dict_of
from .step_inputs import StepInputs
from .step_report import StepReport

PlainData: TypeAlias = Mapping[str, Any] | None  # numbers, texts, lists and mappings of these


class Job:
    """A compiled run: `step`, `evaluate`, `explain`, `simulate`, `code`, `write`, `save`, `resume`, `sync`, `close`.

    Calls that need the devices may come from any thread, one after another; `calls` refuses one while another is under
    way.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Folder,
        programs: Sequence[Program],
        *,
        ties: Mapping[str, str],
        records: Sequence[PassRecord] = (),
        directory: str | Path | None = None,
        trust: Trust = ONLY_VERIFIED,
        loss_weight: LossWeight | None = None,
        replanner: Replanner | None = None,
    ):
        self.model, self.folder, self.programs = model, folder, list(programs)
        self.plan, self.hardware = folder.plan, folder.hardware
        self.trust, self.loss_weight = trust, loss_weight
        self.replanner = replanner  # None for a job that was loaded, which has no graph to plan again
        self.calls = OneCall()
        self._ties = dict(ties)
        prologue = None if replanner is None else replanner.prologue
        self._feed = Feed.for_folder(model, folder, own_device() if TorchrunDriver.is_present() else None, prologue)
        self._run = JobRun(model, folder, self.programs, self._feed, directory, trust)
        forms = Forms.find(self._run, replanner)
        self._inputs = StepInputs(self._run, loss_weight, Taken(model, folder, loss_weight, replanner), forms)
        self._saves = Saves(self._run, self._ties)
        self._pages = Pages(folder, self.programs, records, replanner, trust)

    @property
    def step_count(self) -> int:
        return self._run.step_count

    # --- what it is

    def explain(self, full: bool = False) -> str:
        """The answer of `penstock plan` in a few lines: memory, speed, bound, plan. `full`: every stage, memory, bound,
        rival and pass after it, and what would help, whose first call plans for up to half a minute.
        """
        return self._pages.explain(self._run, full)

    def report(
        self,
        path: str | Path,
        what_if: bool = True,
        machines: Sequence[Mapping[str, Any]] = (),
        price_per_hour: float | None = None,
        spell: Callable[[Any], Any] | None = None,
    ) -> Path:
        """Write the plan, and the last step beside it if there was one, as one self-contained page of HTML.

        what_if: plan for machines with more of one thing, which takes up to half a minute the first time. machines:
        what other machines would do, a mapping with "machine", "step_s" and prices for each. price_per_hour: in
        dollars, where the hardware document has no price. spell: rewrites the texts about other plans and machines,
        which name arguments as Python does. Under torchrun all ranks call it and the first one writes.
        Raises `PlanError` for a path that cannot be written, and then plans nothing.
        """
        is_main = self._feed.device in (None, 0)
        if is_main:
            require_writable(path)
        if what_if:
            self._pages.learn_helps()
        page = self._pages.page(self._last_timeline(), machines, price_per_hour, spell)
        return write_page(path, page) if is_main else Path(path)

    def _last_timeline(self) -> Timeline | None:
        if not self._run.has_stepped:
            return None
        return dataclasses.replace(self.timeline(), peak_bytes=self.last.peak_bytes)  # type: ignore[union-attr]

    def _repr_html_(self) -> str:
        """The report, as notebooks show it."""
        return frame_of(self._pages.page(self._last_timeline()))

    def simulate(self, **sizes: int) -> Timeline:
        """One step on the described hardware, without running anything. Its `step_s` is of one step among many.

        `sizes`: those of each micro-batch, by the names in `dynamic_shapes`, as in `simulate(sequence=512)`; by default
        the most of each. Raises `PlanError` for a size that the plan does not have.
        """
        return self._pages.simulate(sizes)

    def throughput(self, lengths: Iterable[Any]) -> Throughput:
        """Tokens a second, simulated, over batches of these lengths, or over the batches of a loader.

        Raises `PlanError` for a job without one length in `dynamic_shapes`, or a length beyond its range.
        """
        return self._pages.throughput(lengths)

    def rehearse(self, time_scale: float = 1.0) -> Timeline:
        """One step in real time, in the processes that would run it, with waits in place of computation and transfers.

        Needs none of the hardware. With `time_scale` 10 everything takes ten times as long, and the result is given in
        the hardware's seconds. Raises `PlanError` for another scale than a positive number.
        """
        with scratch.temporary("rehearsal") as directory:
            return rehearse(self._run.setup(self.folder.write(directory)), time_scale)

    def code(self, device: int = 0) -> str:
        """The text of the file that a device runs."""
        if device not in self.folder.files:
            raise PlanError(f"device={device}; there are 0 to {len(self.folder.files) - 1}")
        return self.folder.files[device]

    def write(self, directory: str | Path) -> Path:
        """Write the files; `penstock.load` runs them, also after an edit."""
        return self.folder.write(directory)

    # --- running

    @one_call
    def step(self, batch: Any) -> Tensor:
        """One training step on a global batch of the compiled shapes, or on a list of its micro-batches. Returns the
        loss of the whole batch, of which `explain` says how micro-batches make it.

        A rank of torchrun may hand over just its own part, the rows `rows` (`sampler` reads those), or None where it
        loads nothing. Raises `BatchError` for another batch, on all ranks and before anything has run, or where a
        forward failed, and `NonFiniteLoss`: the step is undone, as if it had not been, but where a schedule is
        asynchronous; there it comes after a step. `WorkerError` or `BudgetExceeded` where the step broke off: then only
        `resume` or `close` is possible; `CheckpointError`, before anything has run, where a save in the background has
        failed. Ctrl-C raises KeyboardInterrupt after the step, on all ranks after the same one; a second Ctrl-C breaks
        the step off. Raises `PlanError` after `close`, and where the model, or what forward and the loss read, is other
        than the plan was made for.
        """
        self._saves.tell_failed()
        return self._run.step(self._inputs.for_step(batch))

    @property
    def last(self) -> StepReport | None:
        """The report of the last step; None before the first. Waits for the step's end, which `step` does not.

        A rank of torchrun may read it alone. Raises `WorkerError` naming a rank that ended before its report came.
        """
        self.calls.require_own_process("last")
        return self._run.last

    def take_reports(self) -> list[StepReport]:
        """The reports of steps that have ended since the last call, in their order, at most the last 1000. Waits for
        nothing: a step's report is there as soon as the next step is, or `last` is read, or the job closed."""
        return self._run.take_reports()

    @one_call
    def evaluate(self, batch: Any, outputs: bool = True) -> Outputs:
        """Forward only, in evaluation mode: the loss and the model's outputs, for the whole batch. With `outputs=False`
        the loss only: logits of a large vocabulary stay where they are."""
        if self.folder.settings.evaluation is not None:
            raise PlanError(
                f"this model cannot be evaluated through its programs: {self.folder.settings.evaluation}; call "
                "job.sync() and evaluate the model itself"
            )
        call = "evaluate" if outputs else "evaluate(outputs=False)"
        return self._run.evaluate(self._inputs.for_call("evaluate", batch, call), loss_only=not outputs)

    @property
    @one_call
    def param_groups(self) -> list[GroupOptions]:
        """The options of the optimizer's groups as the next step has them, at the end of the last one;
        `job.param_groups[0]["lr"] = 1e-4` sets one on all devices. Under torchrun all ranks do the same."""
        return read_groups(self._run, self.calls)

    @property
    def rows(self) -> range:
        """The rows of a global batch that this process may hand over: all, or on a rank of torchrun its lane's."""
        return self._feed.rows

    @property
    def why_one_form(self) -> str:
        """The reason why the images of a step have one size and number; "" where they may have several."""
        no_prologue = "models that read no sizes from their batch"
        return "" if self._inputs.forms is not None else why_one_form(self.folder) or no_prologue

    @property
    def inputs(self) -> list[str]:
        """The inputs of a batch that this process's devices load in a step; a rank that has none may hand over None."""
        return self._inputs.needed_here()

    def sampler(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        last: str = "carry",
        start: int | None = None,
    ) -> RankSampler:
        """The `batch_sampler` of a `DataLoader` that reads this process's rows of every batch; see `RankSampler`.

        Each `step` counts as one of its batches, also one that leaves it out. `save` keeps its position, `resume`
        restores it, whether the sampler is made before or after, on any number of ranks. `start`: the first sample.
        `seed`: of the order; default: the job's. A sampler made later replaces this one. Raises `PlanError` for data
        without a length and what `RankSampler` refuses, `CheckpointError` where the resumed run read other data.
        """
        seed = self.folder.settings.seed if seed is None else seed
        return self._feed.sample(dataset, shuffle, seed, last, start)

    @one_call
    def timeline(self) -> Timeline:
        """The last step as measured."""
        return self.driver.timeline()

    def stragglers(self) -> list[Straggler]:
        """The devices that held up the last step, the costliest first: slower than their equals, or than the plan lets
        one expect. Under torchrun all ranks must call it."""
        return find_stragglers(self.timeline(), self.programs, self.hardware, precision=self.plan.precision)

    def offer(self, timelines: Sequence[Timeline] = ()) -> Offer | None:
        """A faster plan for this machine as steps have shown it, in words and to compile again; None where no device
        computes slower than its equals, or than planned beside the others, or where no plan found saves 5 %.

        timelines: the steps to judge by, of which the median counts; default: the last one alone. Plans for up to 20 s.
        Under torchrun all ranks call it. Raises `PlanError` for a job that `load` made, which has no graph to plan
        again.
        """
        steps = list(timelines) or [self.timeline()]
        times = slow_devices(steps, self.programs, self.hardware, precision=self.plan.precision)
        if not times:
            return None
        first = self.of_all_ranks(self._pages.offer(times) if self._feed.device in (None, 0) else None)[0]
        return None if first is None else Offer.from_data(first)

    @one_call
    def of_all_ranks(self, value: Any) -> list[Any]:
        """The plain `value` of each rank of torchrun, in their order; elsewhere just this one. All ranks must call it,
        after the same step, for whose end it does not wait."""
        return self._run.running().gather(value)

    @property
    def driver(self) -> Driver:
        """The running devices, at the end of the last step; the first use starts them, with their weights. Raises
        `WorkerError` where they broke off, `PlanError` after `close`."""
        self.calls.require_own_process("driver")
        return self._run.driver

    # --- state

    def states(self) -> Iterator[Held]:
        """One stage at a time: its spec, weights (fp32) and buffers."""
        with self.calls.serving("states"):
            found = self._run.states()
            while True:
                with finishing("states"), fixed_torch():
                    held = next(found, None)
                if held is None:
                    return
                yield held

    @one_call
    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers under the model's own names, tied names included."""
        states = self._run.states()
        with hide_marks(self.model):
            return state_dict_of(self.model, self._ties, states)

    @one_call
    def sync(self) -> None:
        """Give the user's own model the trained weights and buffers, in place; a meta model becomes real.

        From the first step to this call the model has the weights from before; whoever then uses, copies or saves it is
        told by a `StaleModelWarning`.
        """
        self._run.sync(self._ties)

    @one_call
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Give the devices the weights and buffers of a state dict of the model, which itself gets them at the next
        `sync`; optimizer states stay, as in eager. Raises `CheckpointError` as torch does for keys and shapes."""
        self._run.load_state_dict(state, strict)
        self._inputs.forget()

    @one_call
    def save_pretrained(self, directory: str | Path, merge: bool = False) -> Path:
        """Weights as safetensors that `from_pretrained` loads, one stage in memory at a time. Of a PeftModel, its
        adapters, or with `merge` the model without PEFT that computes the same; of another module than transformers',
        its state dict for `safetensors.torch.load_model`.

        Under torchrun the first rank writes; the others take part. Raises `PlanError`, before anything is written, for
        a model whose files no `from_pretrained` would read back, such as a wrapper with a head of its own, and for
        `merge` where there is no adapter.
        """
        with hide_marks(self.model):
            pretrained.require_savable(self.model, merge)
        states = self._run.states()
        source = self._run.source() if self.driver.is_main and self._run.has_source else None
        with hide_marks(self.model):
            if self.driver.is_main:
                return pretrained.save_pretrained(directory, states, self.model, source=source, merge=merge)
            for _ in states:
                pass
        return Path(directory)

    def export(self, directory: str | Path, merge: bool = False, gguf: str | None = None) -> Export:
        """As `save_pretrained`, with the tokenizer and the generation settings of the base beside the weights, and with
        the commands of vLLM and llama.cpp that serve them.

        `gguf` ("f16", "bf16", "q8_0" or "f32") also writes DIRECTORY/model.gguf. Raises `PlanError`, before anything is
        written, for a model that this file cannot hold, and what `save_pretrained` raises.
        """
        require_exportable(self.model, merge, gguf)
        found = self.save_pretrained(directory, merge=merge)
        name = getattr(getattr(self.model, "config", None), "_name_or_path", None)
        is_main = self.driver.is_main
        return complete(found, base_directory(self.folder.settings.weights, name), gguf) if is_main else Export(found)

    @overload
    def save(self, directory: str | Path, data: PlainData = None, wait: Literal[True] = True) -> Path: ...

    @overload
    def save(self, directory: str | Path, data: PlainData = None, *, wait: Literal[False]) -> BackgroundSave: ...

    def save(self, directory: str | Path, data: PlainData = None, wait: bool = True) -> Path | BackgroundSave:
        """A checkpoint to resume from: weights, optimizer, scheduler, counters, `data` and the position of `sampler`.

        Frozen weights, as those under adapters, are not in it: `resume` takes them from where the job's weights are
        from, and refuses others.
        Atomic: an older checkpoint of that name stays until the new one is complete. Raises `CheckpointError`.

        With `wait=False` it returns when the state has been copied to DRAM; threads write the files while the next
        steps run. The room for the copy stays taken for the next save; where the plan leaves too little, this raises
        `NoRoomForCopy`. States on SSD are not copied: an update waits until they have been read. A save first waits
        for the one before, as `resume` and `close` do. What goes wrong in the background is raised by the next call of
        `step`, `save`, `resume` or `close`, or by `wait()` of the result.
        """
        with finishing("save"), self.calls.serving("save"), fixed_torch():
            return self._saves.save(directory, data or {}, wait)

    @one_call
    def resume(
        self, directory: str | Path, missing_ok: bool = False, options: Literal["checkpoint", "script"] = "checkpoint"
    ) -> dict[str, Any]:
        """Go on from a checkpoint, whatever partition and devices it was saved from. Returns its `data`. With
        `missing_ok`, and where nothing was saved yet, it does nothing and returns an empty dict.

        `options`: whose rates, decays and schedule hold: those of the checkpoint, with a warning that names what this
        script has otherwise, or those of this script, its schedule at the checkpoint's step.

        After an error or `close` it starts the devices again. A checkpoint that is damaged or of another model raises
        `CheckpointError`; where that shows only while devices read it, they need a whole checkpoint before they can go
        on.
        """
        self._saves.wait()
        if missing_ok and not self._run.any_has(directory):
            return {}
        data = self._run.resume(directory, options)
        self._inputs.forget()
        return data

    @one_call
    def close(self) -> None:
        """Stop the devices; what they had trained is gone, unless it was saved or synced. May be called twice.

        Afterwards only `resume` starts the devices again, to go on from a checkpoint. Raises what broke off the last
        step after its loss was known, or a save in the background, for which it waits.
        """
        try:
            try:
                self._run.finish_step()
            finally:
                self._saves.wait()
        finally:
            self._run.close()
            self._inputs.forget()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._saves.wait(only_warn=True)
        self.close()
