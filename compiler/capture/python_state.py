"""The state that Python keeps from one forward to the next: attributes of modules that are no tensors, and the states
of random generators outside torch.

A program repeats what forward did once, so that nothing of this goes on in it: a counter stays at its traced value, a
draw is made once for ever. In: a model, before and after a forward. Out: what has changed, in words.
"""

from __future__ import annotations

import dis
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...ir.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_OPAQUE = (torch.Tensor, nn.Module, torch.SymInt, torch.SymFloat, torch.SymBool, *_CODE)
_DEPTH = 3  # of containers and of objects that are neither modules nor tensors
_OWN = {"_parameters", "_buffers", "_modules", "training"}  # tensors, modules and modes: looked at elsewhere

REMEDY = (
    "a compiled program repeats the forward that was traced. Keep what changes from step to step in a buffer and "
    "change it in place (self.register_buffer, self.count.add_(1)), or pass it in as an input"
)

State = dict[tuple[str, str], Any]  # (module path, attribute) -> its plain values


def state_of(modules: Mapping[str, nn.Module]) -> State:
    """The plain values that the attributes of these modules (by path) hold, in containers and objects, too."""
    walk = _Walk()
    return {
        (path, name): walk.plain(value, _DEPTH)
        for path, module in modules.items()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def values_of(function: Callable[..., Any]) -> State:
    """The plain values that a function, a method or a callable object closes over."""
    while isinstance(function, partial):
        function = function.func
    inner = getattr(function, "__func__", function)
    cells = {name: cell.cell_contents for name, cell in _cells(inner)}
    code = getattr(inner, "__code__", None)
    names = global_names(code) if code else ()
    cells |= {name: inner.__globals__[name] for name in names if name in inner.__globals__}
    owner = getattr(function, "__self__", function)
    if owner is not function or code is None:
        cells |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    numbers = {name: float(v) for name, v in cells.items() if isinstance(v, torch.Tensor) and _is_number(v)}
    walk = _Walk()
    return {("", name): walk.plain(value, _DEPTH) for name, value in (cells | numbers).items()}


@cache
def global_names(code: CodeType) -> frozenset[str]:
    """The names of the globals that a function reads, and the functions inside it. `co_names` also has attributes,
    whose names a script may use for globals."""
    inner = [global_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL").union(*inner)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and not tensor.is_meta and not tensor.is_complex()


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    for name, cell in zip(names, getattr(function, "__closure__", None) or ()):
        if cell != CellType():  # not yet filled
            yield name, cell


def changes(before: State, after: State) -> list[tuple[str, str]]:
    """The attributes that hold other plain values than before."""
    keys = {**before, **after}
    return [key for key in keys if before.get(key) != after.get(key)]


def require_kept(*states: State) -> None:
    """Raises CaptureError for plain attributes that have changed between every two of these states."""
    first, *others = (set(changes(*pair)) for pair in pairwise(states))
    counted = [key for key in changes(*states[-2:]) if key in first.intersection(*others)]
    if counted:
        names = ", ".join(describe_attribute(key, *states) for key in counted[:3])
        raise CaptureError(f"forward changes {names} at every call, which would happen only once: {REMEDY}")


def describe_attribute(key: tuple[str, str], *states: State) -> str:
    """An attribute and the values that it took, such as "self.count of 'encoder' (0, 1, 2)"."""
    path, name = key
    values = ", ".join(_short(state.get(key)) for state in states)
    return f"self.{name} of {path or 'the model'!r} ({values})"


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, _PLAIN) else "..."
    return text if len(text) <= 20 else f"{text[:17]}..."


class _Walk:
    """Turns values into such as compare equal as long as the plain values in them are the same. Tensors, modules and
    functions count for nothing: what they do shows in the graph."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Any] = {}  # (id, depth) -> result: modules share their configuration

    def plain(self, value: Any, depth: int) -> Any:
        if isinstance(value, float) and value != value:
            return "nan"
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, _OPAQUE) or depth == 0:
            return None
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)):
            return _generator_state(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return value.tobytes()
        if (id(value), depth) not in self.known:
            self.known[id(value), depth] = tuple(self._items(value, depth - 1))
        return self.known[id(value), depth]

    def _items(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, dict):
            pairs = (
                (key if isinstance(key, _PLAIN) else id(key), self.plain(item, depth)) for key, item in value.items()
            )
            yield from (pair for pair in pairs if pair[1] is not None)
        elif isinstance(value, (list, tuple)):
            yield from (found for item in value if (found := self.plain(item, depth)) is not None)
        elif isinstance(value, (set, frozenset)):
            yield frozenset(item for item in value if isinstance(item, _PLAIN))
        elif hasattr(value, "__dict__"):
            yield from self._items(vars(value), depth)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())


class GlobalDraws:
    """The states of the random generators that all code of the process shares, to be compared and put back."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state(legacy=False)

    def drawn_from(self) -> str:
        """The module whose generator has been drawn from since; "" for none."""
        if random.getstate() != self.python:
            return "Python's random module"
        return "numpy.random" if pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(self.numpy) else ""

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
