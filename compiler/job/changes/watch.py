"""The values that forward and the loss read from Python, compared at every step in microseconds.

In: the model and the functions that a plan was made of. Out: the values that are others now, in words. Only a new trace
tells whether they make a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ...capture.python_state import global_names
from ...stale import is_mark

_DEPTH = 3  # of containers and objects
_MOST = 1000  # entries of a container that is looked into
_OF_MODULES = vars(nn.Module()).keys() - {"training", "_modules"}  # tensors, hooks, what state dicts need
_FORM = ("attributes", "modules", "forward hooks", "forward pre-hooks")
_LIBRARIES = {"torch", "numpy", "builtins", "re"}  # which read nothing that a script sets
_UNLIKE = (LookupError, RuntimeError, TypeError, ValueError, AttributeError)  # of a value that is gone, or `==` of two


@dataclass(frozen=True)
class _Row:
    """Values of one holder, such as the attributes of a module: their names, and where it is."""

    where: str
    names: tuple[str, ...]
    read: Callable[[], Any]
    before: Any

    def is_same(self) -> bool:
        try:
            return bool(self.read() == self.before)
        except _UNLIKE:
            return False

    def changes(self) -> dict[str, str]:
        """Name to text, of each value that is another, or of all of them."""
        try:
            now = self.read()
        except _UNLIKE:
            now = ()
        rows = zip(self.names, self.before, now) if self.names else ()
        texts = {f"{name} {self.where}": (a, b) for name, a, b in rows if not _same(a, b)}
        found = {name: f"{name}: {_short(a, b)} before, {_short(b, a)} now" for name, (a, b) in texts.items()}
        return found or {self.where: f"{self.where} changed"}


class PythonValues:
    """Remembers modes, hooks, submodules and attributes of modules, and the globals and closures of their forwards, of
    `functions` and of what these call. `ignored`: names of values that may change."""

    def __init__(self, model: nn.Module, functions: Iterable[Any], ignored: Collection[str] = ()):
        self._rows: list[_Row] = []
        own = (*model.parameters(), *model.buffers(), *model.modules())
        self._seen: dict[int, Any] = {id(each): each for each in own}  # tensors are compared elsewhere
        self._names = set[str]()  # that any function reads
        self._ignored = ignored
        self._look_at("of loss_fn", functions, _DEPTH)
        for kind in {type(module): None for module in model.modules()}:
            self._look_in(kind.forward, kind)
        for path, module in model.named_modules():
            self._look_at_module(f"of {path or 'the model'}", module)

    def changes(self) -> dict[str, str]:
        """The name of each value that is other than it was, and a text with both values."""
        changed = [row for row in self._rows if not row.is_same()]
        return {name: text for row in changed for name, text in row.changes().items()}

    def _add(self, where: str, read: Callable[[], Any], names: tuple[str, ...] = ()) -> None:
        if where not in self._ignored:
            self._rows.append(_Row(where, names, read, read()))

    def _note(self, where: str, holder: dict[str, Any], keys: Collection[str]) -> None:
        chosen = tuple(key for key in sorted(keys) if f"{key} {where}" not in self._ignored)
        if chosen:
            self._add(where, partial(itemgetter(*chosen, chosen[0]), holder), chosen)  # of one alone comes no tuple

    def _look_at_module(self, where: str, module: nn.Module) -> None:
        own = vars(module)
        keys = own.keys() - _OF_MODULES
        self._note(where, own, keys)
        self._add(where, partial(_form, own), _FORM)
        self._look_at(where, [own[key] for key in keys - {"_modules"}], _DEPTH)

    def _look_at(self, where: str, values: Iterable[Any], depth: int) -> None:
        """Note what is inside of values: entries, attributes that some function reads, versions of tensors."""
        for value in values:
            if isinstance(value, FunctionType | MethodType | partial):
                self._look_in(value, None)
            elif depth and id(value) not in self._seen and not isinstance(value, type):
                self._seen[id(value)] = value
                self._look_at(where, self._contents_of(where, value), depth - 1)

    def _contents_of(self, where: str, value: Any) -> Iterable[Any]:
        if isinstance(value, nn.Module):  # beside the model, such as a criterion
            self._look_in(type(value).forward, type(value))
            self._look_at_module(f"of {type(value).__name__} {where}", value)
            return [*value._parameters.values(), *value._buffers.values(), *value._modules.values()]
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._add(f"a tensor {where}", partial(getattr, value, "_version"))
            return ()
        if isinstance(value, list | tuple | dict):
            entries = value.items() if isinstance(value, dict) else value
            if len(value) > _MOST:
                return ()
            if not isinstance(value, tuple):
                self._add(f"a {type(value).__name__} {where}", partial(tuple, entries))
            return value.values() if isinstance(value, dict) else value
        module = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
        if callable(value):
            self._look_in(type(value).__call__, type(value))
        if not hasattr(value, "__dict__") or module.partition(".")[0] in _LIBRARIES:
            return ()
        if not isinstance(value, ModuleType):
            for name in self._names & vars(type(value)).keys():
                self._look_in(vars(type(value))[name], None)
        own = vars(value)
        keys = own.keys() & self._names
        self._note(f"of {module if isinstance(value, ModuleType) else type(value).__name__} {where}", own, keys)
        return [own[key] for key in keys]

    def _look_in(self, function: Any, owner: type | None) -> None:
        """Note the globals and closures that a function reads, and look in the functions and methods that it calls."""
        while isinstance(function, partial):
            self._look_at(f"of {function.func}", (*function.args, *function.keywords.values()), _DEPTH)
            function = function.func
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, FunctionType) or id(plain) in self._seen:
            return
        self._seen[id(plain)] = plain
        if str(plain.__module__).partition(".")[0] in _LIBRARIES:
            return
        where, names = f"in {plain.__qualname__}", set(plain.__code__.co_names)
        self._names |= names
        used = global_names(plain.__code__) & plain.__globals__.keys()
        self._note(where, plain.__globals__, used)
        cells = plain.__closure__ or ()
        self._add(where, partial(_contents, cells), plain.__code__.co_freevars)
        held = [plain.__globals__[name] for name in used]
        self._look_at(where, [*held, *_contents(cells), getattr(function, "__self__", None)], _DEPTH)
        for name in names if owner is not None else ():
            self._look_in(getattr(owner, name, None), owner)


def _form(own: dict[str, Any]) -> tuple[Any, ...]:
    """The values that `_FORM` names, of a module with these attributes."""
    inside = own["_modules"]
    hooks = [
        tuple(hook for hook in own[key].values() if not is_mark(hook)) if own[key] else ()
        for key in ("_forward_hooks", "_forward_pre_hooks")
    ]
    return len(own), tuple(inside.values()) if inside else (), *hooks


def _contents(cells: Iterable[CellType]) -> tuple[Any, ...]:
    return tuple(None if cell == CellType() else cell.cell_contents for cell in cells)


def _same(before: Any, now: Any) -> bool:
    try:
        return before is now or bool(before == now)
    except _UNLIKE:
        return False


def _short(value: Any, other: Any) -> str:
    if isinstance(value, tuple) and isinstance(other, tuple):  # modules or hooks
        own = [each for each in value if not any(each is same for same in other)]
        return ", ".join(getattr(each, "__qualname__", type(each).__name__) for each in own) or "none of that"
    text = repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
