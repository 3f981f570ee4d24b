"""The global batch: its leaves by name, its micro-batch's shapes, and whether a later batch is of the same kind."""

from __future__ import annotations

import re
from collections import Counter, UserDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_tensor, nn

from ...ir.errors import BatchError, PlanError
from ...runtime.torch_names import tree_leaves
from ..capture.inputs import entry_names, input_name, is_spec, is_tensor_like, rebuilt, repeat
from ..packing.borders import with_unread
from ..packing.varying_inputs import ANY
from .plain_tensor import plain_tensor


@dataclass(frozen=True)
class BatchShape:
    """Shape and dtype of every tensor of one global batch; `size` is the number of its rows.

    An input may have several entries for each row, such as the patches of an image: each micro-batch takes those of its
    rows, in order. `flags` are its other leaves (numbers, switches, None) as text: capture makes them
    part of the programs, but for those of `ANY` value. A batch that cannot be cut (`is_whole`) has one row, to which
    all entries of all inputs belong, and is one micro-batch. Only such a batch may have tensors without dimensions.
    """

    leaves: dict[str, tuple[tuple[int, ...], torch.dtype]]
    size: int
    flags: dict[str, str]
    is_whole: bool = False

    @staticmethod
    def from_inputs(model: nn.Module, example_inputs: Any, one: bool = False, listed: int = 0) -> BatchShape:
        """one: whether it is known to be one micro-batch; listed: the number of micro-batches that it was joined of,
        each of which counts as a row. Raises `PlanError` for any other batch unless the first
        dimension of every tensor is a multiple of the number of rows, and no list has an entry for each row."""
        tensors, flags = flatten(model, example_inputs)
        leaves = {name: _shape(value) for name, value in tensors.items()}
        if not leaves:
            raise PlanError("example_inputs holds no tensor; pass one global batch as a dict or tuple of tensors")
        sizes = {name: shape[0] for name, (shape, _) in leaves.items() if shape}
        size = listed or number_of_rows([*_outer_sizes(example_inputs)] or sizes.values())
        first = next((name for name, found in sizes.items() if found == size), "")
        targets, single = _list_of_rows(example_inputs), [name for name in leaves if name not in sizes]
        is_cut = not (targets or single or any(found % size for found in sizes.values()))
        if one and all(sizes.values()) and not is_cut:
            return BatchShape(leaves, 1, flags, is_whole=True)
        if targets:
            raise PlanError(
                f"example_inputs[{targets!r}] is a list with an entry for each row: a batch is cut into micro-batches "
                f"along the first dimension of its tensors, and this list is not; micro_batches=1 takes it whole"
            )
        if sizes and not any(sizes.values()):
            raise PlanError(
                f"example_inputs has no rows: {next(iter(sizes))!r} has first dimension 0; pass a batch as large "
                "as those of training"
            )
        for name in leaves:
            found = sizes.get(name)
            if not found or found % size:
                raise PlanError(
                    f"example_inputs[{name!r}] has first dimension {'none' if found is None else found}, {first!r} has "
                    f"{size}: every input is cut into micro-batches along its first dimension, which is {size} or a "
                    f"multiple of it; expand {name!r} to {size} rows, transpose it, or make it a tensor attribute of "
                    "the model if it is the same at every step"
                    + ("" if found == 0 else "; micro_batches=1 takes the batch whole")
                )
        return BatchShape(leaves, size, flags)

    def entries(self, name: str, rows: int) -> int:
        """The first dimension of an input in a batch of `rows` rows; 1 for a tensor without dimensions."""
        return _entries(self.leaves[name][0]) * rows // self.size

    @property
    def wide(self) -> dict[str, int]:
        """The inputs with several entries for each row, and how many."""
        each = {name: self.entries(name, 1) for name in self.leaves}
        return {} if self.is_whole else {name: count for name, count in each.items() if count > 1}

    def check_divisible(self, micro_batches: int) -> None:
        if micro_batches < 1 or self.size % micro_batches:
            near = sorted(
                (m for m in range(1, self.size + 1) if self.size % m == 0), key=lambda m: abs(m - micro_batches)
            )
            raise PlanError(
                f"micro_batches={micro_batches} does not divide the batch of {self.size}; nearest that do: "
                f"{', '.join(map(str, sorted(near[:2])))}"
            )

    def check(
        self, model: nn.Module, batch: Any, *, part_size: int | None = None, needed: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The batch's tensors by name. All may have `part_size` rows instead of `size`; tensors that are not `needed`
        may be absent.

        Raises `BatchError` for other names, shapes, dtypes or flags than compiled, and what `plain_tensor` refuses.
        """
        found = self.tensors(model, batch, self.leaves if needed is None else needed)
        own = {name: _entries(tuple(value.shape)) for name, value in found.items()}
        is_part = part_size is not None and all(own[name] == self.entries(name, part_size) for name in found)
        rows = part_size if is_part and part_size is not None else self.size
        for name, value in found.items():
            shape, dtype = self.leaves[name]
            expected = (self.entries(name, rows), *shape[1:])[: len(shape)]
            if tuple(value.shape) != expected:
                only_rows = bool(shape) and tuple(value.shape[1:]) == shape[1:]
                raise BatchError(
                    f"batch[{name!r}] is {value.dtype}{list(value.shape)}, compiled for {dtype}{list(expected)}; "
                    + self._advice(name, only_rows, part_size)
                )
        return found

    def tensors(self, model: nn.Module, batch: Any, needed: Collection[str]) -> dict[str, torch.Tensor]:
        """The batch's tensors by name, of any shape. Raises `BatchError` where one that is `needed` is missing, for
        other names, dtypes or flags than compiled, and what `plain_tensor` refuses."""
        found, flags = flatten(model, batch)
        found = {name: plain_tensor(name, value) for name, value in found.items()}
        missing = [name for name in needed if name not in found]
        if missing:
            raise BatchError(f"batch lacks {', '.join(missing)}; it has {', '.join(found) or 'no tensor'}")
        unknown = [name for name in found if name not in self.leaves]
        if unknown:
            raise BatchError(
                f"batch has {', '.join(unknown)}, which was not compiled; expected {', '.join(self.leaves)}"
            )
        for name, value in found.items():
            dtype = self.leaves[name][1]
            if value.dtype != dtype:
                raise BatchError(
                    f"batch[{name!r}] has dtype {value.dtype}, compiled for {dtype}: convert it (batch[{name!r}]"
                    f".to({dtype})), or compile again for the new dtype"
                )
        for name in sorted(self.flags.keys() | flags.keys()):
            now, then = (given.get(name, "absent") for given in (flags, self.flags))
            if now != then and (then != ANY or now == "absent"):
                value, in_list = _find_part(batch, name), _find_part(batch, name.rpartition("_")[0], list | tuple)
                what = f"{value or f'batch[{name!r}]'} is {now}, compiled as {then}"
                if "absent" in (now, then) and in_list:
                    entry = re.compile(rf"{name.rpartition('_')[0]}_\d+")
                    counts = [len([*filter(entry.fullmatch, each)]) for each in (flags, self.flags)]
                    what = f"{in_list} has {counts[0]} entries, compiled with {counts[1]}"
                raise BatchError(
                    f"{what}; what is no tensor is part of the programs: compile again for another value, or leave it "
                    "out of example_inputs and batches if the model does without"
                )
        return found

    def _advice(self, name: str, only_rows: bool, part_size: int | None) -> str:
        if not only_rows:
            return "pad or cut the batch, or compile again for the new shape"
        part = ""
        if part_size not in (None, self.size):
            assert part_size is not None
            part = f", or the {self.entries(name, part_size)} of this rank's lane in all of them"
        return (
            f"allowed are {self.entries(name, self.size)} rows{part}. Drop a short last batch "
            "(DataLoader(drop_last=True), or dataloader_drop_last=True of TrainingArguments) or fill it up; "
            "job.sampler(dataset) makes batches of one size"
        )


def number_of_rows(sizes: Collection[int]) -> int:
    """The rows of a batch with inputs of these first dimensions: the smallest of them, if the others are multiples of
    it, else what most of them have. An input with one entry is rather one that was not expanded to all rows."""
    counts = Counter(size for size in sizes if size)
    least = min((size for size in counts if size > 1), default=1)
    if all(size % least == 0 for size in counts):
        return least
    return max(counts, key=lambda size: (counts[size], size > 1, -size))


def rows_of_leaves(leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """The rows of a batch that was compiled; one row of a batch that is taken whole."""
    sizes = [_entries(shape) for shape, _ in leaves.values()]
    rows = number_of_rows(sizes)
    is_whole = any(size % rows for size in sizes) or not all(shape for shape, _ in leaves.values())
    return 1 if is_whole else rows


def _entries(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def program_inputs(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves as programs take them, with at least one dimension: one entry in place of none."""
    return {name: value if value.dim() else value.reshape(1) for name, value in leaves.items()}


def _outer_sizes(batch: Any) -> Iterator[int]:
    """The first dimensions of the tensors of a batch that are in no list of its own, which has no rows."""
    if isinstance(batch, torch.Tensor) or is_spec(batch):
        yield from _shape(batch)[0][:1]
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from () if isinstance(value, (list, tuple)) else _outer_sizes(value)


def _list_of_rows(batch: Any) -> str:
    """The entry of a batch that is a list of dicts of tensors, one for each row of its tensors, such as the boxes of
    images; "" for none."""
    if not isinstance(batch, Mapping):
        return ""
    rows = {_shape(value)[0][:1] for value in batch.values() if is_spec(value) or isinstance(value, torch.Tensor)}
    for name, value in batch.items():
        if (
            isinstance(value, (list, tuple))
            and {(len(value),)} == rows
            and all(isinstance(each, Mapping) and not is_spec(each) for each in value)
        ):
            return str(name)
    return ""


def micro_batch_spec(example_inputs: Any, micro_batches: int) -> Any:
    """The same nest with each tensor replaced by the shape of one micro-batch."""
    if is_spec(example_inputs) or isinstance(example_inputs, torch.Tensor):
        shape, dtype = _shape(example_inputs)
        rows = [shape[0] // micro_batches] if shape else []
        return {"shape": [*rows, *shape[1:]], "dtype": str(dtype).removeprefix("torch.")}
    if isinstance(example_inputs, Mapping):
        return {key: micro_batch_spec(value, micro_batches) for key, value in example_inputs.items()}
    if isinstance(example_inputs, (tuple, list)):
        return rebuilt(example_inputs, [micro_batch_spec(value, micro_batches) for value in example_inputs])
    return example_inputs


def join_example(example_inputs: Any) -> tuple[Any, int]:
    """The batch of an example that is a list of micro-batches, and their number: all are as the largest of them. Any
    other example as it is, and 0."""
    if type(example_inputs) is not list or not example_inputs or not all(map(_has_values, example_inputs)):
        return example_inputs, 0
    if len({frozenset(each) for each in example_inputs}) > 1:
        raise PlanError("example_inputs is a list of micro-batches, which have other inputs each; all have the same")
    largest = max(example_inputs, key=lambda each: sum(x.numel() for x in tree_leaves(each) if is_tensor(x)))
    return repeat(largest, len(example_inputs)), len(example_inputs)


def _has_values(batch: Any) -> bool:
    """Whether a batch is a dict with tensors, and no descriptions of some."""
    leaves = tree_leaves(batch, is_leaf=is_spec) if isinstance(batch, dict) else []
    return any(map(is_tensor, leaves)) and not any(map(is_spec, leaves))


def as_dicts(batch: Any) -> Any:
    """A batch of a tokenizer, or a list of them, as the dict that it wraps: for pytree a `UserDict` is one leaf."""
    if isinstance(batch, UserDict):
        return dict(batch)
    return [as_dicts(each) for each in batch] if type(batch) is list else batch


def flatten(model: nn.Module, batch: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by the placeholder names that capture gives them, and the text of every other leaf.

    Raises `BatchError` for arrays of other libraries.
    """
    found: dict[str, Any] = {}
    flags: dict[str, str] = {}

    def walk(name: str, value: Any) -> None:
        if is_spec(value) or isinstance(value, torch.Tensor):
            found[input_name(name)] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                walk(f"{name}.{i}", item)
        elif is_tensor_like(value):
            raise BatchError(f"batch[{name!r}] is a {type(value).__name__}; pass a torch.Tensor (torch.as_tensor)")
        else:
            flags[input_name(name)] = repr(value)

    batch = with_unread(batch)
    if isinstance(batch, Mapping) and not is_spec(batch):
        walk("", batch)
    elif isinstance(batch, (tuple, list)):
        for name, value in zip(entry_names(model, len(batch)), batch):
            walk(name, value)
    else:
        walk(entry_names(model, 1)[0], batch)
    return found, flags


def _find_part(value: Any, name: str, kind: Any = object, path: str = "", text: str = "batch") -> str:
    """The part of the batch that has this name and is of this kind, as a script writes it; "" for none."""
    if path and input_name(path) == name and isinstance(value, kind):
        return text
    if is_tensor_like(value) or not isinstance(value, (Mapping, tuple, list)):
        return ""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    rows = ((f"{path}.{key}" if path else str(key), f"{text}[{key!r}]", item) for key, item in items)
    return next(filter(None, (_find_part(item, name, kind, *place) for *place, item in rows)), "")


def _shape(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    dtype = value.get("dtype", "float32")
    return tuple(value["shape"]), dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
