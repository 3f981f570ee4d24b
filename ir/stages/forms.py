"""Forms of a micro-batch: other sizes, and other numbers read from the batch, than those of a plan's example.

The programs of a plan run every form: what they move and keep is the same, and the stages of a form have code of their
own. In: the interfaces of two forms. Out: what keeps them from sharing programs, and the interface of both, in which
each value has the bytes of the larger one. A program whose interface has the size `FORM` runs several forms; the input
`SIZES` has the number of the form of each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from .interface import Interface, sizes_spec
from .sizes import SIZES, SizeRange
from .stage import StageSpec, TensorSpec

FORM = "form"
FIRST_FORM = 1  # the number of the example's
MOST_FORMS = 256  # that devices keep at a time


def why_unlike(first: Interface, other: Interface) -> str:
    """The reason for which the stages of two forms cannot share programs; "" if they can."""
    return next(_differences(first, other), "")


def _differences(first: Interface, other: Interface) -> Iterator[str]:
    if first.stages.keys() != other.stages.keys():
        yield "there are other stages"
    values = [_values_of(first), _values_of(other)]
    for name in first.stages.keys() & other.stages.keys():
        a, b = first.stages[name], other.stages[name]
        if a.params != b.params:
            yield f"{name} uses other parameters"
        if [_links(a, values[0]), _kinds(a)] != [_links(b, values[1]), _kinds(b)]:
            yield f"{name} takes or gives other values"


def _values_of(interface: Interface) -> dict[str, Any]:
    """The origin of each value that stages read, by its name: an input's is its name."""
    found: dict[str, Any] = {name: name for name in interface.batch}
    for stage, spec in interface.stages.items():
        found |= {output.name: (stage, number) for number, output in enumerate(spec.made)}
    return found


def _links(spec: StageSpec, values: dict[str, Any]) -> list[Any]:
    unneeded = [] if spec.again is None else [values[name] for name in spec.again.inputs]
    handed = [(values[a], values[b]) for a, b in spec.handed]
    return [[values[i.name] for i in spec.inputs], unneeded, handed, [values[name] for name in spec.passing]]


def _kinds(spec: StageSpec) -> list[Any]:
    rows = [(value.dtype, value.requires_grad) for value in (*spec.inputs, *spec.outputs)]
    loss = [output.name == spec.loss for output in spec.outputs]
    return [rows, loss, spec.draws, spec.rematerialisable, spec.changing_buffers, len(spec.exchanges)]


def larger_interface(first: Interface, other: Interface) -> Interface:
    """The interface of programs that run micro-batches of both forms, with the names of the first."""
    batch = {name: _larger(spec, other.batch[name]) for name, spec in first.batch.items() if name != SIZES}
    stages = {name: _stage_with_room(spec, other.stages[name]) for name, spec in first.stages.items()}
    sizes = {FORM: SizeRange(FIRST_FORM, MOST_FORMS)}
    return replace(first, batch={**batch, SIZES: sizes_spec(sizes)}, stages=stages, sizes=sizes)


def _larger(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    """A value with room for either, as a row of elements where their shapes differ."""
    if a.shape == b.shape:
        return a
    return replace(a, shape=(max(math.prod(a.shape), math.prod(b.shape)),), order=(), dims=())


def _stage_with_room(a: StageSpec, b: StageSpec) -> StageSpec:
    costs = {
        field.name: max(getattr(a, field.name), getattr(b, field.name))
        for field in fields(StageSpec)
        if type(getattr(a, field.name)) in (int, float) and field.name != "weight_share"
    }
    extras = {output.name: output for output in b.extra_outputs}
    saved_bytes = {saved.name: saved.bytes for saved in b.saved}
    again = a.again
    if again is not None and b.again is not None:
        again = replace(again, workspace_bytes=max(again.workspace_bytes, b.again.workspace_bytes))
    unpacked = a.unpacked
    if unpacked is not None and b.unpacked is not None:
        unpacked = replace(unpacked, workspace_bytes=max(unpacked.workspace_bytes, b.unpacked.workspace_bytes))
    return replace(
        a,
        **costs,
        inputs=tuple(map(_larger, a.inputs, b.inputs)),
        outputs=tuple(map(_larger, a.outputs, b.outputs)),
        extra_outputs=tuple(_larger(output, extras.get(output.name, output)) for output in a.extra_outputs),
        saved=tuple(replace(x, bytes=max(x.bytes, saved_bytes.get(x.name, 0))) for x in a.saved),
        again=again,
        unpacked=unpacked,
    )


def part_of_form(region: Tensor, spec: TensorSpec) -> Tensor:
    """The value of a form whose elements are the first of a micro-batch's rows of an input."""
    return region.reshape(-1)[: math.prod(spec.shape)].view(spec.shape)
