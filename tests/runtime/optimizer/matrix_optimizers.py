"""Optimizers that keep a matrix for each dimension of a parameter, as SOAP and Shampoo do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Soap(torch.optim.Optimizer):
    """Keeps lists of matrices: second moments of each dimension, and the bases that follow from them."""

    def __init__(self, params: Any, lr: float = 1e-2, most: int = 64, decay: float = 0.9):
        super().__init__(params, {"lr": lr, "most": most, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)

    def _step(self, param: Tensor, grad: Tensor, group: Any) -> None:
        state, decay = self.state[param], group["decay"]
        if not state:
            sizes = [size if size <= group["most"] else 0 for size in param.shape]
            state["step"], state["moment"] = 0, torch.zeros_like(grad)
            state["GG"] = [torch.zeros(size, size, device=grad.device) if size else [] for size in sizes]
            state["Q"] = [torch.eye(size, device=grad.device) if size else [] for size in sizes]
        state["step"] += 1
        turned = grad
        for dim, moment in enumerate(state["GG"]):
            if len(moment):
                flat = grad.transpose(0, dim).flatten(1) if grad.dim() > 1 else grad[:, None]
                moment.lerp_(flat @ flat.T, 1 - decay)
                state["Q"][dim] = torch.linalg.qr(moment @ state["Q"][dim] + torch.eye(len(moment)))[0]
                turned = torch.tensordot(state["Q"][dim], turned.transpose(0, dim), 1).transpose(0, dim)
        state["moment"].lerp_(turned, 1 - decay)
        param.sub_(group["lr"] * state["moment"])


class Shampoo(Soap):
    """Takes a root of each matrix by its eigenvalues: minutes for a vector of some thousand elements."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr, most=1 << 20)

    def _step(self, param: Tensor, grad: Tensor, group: Any) -> None:
        if not isinstance(grad, torch._subclasses.FakeTensor):
            assert param.numel() <= 64 * 160 and max(param.shape) <= 256, "a trial of this size takes minutes"
        super()._step(param, grad, group)


class Holder:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Hides(Soap):
    """Keeps its moments in an object of its own, where nobody sees them."""

    def _step(self, param: Tensor, grad: Tensor, group: Any) -> None:
        state = self.state[param]
        if not state:
            state["holder"] = Holder(torch.zeros_like(grad))
        state["holder"].tensor.lerp_(grad, 0.1)
        param.sub_(group["lr"] * state["holder"].tensor)


class Mixes(Soap):
    """Keeps a number beside a tensor in one list."""

    def _step(self, param: Tensor, grad: Tensor, group: Any) -> None:
        state = self.state[param]
        state["both"] = [0, torch.zeros_like(grad)] if not state else [state["both"][0] + 1, state["both"][1]]
