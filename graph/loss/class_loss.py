"""Losses of classes in an op graph: cross entropies and negative log-likelihoods, however they are called.

In: a node. Out: the call of `F.cross_entropy` or `F.nll_loss` that it makes, with all arguments by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from ...ir.calls import call_name
from ...runtime.torch_names import reduction
from ..opgraph import OpGraph

_FUNCTIONS: dict[str, Callable[..., Any]] = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}


@dataclass(frozen=True)
class ClassLoss:
    """A cross entropy, or a negative log-likelihood, of classes: the call of `function` that a node makes."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    weight: str = ""  # the name of a module's own class weights

    @property
    def reduction(self) -> str:
        return str(self.arguments["reduction"])


def class_loss(graph: OpGraph, node: fx.Node) -> ClassLoss | None:
    """The loss of classes that a node computes, as a function or a module; None for another node."""
    if node.op == "call_module":
        return _module_loss(node, graph.module.get_submodule(str(node.target)))
    name = call_name(node)
    if node.op != "call_function" or _FUNCTIONS.get(name) is not node.target:
        return None
    bound = inspect.signature(_FUNCTIONS[name]).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    average, reduce = given.pop("size_average"), given.pop("reduce")
    if average is not None or reduce is not None:
        given["reduction"] = reduction.legacy_get_string(average, reduce, emit_warning=False)
    return ClassLoss(_FUNCTIONS[name], given)


def _module_loss(node: fx.Node, module: nn.Module) -> ClassLoss | None:
    if type(module) not in (nn.CrossEntropyLoss, nn.NLLLoss):
        return None
    entropy = isinstance(module, nn.CrossEntropyLoss)
    given: dict[str, Any] = dict(zip(("input", "target"), node.args)) | dict(node.kwargs)
    given |= {"weight": None, "ignore_index": module.ignore_index, "reduction": module.reduction}
    given |= {"label_smoothing": module.label_smoothing} if entropy else {}
    weight = f"{node.target}.weight" if module.weight is not None else ""
    return ClassLoss(F.cross_entropy if entropy else F.nll_loss, given, weight)
