"""The user's own model with the random numbers of a plan: each draw in its forward is seeded by its place.

In: a module that is called as it is, on one micro-batch or on several at once. Out: a context in which dropout drops
what it drops in any plan of this model. It watches calls as the recorder does, so it knows the same places and numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ...graph.opgraph import OpGraph
from ...runtime.stage.draws import Draws
from ...runtime.torch_names import tree_leaves, tree_map
from ..capture.calls import classify, is_random, is_random_module, leaf_modules
from ..capture.custom_functions import original_apply
from ..capture.guard import replace_functions
from ..capture.watch.modes import DrawWatch, EachFunction

Shapes = Mapping[tuple[str, int], torch.Size]  # by place and number: of what one micro-batch draws


class NotByRows(Exception):
    """A draw for several micro-batches at once is not made of what each of them draws."""


def shapes_of_draws(graph: OpGraph) -> Shapes:
    """The shapes of all draws whose value is one tensor."""
    random = [node for node in graph.nodes if node.meta.get("random")]
    tensors = [node for node in random if isinstance(node.meta["val"], Tensor)]
    return {(node.meta["module_path"], node.meta["draw"]): node.meta["val"].shape for node in tensors}


class ModelDraws:
    """`with draws.seed_draws([micro_batch_seed(...)], batch): model(...)`. Activation checkpointing is off meanwhile: a
    forward that backward repeats would be outside of the context."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        shapes: Shapes | None = None,
        leaves: Collection[int] | None = None,
    ):
        self.shapes: Shapes = shapes or {}
        self.seeds: Sequence[int] = ()
        self.rows = 0  # of the batch
        self.draws = Draws(type(model).__name__, model, device)
        self.leaves = leaf_modules(model) if leaves is None else leaves
        self.path_of: dict[int, str] = {}
        for path, module in model.named_modules():
            self.path_of.setdefault(id(module), path)
        self.places = [""]
        self.busy = False  # inside a leaf: what runs there is one draw

    @contextmanager
    def seed_draws(self, seeds: Sequence[int], batch: Any) -> Iterator[None]:
        """For one forward of the micro-batches of these seeds, whose rows are those of `batch` in order."""
        self.seeds = seeds
        self.rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), 0)
        call = nn.Module.__call__

        def on_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.path_of.get(id(module))
            if self.busy or path is None:
                return call(module, *args, **kwargs)
            self.places.append(path)
            try:
                if id(module) not in self.leaves or not path:
                    return call(module, *args, **kwargs)
                run = functools.partial(self._whole, call, module)
                return self._draw(run, args, kwargs) if is_random_module(module) else run(*args, **kwargs)
            finally:
                self.places.pop()

        def on_apply(kind: type, *args: Any) -> Any:
            run = functools.partial(original_apply, kind)
            if kind is checkpoint.CheckpointFunction:
                return args[0](*args[2:])
            return run(*args) if self.busy else self._custom(run, *args)

        changes = [
            (nn.Module, "__call__", on_call),
            (torch.autograd.Function, "apply", classmethod(on_apply)),
            (checkpoint, "_checkpoint_without_reentrant_generator", _nothing),
        ]
        with self.draws.seed_draws(seeds[0]), replace_functions(*changes), EachFunction(self.on_function):
            yield

    def on_function(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A torch function, method, operator or property was called."""
        if not self.busy:
            call = classify(func, len(args), bool(kwargs))
            if call.kind in ("call_function", "call_method") and is_random(call, args, kwargs):
                return self._draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _custom(self, run: Callable[..., Any], *args: Any) -> Any:
        """A custom autograd function is one draw, if it draws at all."""
        watch, place = DrawWatch(), self.places[-1]
        self.draws.begin(place)
        found = self._whole(watch.watch(run), *args)
        if not watch.seen:
            self.draws.take_back(place)
        elif len(self.seeds) > 1:
            self.draws.take_back(place)
            return self._draw(functools.partial(self._whole, run), args, {})
        return found

    def _draw(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Draw for one call: put the draws of all micro-batches together, each on its rows."""
        place = self.places[-1]
        number = self.draws.begin(place)
        if len(self.seeds) == 1:
            return run(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [operand._version for operand in operands]
        parts = []
        for m, seed in enumerate(self.seeds):
            self.draws.start(seed, place, number)
            own_args, own_kwargs = tree_map(functools.partial(self._part, operands, m), (args, kwargs))
            parts.append(run(*own_args, **own_kwargs))
            wanted = self.shapes.get((place, number), getattr(parts[-1], "shape", None))
            by_rows = operands and operands[0].dim() and len(operands[0]) % self.rows == 0
            in_place = [operand._version for operand in operands] != versions
            if not (by_rows and isinstance(parts[-1], Tensor) and parts[-1].shape == wanted) or in_place:
                raise NotByRows(f"it draws random numbers at {place or 'its root'!r} that are not of single rows")
        return torch.cat(parts)

    def _part(self, operands: Sequence[Tensor], micro_batch: int, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and operands[0].dim() and len(leaf) == len(operands[0]):
            return leaf.chunk(len(self.seeds))[micro_batch]
        return leaf

    def _whole(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.busy = True
        try:
            return run(*args, **kwargs)
        finally:
            self.busy = False


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what `torch.utils.checkpoint` does around the function that it calls."""
    yield
