"""Rows that a mask chooses by its values, such as the tokens of an expert: in a program all rows go through what is
computed of them, and results of those that were not chosen are left out where they are written back.

A forward loops over the experts that got tokens (`for e in hit.nonzero()`), or leaves one without tokens out
(`if places.numel() == 0: continue`). A program has the loop for every expert. Where eager skips one, a condition says
so: results do not count, and parameters get no gradient (`runtime/functions/chosen.py`), so that an optimizer leaves
them alone as in eager.

In: calls as the user's code makes them. Out: calls of fixed sizes. At the end a proof, without which the model is
refused: nothing but what is written back leaves a loop, and of what is computed each row follows from its own row.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ....graph.dataflow import closure
from ....graph.edit import GraphEdit, replace_uses
from ....graph.follow.engine import meeting_rows
from ....graph.opgraph import OpGraph, value_tensors
from ....ir.calls import call_name
from ....ir.errors import CaptureError
from ....runtime.functions.chosen import gradient_if
from ....runtime.torch_names import DisableTorchFunction, FakeTensor, assert_async
from ..rows.sizes import OtherTrace
from .branches import answer_about_length, span_of_branch
from .chosen_count import ChosenCount
from .fixed_sizes import is_mask, map_leaves

NOT_CHOSEN = object()
MOST_TURNS = 1024  # of a loop over places
_TEXT = (
    "needs the values of activations, such as which tokens an expert gets. A program computes all rows, and leaves out "
    "those that were not chosen where they are written back to their places (index_add_, y[places] = ..., y[mask] = "
    "...): up to there each row must follow from its own, nothing else may leave a part that is run for chosen rows "
    "alone, and their number may be compared with 0 only (`if places.numel() == 0: continue`). Elsewhere use "
    "torch.where and masks of all rows. In a mixture of transformers, "
    'model.set_experts_implementation("batched_mm") may do'
)
_COUNTS = ("size", "shape", "numel", "nelement", "__len__")
_SHAPES = ("view", "reshape", "expand", "unflatten")
_FLAT = ("squeeze", "flatten", "view", "reshape", "ravel")


@dataclass(eq=False)
class MaskPlaces:
    """The places of a mask. `valid`: for each place, whether it is chosen; `numbers`: of each dimension of the mask;
    `entries`: nodes with a row for each place, and along which dimension; `written`: the nodes that leave out rows,
    and of which values; `condition`: without which eager does not come here."""

    sizes: tuple[int, ...]
    valid: Tensor
    numbers: tuple[Tensor, ...]
    mask: fx.Node
    text: str
    condition: Tensor | None
    entries: dict[fx.Node, int] = field(default_factory=dict)
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(eq=False)
class SkippedSpan:
    """A part of forward that eager runs under a condition. `path`: its number within each of the parts around it;
    `branch`: its frame and its instructions there, of a branch; `first` and `last`: the nodes before it and at its end;
    `steps`: those of the recorder."""

    condition: Tensor
    text: str
    path: tuple[int, ...]
    branch: tuple[FrameType, range] | None  # None for a turn of a loop over places, which tells its end
    first: fx.Node | None
    steps: range
    last: fx.Node | None = None


class ChosenRows:
    """The masks of one run of forward, beside the recorder that runs it."""

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.places: list[MaskPlaces] = []
        self.numbers: dict[int, tuple[MaskPlaces, int]] = {}  # id of a tensor of numbers -> its mask and dimension
        self.lists: dict[int, MaskPlaces] = {}  # id of what nonzero() gives
        self.follows: set[fx.Node] = set()  # nodes that have rows by places
        self.ends: set[fx.Node] = set()  # nodes that leave rows out
        self.results: dict[fx.Node, fx.Node | None] = {}  # those that write back -> what they give without rows
        self.segments: list[list[MaskPlaces]] = []  # those of each split by sizes
        self.read: tuple[FrameType, int] | None = None  # the instruction that has taken a `ChosenCount` as a number
        self.is_writing = False
        self.skipped: dict[fx.Node, fx.Node] = {}  # nodes that eager may leave out -> on which condition
        self.open: list[SkippedSpan] = []
        self.closed: list[SkippedSpan] = []
        self.begun: dict[tuple[int, ...], int] = {}  # path of a part -> the number of parts in it so far

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Record another call, also where the user's code runs."""
        with DisableTorchFunction():
            return self.recorder.on_function(func, args, kwargs)

    # --- while forward runs

    def perform(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call that makes or takes places; NOT_CHOSEN for other calls."""
        name = getattr(func, "__name__", "")
        if self.read is not None:
            self._require_shape(name)
        self.close()
        if name in ("where", "nonzero", "argwhere") and len(args) == 1 and self._is_choice(args[0]):
            places = self._places(args[0])
            if name == "where" or kwargs.get("as_tuple"):
                return places.numbers
            listed = self.call(torch.stack, list(places.numbers), 1)
            self.lists[id(listed)] = places
            return listed
        if name == "item" and (listed := self._item_of(args[0])) is not None:
            return ChosenCount(listed, self, None)
        if name == "split" and len(args) > 1 and (sizes := self._sizes(args[1])) is not None:
            return self._split(args[0], sizes, *args[2:], **kwargs)
        if name == "cat" and self.segments:
            return self._join(*args, **kwargs)
        if name == "__getitem__":
            key = self._replace_masks(args[1])
            if key is not args[1] or self.places:
                return self._read(args[0], key) if key is args[1] else self._get(args[0], key)
            return NOT_CHOSEN
        if not self.places or self.is_writing:
            return NOT_CHOSEN
        self._require_sizes(name, args, kwargs)
        is_loop = name == "__iter__" or (name == "unbind" and args[1:] in ((), (0,)) and not kwargs)
        if is_loop and (listed := self._list_places(args[0])) is not None:
            return self._turns(args[0], listed)
        if name in _FLAT and id(args[0]) in self.lists and len(self.lists[id(args[0])].sizes) == 1:
            return self.lists[id(args[0])].numbers[0]
        if name in ("index_add", "index_add_"):
            return self._add(func, *args, **kwargs)
        if name in ("__setitem__", "index_put", "index_put_"):
            return self._put(func, *args, **kwargs)
        return NOT_CHOSEN

    def _require_shape(self, name: str = "") -> None:
        """A number of rows was an argument of this call, which makes a shape."""
        frame = next(iter(self.recorder.lines.frames(1)), None)
        if name not in _SHAPES or frame is None or self.read != (frame, frame.f_lasti):
            self.refuse()
        self.read = None

    def _require_sizes(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """A number of rows is no number of a call, but for the shape of such rows."""
        leaves: list[Any] = []
        map_leaves(leaves.append, (args, kwargs))
        if any(type(leaf) is ChosenCount for leaf in leaves) and not (name in _SHAPES and self.has(args[0])):
            self.refuse()

    def note(self, node: fx.Node) -> None:
        """Follow rows by places through a call."""
        if self.follows and node not in self.ends and not self.follows.isdisjoint(node.all_input_nodes):
            self.follows.add(node)

    def has(self, value: Any) -> bool:
        """Whether a tensor is made of rows by places."""
        return bool(self.follows) and self.recorder.node_of.get(id(value)) in self.follows

    def answer(self, query: str, tensor: Any, answer: Any) -> Any:
        """The answer to a query; what counts chosen rows is a `ChosenCount`."""
        if query not in _COUNTS or not self.has(tensor):
            return answer
        found = self._find_places(self.recorder.node_of[id(tensor)])

        def count(number: Any) -> Any:
            is_other = found is not None and (number % found.count or not number)
            return number if is_other else ChosenCount(number, self, found)

        if query == "__len__" and isinstance(counted := count(answer), ChosenCount):  # len() makes a plain number of it
            (frame,) = self.recorder.lines.frames(1)
            truth = answer_about_length(frame)
            if truth is None:
                self.refuse()
            return answer if self.decide(counted, truth, frame) == truth else 0
        return tuple(map(count, answer)) if isinstance(answer, tuple) else count(answer)

    def decide(self, count: ChosenCount, answer: bool, frame: FrameType) -> bool:
        """A branch of the user's code asks whether there are rows. `answer`: where there are some."""
        inside = span_of_branch(frame, answer)
        if inside is None or count.of is None:
            self.refuse()
        self.close()
        span = self._begin(self.call(torch.any, count.of.valid), (frame, inside))
        return answer if span is not None else not answer

    def refuse(self) -> NoReturn:
        raise CaptureError(self._text())

    def _text(self) -> str:
        return f"{self.recorder.lines.where()}\n  {_TEXT}"

    def _is_choice(self, value: Any) -> bool:
        """Whether a tensor's values are told by activations."""
        recorder = self.recorder
        is_fixed = recorder.fake_mode.shape_env is None
        if not is_fixed or not isinstance(value, FakeTensor) or recorder.values.knows(value):
            return False
        node = recorder.node_of.get(id(value))
        if node is None or not value.dim() or not value.numel() or recorder.prologue.inputs_of((node,)):
            return False
        if recorder.rows is not None:
            raise OtherTrace(self._text())
        return True

    def _places(self, mask: Tensor) -> MaskPlaces:
        node = self.recorder.node_of[id(mask)]
        condition = self.open[-1].condition if self.open else None
        known = next((p for p in self.places if p.condition is condition and self._same(p.mask, node)), None)
        if known is not None:
            return known
        sizes, call = tuple(map(int, mask.shape)), self.call
        valid = call(torch.flatten, mask if mask.dtype == torch.bool else call(torch.ne, mask, 0))
        if condition is not None:  # the masks of those that are left out are empty
            text = f"{self.recorder.lines.current()}: rows are chosen where forward leaves them out"
            call(assert_async, call(torch.logical_or, call(torch.logical_not, call(torch.any, valid)), condition), text)
        numbers = [call(torch.arange, size) for size in sizes]
        if len(sizes) > 1:
            shapes = [[size if d == i else 1 for d in range(len(sizes))] for i, size in enumerate(sizes)]
            spread = [call(Tensor.expand, call(Tensor.view, n, shape), sizes) for n, shape in zip(numbers, shapes)]
            numbers = [call(torch.flatten, each) for each in spread]
        found = MaskPlaces(sizes, valid, tuple(numbers), node, self._text(), condition)
        self.places.append(found)
        for dim, number in enumerate(numbers):
            self.numbers[id(number)] = found, dim
            self._enter(found, number, 0)
        return found

    def _same(self, a: Any, b: Any) -> bool:
        """Whether two masks are computed alike, of values that nothing changes in place."""
        if a is b:
            return True
        if isinstance(b, fx.Node) and isinstance(a, fx.Node) and self._is_written_between(a, b):
            return False
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a.op == "placeholder" or a.meta["random"]:
            return type(a) is type(b) and not isinstance(a, (fx.Node, list, tuple, dict)) and bool(a == b)
        alike = (a.op, a.target, a.kwargs, len(a.args)) == (b.op, b.target, b.kwargs, len(b.args))
        fresh = not a.meta["mutates"] and a.meta["alias_of"] is None and b.meta["alias_of"] is None
        return alike and a.op != "get_attr" and fresh and all(map(self._same, a.args, b.args))

    def _is_written_between(self, node: fx.Node, last: fx.Node) -> bool:
        """Whether anything but rows by places is changed in place between two nodes, in the order of calls."""
        while (node := node.next) is not last and node.op != "root":
            if node.meta.get("mutates") and node not in self.follows:
                return True
        return False

    def _enter(self, places: MaskPlaces, value: Tensor, dim: int) -> None:
        node = self.recorder.node_of[id(value)]
        places.entries[node] = dim
        self.follows.add(node)

    def _find_places(self, node: fx.Node) -> MaskPlaces | None:
        """The places of whose rows a node is made, if they are of one mask."""
        above = closure([node], lambda n: [m for m in n.all_input_nodes if m in self.follows])
        found = [places for places in self.places if not above.isdisjoint(places.entries)]
        return found[0] if len(found) == 1 else None

    # --- reads

    def _replace_masks(self, key: Any) -> Any:
        """A key with places in place of masks."""
        items = key if isinstance(key, tuple) else (key,)
        if not any(is_mask(item) and self._is_choice(item) for item in items):
            return key
        return tuple(n for item in items for n in (self._places(item).numbers if is_mask(item) else (item,)))

    def _get(self, value: Tensor, key: tuple) -> Any:
        found = self._read(value, key)
        return self.call(Tensor.__getitem__, value, key) if found is NOT_CHOSEN else found

    def _key(self, value: Tensor, key: Any) -> tuple[MaskPlaces, int, list[int], tuple, tuple] | None:
        """The places of a key that has all numbers of each dimension of a value next to each other: those, the value's
        first dimension of them, the mask's dimensions, and the items before and after."""
        items = key if isinstance(key, tuple) else (key,)
        at = [i for i, item in enumerate(items) if isinstance(item, Tensor) and id(item) in self.numbers]
        if not at or at != list(range(at[0], at[-1] + 1)):
            return None
        found = [self.numbers[id(items[i])] for i in at]
        before, after, dims = items[: at[0]], items[at[-1] + 1 :], [dim for _, dim in found]
        plain = all(item is None or item is Ellipsis or item == slice(None) for item in (*before, *after))
        if len({id(places) for places, _ in found}) != 1 or len(set(dims)) != len(dims) or not plain:
            return None
        first = sum(item is not None for item in before)
        sizes = found[0][0].sizes
        fits = [*value.shape[first : first + len(dims)]] == [sizes[dim] for dim in dims]
        return (found[0][0], first, dims, before, after) if fits and Ellipsis not in before else None

    def _read(self, value: Any, key: Any) -> Any:
        """`value[key]` with numbers of places, as a row for each place."""
        found = self._key(value, key) if isinstance(value, Tensor) else None
        if found is None:
            return NOT_CHOSEN
        places, first, dims, before, after = found
        order = sorted(range(len(dims)), key=dims.__getitem__)
        call, rest = self.call, range(first + len(dims), value.dim())
        moved = call(Tensor.permute, value, (*range(first), *(first + i for i in order), *rest))
        for dim in sorted(set(range(len(places.sizes))) - set(dims)):
            moved = call(torch.unsqueeze, moved, first + dim)
        shape = (*value.shape[:first], *places.sizes, *(value.shape[i] for i in rest))
        flat = call(torch.flatten, call(Tensor.expand, moved, shape), first, first + len(places.sizes) - 1)
        flat = call(torch.clone, flat)
        if None in before or None in after:
            flat = call(Tensor.__getitem__, flat, (*before, slice(None), *after))
        self._enter(places, flat, len(before))
        return flat

    # --- writes

    def _left_out(self, places: MaskPlaces, values: Tensor) -> Tensor:
        """The values with zeros for rows that were not chosen."""
        if not self.has(values) or self._find_places(self.recorder.node_of[id(values)]) is not places:
            self.refuse()
        if values.shape[0] != places.count:
            self.refuse()
        call, given = self.call, self.recorder.node_of[id(values)]
        others = call(Tensor.view, call(torch.logical_not, places.valid), (places.count, *[1] * (values.dim() - 1)))
        kept = call(torch.masked_fill, values, others, 0)
        node = self.recorder.node_of[id(kept)]
        self.ends.add(node)
        self.follows.discard(node)
        places.written[node] = given
        return call(gradient_if, kept, self.open[-1].condition) if self.open else kept  # type: ignore[no-any-return]

    def _total(self, places: MaskPlaces, values: Tensor, dims: Sequence[int]) -> Tensor:
        """Values [places, ...] added up over the dimensions of the mask beside `dims`, which come first, in order."""
        shaped = self.call(torch.unflatten, values, 0, places.sizes)
        others = [dim for dim in range(len(places.sizes)) if dim not in dims]
        total = self.call(torch.sum, shaped, others, dtype=values.dtype) if others else shaped
        left = sorted(dims)
        if list(dims) == left:
            return total  # type: ignore[no-any-return]
        rest = range(len(dims), total.dim())
        return self.call(Tensor.permute, total, (*(left.index(dim) for dim in dims), *rest))  # type: ignore[no-any-return]

    def _add(self, func: Any, target: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Any:
        if not self.has(index) and not self.has(source):
            return NOT_CHOSEN
        places = self._find_places(self.recorder.node_of[id(index)]) if self.has(index) else None
        if places is None or dim != 0 or more:
            self.refuse()
        kept, into = self._left_out(places, source), self.recorder.node_of.get(id(target))
        raw = self._key(target, index)
        if raw is None:
            self.is_writing = True
            result = self.call(func, target, dim, index, kept)
            self.is_writing = False
            node = self.recorder.node_of[id(result)]
            self.ends.add(node)
            self.follows.discard(node)
            places.written[node] = self.recorder.node_of[id(index)]
        else:
            total = self._total(places, kept, raw[2])
            result = self.call(torch.add if func.__name__ == "index_add" else Tensor.add_, target, total)
        return self._result(result, into)

    def _put(self, func: Any, target: Tensor, key: Any, values: Any, accumulate: bool = False) -> Any:
        key = self._replace_masks(tuple(key) if isinstance(key, list) else key)
        items = key if isinstance(key, tuple) else (key,)
        if not self.has(values) and not any(self.has(item) for item in items):
            return NOT_CHOSEN
        found = self._key(target, key)
        if found is None or found[3] or None in found[4] or not isinstance(values, Tensor):
            self.refuse()
        places, _, dims, _, _ = found
        call, into = self.call, self.recorder.node_of.get(id(target))
        values = values if values.dtype == target.dtype else call(Tensor.to, values, target.dtype)
        total = self._total(places, self._left_out(places, values), dims)
        if accumulate:
            new = call(torch.add, target, total)
        else:
            number = self._total(places, call(Tensor.to, places.valid, torch.int32), dims)
            if len(dims) < len(places.sizes):
                text = f"{self.recorder.lines.current()}: a row is chosen several times, and written in any order"
                call(assert_async, call(torch.all, call(torch.le, number, 1)), text)
            chosen = call(Tensor.view, call(torch.gt, number, 0), (*number.shape, *[1] * (total.dim() - number.dim())))
            new = call(torch.where, chosen, total, target)
        if func.__name__ == "index_put":
            return self._result(new, into)
        result = self._result(call(Tensor.copy_, target, new), into)
        return None if func.__name__ == "__setitem__" else result

    def _result(self, value: Tensor, into: fx.Node | None) -> Tensor:
        self.results[self.recorder.node_of[id(value)]] = into
        return value

    # --- runs of rows of sizes that activations tell

    def _item_of(self, value: Any) -> tuple[fx.Node, int] | None:
        """The list of whole numbers of which `tolist` reads this one, and its place in it."""
        node = self.recorder.node_of.get(id(value))
        if node is None or node.target is not operator.getitem or call_name(node.args[0]) != "unbind":
            return None
        listed = node.args[0].args[0]
        is_list = listed.meta["val"].dim() == 1 and not value.is_floating_point()
        return (listed, node.args[1]) if is_list and self._is_choice(listed.meta["val"]) else None

    def _sizes(self, given: Any) -> Tensor | None:
        """The tensor of the numbers of a list that `tolist` made."""
        items = [item.value for item in given if type(item) is ChosenCount] if isinstance(given, (list, tuple)) else []
        if not items or not all(isinstance(item, tuple) for item in items):
            return None
        tensor = items[0][0].meta["val"]
        if len(items) != len(given) or items != [(items[0][0], i) for i in range(tensor.shape[0])]:
            self.refuse()
        return tensor  # type: ignore[no-any-return]

    def _split(self, value: Tensor, sizes: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """All rows for each run, of which its own are chosen."""
        call, count = self.call, int(value.shape[0])
        if dim != 0:
            self.refuse()
        ends = call(torch.cumsum, sizes, 0)
        fits = call(torch.eq, call(torch.sum, sizes), count)
        call(assert_async, fits, f"{self.recorder.lines.current()}: the sizes are not those of all rows")
        number, node = call(torch.arange, count), self.recorder.node_of[id(sizes)]
        places, found, before = list[MaskPlaces](), list[Tensor](), None
        for turn in range(sizes.shape[0]):
            is_before = call(torch.lt, number, call(Tensor.__getitem__, ends, turn))
            own = is_before if before is None else call(torch.logical_and, is_before, call(torch.logical_not, before))
            before = is_before
            places.append(MaskPlaces((count,), own, (), node, self._text(), None))
            found.append(call(torch.clone, value))
            self.places.append(places[-1])
            self._enter(places[-1], found[-1], 0)
        self.segments.append(places)
        return tuple(found)

    def _join(self, values: Any, dim: int = 0) -> Any:
        """The runs of a split one after the other again, which are in their places."""
        nodes = [self.recorder.node_of.get(id(value)) for value in values]
        if not any(node in self.follows for node in nodes):
            return NOT_CHOSEN
        own = [self._find_places(node) if node in self.follows else None for node in nodes]
        if dim != 0 or own not in self.segments:
            self.refuse()
        total = self._left_out(self.segments[self.segments.index(own)][0], values[0])  # type: ignore[arg-type]
        for places, value in list(zip(own, values))[1:]:
            total = self.call(torch.add, total, self._left_out(places, value))  # type: ignore[arg-type]
        return self._result(total, None)

    # --- loops

    def _list_places(self, value: Any) -> MaskPlaces | None:
        if id(value) in self.lists:
            found = self.lists[id(value)]
        elif id(value) in self.numbers:
            found, _ = self.numbers[id(value)]
        else:
            return None
        if len(found.sizes) > 1 or found.count > MOST_TURNS:
            self.refuse()
        return found

    def _turns(self, listed: Tensor, places: MaskPlaces) -> Iterator[Tensor]:
        """The turns of a loop over chosen places, one for every place."""
        most = _most_numbers(places.mask, places.count)
        if most < places.count:
            last = self.call(torch.any, self.call(torch.narrow, places.valid, 0, most, places.count - most))
            text = f"{self.recorder.lines.current()}: a number beyond those that topk gives"
            self.call(assert_async, self.call(torch.logical_not, last), text)
        for number in range(most):
            item = self.call(Tensor.__getitem__, listed, number)
            node = self.recorder.node_of[id(item)]
            self.follows.discard(node)
            self.ends.add(node)
            outer = self.open[-1].condition if self.open else None
            condition = self.call(Tensor.__getitem__, places.valid, number)
            condition = condition if outer is None else self.call(torch.logical_and, condition, outer)
            span = self._begin(condition, None)
            if span is None:
                continue
            try:
                yield item
            finally:
                while span in self.open:
                    self._end()

    def _begin(self, condition: Tensor, branch: tuple[FrameType, range] | None) -> SkippedSpan | None:
        """Begin a part of forward that eager runs under a condition; None where it is to be left out."""
        outer = self.open[-1].path if self.open else ()
        number = self.begun.get(outer, 0)
        self.begun[outer] = number + 1
        if self.recorder.leaves_out((*outer, number)):
            return None
        begin = len(self.recorder.steps)
        self.open.append(
            SkippedSpan(condition, self._text(), (*outer, number), branch, self._last_node(), range(begin, begin))
        )
        return self.open[-1]

    def _end(self) -> None:
        span = self.open.pop()
        span.last, span.steps = self._last_node(), range(span.steps.start, len(self.recorder.steps))
        self.closed.append(span)

    def close(self) -> None:
        """End the spans whose frame has left them."""
        if not self.open or self.open[-1].branch is None:
            return
        running, frame = set[FrameType](), sys._getframe(1)
        while frame.f_back is not None:
            running.add(frame)
            frame = frame.f_back
        while self.open and self.open[-1].branch is not None:
            frame, inside = self.open[-1].branch
            if frame in running and frame.f_lasti in inside:
                return
            self._end()

    def _last_node(self) -> fx.Node | None:
        return next(iter(reversed(self.recorder.graph.nodes)), None)

    # --- afterwards

    def require_written_back(self) -> None:
        """Raise CaptureError where anything but what is written back leaves a part that eager may skip."""
        if self.read is not None:
            self._require_shape()
        while self.open:
            self._end()
        nodes = list(self.recorder.graph.nodes)
        order = {node: place for place, node in enumerate(nodes)}
        for span in self.closed:  # inner ones before those around them
            begin = -1 if span.first is None else order[span.first]
            end = -1 if span.last is None else order[span.last]
            for node in nodes[begin + 1 : end + 1]:
                self.skipped.setdefault(node, self.recorder.node_of[id(span.condition)])
                if node.op == "get_attr" or node in self.results:
                    continue
                written = any(order[target] <= begin for target in node.meta["mutates"])
                if written or any(order[user] > end for user in node.users):
                    raise CaptureError(span.text)

    def notes(self) -> Iterator[str]:
        """A line for people, where rows are chosen."""
        if self.places:
            line = self.places[0].text.splitlines()[0]
            yield f"{line}: activations choose rows, {len(self.places)} times in all; the program computes all rows"

    def finish(self, graph: OpGraph) -> None:
        """Prove that rows stay apart, and let parameters of what eager skips have no gradient. Raises CaptureError."""
        there = set(graph.nodes)
        outputs, regions = set(graph.outputs.values()), list[tuple[MaskPlaces, list[fx.Node]]]()
        for places in self.places:
            entries = {node: dim for node, dim in places.entries.items() if node in there}
            inside = closure(entries, lambda n: [m for m in n.users if m not in self.ends])
            region = [node for node in graph.nodes if node in inside and node not in entries and node.op != "output"]
            writes = {target for node in region for target in node.meta["mutates"]}
            is_apart = outputs.isdisjoint(inside) and writes <= inside
            is_apart = is_apart and all(_is_of_rows(node, places.count) for node in region)
            ends = [given for node, given in places.written.items() if node in there]
            if not is_apart or meeting_rows(graph, region, entries, ends, places.count) is not None:
                raise CaptureError(places.text)
            regions.append((places, region))
        seen = set[fx.Node]()
        for places, region in regions:
            if not seen.isdisjoint(region):
                raise CaptureError(places.text)
            seen.update(region)
            self._condition(graph, region, {*region, *places.entries})

    def _condition(self, graph: OpGraph, region: list[fx.Node], inside: set[fx.Node]) -> None:
        """Let no gradient reach what nodes read that eager may leave out, without their condition."""
        for node in region:
            condition = self.skipped.get(node)
            for given in node.all_input_nodes if condition is not None and not node.meta["no_grad"] else ():
                if given not in inside and any(t.requires_grad for t in value_tensors(given.meta["val"])):
                    edit = GraphEdit(graph, node)
                    new = edit.call(gradient_if, given, condition, view_of=given)
                    replace_uses(graph, {given: new}, readers={node})


def _most_numbers(mask: fx.Node, count: int) -> int:
    """The number of places that a mask over the classes of `one_hot` may have, of which some are of no number that
    `topk` can give."""
    for node in closure([mask], lambda n: n.all_input_nodes):
        if call_name(node) == "one_hot" and node.meta["val"].shape[-1] == count:
            for above in closure(node.all_input_nodes[:1], lambda n: n.all_input_nodes[:1]):
                if call_name(above) == "topk":
                    dim = above.kwargs.get("dim", above.args[2] if len(above.args) > 2 else -1)
                    return min(count, int(above.all_input_nodes[0].meta["val"].shape[dim]))
    return count


def _is_of_rows(node: fx.Node, count: int) -> bool:
    """Whether a node does nothing but give values, in each of which there may be all rows."""
    sizes = [tensor.numel() for tensor in value_tensors(node.meta["val"])]
    return bool(sizes) and not any(n % count for n in sizes) and not node.meta.get("updates_buffers")
