"""The values of tensors that follow from constants alone: a line of the model may read them while it is captured.

In: recorded calls. Out: what they give for real, for small tensors whose operands are all known. What a line reads
(`sizes.tolist()`) becomes part of the program, as every number is; it is the same at every step, as no input is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...runtime.torch_names import FakeTensor, tree_map_only, unset_fake_temporarily

LARGEST = 1 << 12  # elements of a tensor whose value is kept
UNKNOWN = object()


class KnownValues:
    """Real values by the fake tensors that stand for them."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}  # id(fake) -> its value
        self._fakes: dict[int, list[torch.Tensor]] = {}  # storage -> the fakes in it, which also keeps their ids

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        if value.numel() <= LARGEST and not value.is_meta:
            self._of[id(fake)] = value
            self._fakes.setdefault(_storage(fake), []).append(fake)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a tensor is known: of a fake one, or of one that is in memory and small."""
        if isinstance(tensor, FakeTensor):
            return id(tensor) in self._of
        return tensor.numel() <= LARGEST and not tensor.is_meta

    def forget(self, fake: torch.Tensor) -> None:
        """Forget a tensor that was changed in place, and all that share its memory."""
        for other in self._fakes.pop(_storage(fake), []):
            self._of.pop(id(other), None)

    def result(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The real result of a call; UNKNOWN where an operand's value is not known. `args` and `kwargs` hold nodes."""
        try:
            args, kwargs = fx.map_arg((args, kwargs), lambda node: self._of[id(node.meta["val"])])
        except KeyError:
            return UNKNOWN
        copies: dict[int, torch.Tensor] = {}
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: copies.setdefault(id(t), t.clone()), (tuple(args), dict(kwargs))
        )
        return run(*args, **kwargs)

    def note(self, run: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Keep the value of a call's result, if it is small and its operands are known."""
        if isinstance(result, torch.Tensor) and not result.requires_grad:
            results = [result]
        elif type(result) in (tuple, list) and all(isinstance(item, torch.Tensor) for item in result):
            results = list(result)
        else:
            return
        if any(not isinstance(t.numel(), int) or t.numel() > LARGEST for t in results):
            return
        with unset_fake_temporarily(), torch.no_grad():
            values = self.result(run, args, kwargs)
        if values is not UNKNOWN:
            for fake, value in zip(results, [values] if isinstance(values, torch.Tensor) else values, strict=True):
                self.know(fake, value)


def _storage(fake: torch.Tensor) -> int:
    return int(fake.untyped_storage()._cdata)
