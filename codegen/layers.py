"""A layer of torch's own as the call that builds another one like it: its class and plain arguments.

torch's layers print themselves as such calls (`Linear(in_features=4, out_features=8, bias=True)`). The text is read as
a call with literals and never evaluated, so that a layer's attributes are no more than data.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LayerCall:
    """`text` is the call as a file has it; `build` makes a layer by it, on the meta device."""

    text: str
    kind: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return self.kind(*self.args, **self.kwargs)


def layer_call(module: nn.Module) -> LayerCall | None:
    """None for a module of another class than torch's own, and for a text that is no call with literals."""
    kind, said = type(module), repr(module)
    if getattr(nn, kind.__name__, None) is not kind:
        return None
    try:
        call = ast.parse(said, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != kind.__name__:
            return None
        args = tuple(ast.literal_eval(argument) for argument in call.args)
        kwargs = {str(given.arg): ast.literal_eval(given.value) for given in call.keywords if given.arg}
    except (SyntaxError, ValueError, TypeError):
        return None  # prose, or a name among the arguments
    return LayerCall(f"nn.{said}", kind, args, kwargs)
