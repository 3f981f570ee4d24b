"""The caches of a script: what its functions may fill while they run on fake tensors, and what was in it before.

In: the functions, classes and objects that are about to run. Out: whatever holds a fake tensor or a traced size
afterwards is as it was: a dictionary of a module, a global variable, an attribute of a class, a default argument, a
variable of a closure, an `lru_cache`. What is looked at follows from the names in the code that can run, so that
objects of the script which no such code names cost nothing: nor does what `__init__` of a module's class names, unless
code can make another object of the class.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import _lru_cache_wrapper
from operator import is_
from threading import local
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from .torch_names import FakeTensor

_TRACED = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_LEAVES = {bool, int, float, complex, str, bytes, range, type(None), CodeType, GetSetDescriptorType, torch.dtype}
_OWN = __name__.partition(".")[0]  # objects of ours note what fake tensors show on purpose
# The modules of types that hold values of a script ("None": of Python's own). A logger leads to all of a process.
_HOLDERS = {"None", "builtins", "types", "collections", "contextvars", "functools", "_thread", "_threading_local"}
_FIXED = {tuple, property, MethodType, MethodDescriptorType, WrapperDescriptorType}  # their content never changes
_CONTAINERS = (dict, list, deque, set, CellType, ContextVar)
PLAIN_CONTAINERS = (dict, OrderedDict, list, set)  # of a module's own, which a run on fake tensors is lent copies of
_LIBRARIES = {"torch", "numpy", _OWN, *sys.stdlib_module_names}
_CALLED_BY_TORCH = ("forward", "setup_context", "backward", "step")
_NAME = ("__name__", "__module__")  # of a module, of a class
_EMPTY = CellType()
_Slots = dict[Any, Any]  # what an object holds, by key, name or place
_Members = tuple[tuple[str, MemberDescriptorType], ...]  # what a class names in `__slots__`


@contextmanager
def kept_caches(*roots: Any) -> Iterator[None]:
    """Undo, on exit, what code that `roots` reach has kept of fake tensors."""
    caches = ScriptCaches(roots)
    try:
        yield
    finally:
        caches.put_back()


class ScriptCaches:
    """All that `roots` reach and can change, as it is now, but the attributes of `modules` and their plain containers:
    who runs the modules puts the attributes back, and lends copies of the containers."""

    def __init__(self, roots: Iterable[Any], modules: Iterable[nn.Module] = ()):
        self._before: list[tuple[Any, _Members, _Slots]] = []
        self._members: dict[type, _Members] = {}
        self._cached: list[tuple[_lru_cache_wrapper[Any], Any]] = []  # with counts of calls
        self._seen: dict[int, Any] = {}  # id -> the object, which keeps its id
        self._names = {*_CALLED_BY_TORCH}  # and those in code that was reached
        self._unnamed: dict[str, list[Any]] = {}  # values by name, which no code was seen to read yet
        self._makers: dict[int, Any] = {}  # id of a class whose objects are there -> its `__init__`
        roots, modules = [*roots], [*modules]
        classes = dict.fromkeys(map(type, modules))
        attributes = [value for module in modules for value in vars(module).values()]
        holders = (each for each in (*roots, *classes, *attributes) if isinstance(each, (type, FunctionType)))
        self._asked = {_package_of(each) for each in holders}  # libraries that run as the script's own code
        self._seen.update((id(module), module) for module in modules)
        self._waiting = roots
        for each in attributes:
            self._waiting += gc.get_referents(each) if type(each) in PLAIN_CONTAINERS else (each,)
        for each in classes:
            self._visit_class(each)
        while self._waiting:
            self._visit(self._waiting.pop())

    def put_back(self) -> None:
        """Give every slot that leads to a fake tensor what it held before."""
        for owner, members, before in self._before:
            if _is_same(owner, members, before):
                continue  # as nearly all of them
            now = _slots(owner, members)
            changed = [key for key, value in now.items() if value is not before.get(key, _EMPTY)]
            traced = [key for key in changed if _holds_fakes(key, now[key])]
            if traced:
                _restore(owner, before, traced)
        for cache, calls in self._cached:
            if cache.cache_info() != calls and _holds_fakes(*gc.get_referents(cache)):
                cache.cache_clear()

    def forget_by_tensor(self) -> None:
        """Empty each `lru_cache` with an entry under a fake tensor: a forward on tensors of its own would find none."""
        for cache, _ in self._cached:
            entries = [each for each in gc.get_referents(cache) if isinstance(each, dict)]
            if any(_holds_fakes(*each) for each in entries):  # their keys
                cache.cache_clear()

    def _visit_class(self, kind: type) -> None:
        """Visit the class of an object that is there, with what it inherits from."""
        for each in kind.__mro__:
            if id(each) not in self._seen and not self._is_foreign(each):
                self._seen[id(each)] = each
                self._before.append((each, (), _slots(each)))
                self._makers[id(each)] = vars(each).get("__init__")
                self._expose({name: value for name, value in vars(each).items() if name != "__init__"})

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._makers:  # code reads the class itself
            self._waiting += (self._makers.pop(id(value)), *value.__mro__)
        if kind in _LEAVES or id(value) in self._seen or issubclass(kind, torch.Tensor):
            return
        self._seen[id(value)] = value
        if kind is FunctionType:
            self._visit_function(value)
        elif issubclass(kind, (type, ModuleType)):
            if not self._is_foreign(value):
                self._before.append((value, (), _slots(value)))
                self._expose(vars(value))
                self._waiting += value.__mro__ if isinstance(value, type) else ()  # modules may import at a name
        elif kind is _lru_cache_wrapper:
            self._cached.append((value, value.cache_info()))
            self._waiting += (value.__wrapped__, value.__dict__)
        elif _package_of(kind) in _HOLDERS or not self._is_foreign(kind):
            members = () if kind in _FIXED else self._members_of(kind)
            if members or isinstance(value, _CONTAINERS):
                self._before.append((value, members, _slots(value, members)))
            self._waiting += gc.get_referents(value)
            if kind.__dictoffset__ or issubclass(kind, local):
                self._waiting.append(value.__dict__)

    def _visit_function(self, function: FunctionType) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        of_super = cells.pop("__class__", _EMPTY)
        if of_super != _EMPTY:
            self._visit_class(of_super.cell_contents)
        self._waiting += (function.__defaults__, function.__kwdefaults__, vars(function), *cells.values())
        place = function.__globals__
        module = sys.modules.get(place.get("__name__", ""))
        if module is not None and self._is_foreign(module):
            return
        if module is None or vars(module) is not place:
            if id(place) not in self._seen:
                self._seen[id(place)] = place
                self._before.append((place, (), place.copy()))
                self._expose(place)
        else:
            self._waiting.append(module)
        for name in _names_in(function.__code__) - self._names:
            self._names.add(name)
            self._waiting += self._unnamed.pop(name, ())
            for imported in (name, f"{place.get('__package__')}.{name}"):
                self._waiting.append(sys.modules.get(imported))

    def _members_of(self, kind: type) -> _Members:
        if kind not in self._members:
            named = (each for each in kind.__mro__ if "__slots__" in vars(each) and _package_of(each) not in _LIBRARIES)
            slots = {name: slot for each in named for name, slot in vars(each).items()}
            self._members[kind] = tuple(
                (name, slot) for name, slot in slots.items() if isinstance(slot, MemberDescriptorType)
            )
        return self._members[kind]

    def _is_foreign(self, value: Any) -> bool:
        """Whether a class or module is of a library that keeps nothing of what the script's code computes."""
        package = _package_of(value)
        return package in _LIBRARIES or (package not in self._asked and _is_installed(package))

    def _expose(self, namespace: Any) -> None:
        for name, value in namespace.items():
            if type(value) in _LEAVES:
                continue
            if name in self._names or (name.startswith("__") and isinstance(value, FunctionType)):
                self._waiting.append(value)
            else:
                self._unnamed.setdefault(name, []).append(value)


def _package_of(value: Any) -> str:
    """The first part of the name of a class's, a function's or a module's own module."""
    name = value.__module__ if isinstance(value, FunctionType) else vars(value).get(_NAME[isinstance(value, type)])
    return str(name).partition(".")[0]


def _is_installed(package: str) -> bool:
    """Whether a package is in a directory of packages, and not a script's own."""
    place = str(vars(sys.modules.get(package, sys)).get("__file__"))
    return "site-packages" in place or "dist-packages" in place


def _names_in(code: CodeType) -> set[str]:
    """The names, and the texts that may be names, of some code and of the functions in it."""
    texts = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return texts.union(code.co_names, *inner)


def _slots(owner: Any, members: _Members = ()) -> _Slots:
    """The contents of an object that can be changed, by key, name or place. `members`: of an object's class."""
    if isinstance(owner, dict):
        return dict(dict.items(owner))  # not by methods of a subclass, which may load what they list
    if isinstance(owner, (list, deque)):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return dict.fromkeys(owner)
    if isinstance(owner, CellType):
        return {} if owner == _EMPTY else {"cell_contents": owner.cell_contents}
    if isinstance(owner, ContextVar):
        return {"": owner.get(None)}
    if isinstance(owner, (type, ModuleType)):
        return vars(owner).copy()
    found = {name: _content(owner, slot) for name, slot in members}
    return {name: value for name, value in found.items() if value is not _EMPTY}


def _is_same(owner: Any, members: _Members, before: _Slots) -> bool:
    """Whether an object holds what it held before: the same objects at the same keys."""
    if type(owner) is list:
        return len(owner) == len(before) and all(map(is_, owner, before.values()))
    now = owner if type(owner) is dict else _slots(owner, members)
    return len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values()))


def _content(owner: Any, slot: MemberDescriptorType) -> Any:
    """The content of a slot of an object, without the object's own `__getattr__`."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _EMPTY


def _restore(owner: Any, before: _Slots, traced: Iterable[Any]) -> None:
    """Put back the slots of an object. `traced`: the keys of those that lead to a fake tensor."""
    if isinstance(owner, ContextVar):
        owner.set(before[""])
    elif isinstance(owner, (list, deque)):
        owner.clear()
        owner.extend(before.values())
    elif isinstance(owner, set):
        owner.clear()
        owner.update(before)
    elif isinstance(owner, dict):
        for key in traced:
            del owner[key]
        owner.update({key: value for key, value in before.items() if key not in owner})
    else:
        for name in traced:
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


def _holds_fakes(*values: Any) -> bool:
    """Whether values are, or hold, fake tensors or traced sizes; not in objects of ours, such as a job."""
    waiting, seen = [*values], {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, _TRACED):
            return True
        if type(each) in _LEAVES or isinstance(each, (type, ModuleType)) or id(each) in seen:
            continue
        if _package_of(type(each)) == _OWN:
            continue
        seen[id(each)] = each
        if isinstance(each, FunctionType):
            waiting += (each.__defaults__, each.__kwdefaults__, each.__closure__, vars(each))
        else:
            waiting += gc.get_referents(each)
    return False
