"""The values of tensors that follow from constants, and from inputs whose values are lent: a line of the model may read
them while it is captured.

In: recorded calls. Out: what they give for real, for tensors whose operands are all known. What a line reads
(`sizes.tolist()`) becomes part of the program, as every number is. Where it follows from constants, it is the same at
every step; where it follows from an input, the prologue (`prologue/`) sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from ....graph.operators.record import Elements
from ....graph.operators.table import OPERATORS
from ....ir.calls import function_name
from ....runtime.torch_names import FakeTensor, tree_map_only, unset_fake_temporarily

LARGEST = 1 << 12  # elements of a tensor whose value is kept, where it follows from constants
LARGEST_OF_BATCH = 1 << 26  # and where an input or a line that has read one makes it
UNKNOWN = object()


def reads_form(name: str) -> bool:
    """Whether a function reads the shape and the dtype of its first operand alone, as `zeros_like` does."""
    known = OPERATORS.get(name)
    return known is not None and known.elements is Elements.NONE


class KnownValues:
    """Real values by their fake tensors."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}  # id(fake) -> its value
        self._fakes: dict[int, list[torch.Tensor]] = {}  # storage -> the fakes in it, which also keeps their ids
        self.of_batch: set[int] = set()  # the ids of those that follow from an input
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # values that were changed, and what they were
        self._once: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id(fake) -> it and its value, also if forgotten

    def know(self, fake: torch.Tensor, value: torch.Tensor, of_batch: bool = False) -> None:
        if value.numel() <= (LARGEST_OF_BATCH if of_batch else LARGEST) and not value.is_meta:
            self._of[id(fake)] = value
            self._once[id(fake)] = fake, value
            self._fakes.setdefault(_storage(fake), []).append(fake)
            self.of_batch |= {id(fake)} if of_batch else set()

    def know_as(self, fake: torch.Tensor, other: torch.Tensor) -> None:
        """Know of a tensor what is known of another."""
        self._of.pop(id(fake), None)
        if id(other) in self._once:
            self._once[id(fake)] = fake, self._once[id(other)][1]
        if id(other) in self._of:
            self.know(fake, self._of[id(other)], id(other) in self.of_batch)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a tensor is known: of a fake one, or of one that is in memory and small."""
        if isinstance(tensor, FakeTensor):
            return id(tensor) in self._of
        return tensor.numel() <= LARGEST and not tensor.is_meta

    def value(self, fake: torch.Tensor) -> torch.Tensor:
        """The value of a tensor that is known."""
        return self._of.get(id(fake), fake)

    def knew(self, fake: torch.Tensor) -> bool:
        """Whether the value of a tensor is known, or was until a call changed it to what is not."""
        return id(fake) in self._once

    def last_value(self, fake: torch.Tensor) -> torch.Tensor:
        """The last value that is known of a tensor."""
        return self._once[id(fake)][1]

    def form_of(self, fake: torch.Tensor) -> torch.Tensor:
        """The value of a tensor of which a call reads shape and dtype alone: where it is not known, zeros of these;
        the tensor itself where its sizes are not known either."""
        if self.knows(fake) or not all(isinstance(size, int) for size in fake.shape):
            return self.value(fake)
        with unset_fake_temporarily():
            return torch.zeros((), dtype=fake.dtype).expand(fake.shape)

    def forget(self, fake: torch.Tensor) -> None:
        """Forget a tensor that was changed in place, and all that share its memory."""
        for other in self._fakes.pop(_storage(fake), []):
            self._of.pop(id(other), None)
            self.of_batch.discard(id(other))

    def result(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The real result of a call, which leaves its operands as they are; UNKNOWN where the value of one is not
        known. `args` and `kwargs` hold nodes."""
        return self._run(run, args, kwargs, torch.clone)

    def _run(
        self, run: Callable[..., Any], args: Any, kwargs: Any, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """The real result of a call. `own`: makes an operand of a value."""
        operands: dict[int, torch.Tensor] = {}
        if reads_form(function_name(run)) and args and isinstance(args[0], fx.Node):
            form = self.form_of(args[0].meta["val"])
            args = (args[0] if isinstance(form, FakeTensor) else form, *args[1:])
        try:
            args, kwargs = fx.map_arg((args, kwargs), lambda node: self._of[id(node.meta["val"])])
        except KeyError:
            return UNKNOWN
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: operands.setdefault(id(t), own(t)), (tuple(args), dict(kwargs))
        )
        return run(*args, **kwargs)

    def note(self, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, of_batch: bool = False) -> None:
        """Keep the value of a call's result, if it is small and its operands are known, whose memory it may share.
        `of_batch`: an input makes it, whatever its operands are."""
        if isinstance(result, torch.Tensor) and not result.requires_grad:
            results = [result]
        elif isinstance(result, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in result):
            results = list(result)
        else:
            return
        of_batch = of_batch or self.follows(args, kwargs)
        most = LARGEST_OF_BATCH if of_batch else LARGEST
        if any(not isinstance(t.numel(), int) or t.numel() > most for t in results):
            return
        with unset_fake_temporarily(), torch.no_grad():
            values = self._run(run, args, kwargs, lambda t: t)
        if values is not UNKNOWN:
            for fake, value in zip(results, [values] if isinstance(values, torch.Tensor) else values, strict=True):
                self.know(fake, value, of_batch)

    def write(self, run: Callable[..., Any], args: Any, kwargs: Any, targets: list[torch.Tensor]) -> None:
        """Follow a call that changes targets in place: their values, and those that share their memory, change where
        all operands are known, and are forgotten elsewhere."""
        with unset_fake_temporarily(), torch.no_grad():
            for value in [self._of[id(target)] for target in targets if id(target) in self._of]:
                if id(value) not in self._before:
                    self._before[id(value)] = value, value.clone()
            is_known = self._run(run, args, kwargs, lambda t: t) is not UNKNOWN
        for target in targets:
            shared = self._fakes.get(_storage(target), [])
            for fake in shared:
                if isinstance(fake, FakeTensor):
                    fake.constant = None  # the value that torch keeps, which no second forward finds as it was
            if not is_known:
                self.forget(target)
            elif self.follows(args, kwargs):
                self.of_batch.update(id(fake) for fake in shared if id(fake) in self._of)

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Values as they were before any was changed in place, until the end, when they are what they are now."""
        changed = [*self._before.values()]
        with unset_fake_temporarily(), torch.no_grad():
            now = [value.clone() for value, _ in changed]
            for value, before in reversed(changed):
                value.copy_(before)
        try:
            yield
        finally:
            with unset_fake_temporarily(), torch.no_grad():
                for (value, _), last in zip(changed, now, strict=True):
                    value.copy_(last)

    def follows(self, *arguments: Any) -> bool:
        """Whether an operand follows from an input."""
        found: list[bool] = []
        fx.map_arg(arguments, lambda node: found.append(id(node.meta["val"]) in self.of_batch))
        return any(found)


def _storage(fake: torch.Tensor) -> int:
    return int(fake.untyped_storage()._cdata)
