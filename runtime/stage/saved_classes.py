"""Classes of saved tensors, executed: outputs of a stage's costly calls that one forward keeps and the next takes.

Fuyou (4.5, eq. 12) swaps the outputs of a transformer's linear layers, so that rematerialisation need not compute them.
Here a class is what any one costly call of a stage gives: a matrix product, also one in batches or in groups, a
convolution, or fused attention, whose output and log-sum-exp are kept together, since its backward needs both. What
else CUDA's attention returns (where its dropout's draws began) is a few bytes, stays where it is, and is handed back as
it was. A forward without autograd runs under `Keeping`, which counts these calls in order and keeps the outputs of
those chosen. The forward that backward runs again is under `Taking`, below autograd: it hands back the kept outputs in
place of computing them, so that autograd records the same graph and gradients are the same bits. Attention with dropout
that is taken moves the generator on as if it had drawn. Nothing else that is random is ever a class.

Only the costly calls come through Python: they have kernels at a dispatch key of torch's between autograd and
the devices, that no tensor has, and that a thread switches on around such a forward. The first forward of each kind is
watched whole, call by call, by a mode: it finds what changes a kept tensor, and which costly calls are made inside
of others; a stage makes the same calls every time. Attention as single calls is the exception: without a mode torch
adds the mask to the scores in place, so stages with it are always watched whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from ...ir.errors import VerifyError
from ...ir.program import SavedSpec, StageSpec, aligned
from ..accelerator import generator_of
from ..torch_names import TorchDispatchMode, dispatch_key_parse, dispatch_keyset_full_after, include_dispatch_key
from .operators import COSTLY, CUDA_ATTENTION, GIVES_ROWS, written_tensors

EFFICIENT_ROWS = 32  # the efficient kernel pads rows to a multiple of these
PART = "/"  # before the number of a call's further results in their names

Look = tuple[Any, ...]  # the op and what it is given, without values
Results = Tensor | tuple[Any, ...]


@dataclass(frozen=True)
class Aside:
    """The results of a costly call besides the kept tensors, and the offset by which it moved the GPU's generator."""

    results: tuple[Any, ...] = ()
    drawn: int = 0


class SavedClasses:
    """The classes of one stage, and what their calls looked like in its first forward: all others must look alike."""

    def __init__(self, spec: StageSpec):
        self.stage = spec.name
        self.rows = {row.name: row for row in spec.saved}
        self.left_out = frozenset(spec.again.calls if spec.again is not None else ())  # when forward runs again
        self.looks: dict[str, Look] = {}
        self.count: int | None = None  # of costly calls in a forward, once one has run
        self.inner: dict[type[_Watch], set[int]] = {}  # after the first of a kind: numbers of calls inside of others
        self.adds_in_place = False  # as single calls, attention changes a product's output where no mode is on

    def keeping(self, names: Sequence[str]) -> Keeping:
        """For a forward without autograd that keeps these classes."""
        return Keeping(self, self._rows_by_number(names))

    def taking(self, tensors: Mapping[str, Tensor], aside: Mapping[str, Aside]) -> Taking:
        """For a forward with autograd that takes what an earlier one kept."""
        return Taking(self, self._rows_by_number([name for name in tensors if PART not in name]), tensors, aside)

    def _rows_by_number(self, names: Sequence[str]) -> dict[int, SavedSpec]:
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

    def look(self, row: SavedSpec, func: Any, look: Look, out: Results) -> None:
        """Remember how a class's call looks, or compare. Raises `VerifyError` if plan and runs do not agree."""
        if row.name not in self.looks:
            found = attention_bytes(parts_of(out)[0]) if func in CUDA_ATTENTION else result_bytes(out)
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


class _Watch:
    """Sees the costly calls that the calling thread makes inside of it."""

    def __init__(self, classes: SavedClasses, wanted: dict[int, SavedSpec]):
        self.classes, self.wanted = classes, wanted
        self.count = 0
        self.left_out: frozenset[int] = frozenset()  # numbers of calls that this forward does not make
        self.number = 0  # of the next call, counted with those that are made inside of others
        self.is_within = False  # inside a costly call: what it is made of is no call of the stage
        inner = classes.inner.get(type(self))
        self.inner: set[int] = set() if inner is None else inner
        self.whole = _Whole(self) if inner is None or classes.adds_in_place else None

    def __enter__(self) -> _Watch:
        self.before = getattr(_now, "watch", None)
        _now.watch = self
        include_dispatch_key(_KEY, True)
        if self.whole is not None:
            self.whole.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.whole is not None:
            self.whole.__exit__(*error)
            self.whole = None  # a ring of the two would hold the tensors until Python looks for rings
        _now.watch = self.before
        include_dispatch_key(_KEY, self.before is not None)

    def call(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any, is_inner: bool) -> Any:
        """One costly call, which `run` computes. `is_inner`: known to be made inside of a call that is not costly."""
        if self.is_within:
            return run(*args, **kwargs)
        number = self.number
        self.number += 1
        if is_inner:
            self.inner.add(number)
        row = None
        if number not in self.inner:
            self.pass_left_out()
            row = self.wanted.get(self.count)
            self.count += 1
        self.is_within = True
        try:
            if row is None:
                return run(*args, **kwargs)
            if func in GIVES_ROWS:  # attention must give its rows' log-sum-exp
                args = (*args[:4], True, *args[5:])
            return self.run_chosen(row, func, run, args, kwargs)
        finally:
            self.is_within = False

    def pass_left_out(self) -> None:
        while self.count in self.left_out:
            self.count += 1

    def run_chosen(self, row: SavedSpec, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of a class."""
        raise NotImplementedError

    def look(self, row: SavedSpec, func: Any, args: Any, kwargs: Any, out: Results) -> None:
        """In the first forward of a kind, and of a class: see `SavedClasses.look`."""
        if self.whole is not None or row.name not in self.classes.looks:
            self.classes.look(row, func, look_of(func, args, kwargs, out), out)

    def changes(self, func: Any, tensor: Tensor) -> None:
        """A call writes a tensor."""

    def finish(self) -> None:
        """Call it after the forward, which must have run to its end. Raises `VerifyError`."""
        self.pass_left_out()
        self.classes.finish(self.count, [row for number, row in self.wanted.items() if number >= self.count])
        self.classes.inner[type(self)] = self.inner


class _Whole(TorchDispatchMode):
    """Shows every aten call of a forward to its watch."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self.watch = watch
        self.is_within = False  # inside a call that is not costly

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, and each is wrapped once more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COSTLY:
            return self.watch.call(func, func, args, kwargs, False)
        for tensor in written_tensors(func, args, kwargs):
            self.watch.changes(func, tensor)
        if func is torch.ops.aten._safe_softmax.default:  # nothing else calls it
            self.watch.classes.adds_in_place = True
        self.is_within = True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_within = False


class Keeping(_Watch):
    """`tensors`: class name to the output that was kept; `aside` what else its call gave. Raises `VerifyError` if the
    stage changes one in place."""

    def __init__(self, classes: SavedClasses, wanted: dict[int, SavedSpec]):
        super().__init__(classes, wanted)
        self.tensors: dict[str, Tensor] = {}
        self.aside: dict[str, Aside] = {}
        self.owner: dict[int, str] = {}  # address of a kept storage -> its class, in a forward that is watched whole

    def run_chosen(self, row: SavedSpec, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = _offset(func, args)
        out = run(*args, **kwargs)
        self.look(row, func, args, kwargs, out)
        for name, part in zip(_part_names(row.name), parts_of(out)):
            self.tensors[name] = part
            if self.whole is not None:
                self.owner[part.untyped_storage().data_ptr()] = row.name
        if func in CUDA_ATTENTION:
            self.aside[row.name] = Aside(out[2:], _offset(func, args) - before)
        return out

    def changes(self, func: Any, tensor: Tensor) -> None:
        name = self.owner.get(tensor.untyped_storage().data_ptr())
        if name is not None:
            raise VerifyError(
                f"{self.classes.stage} changes class {name!r} in place ({func}) after the call that made it; "
                "it cannot be kept"
            )


class Taking(_Watch):
    """Hands out `tensors`, and what is `aside`, in place of computing them."""

    def __init__(
        self,
        classes: SavedClasses,
        wanted: dict[int, SavedSpec],
        tensors: Mapping[str, Tensor],
        aside: Mapping[str, Aside],
    ):
        super().__init__(classes, wanted)
        self.tensors, self.aside, self.left_out = tensors, aside, classes.left_out

    def run_chosen(self, row: SavedSpec, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        parts = tuple(self.tensors[name] for name in _part_names(row.name) if name in self.tensors)
        kept = parts if len(func._schema.returns) > 1 else parts[0]
        self.look(row, func, args, kwargs, kept)
        aside = self.aside.get(row.name, Aside())
        if aside.drawn:
            _offset(func, args, aside.drawn)
        # of their own: autograd may make them part of the graph
        taken = tuple(v.detach() if isinstance(v, Tensor) else v for v in (*parts, *aside.results))
        return taken if isinstance(kept, tuple) else taken[0]


# The key of libraries outside of torch, directly below the one of Python's modes. Nothing of torch has kernels there.
_KEY = dispatch_key_parse("Fake")
_BELOW = dispatch_keyset_full_after(_KEY)
_now = threading.local()  # `watch`: that of the thread, while the key is switched on


def _costly_call(func: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    watch = _now.watch
    inner = watch.whole is not None and watch.whole.is_within
    return watch.call(func, functools.partial(func.redispatch, keys & _BELOW), args, kwargs, inner)


def _kernels() -> tuple[Library, Library]:
    """The kernels at the key, as long as the libraries live: one for each costly call, none for all others."""
    others, ours = Library("_", "IMPL"), Library("aten", "IMPL", "Fake")
    others.fallback(fallthrough_kernel, "Fake")
    for func in COSTLY:
        ours.impl(func, functools.partial(_costly_call, func), with_keyset=True)
    return others, ours


_LIBRARIES = _kernels()


def _offset(func: Any, args: Any, drawn: int = 0) -> int:
    """The offset of the generator that attention on a GPU draws from, after it was moved on by `drawn`."""
    if func not in CUDA_ATTENTION or not args[0].is_cuda:
        return 0
    generator = generator_of(args[0].device)
    if drawn:
        generator.set_offset(generator.get_offset() + drawn)
    return generator.get_offset()


def parts_of(out: Results) -> tuple[Tensor, ...]:
    """The results of a costly call that are kept: of attention's its output and log-sum-exp."""
    return out[:2] if isinstance(out, tuple) else (out,)


def result_bytes(out: Results) -> int:
    """Bytes of a costly call's results in one buffer, each aligned."""
    *first, last = (part.nbytes for part in parts_of(out))
    return sum(map(aligned, first)) + last


def attention_bytes(out: Tensor) -> int:
    """The same for an output of CUDA's attention with its log-sum-exp, whichever kernel the device takes: the number of
    rows is that of the kernel that pads them."""
    batch, heads, rows, _ = out.shape
    return aligned(out.nbytes) + batch * heads * aligned(rows, EFFICIENT_ROWS) * torch.float32.itemsize


def _part_names(name: str) -> tuple[str, ...]:
    return name, f"{name}{PART}1"


def look_of(func: Any, args: Any, kwargs: Any, out: Results) -> Look:
    """The key that tells two calls apart, without the values of their operands."""
    results = ((_look(part), part.stride()) for part in parts_of(out))
    return (func, *map(_look, args), *((k, _look(v)) for k, v in (kwargs or {}).items()), *results)


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return tuple(value) if isinstance(value, list) else value
