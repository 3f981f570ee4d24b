"""Edits of an op graph's copy: new nodes with the meta that `opgraph.py` promises, in place of old ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .kernels.stand_ins import SHAPE_RULES
from .opgraph import OpGraph, plain_meta, value_tensors


class GraphEdit:
    """Writes nodes before `at`, or `after` it, in the modes in which `at` was recorded, at the module path `path`."""

    def __init__(self, graph: OpGraph, at: fx.Node, after: bool = False):
        self.place = graph.graph.inserting_after if after else graph.graph.inserting_before
        self.graph, self.at, self.path = graph, at, str(at.meta["module_path"])
        self.fake_mode = next(t.fake_mode for t in value_tensors(at.meta["val"]) if isinstance(t, FakeTensor))

    def call(self, target: Any, *args: Any, view_of: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A call of a torch function. `view_of`: the argument whose storage the result shares."""
        with self.place(self.at):
            node = self.graph.graph.call_function(target, args, kwargs)
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode, torch.set_grad_enabled(not self.at.meta["no_grad"]), self.autocast():
            return self._annotate(node, SHAPE_RULES.get(target, target)(*given, **named), view_of)

    def parameter(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> fx.Node:
        """A read of a parameter in the dtype of the computation."""
        with self.place(self.at):
            node = self.graph.graph.create_node("get_attr", name)
        with self.fake_mode:
            fake = torch.empty(value.shape, dtype=dtype, requires_grad=value.requires_grad)
        return self._annotate(node, fake, None)

    def _annotate(self, node: fx.Node, value: Any, view_of: fx.Node | None) -> fx.Node:
        node.meta = {**plain_meta(self.at), "val": value, "module_path": self.path, "alias_of": view_of}
        at = self.at.meta
        if "dims" in at and getattr(value, "shape", None) == getattr(at["val"], "shape", ()):
            node.meta["dims"] = at["dims"]
        return node

    def autocast(self) -> AbstractContextManager[Any]:
        """The modes of the model's own `torch.autocast` in which `at` was recorded."""
        setting = self.at.meta["autocast"]
        if setting is None:
            return nullcontext()
        device, dtype, enabled, cache = setting
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of `old` read `new`, and remove `old`."""
        replace_all(self.graph, {old: new})


def replace_all(graph: OpGraph, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let every reader of a node of `new` read the one that stands for it, and remove it."""
    for old, other in new.items():
        old.replace_all_uses_with(other)
    for node in graph.graph.nodes:
        for key in ("mutates", "alias_of", "eval_args", "eval_kwargs"):
            if node.meta.get(key):
                node.meta[key] = fx.map_arg(node.meta[key], lambda n: new.get(n, n))
    graph.outputs = {name: new.get(node, node) for name, node in graph.outputs.items()}
    for old in new:
        graph.graph.erase_node(old)
