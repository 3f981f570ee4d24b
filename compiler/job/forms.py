"""Micro-batches of several forms in one job: images of other sizes and numbers, longer or shorter rows.

What a model does may follow from numbers that it reads from a batch (`capture/prologue/`). The form of a micro-batch is
its shapes and these numbers. A form that has not come before is captured, and printed by the job's own plan: its stages
get code of their own, and programs, devices and places stay (`ir/stages/forms.py`). In: batches. Out: micro-batches
with the numbers of their forms, which the devices have.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import BatchError, CaptureError, DoesNotFit, PassError, PlanError, VerifyError
from ...ir.ops import SSD
from ...ir.program import FIRST_FORM, FORM, MOST_FORMS, Interface, larger_interface, profile_memory
from ...ir.units import format_seconds
from ...ir.verify import verify
from ...runtime import scratch
from ...runtime.processes.driver import Driver
from ...runtime.processes.setup import RunSetup
from ...runtime.torch_names import tree_map_only
from ..batches.shape import BatchShape, flatten, program_inputs
from ..capture.prologue.prologue import Prologue
from ..folder import Folder
from ..packing.limit import DocumentLimit
from ..replanner import Replanner
from .any_size import MicroBatch, is_listed
from .counts import part_of
from .run import JobRun

FEW = 24  # numbers that a message shows
_EACH_HAS = (
    "every micro-batch runs all stages, also those that read images: put rows without an image beside a row with one, "
    "or add such a row with labels that are all -100, which adds nothing to the loss"
)


@dataclass(eq=False)
class KnownForm:
    """A form that has come. `files`: of its stages; None for the example's, which the job's own files have."""

    number: int
    prologue: Prologue
    interface: Interface
    files: RunSetup | None = None
    directory: Path | None = None
    used: int = 0  # when it came last

    @property
    def outputs(self) -> set[str]:
        """The tensors that forward returns, beside the loss."""
        return {output.name for spec in self.interface.stages.values() for output in spec.extra_outputs}

    def num_same(self, micro_batch: Mapping[str, Any]) -> int:
        """The number of inputs that forward reads and that are those of the form's first micro-batch."""
        example = self.prologue.example
        reads = {name: value for name, value in micro_batch.items() if name in self.prologue.reads and value.dim()}
        return sum(torch.equal(example[name][: len(value)], value) for name, value in reads.items())

    def read(self, shape: BatchShape, micro_batch: Mapping[str, Any], total: int) -> dict[str, Tensor]:
        """The inputs of a micro-batch, with those that its prologue makes. Raises `BatchError` for another form."""
        found = self.prologue.add(micro_batch, 1, total)
        leaves = program_inputs({**flatten(self.prologue.model, found)[0]})
        for name in shape.leaves.keys() & self.interface.batch.keys():
            if tuple(leaves[name].shape) != self.interface.batch[name].shape:
                raise BatchError(f"{name} is {list(leaves[name].shape)}")
        return leaves


def why_one_form(folder: Folder) -> str:
    """The reason for which all micro-batches of a job must have the example's form; "" for none."""
    interface = folder.interface
    reasons = {
        "asynchronous training": interface.asynchronous,
        "cuda_graphs=True": interface.cuda_graphs,
        "teams of devices": interface.team > 1,
        "lanes that have shares of different sizes": bool(interface.smaller_shares),
        "buffers that forward changes": any(x.changing_buffers or x.exchanges for x in interface.stages.values()),
        "packed documents": DocumentLimit.from_plan(folder.plan) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Forms:
    """The forms of a job. `shape`: of its example, with what its prologue makes."""

    def __init__(self, run: JobRun, replanner: Replanner, prologue: Prologue, shape: BatchShape):
        self.run, self.replanner, self.prologue = run, replanner, prologue
        self.model, self.shape = run.model, shape
        interface = run.folder.interface
        self.count, self.room = interface.total_micro_batches, interface
        self.forms = [KnownForm(FIRST_FORM, prologue, interface)]
        self._user_names = [name for name in shape.leaves if name not in prologue.names]
        self._scratch: scratch.Scratch | None = None
        self._driver: Driver | None = None  # that has forms
        self._there: set[int] = set()
        self._time = 0

    @staticmethod
    def find(run: JobRun, replanner: Replanner | None) -> Forms | None:
        """The forms of a job whose devices can run several; None for any other job."""
        if replanner is None or replanner.prologue is None or why_one_form(run.folder):
            return None
        return Forms(run, replanner, replanner.prologue, run.feed.shape)

    @property
    def is_begun(self) -> bool:
        """Whether the devices have several forms, and are told that of each micro-batch."""
        return bool(self._there) and self.run.live_driver is self._driver

    def is_uneven(self, batch: Any) -> bool:
        """Whether a batch is a list of micro-batches of different shapes, which no cut of the whole would give back."""
        if not is_listed(batch, self.shape):
            return False
        shapes = [{name: value.shape for name, value in flatten(self.model, part)[0].items()} for part in batch]
        return shapes.count(shapes[0]) < len(shapes)

    def is_other(self, batch: Any) -> bool:
        """Whether a micro-batch of a batch is of another form than the example. Raises `BatchError` for a batch that no
        program of the plan takes."""
        return any(form.number != FIRST_FORM for form, _ in map(self._find, self._cut(batch)))

    def describe(self, batch: Any) -> list[Any]:
        """The micro-batches of a rank's batch for the other ranks: the numbers of forms that have come, and of others,
        as plain data, what forward reads of them and the sizes of the rest."""
        parts = [] if batch is None else self._cut(batch)
        found = [(self._look_up(part), part) for part in parts]
        return [self._plain(part) if known is None else known[0].number for known, part in found]

    def meet(self, described: Sequence[Any]) -> list[KnownForm]:
        """The forms of all ranks' micro-batches, which every rank looks for in one order; none where the devices run
        the example's alone. Raises `BatchError`, on all ranks."""
        if not self.is_begun and all(each == FIRST_FORM for each in described):
            return []
        self._time += 1
        found = [form for form in self.forms if form.number in described]
        for form in found:
            form.used = self._time
        for each in described:
            if isinstance(each, dict):
                found.append(self._find(self._from_plain(each))[0])
        return found

    def read(
        self, batch: Any, with_outputs: bool, met: Sequence[KnownForm] = ()
    ) -> tuple[list[MicroBatch], Sequence[KnownForm]]:
        """The micro-batches of a batch, and the forms that the devices need for it. Raises `BatchError` for a batch
        that no program of the plan takes; `with_outputs`: also for one of which forward returns other tensors than of
        the example. `met`: the forms of all ranks' micro-batches."""
        parts = [] if batch is None else self._cut(batch)
        known = [self._look_up(part) if met else self._find(part) for part in parts]
        found = [each for each in known if each is not None]
        met = met or [form for form, _ in found]
        others = set[str]().union(*(form.outputs ^ self.forms[0].outputs for form in met))
        if with_outputs and others:
            raise BatchError(
                f"forward returns {', '.join(sorted(others))} for this batch or for the example, not for both: "
                "evaluate(batch, outputs=False) gives the loss"
            )
        if not all(map(self.forms.__contains__, met)):
            raise BatchError(
                f"the micro-batches of this step have more than {MOST_FORMS} forms, which devices keep at most: "
                "let the processor round the sizes of images to fewer"
            )
        if isinstance(batch, Mapping) and len(parts) > 1:
            if len({form.number for form, _ in found}) > 1:  # forward on the whole may use one number for all of them
                raise BatchError(
                    f"micro-batches of this batch differ in what forward does with them: {self._text(parts[0])}; "
                    f"{self._text(parts[-1])}. Hand over a list of the {len(parts)} micro-batches, as gradient "
                    "accumulation has them, which are taken by themselves; or compile with micro_batches=1"
                )
            found[0][0].prologue.add(batch, len(parts), self.count)  # which refuses rows that meet
        return [
            MicroBatch(part, leaves, {FORM: form.number}, form.directory)
            for part, (form, leaves) in zip(parts, found, strict=True)
        ], met

    def load(self, forms: Sequence[KnownForm], parts: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Give the devices the forms that they do not have. Returns each input of these micro-batches, at its place in
        one tensor with room for the largest of each."""
        if not self.is_begun or not self._there.issuperset(form.number for form in forms if form.files is not None):
            driver = self.run.driver
            if driver is not self._driver:
                self._driver, self._there = driver, set()
            for form in forms:
                if form.files is not None and form.number not in self._there:
                    driver.take_form(form.number, form.files, self.room)
                    self._there.add(form.number)
        assert self._driver is not None
        room = self._driver.setup.interface.batch  # without that of forms that the devices do not have
        found: dict[str, Tensor] = {}
        for name in self.shape.leaves if parts else ():
            if name not in room:
                continue
            first, *rest = room[name].shape
            whole = found[name] = torch.zeros(first * len(parts), *rest, dtype=self.shape.leaves[name][1])
            for place, each in zip(whole.chunk(len(parts)), parts):
                value = each.leaves[name].reshape(-1)
                place.view(-1)[: len(value)] = value
        return found

    def _cut(self, batch: Any) -> list[Any]:
        """The micro-batches of a batch, or of a list of them: of all of it, or on a rank of torchrun of its lane."""
        shape = replace(self.shape, leaves={name: self.shape.leaves[name] for name in self._user_names})
        listed = is_listed(batch, shape)
        parts: list[Any] = batch if listed else [batch]
        for part in parts:
            given = flatten(self.model, part)[0]
            missing = [name for name in shape.leaves if name not in given or given[name].shape[:1] == (0,)]
            if missing:
                raise BatchError(f"a micro-batch lacks {', '.join(missing)}; {_EACH_HAS}")
        tensors = [shape.tensors(self.model, part, shape.leaves) for part in parts]
        own = len(self.run.feed.micro_batches)
        if listed:
            if len(parts) not in (own, self.count):
                raise BatchError(f"the batch is a list of {len(parts)} micro-batches, and {own} make a step")
            return parts
        count = self.count
        if own < count:
            name = min(shape.leaves, key=lambda name: self.shape.entries(name, self.shape.size))
            count = count if len(tensors[0][name]) == self.shape.entries(name, self.shape.size) else own
        for name, value in tensors[0].items():
            if count > 1 and (not value.dim() or len(value) % count):
                raise BatchError(
                    f"batch[{name!r}] has {len(value) if value.dim() else 'no'} entries, so that nothing says which "
                    f"belong to which of {count} micro-batches: hand over a list of {count} micro-batches, as gradient "
                    "accumulation has them"
                )
        return [part_of(batch, i, count) for i in range(count)]

    def _plain(self, micro_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The dtype and shape of each tensor, and the values where forward reads them."""
        return {
            name: [str(x.dtype).removeprefix("torch."), [*x.shape], x.tolist() if name in self.prologue.reads else None]
            for name, x in flatten(self.model, micro_batch)[0].items()
        }

    def _from_plain(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The micro-batch that `_plain` was made of; what is no tensor is as in the example."""
        example = dict(self.prologue.example)
        tensors = map(lambda name: _tensor(*plain[name]), flatten(self.model, example)[0])
        found: dict[str, Any] = tree_map_only(Tensor, lambda _: next(tensors), example)
        return found

    def _look_up(self, micro_batch: Mapping[str, Any]) -> tuple[KnownForm, dict[str, Tensor]] | None:
        """The form of a micro-batch, and its inputs; None where it has not come before."""
        given = {name: tuple(t.shape) or (1,) for name, t in flatten(self.model, micro_batch)[0].items()}
        for form in sorted(self.forms, key=lambda form: (-form.num_same(micro_batch), -form.used)):
            own = form.interface.batch
            if all(own[name].shape == found for name, found in given.items() if name in own):
                try:
                    leaves = form.read(self.shape, micro_batch, self.count)
                except BatchError:
                    continue
                return form, leaves
        return None

    def _find(self, micro_batch: Mapping[str, Any]) -> tuple[KnownForm, dict[str, Tensor]]:
        """The form of a micro-batch, which is captured where it has not come before, and its inputs."""
        self._time += 1
        found = self._look_up(micro_batch)
        if found is not None:
            found[0].used = self._time
            return found
        form = self._capture(micro_batch)
        leaves = form.read(self.shape, micro_batch, self.count)
        for dropped in [each for each in self.forms if each.number == form.number]:
            self.forms.remove(dropped)
            shutil.rmtree(dropped.directory or "")
        self.forms.append(form)
        return form, leaves

    def _capture(self, micro_batch: Mapping[str, Any]) -> KnownForm:
        """Raises `BatchError` where the plan's programs cannot run it."""
        begun_s, what = time.perf_counter(), self._text(micro_batch)
        try:
            settings = self.run.folder.settings
            found = self.replanner.print_form(micro_batch, (settings.counts, settings.picks))
            printed = found.printed
            room = larger_interface(self.room, printed.interface)
            self._require_memory(room)
        except (DoesNotFit, VerifyError) as error:
            raise BatchError(
                f"a micro-batch with {what} takes more memory than the plan's devices have: {error}\n  Hand over fewer "
                "or smaller images, or compile with such a micro-batch in example_inputs"
            ) from error
        except (CaptureError, PassError, PlanError, BatchError) as error:
            raise BatchError(
                f"a micro-batch with {what}: the plan that was made for {self._text()} cannot run it: {error}"
            ) from error
        number = len(self.forms) + FIRST_FORM
        if number > MOST_FORMS:
            number = min(self.forms[1:], key=lambda form: form.used).number
            self._there.discard(number)
        if self._scratch is None:
            self._scratch = scratch.temporary("forms")
        folder = replace(
            self.run.folder, interface=printed.interface, files=printed.files, smaller=printed.smaller,
            counts=found.counts, constants=printed.constants,
        )  # fmt: skip
        directory = folder.write(self._scratch.path / f"form{self._time}")
        self.room = room
        warnings.warn(
            f"a micro-batch with {what}: its stages were captured in {format_seconds(time.perf_counter() - begun_s)}; "
            f"of the {number} forms so far, each is captured once",
            stacklevel=7,
        )
        setup = replace(self.run.setup(directory), interface=printed.interface)
        return KnownForm(number, found.prologue, printed.interface, setup, directory, self._time)

    def _require_memory(self, room: Interface) -> None:
        """Raise `VerifyError` where programs with this room take more than a memory has."""
        if self.run.driver and self.run.directory is not None:
            files = replace(self.run.setup(self.run.directory), interface=room)
            for name in files.roles[0]:
                verify([programs[name] for programs in files.roles], self.run.folder.hardware)
            for first, own in zip(self.run.programs, files.roles):
                if profile_memory(own["step"]).arenas[SSD] > profile_memory(first).arenas[SSD]:
                    raise VerifyError("activations would take more of the SSD than the run has reserved there")

    def _text(self, micro_batch: Mapping[str, Any] | None = None) -> str:
        """The shapes of a micro-batch that are others than the example's, and the numbers that forward reads; or those
        of the example."""
        own = {name: [*spec.shape] for name, spec in self.forms[0].interface.batch.items() if name in self._user_names}
        if micro_batch is None:
            return ", ".join(f"{name} {shape}" for name, shape in own.items())
        given = flatten(self.model, micro_batch)[0]
        texts = [f"{name} {[*given[name].shape]}" for name, shape in own.items() if [*given[name].shape] != shape]
        few = [name for name in sorted(self.prologue.reads - own.keys()) if given[name].numel() <= FEW]
        texts += [f"{name} {given[name].tolist()}" for name in few]
        return ", ".join(texts) or "the example's shapes, and other numbers in what forward reads"


def _tensor(dtype: str, shape: Sequence[int], values: Any) -> Tensor:
    kind = getattr(torch, dtype)
    return torch.empty(shape, dtype=kind, device="meta") if values is None else torch.tensor(values, dtype=kind)
