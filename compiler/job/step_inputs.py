"""The inputs that devices load in a step: the batch's tensors, and the inputs that no batch of the user has.

In: a batch, or on a rank of torchrun a part of one. Out: tensors by the names of the programs' inputs. What the loss
divides by is counted over the whole batch first, by all ranks together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import BatchError, PenstockError, PlanError
from ...ir.program import SIZES, place_of
from ...runtime.processes.driver import DifferentCalls, Driver, loaded_names
from ...runtime.state.weights import WeightSource, stage_buffers
from ..batches.shape import as_dicts
from ..folder import COUNTS_FILE, Folder
from ..packing.borders import POSITIONS, most_documents
from ..packing.limit import DocumentLimit
from .any_size import MicroBatch
from .bad_values import PickCheck
from .changes.model import Taken
from .counts import BatchCounts, Counts, LossWeight, counts_spec, merge_lanes, mini_batches, open_counts, rows_of
from .feed import PART, WHOLE
from .forms import Forms, KnownForm
from .run import JobRun
from .state import whole_state


@dataclass(frozen=True)
class ReadBatch:
    """The batch of one process for a step: the tensors that its devices load, the kind of its batch, and the counts and
    sizes of each micro-batch; None where the process cannot know them. `forms`: those of all processes' micro-batches,
    where these run in forms, and `parts` are this one's."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    kind: str = ""
    counts: Counts | None = None
    sizes: list[list[int]] | None = None
    forms: Sequence[KnownForm] = ()
    parts: Sequence[MicroBatch] = ()


class StepInputs:
    """The inputs of a run's steps. `loss_weight`: the user's own count of a micro-batch. `taken`: what the plan took
    from the model, which must still be so. `forms`: of micro-batches, where the devices can run several."""

    def __init__(self, run: JobRun, loss_weight: LossWeight | None, taken: Taken, forms: Forms | None):
        folder, self.taken = run.folder, taken
        self.run, self.loss_weight, self.feed = run, loss_weight, run.feed
        self.interface, self.rules = folder.interface, folder.settings.counts
        self._counters: dict[Path | None, BatchCounts] = {}  # by the folder of a form
        self._buffers: dict[str, Tensor] | None = None  # that counting reads
        self._picks: dict[Path | None, PickCheck] = {}
        self.documents = DocumentLimit.from_plan(folder.plan)
        self.forms = forms

    def for_step(self, batch: Any) -> dict[str, Tensor]:
        """The inputs of a step. A batch that is refused counts as well, as its loader has handed it out, but not
        where the ranks make different calls: then only some of them have one."""
        try:
            return self.for_call("step", batch)
        except DifferentCalls:
            raise
        except BatchError:
            self.feed.advance()
            raise

    def for_call(self, function: str, batch: Any, call: str = "") -> dict[str, Tensor]:
        """The inputs of a call. A rank of torchrun starts its device first, and learns from the others: all ranks raise
        if one batch is wrong, or if their calls differ. What one rank refuses alone it must refuse between the two
        exchanges, where no rank asks another."""
        batch = as_dicts(batch)
        if self.feed.device is None:
            self._require_model(function)
            given = self._read(function, batch, (), call)
            return self._inputs(function, given, [given.counts], [given.sizes])
        driver = self.run.driver
        refused: PenstockError | None = None
        given, described = ReadBatch(), list[Any]()
        try:
            self._require_model(function)
            described = [] if self.forms is None else self.forms.describe(batch)
        except (BatchError, PlanError) as error:
            refused = error
        self.counter()  # all ranks, whether or not their batches are accepted: it may ask the others
        rows = [described] if self.forms is None else driver.gather(None if refused else described)
        try:
            if refused is None and None not in rows:
                met = [] if self.forms is None else self.forms.meet([each for row in rows for each in row])
                needed = self.inputs_for(driver.inputs.get(function, ()))
                given = self._read(function, batch, needed, call, met)
        except (BatchError, PlanError) as error:
            refused = error
        rows = driver.agree_on_batch(call or function, given.kind, refused, [given.counts, given.sizes])
        self.feed.keep_to(function, given.kind)
        return self._inputs(function, given, [counts for counts, _ in rows], [sizes for _, sizes in rows])

    def _require_model(self, function: str) -> None:
        """Raises `PlanError` where the script has changed the model so that this call would not see it."""
        if self.run.require_own(function):  # before anything is counted with buffers, such as class weights
            self.run.running()
            self.forget()
        if function == "step":
            self.taken.require_unchanged()

    def _read(
        self, function: str, batch: Any, needed: Collection[str], call: str, met: Sequence[KnownForm] = ()
    ) -> ReadBatch:
        """Raises `BatchError` for a batch that the programs do not take. `met`: the forms of all ranks' micro-batches,
        where these run in forms."""
        alone = self.run.folder.settings.one_document
        if alone and any(map(most_documents, batch if isinstance(batch, list) else [batch])):
            raise BatchError(f"batch[{POSITIONS!r}] {alone}")
        forms = self.forms
        if forms is not None and (met or (self.feed.device is None and (forms.is_begun or forms.is_uneven(batch)))):
            return self._read_forms(forms, batch, needed, call, met)
        if self.feed.any_sizes is None:
            try:
                leaves, kind = self.feed.read(function, batch, needed)
            except BatchError:
                if forms is None or batch is None or self.feed.device is not None or not forms.is_other(batch):
                    raise
                return self._read_forms(forms, batch, needed, call)
            if self.documents is not None and self.documents.positions in leaves:
                rows = self.feed.shape.entries(self.documents.positions, self.feed.shape.size)
                positions = leaves[self.documents.positions]
                self.documents.check(positions.split(rows // self.interface.total_micro_batches))
            return ReadBatch(leaves, kind, self._count(batch, leaves, kind) if kind else None)
        parts, kind = self.feed.cut(function, batch, needed)
        if not kind:
            return ReadBatch()
        first = 0
        for part in parts:
            name, value = next(iter(part.leaves.items()))
            rows = len(value) * self.feed.shape.size // self.feed.shape.entries(name, self.feed.shape.size)
            self.picks().check(part.leaves, 1, first, rows)
            first += rows
        if self.documents is not None and all(self.documents.positions in part.leaves for part in parts):
            self.documents.check([part.leaves[self.documents.positions] for part in parts])
        leaves = self.feed.any_sizes.pad(parts)
        sizes = [[part.sizes[name] for name in self.interface.sizes] for part in parts]
        if kind == WHOLE and self.feed.device is not None:
            own = self.feed.micro_batches
            parts, sizes = parts[own.start : own.stop], sizes[own.start : own.stop]
        counts = self._counts_of(parts) if leaves.keys() >= set(self.rules.inputs) else None
        return ReadBatch(leaves, kind, counts, sizes)

    def _read_forms(
        self, forms: Forms, batch: Any, needed: Collection[str], call: str, met: Sequence[KnownForm] = ()
    ) -> ReadBatch:
        """A batch whose micro-batches may be of different forms."""
        is_absent = self.feed.is_absent(batch, needed)
        parts, met = forms.read(batch, call == "evaluate", met)
        kept = [form.directory for form in forms.forms]
        for known in (self._counters, self._picks):
            for files in known.keys() - {*kept}:
                del known[files]
        if is_absent:
            return ReadBatch(forms=met)
        for number, part in enumerate(parts):
            self.picks(part.files).check(part.leaves, 1, number, 1)
        kind = WHOLE if len(parts) == forms.count else PART
        counts, sizes = self._counts_of(parts), [[*part.sizes.values()] for part in parts]
        if kind == WHOLE and self.feed.device is not None:
            own = self.feed.micro_batches
            counts, sizes = counts and counts[own.start : own.stop], sizes[own.start : own.stop]
        return ReadBatch({}, kind, counts, sizes, met, parts)

    def _counts_of(self, parts: Sequence[MicroBatch]) -> Counts | None:
        if not self.rules.divisors:
            return None
        return [row for part in parts for row in self.counter(part.files).count(part.batch, part.leaves, 1)]

    def _inputs(
        self,
        function: str,
        given: ReadBatch,
        counts: Sequence[Counts | None],
        sizes: Sequence[list[list[int]] | None],
    ) -> dict[str, Tensor]:
        """The tensors that the devices load. `counts` and `sizes`: of every process; none has refused its batch."""
        kind, leaves = given.kind, given.leaves
        if self.forms is not None and given.forms:
            leaves = self.forms.load(given.forms, given.parts)
        own = {name: value for name, value in leaves.items() if name in self.interface.batch}
        return own | self._divisors(function, counts, kind) | self._sizes(sizes, kind)

    def inputs_for(self, loaded: Collection[str]) -> list[str]:
        """The inputs of the user's batch that a process needs whose devices load these: counts are no inputs of the
        batch, but are made from some, and a prologue runs forward on all of it."""
        loaded = set(loaded) - {SIZES}
        if loaded and self.feed.prologue is not None:
            return sorted(self.feed.shape.leaves.keys() - self.feed.prologue.names)
        own = loaded.difference(self.rules.names)
        if own == loaded:
            return sorted(own)
        return sorted(own.union(self.rules.inputs) or self.feed.shape.leaves)

    def needed_here(self) -> list[str]:
        """The inputs of the user's batch that this process's devices need."""
        programs, device = self.run.programs, self.feed.device
        here = programs if device is None else [programs[place_of(self.interface, device)[1]]]
        return self.inputs_for(set().union(*(loaded_names(program) for program in here)))

    def counter(self, files: Path | None = None) -> BatchCounts:
        """`files`: the folder of a form; None for the job's own."""
        if files not in self._counters:
            self._counters[files] = self._new_counter(files)
        return self._counters[files]

    def _new_counter(self, files: Path | None) -> BatchCounts:
        """Counts batches with the running devices' buffers (class weights). Under torchrun it asks other ranks."""
        if not self.rules.means:
            return BatchCounts(self.rules, loss_weight=self.loss_weight)
        run = self.run
        if self._buffers is None:
            self._buffers = counted_buffers(run.folder, run.driver, run.source)
        folder = files or run.directory
        assert folder is not None
        return BatchCounts.from_file(run.folder.settings, folder / COUNTS_FILE, self._buffers, run.trust)

    def picks(self, files: Path | None = None) -> PickCheck:
        """The check of a batch's numbers. Starts the devices, with which its file is written. `files`: as above."""
        if files not in self._picks:
            run, settings, made = self.run, self.run.folder.settings, None
            if settings.picks.bounds and run.driver and (folder := files or run.directory) is not None:
                made = open_counts(settings, folder / COUNTS_FILE, run.trust)["picks"]()
            self._picks[files] = PickCheck(settings.picks, made)
        return self._picks[files]

    def forget(self) -> None:
        """Make the counters anew for the next batch: the devices may have other buffers."""
        self._counters.clear()
        self._buffers = None

    def _count(self, batch: Any, leaves: Mapping[str, Tensor], kind: str) -> Counts | None:
        """The counts of this process's rows, on a rank of torchrun of its lane's; None without the inputs to count.
        Raises `BatchError` for numbers out of their bounds."""
        feed, first = self.feed, 0
        if len(feed.rows) < feed.shape.size and kind == WHOLE:
            batch, leaves = rows_of((batch, leaves), feed.rows, feed.shape.size)
            first = feed.rows.start
        self.picks().check(leaves, len(feed.micro_batches), first, len(feed.rows))
        if not self.rules.divisors or not leaves.keys() >= set(self.rules.inputs):
            return None
        return self.counter().count(batch, leaves, len(feed.micro_batches))

    def _divisors(self, function: str, rows: Sequence[Counts | None], kind: str) -> dict[str, Tensor]:
        """The inputs that no batch of the user has, cut to this kind of batch. `rows`: the counts of every process."""
        if not self.rules.divisors:
            return {}
        counts = rows[0] if self.feed.device is None else merge_lanes(rows, self.interface)
        assert counts is not None
        own = mini_batches(self.interface) if self.interface.asynchronous and function == "step" else None
        return self._part_of(self.counter().inputs(counts, own), kind)

    def _sizes(self, rows: Sequence[list[list[int]] | None], kind: str) -> dict[str, Tensor]:
        """The sizes of the micro-batches of this kind of batch, where they differ."""
        if self.feed.any_sizes is None and all(row is None for row in rows):
            return {}
        found = rows[0] if self.feed.device is None else merge_lanes(rows, self.interface, "a batch")
        return self._part_of({SIZES: torch.tensor(found, dtype=torch.int64)}, kind)

    def _part_of(self, inputs: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
        """The inputs, one entry for each micro-batch, cut to the micro-batches of this kind of batch."""
        if kind != PART:
            return inputs
        own = self.feed.micro_batches
        return {name: value[own.start : own.stop] for name, value in inputs.items()}


def counted_buffers(folder: Folder, driver: Driver, find_source: Callable[[], WeightSource]) -> dict[str, Tensor]:
    """The buffers that counting reads (class weights): the programs' constants, those that a stage holds, else the
    model's own."""
    spec = counts_spec(folder.settings.counts)
    names = {buffer.name for buffer in spec.buffers}
    found = {name: tensor for name, tensor in folder.constants.items() if name in names}
    for stage in folder.interface.stages.values():
        if not found.keys() >= {buffer.name for buffer in stage.model_buffers} & names:
            found |= whole_state(driver, stage, with_optimizer=False).buffers
    rest = tuple(buffer for buffer in spec.buffers if buffer.name not in found)
    if rest:
        found |= stage_buffers(find_source(), dataclasses.replace(spec, buffers=rest))
    return found
