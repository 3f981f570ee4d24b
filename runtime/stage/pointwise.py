"""Pointwise results that backward needs are computed again in it, instead of being saved.

Autograd saves what each call's derivative reads: of a GELU that is written in eight calls, seven tensors of the size of
the first. Here the forward runs under `PointwiseAgain`, which knows how each result was made of others by cheap calls
(one pass over their operands: pointwise calls, casts, copies, concatenation, normalisation of rows). A result is saved
as a recipe where the tensors that it needs are saved anyway, or are smaller than itself. Backward repeats the same
calls on the same values, so that gradients have the same bits. Nothing random is ever repeated. (Chen et al. 2016,
"Training deep nets with sublinear memory cost", drop the results of cheap operations so.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_names import TorchDispatchMode, storage_of_weak_ptr, tree_map_only
from .operators import is_cheap, written_tensors


class _Result:
    """A storage that a forward has made. `call`: how cheap calls make it; None for the result of another call. `held`:
    what `pack` gave for it, once it is saved. `waiting`: the number of saved views that backward has not read yet."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.ref = StorageWeakRef(storage)  # keeps the storage's identity, not its memory
        self.num_bytes = storage.nbytes()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.call: _Call | None = None
        self.held: Any = None
        self.value: Tensor | None = None
        self.waiting = 0

    @property
    def is_held(self) -> bool:
        return self.held is not None

    @property
    def is_made(self) -> bool:
        """Whether it can be read without a call."""
        return self.is_held or self.value is not None


@dataclass(frozen=True)
class _Call:
    """A cheap call; tensors among its arguments are `_View`s. `index`: which of several outputs the result is."""

    func: Any
    args: Any
    kwargs: Any
    index: int | None

    def views(self) -> list[_View]:
        found: list[_View] = []
        tree_map_only(_View, found.append, (self.args, self.kwargs))
        return found


@dataclass(frozen=True, eq=False)
class _View:
    """A tensor, as the part of a result that it shows; or a weight, which `pack` has `packed`."""

    of: _Result | None
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    packed: Any = None


@dataclass
class PointwiseAgain:
    """Run a forward inside `hooks()`. `pack` and `unpack` are how else a tensor is saved; `is_weight` tells tensors
    whose memory lasts anyway; `flat` shows all of a storage as a tensor."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    is_weight: Callable[[Tensor], bool]
    flat: Callable[[torch.UntypedStorage, torch.dtype, torch.device], Tensor] = field(
        default=lambda *of: flat_tensor(*of)
    )
    results: dict[int, _Result] = field(default_factory=dict)  # by storage
    saved: list[weakref.ref[_View]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mode = _Watching(self)
        self.hooks = saved_tensors_hooks(self.save, self.read)

    def __enter__(self) -> PointwiseAgain:
        self.mode.__enter__()
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        self.mode.__exit__(*error)
        self.results.clear()  # autograd holds `save`, which holds this
        self.saved.clear()

    # --- forward

    def note_output(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember how a cheap call made its first output, unless it shows an operand."""
        first, index = (out, None) if isinstance(out, Tensor) else (out[0], 0)
        shown_args, shown_kwargs = tree_map_only(Tensor, self.view, (args, kwargs))
        result = _Result(first)
        if result.ref.cdata not in self.results:
            result.call = _Call(func, shown_args, shown_kwargs, index)
            self.results[result.ref.cdata] = result

    def view(self, tensor: Tensor) -> _View:
        if self.is_weight(tensor):
            return _View(None, tensor.dtype, packed=self.pack(tensor.detach()))
        key = tensor.untyped_storage()._cdata
        if key not in self.results:
            self.results[key] = _Result(tensor)
        offset = int(tensor.storage_offset())
        return _View(self.results[key], tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def save(self, tensor: Tensor) -> _View:
        """The value that autograd keeps for a tensor."""
        with self.mode.pause_watching():
            view = self.view(tensor)
            if view.of is not None:
                if view.of.call is None or self._price(view.of.call, view.of.num_bytes) is None:
                    self._hold(view.of)
                view.of.waiting += 1
                self.saved.append(weakref.ref(view))
            return view

    def _price(self, call: _Call, limit_bytes: int) -> int | None:
        """Hold what a call needs, if that takes less than `limit_bytes` more; its bytes, or None where it is not so."""
        wanted = self._operands_to_hold(call)
        if wanted is None or sum(result.num_bytes for result in wanted) >= limit_bytes:
            return None
        for result in wanted:
            self._hold(result)
        return sum(result.num_bytes for result in wanted)

    def _operands_to_hold(self, call: _Call) -> set[_Result] | None:
        """Results to hold so that a call can be repeated; None where one is gone. Of an operand that was made by cheap
        calls, the operand itself, unless what it was made of takes less."""
        found: set[_Result] = set()
        for view in call.views():
            result = view.of
            if result is None or result.is_held or result in found:
                continue
            deeper = self._operands_to_hold(result.call) if result.call is not None else None
            deeper_bytes = sum(r.num_bytes for r in deeper) if deeper is not None else None
            if (
                deeper is not None
                and deeper_bytes is not None
                and (deeper_bytes < result.num_bytes or result.ref.expired())
            ):
                found |= deeper
            elif result.ref.expired():
                return None
            else:
                found.add(result)
        return found

    def _hold(self, result: _Result) -> None:
        if not result.is_held:
            storage = storage_of_weak_ptr(result.ref.cdata)
            result.held = self.pack(self.flat(storage, result.dtype, result.device))

    def changes(self, tensor: Tensor) -> None:
        """Before a tensor is written in place: what was to be made of it is made now, and nothing will be later."""
        changed = self.results.get(tensor.untyped_storage()._cdata)
        if changed is None:
            return
        for saved in self.saved:
            view = saved()
            if view is not None and view.of is not None and not view.of.is_held and _rests_on(view.of, changed):
                view.of.held = self.pack(self._value(view.of))
        for result in list(self.results.values()):
            if result.call is not None and not result.is_held and _rests_on(result, changed):
                result.call = None
        self.results.pop(changed.ref.cdata, None)  # what is saved of it from now on has other values

    # --- backward

    def read(self, view: _View) -> Tensor:
        """The tensor that autograd saved."""
        if view.of is None:
            return self.unpack(view.packed)
        result = view.of
        with torch.no_grad(), self.mode.pause_watching():
            base = self._value(result)
            result.waiting -= 1
            result.value = base if result.waiting > 0 and not result.is_held else None
            return _view_of_base(base, view)

    def _value(self, result: _Result) -> Tensor:
        """A tensor in a result's storage, or in one like it. What is made for it on the way goes as soon as it can."""
        made: dict[_Result, Tensor] = {}
        order = _calls_for(result)
        reads = Counter(view.of for one in order if one.call and not one.is_made for view in one.call.views())

        def operand(view: _View) -> Tensor:
            if view.of is None:
                return self.unpack(view.packed)
            reads[view.of] -= 1
            base = made[view.of] if reads[view.of] > 0 or view.of not in made else made.pop(view.of)
            return _view_of_base(base, view)

        for one in order:
            if one.is_made:
                made[one] = one.value if one.value is not None else self.unpack(one.held)
            else:
                assert one.call is not None
                args, kwargs = tree_map_only(_View, operand, (one.call.args, one.call.kwargs))
                out = one.call.func(*args, **kwargs)
                made[one] = out if one.call.index is None else out[one.call.index]
                del args, kwargs, out
        return made[result]


class _Watching(TorchDispatchMode):
    """Shows every aten call of a forward to a `PointwiseAgain`."""

    def __init__(self, owner: PointwiseAgain):
        super().__init__()
        self.owner = owner
        self.is_idle = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, and each is wrapped once more

    @contextmanager
    def pause_watching(self) -> Iterator[None]:
        before, self.is_idle = self.is_idle, True
        try:
            yield
        finally:
            self.is_idle = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_idle:
            return func(*args, **kwargs)
        with self.pause_watching():
            for tensor in written_tensors(func, args, kwargs):
                self.owner.changes(tensor)
            out = func(*args, **kwargs)
            if is_cheap(func):
                self.owner.note_output(func, args, kwargs, out)
        return out


def _calls_for(result: _Result) -> list[_Result]:
    """The calls that exist or must be repeated for a result, operands first; the result last."""
    order: dict[_Result, None] = {}
    stack = [(result, False)]
    while stack:
        one, is_ready = stack.pop()
        if is_ready or one.is_made:
            order.setdefault(one)
        elif one not in order:
            assert one.call is not None
            stack.append((one, True))
            stack += [(view.of, False) for view in one.call.views() if view.of is not None]
    return list(order)


def _rests_on(result: _Result, other: _Result) -> bool:
    """Whether a result would be made of another one's storage, or is that storage."""
    if result is other:
        return True
    if result.is_held or result.call is None:
        return False
    return any(view.of is not None and _rests_on(view.of, other) for view in result.call.views())


def flat_tensor(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All of a storage as a tensor of one dimension."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def _view_of_base(base: Tensor, view: _View) -> Tensor:
    if base.dtype != view.dtype:
        base = base.as_strided((base.untyped_storage().nbytes() // base.dtype.itemsize,), (1,), 0).view(view.dtype)
    return base.as_strided(view.shape, view.stride, view.offset)
