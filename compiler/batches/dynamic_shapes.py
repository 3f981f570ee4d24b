"""`dynamic_shapes=`: which sizes of a batch differ from step to step, and how large each may be.

In: what the user says, in torch.export's own form or its shorthand, and an example batch. Out: `BatchSizes`, the batch
with the most of each size, for which memory is planned, and what is symbolic in a trace for all sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ...ir.program import SizeRange
from ...runtime.torch_names import DerivedDim, DimHint, DimHintType
from ..capture.dynamic import DynamicDims
from ..capture.inputs import entry_names, input_name, is_spec, is_tensor_like, rebuilt
from .shape import BatchShape, flatten
from .sizes import BatchSizes

ROWS = "_rows"  # of a micro-batch, where the user gives its size no name
_FORMS = (
    'allowed are torch.export\'s form, such as {"input_ids": {1: torch.export.Dim("sequence", max=2048)}}, and its '
    'shorthand for a tokenizer\'s batch: torch.export.Dim("sequence", max=2048), or (torch.export.Dim("batch", max=8), '
    'torch.export.Dim("sequence", max=2048))'
)


def read_dynamic_shapes(model: nn.Module, example_inputs: Any, given: Any) -> BatchSizes:
    """Raises `PlanError` naming what of `given` is no such description, or does not fit the example."""
    reader = _Reader(BatchShape.from_inputs(model, example_inputs))
    if isinstance(given, torch.export.Dim) or _is_pair(given):
        reader.read_shorthand(given)
    else:
        reader.read(model, example_inputs, given)
    if not reader.ranges:
        raise PlanError(f"dynamic_shapes={given!r} leaves every size fixed; {_FORMS}")
    return reader.sizes()


def largest(sizes: BatchSizes, shape: BatchShape) -> BatchShape:
    """The batch with the most of each size."""
    size = sizes.ranges[sizes.rows].most if sizes.rows else shape.size
    leaves = {}
    for name, (own, dtype) in shape.leaves.items():
        first = own[0] // shape.size * size
        rest = (sizes.ranges[dim].most if dim else n for dim, n in zip(sizes.dims[name][1:], own[1:]))
        leaves[name] = (first, *rest), dtype
    return BatchShape(leaves, size, shape.flags)


def describe_tensors(model: nn.Module, example_inputs: Any, shape: BatchShape) -> Any:
    """The nest with shape and dtype in place of each tensor of a batch of this shape."""
    leaves = iter([shape.leaves[name] for name in flatten(model, example_inputs)[0]])
    return _describe(example_inputs, lambda: next(leaves))


def dynamic_dims(sizes: BatchSizes, shape: BatchShape) -> DynamicDims:
    """The symbolic sizes of a trace of the largest batch, its number of rows among them: micro-batches have fewer."""
    rows, ranges = sizes.rows or ROWS, {name: of for name, of in sizes.ranges.items() if name != sizes.rows}
    ranges[rows] = SizeRange(1, max(shape.size, 1))
    dims: dict[str, tuple[tuple[str, int] | None, ...]] = {}
    for name, own in sizes.dims.items():
        first = (rows, shape.leaves[name][0][0] // shape.size) if shape.size > 1 else None
        dims[name] = (first, *((dim, 1) if dim else None for dim in own[1:]))
    return DynamicDims(ranges, dims)


def fixed_dimension(sizes: BatchSizes, shape: BatchShape) -> str:
    """Words for dimensions that are as large as one with a name, and have none."""
    for name, of in sizes.ranges.items():
        for other, (own, _) in shape.leaves.items():
            for dim, size in enumerate(own):
                if dim and size == of.most and not sizes.dims[other][dim]:
                    return (
                        f"dynamic_shapes leaves dimension {dim} of {other!r} at {size}, the most of {name}: give it "
                        "the same torch.export.Dim if it is the same size"
                    )
    return ""


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and bool(given) and all(d is None or isinstance(d, torch.export.Dim) for d in given)


class _Reader:
    def __init__(self, shape: BatchShape):
        self.shape = shape
        self.ranges: dict[str, SizeRange] = {}
        self.examples: dict[str, tuple[int, str]] = {}  # name -> size in the example, and where it was seen
        self.rows = ""
        self.dims = {name: [""] * len(own) for name, (own, _) in shape.leaves.items()}

    def sizes(self) -> BatchSizes:
        if self.rows:
            for dims in self.dims.values():
                dims[0] = self.rows
        found = {name: tuple(dims) for name, dims in self.dims.items()}
        return BatchSizes(ranges=self.ranges, rows=self.rows, dims=found)

    def read_shorthand(self, given: Any) -> None:
        rows, sequence, *more = given if isinstance(given, tuple) and len(given) > 1 else (None, given)
        if more:
            raise PlanError(f"dynamic_shapes has {2 + len(more)} dimensions for every input; {_FORMS}")
        if isinstance(sequence, tuple):
            (sequence,) = sequence
        tokens = [own for own, dtype in self.shape.leaves.values() if len(own) > 1 and not dtype.is_floating_point]
        if sequence is not None and not tokens:
            raise PlanError(
                f"dynamic_shapes={sequence!r}: the example has no input of whole numbers with two dimensions, as a "
                f"tokenizer's batch has; {_FORMS}"
            )
        for name, (own, _) in self.shape.leaves.items():
            if rows is not None:
                self._note(rows, name, 0, own)
            if sequence is not None and len(own) > 1 and own[1] == tokens[0][1]:
                self._note(sequence, name, 1, own)

    def read(self, model: nn.Module, example_inputs: Any, given: Any) -> None:
        if isinstance(example_inputs, Mapping) and not is_spec(example_inputs):
            self._walk("", example_inputs, given)
        elif isinstance(example_inputs, (tuple, list)):
            names = entry_names(model, len(example_inputs))
            self._walk("", dict(zip(names, example_inputs)), _entries_by_name(names, given))
        else:
            self._walk(entry_names(model, 1)[0], example_inputs, given)

    def _walk(self, name: str, example: Any, given: Any) -> None:
        """Read what is said of an input, or of each in a nest."""
        if given is None or not (is_spec(example) or is_tensor_like(example) or _items(example)):
            return
        items = _items(example)
        if not items:
            self._read_input(input_name(name), given, self.shape.leaves[input_name(name)][0])
            return
        said = _items(given)
        for key in said:
            if key not in items:
                known = ", ".join(map(str, items))
                near = difflib.get_close_matches(str(key), [str(item) for item in items], 1) or [next(iter(items))]
                raise PlanError(f"dynamic_shapes[{key!r}]: {name or 'the batch'} has {known}; nearest: {near[0]!r}")
        if not said:
            raise PlanError(f"dynamic_shapes{f'[{name!r}]' if name else ''}={given!r}; {_FORMS}")
        for key, value in said.items():
            self._walk(f"{name}.{key}" if name else str(key), items[key], value)

    def _read_input(self, name: str, dims: Any, own: tuple[int, ...]) -> None:
        if dims is None:
            return
        rows = dims.items() if isinstance(dims, Mapping) else enumerate(dims) if isinstance(dims, Sequence) else None
        if rows is None:
            raise PlanError(f"dynamic_shapes[{name!r}] is {dims!r}; {_FORMS}")
        for dim, size in rows:
            if not isinstance(dim, int) or not -len(own) <= dim < len(own):
                raise PlanError(f"dynamic_shapes[{name!r}] names dimension {dim!r}; {name!r} has {len(own)}")
            self._note(size, name, dim % len(own), own)

    def _note(self, size: Any, name: str, dim: int, own: tuple[int, ...]) -> None:
        where = f"dynamic_shapes[{name!r}][{dim}]"
        if size is None or (isinstance(size, DimHint) and size.type == DimHintType.STATIC):
            return
        if isinstance(size, int) and not isinstance(size, bool) and size == own[dim]:
            return
        if not isinstance(size, torch.export.Dim) or isinstance(size, DerivedDim):
            raise PlanError(
                f"{where} is {size!r}; it is a torch.export.Dim with a name and a max, None, or the example's size, "
                f"{own[dim]}"
            )
        label, most = size.__name__, size.max
        if label == ROWS:
            raise PlanError(f"{where}: {label} is a name of ours; give the Dim another one")
        if not isinstance(most, int) or most >= 1 << 40:
            raise PlanError(
                f'{where}: {label} has no max, for which memory is planned; say torch.export.Dim("{label}", max=...), '
                f"for instance {own[dim]}, as the example has"
            )
        if dim and self.rows == label:
            raise PlanError(f"{where}: {label} is the number of rows already, which is the first dimension")
        of, example = SizeRange(max(int(size.min), 1), most), own[dim] if dim else self.shape.size
        if example not in of:
            raise PlanError(f"{where}: {label} is {of.least} to {of.most}, and the example has {example}")
        before = self.ranges.setdefault(label, of)
        if before != of:
            raise PlanError(
                f"{where}: {label} is {of.least} to {of.most} here, and elsewhere {before.least} to {before.most}"
            )
        seen, place = self.examples.setdefault(label, (example, where))
        if seen != example:
            raise PlanError(f"{where}: {label} is {example} in the example, and {seen} in {place}; give them two names")
        if dim:
            self.dims[name][dim] = label
        elif self.rows not in ("", label):
            raise PlanError(f"{where}: the rows are called {self.rows} and {label}; every input has the same number")
        else:
            self.rows = label


def _items(nest: Any) -> dict[Any, Any]:
    """The entries of a nest by key or number; none for a leaf."""
    if isinstance(nest, Mapping) and not is_spec(nest):
        return dict(nest)
    return dict(enumerate(nest)) if isinstance(nest, (tuple, list)) else {}


def _entries_by_name(names: Sequence[str], given: Any) -> Any:
    """The entries of a tuple by the names of the batch; anything else unchanged."""
    if isinstance(given, (tuple, list)):
        if len(given) > len(names):
            raise PlanError(f"dynamic_shapes has {len(given)} entries, the batch {len(names)} ({', '.join(names)})")
        return dict(zip(names, given))
    return given


def _describe(value: Any, take: Any) -> Any:
    if is_spec(value) or is_tensor_like(value):
        shape, dtype = take()
        return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: _describe(item, take) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [_describe(item, take) for item in value])
    return value
