"""Classes of saved tensors, executed: outputs of a stage's costly calls that one forward keeps and the next takes.

Fuyou (4.5, eq. 12) swaps the outputs of a transformer's linear layers, so that rematerialisation need not compute them.
Here a class is what any one costly call of a stage gives: a matrix product, also one in batches, a convolution, or
fused attention, whose output and log-sum-exp are kept together, since its backward needs both. A forward without
autograd runs under `Keeping`, which counts these calls in order and keeps the outputs of those chosen. The forward that
backward runs again is under `Taking`, below autograd: it hands back the kept outputs in place of computing them, so
that autograd records the same graph and gradients are the same bits. Nothing random is ever a class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.errors import VerifyError
from ...ir.program import SavedSpec, StageSpec, aligned

aten = torch.ops.aten
# Each product is one call on CPU and on CUDA, whatever the kernels. Of attention's kernels only that of CPUs is here:
# those of CUDA also give the state of a generator, not all of it on the device.
COSTLY = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    )
)
PART = "/"  # before the number of a call's further results in their names

Look = tuple[Any, ...]  # the op and what it is given, without values
Results = Tensor | tuple[Tensor, ...]


class SavedClasses:
    """The classes of one stage, and what their calls looked like in its first forward: all others must look alike."""

    def __init__(self, spec: StageSpec):
        self.stage = spec.name
        self.rows = {row.name: row for row in spec.saved}
        self.looks: dict[str, Look] = {}
        self.count: int | None = None  # of costly calls in a forward, once one has run

    def keeping(self, names: Sequence[str]) -> Keeping:
        """For a forward without autograd that keeps these classes."""
        return Keeping(self, self._by_number(names))

    def taking(self, tensors: Mapping[str, Tensor]) -> Taking:
        """For a forward with autograd that takes what an earlier one kept."""
        return Taking(self, self._by_number([name for name in tensors if PART not in name]), tensors)

    def _by_number(self, names: Sequence[str]) -> dict[int, SavedSpec]:
        found: dict[int, SavedSpec] = {}
        for name in names:
            row = self.rows.get(name)
            if row is None:
                known = ", ".join(self.rows) or "none"
                raise VerifyError(f"{self.stage} has no class {name!r} of saved tensors; it has {known}")
            if len(row.calls) != 1 or row.calls[0] in found:
                raise VerifyError(f"class {name!r} of {self.stage} must be one call of its own; it is {row.calls}")
            found[row.calls[0]] = row
        return found

    def look(self, row: SavedSpec, look: Look, out: Results) -> None:
        """Remember how a class's call looks, or compare. Raises `VerifyError` if plan and runs do not agree."""
        if row.name not in self.looks:
            found = result_bytes(out)
            if found != row.bytes:
                raise VerifyError(
                    f"class {row.name!r} of {self.stage} has {found} bytes, planned {row.bytes}; the plan is of "
                    "another model, or the stage's file was changed"
                )
            self.looks[row.name] = look
        elif self.looks[row.name] != look:
            raise VerifyError(f"class {row.name!r} of {self.stage}: the call was {self.looks[row.name]}, now {look}")

    def finish(self, count: int, missing: Sequence[SavedSpec]) -> None:
        """End a forward with `count` costly calls. Raises `VerifyError` for classes whose calls it did not make."""
        if missing:
            row = missing[0]
            raise VerifyError(
                f"class {row.name!r} of {self.stage} is costly call {row.calls[0]} of its forward, which makes {count}"
            )
        if self.count not in (None, count):
            raise VerifyError(f"{self.stage} made {self.count} costly calls in a forward, and {count} in another")
        self.count = count


class _Counting(TorchDispatchMode):
    """Counts costly calls. Every aten call passes through here, so as little as possible is done."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, and each is wrapped once more

    def __init__(self, classes: SavedClasses, wanted: dict[int, SavedSpec]):
        super().__init__()
        self.classes, self.wanted = classes, wanted
        self.count = 0

    def finish(self) -> None:
        """Call it after the forward, which must have run to its end. Raises `VerifyError`."""
        self.classes.finish(self.count, [row for number, row in self.wanted.items() if number >= self.count])


class Keeping(_Counting):
    """`tensors`: class name to the output that was kept. Raises `VerifyError` if the stage changes one in place."""

    def __init__(self, classes: SavedClasses, wanted: dict[int, SavedSpec]):
        super().__init__(classes, wanted)
        self.tensors: dict[str, Tensor] = {}
        self.owner: dict[int, str] = {}  # address of a kept storage -> its class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func in COSTLY:
            row = self.wanted.get(self.count)
            self.count += 1
            if row is not None:
                self.classes.look(row, look_of(func, args, kwargs, out), out)
                for part_name, part in zip(_part_names(row.name), parts_of(out)):
                    self.tensors[part_name] = part
                    self.owner[part.untyped_storage().data_ptr()] = row.name
        elif self.owner and written_arguments(func):
            for tensor in written(func, args, kwargs or {}):
                name = self.owner.get(tensor.untyped_storage().data_ptr())
                if name is not None:
                    raise VerifyError(
                        f"{self.classes.stage} changes class {name!r} in place ({func}) after the call that made it; "
                        "it cannot be kept"
                    )
        return out


class Taking(_Counting):
    """Hands out `tensors` in place of computing them."""

    def __init__(self, classes: SavedClasses, wanted: dict[int, SavedSpec], tensors: Mapping[str, Tensor]):
        super().__init__(classes, wanted)
        self.tensors = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COSTLY:
            row = self.wanted.get(self.count)
            self.count += 1
            if row is not None:
                parts = tuple(self.tensors[name] for name in _part_names(row.name) if name in self.tensors)
                kept = parts if len(func._schema.returns) > 1 else parts[0]
                self.classes.look(row, look_of(func, args, kwargs, kept), kept)
                taken = tuple(part.detach() for part in parts)  # of their own: autograd may make them part of the graph
                return taken if isinstance(kept, tuple) else taken[0]
        return func(*args, **kwargs) if kwargs else func(*args)


def parts_of(out: Results) -> tuple[Tensor, ...]:
    """The results of a costly call."""
    return out if isinstance(out, tuple) else (out,)


def result_bytes(out: Results) -> int:
    """Bytes of a costly call's results in one buffer, each aligned."""
    *first, last = (part.nbytes for part in parts_of(out))
    return sum(map(aligned, first)) + last


def _part_names(name: str) -> tuple[str, ...]:
    return name, f"{name}{PART}1"


def look_of(func: Any, args: Any, kwargs: Any, out: Results) -> Look:
    """What tells two calls apart, except for the values of their operands."""
    results = ((_look(part), part.stride()) for part in parts_of(out))
    return (func, *map(_look, args), *((k, _look(v)) for k, v in (kwargs or {}).items()), *results)


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an aten op writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes."""
    for position, name in written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor))
