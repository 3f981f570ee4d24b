"""The results of a step and of an evaluation: the loss and the model's outputs, of all micro-batches together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import PlanError


class StepLoss(Tensor):
    """The loss of a step that has been taken. Arithmetic keeps the class; `detach`, copies in files and text are those
    of a plain tensor."""

    @property
    def requires_grad(self) -> bool:
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            raise _refusal("loss.requires_grad = True")

    def requires_grad_(self, requires_grad: bool = True) -> StepLoss:
        self.requires_grad = requires_grad
        return self

    def backward(self, *_: Any, **__: Any) -> None:
        raise _refusal("loss.backward()")

    def detach(self) -> Tensor:
        return super().detach().as_subclass(Tensor)

    def __format__(self, spec: str) -> str:
        return format(self.detach(), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.detach())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _refusal(call: str) -> PlanError:
    return PlanError(
        f"{call}: job.step has taken backward and the optimizer's step; leave out loss.backward(), optimizer.step() "
        "and optimizer.zero_grad(). A term that is added to the loss here trains nothing: add it in forward or loss_fn"
    )


class Outputs(dict[str, Tensor]):
    """Results by name, also as attributes: `out.loss`, `out["logits"]`."""

    def __missing__(self, name: object) -> Tensor:
        raise KeyError(f"no output {name!r}; there are {', '.join(self)}")

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None


def join(values: list[Tensor]) -> Any:
    """Join the tensors of all micro-batches to one; a list, where their lengths differ."""
    if values[0].dim() == 0:
        return torch.stack(values).mean(0)
    return torch.cat(values) if len({value.shape[1:] for value in values}) == 1 else values
