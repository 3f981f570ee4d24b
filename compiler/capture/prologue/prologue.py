"""The prologue of a model: what its forward makes of a batch by reading values, before anything is computed.

Vision-language models count the patches of each image (`grid.tolist()`) and place their tokens. A program is made
before any batch is there, and so what follows from such numbers becomes inputs of the program, which the prologue makes
of each batch on the host. In: a model, an example batch with values, and the inputs that forward reads. Out:
`MadeInput`s, and for each batch their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....ir.errors import BatchError, CaptureError
from ....runtime.torch_names import tree_map_only
from ..guard import TraceOptions
from ..inputs import input_name, repeat
from ..recorder import NeedsValue
from ..replay import Misaligned
from ..trace import Recording, record_again, record_steps
from .made_input import MadeInput
from .nodes import find_rows, require_number
from .replay import PrologueReplay


@dataclass(frozen=True, eq=False)
class Prologue:
    """The prologue of `model`. `reads`: the inputs whose values forward reads; `inputs`: what it makes of them.
    `apart`: the example is a list of micro-batches, of which each is taken as it is."""

    model: nn.Module
    example: Mapping[str, Any]
    options: TraceOptions
    reads: frozenset[str]
    rows: int
    inputs: tuple[MadeInput, ...] = ()
    apart: bool = False
    _recordings: dict[int, Recording] = field(default_factory=dict)

    @staticmethod
    def find(
        model: nn.Module, example: Any, rows: int, options: TraceOptions, error: NeedsValue, one: bool, apart: bool
    ) -> Prologue:
        """The prologue of a model of which a trace ended in this error. `rows`: of the example; `one`: whether it is
        one micro-batch; `apart`: whether each row is a micro-batch of a list. Raises the error where forward reads
        anything else than inputs of the example, which are a dict of tensors with values, and `CaptureError` where it
        does not do the same with parts of the example."""
        reads = frozenset[str]()
        while True:
            more = error.inputs - reads
            named = {input_name(str(key)): value for key, value in example.items()} if isinstance(example, dict) else {}
            if not more or not all(type(named.get(name)) is Tensor and not named[name].is_meta for name in more):
                raise error
            reads |= more
            prologue = Prologue(model, example, options, reads, rows, apart=apart)
            try:
                return replace(prologue, inputs=prologue.find_inputs(one))
            except NeedsValue as another:
                error = another

    def find_inputs(self, one: bool) -> tuple[MadeInput, ...]:
        """Find the inputs, in the order in which the program uses them. `one`: as in `find`."""
        whole = self._values_of(self._recording(self.rows if self.apart else 1))
        if self.apart:
            return _whole_inputs(whole)
        try:
            return self._find_rows(whole)
        except NeedsValue:
            raise
        except (BatchError, CaptureError) as error:
            if not one:
                raise CaptureError(f"{error}\n  micro_batches=1 takes the batch whole") from error
        return _whole_inputs(whole)

    def form_prologue(self, batch: Mapping[str, Any], count: int) -> Prologue:
        """The prologue of micro-batches of another form, of which this is one, and `count` make a batch. Raises
        `CaptureError` where it makes other inputs than this one."""
        sizes = tree_map_only(Tensor, lambda x: x.to("meta"), dict(batch))
        example = {name: value if input_name(name) in self.reads else sizes[name] for name, value in batch.items()}
        found = replace(self, example=repeat(example, count), rows=count, inputs=(), apart=True, _recordings={})
        values = found._values_of(found._recording(count))
        require_number(found._recording(count).prologue, len(self.inputs))
        own = [
            MadeInput(each.name, None, value) if each.dim is None or not value.dim() else MadeInput(each.name)
            for each, value in zip(self.inputs, values)
        ]
        changed = next((a.name for a, b in zip(self.inputs, own) if (a.dim is None) != (b.dim is None)), None)
        if changed is not None:
            raise CaptureError(f"forward makes a tensor without dimensions in the place of {changed}")
        return replace(found, inputs=tuple(own))

    def _find_rows(self, whole: list[Tensor]) -> tuple[MadeInput, ...]:
        """The inputs with the dimensions of their rows, of the example. Raises `CaptureError` where rows meet."""
        count = next((n for n in range(2, self.rows + 1) if self.rows % n == 0), 1)
        parts = [self._make(self._recording(count), _cut(self.example, count, i)) for i in range(count)]
        return self._match(whole, parts, count)

    def _match(self, whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], total: int) -> tuple[MadeInput, ...]:
        """The inputs with the dimensions in which what is made of the parts of a batch comes to what is made of all of
        it. Raises `CaptureError` where none does."""
        first, joined = self._recording(total), self._recording(total // len(parts))
        require_number(first.prologue, len(whole))
        places = zip(
            *([each.recorder.prologue.number_of_places(node) for node in each.prologue] for each in (first, joined))
        )
        return tuple(
            find_rows(f"prologue_{i}", node, value, list(own), of)
            for i, (node, of, value, *own) in enumerate(zip(first.prologue, places, whole, *parts))
        )

    @property
    def names(self) -> list[str]:
        """The inputs that it makes."""
        return [each.name for each in self.inputs if each.dim is not None]

    def note(self, why_one_form: str) -> str:
        """The note for a user. `why_one_form`: why batches of other sizes cannot be captured; "" if they can."""
        sizes = "batches of other sizes, such as images, are captured when they first come (docs/promises.md)"
        if why_one_form:
            same = "the example's sizes (the same number of images a row, all of one size)"
            sizes = f"with {why_one_form}, all batches must have {same}"
        made = ", ".join(self.names)
        how = f"comes in as {made}, which the host makes" if made else "the host makes again, and compares,"
        return f"forward reads the values of {self._reads_text}: what it makes of them {how} before each step; {sizes}"

    def add(
        self, batch: Mapping[str, Any], count: int, total: int, listed: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """The batch, with what the prologue makes of each of its `count` micro-batches, of which a whole batch has
        `total`. `listed`: the micro-batches, where they are handed over one by one, and no whole batch is compared with
        them. Raises `BatchError` for a batch of which forward would make another program."""
        cut = listed or [_cut(batch, count, i) for i in range(count)]
        parts = [self._make(self._recording(total), part) for part in cut]
        if count > 1 and total % count == 0 and not listed:
            self._require_rows_apart(batch, parts, total)
        made: dict[str, Any] = {}
        for each, *own in zip(self.inputs, *parts):
            if each.dim is None:
                self._require_constant(each, own)
            else:
                made[each.name] = torch.cat([value.movedim(each.dim, 0) for value in own])
        return {**batch, **made}

    def _require_rows_apart(self, batch: Mapping[str, Any], parts: Sequence[list[Tensor]], total: int) -> None:
        """Raise `BatchError` where forward makes another thing of a batch than of its parts, which are given."""
        try:
            whole = self._make(self._recording(total // len(parts)), batch)
            if self.apart:
                self._match(whole, parts, total)
            for each, value, *own in () if self.apart else zip(self.inputs, whole, *parts):
                if not each.is_made_of(value, own, total):
                    raise CaptureError(
                        f"{each.name}: rows of this batch meet in what forward makes of {self._reads_text}, so that "
                        "micro-batches would get other numbers than the whole batch"
                    )
        except CaptureError as error:
            raise BatchError(
                f"{error}\n  Hand over a list of the {len(parts)} micro-batches, as gradient accumulation has them, "
                "which are taken by themselves; or compile with micro_batches=1"
            ) from error

    @property
    def _reads_text(self) -> str:
        return ", ".join(sorted(self.reads))

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The micro-batches of an example that is a list of them; none of any other example."""
        return [_cut(self.example, self.rows, i) for i in range(self.rows if self.apart else 0)]

    def trace_options(self, count: int) -> dict[str, Any]:
        """The options of a trace of the first of `count` micro-batches of the example."""
        return {"lent": _read(_cut(self.example, count, 0), self.reads), "made": self.inputs}

    def _recording(self, count: int) -> Recording:
        """Forward on the first of `count` parts of the example."""
        if count not in self._recordings:
            part = _cut(self.example, count, 0)
            self._recordings[count] = record_steps(
                self.model, part, replace(self.options, lent=_read(part, self.reads), evaluation=False)
            )
            if self.inputs:
                require_number(self._recordings[count].prologue, len(self.inputs))
        return self._recordings[count]

    def _values_of(self, recording: Recording) -> list[Tensor]:
        return [recording.recorder.values.last_value(node.meta["val"]) for node in recording.prologue]

    def _make(self, recording: Recording, part: Mapping[str, Any]) -> list[Tensor]:
        """Run the prologue on a micro-batch. Raises `BatchError`."""
        replay = PrologueReplay(recording.recorder, recording.unused, _read(part, self.reads))
        try:
            record_again(recording, replay, part)
        except (Misaligned, CaptureError) as error:
            raise BatchError(
                f"forward reads {self._reads_text}, and does something else with this batch than with the example, for "
                f"which the program was made: {error}\n  Give batches the sizes of the example (the same number of "
                "images a row, all of one size), or compile again"
            ) from error
        return [replay.found[node] for node in recording.prologue]

    def _require_constant(self, made: MadeInput, values: Sequence[Tensor]) -> None:
        for value in values:
            if made.value is not None and not torch.equal(value, made.value):
                raise BatchError(
                    f"forward reads {self._reads_text} and makes {value.tolist()} of a micro-batch, and "
                    f"{made.value.tolist()} of the example, for which the program was made: give batches the sizes of "
                    "the example, or compile again"
                )


def _whole_inputs(values: Sequence[Tensor]) -> tuple[MadeInput, ...]:
    """The inputs of a micro-batch that is looked at alone: all with elements."""
    return tuple(
        MadeInput(f"prologue_{i}") if value.dim() and len(value) else MadeInput(f"prologue_{i}", None, value)
        for i, value in enumerate(values)
    )


def _read(part: Mapping[str, Any], names: frozenset[str]) -> dict[str, Tensor]:
    return {input_name(str(key)): value for key, value in part.items() if input_name(str(key)) in names}


def _cut(batch: Mapping[str, Any], count: int, i: int) -> dict[str, Any]:
    """One of `count` equal parts of a batch."""
    found: dict[str, Any] = tree_map_only(Tensor, lambda x: x.chunk(count)[i] if x.dim() else x, dict(batch))
    return found
