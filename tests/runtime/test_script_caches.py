"""Fake tensors that a script keeps are gone once they have run, wherever Python can keep a thing."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.prologue.made_input import MadeInput
from penstock.runtime import script_caches
from penstock.runtime.script_caches import ScriptCaches, kept_caches
from penstock.runtime.torch_names import FakeTensor, FakeTensorMode


def table() -> Tensor:
    return torch.arange(4.0)


def remember(cache: Any) -> Tensor:
    if "table" not in cache:
        cache["table"] = table()
    return cache["table"]


class Holder:
    shared: dict[str, Tensor] = {}
    table: Tensor | None = None

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.last: Tensor | None = None


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Tensor | None = None


DICT: dict[str, Tensor] = {}
ORDERED: OrderedDict[str, Tensor] = OrderedDict()
NESTED: defaultdict[str, dict[str, list[Tensor]]] = defaultdict(dict)
FULL = {"table": torch.zeros(2)}
TABLES: list[Tensor] = []
LAST: deque[Tensor] = deque(maxlen=1)
KEYS: set[Tensor] = set()
FUNCTIONS: dict[str, Callable[[], Tensor]] = {}
GLOBAL: Tensor | None = None
HOLDER, SLOTTED, SPACE = Holder(), Slotted(), SimpleNamespace(table=None)
LOCAL = threading.local()
VARIABLE: ContextVar[Tensor | None] = ContextVar("table", default=None)


def keep_in_a_dictionary() -> Tensor:
    return remember(DICT)


def keep_in_an_ordered_dictionary() -> Tensor:
    return remember(ORDERED)


def keep_in_nested_containers() -> Tensor:
    if not NESTED["tables"]:
        NESTED["tables"]["all"] = [table()]
    return NESTED["tables"]["all"][0]


def replace_an_entry() -> Tensor:
    if len(FULL["table"]) < 4:
        FULL["table"] = table()
    return FULL["table"]


def keep_in_a_list() -> Tensor:
    if not TABLES:
        TABLES.append(table())
    return TABLES[0]


def keep_in_a_deque() -> Tensor:
    LAST.append(table())
    return LAST[0]


def keep_in_a_set() -> Tensor:
    KEYS.add(table())
    return next(iter(KEYS))


def keep_in_a_function() -> Tensor:
    if "table" not in FUNCTIONS:
        tensor = table()
        FUNCTIONS["table"] = lambda: tensor
    return FUNCTIONS["table"]()


def keep_in_a_global_variable() -> Tensor:
    global GLOBAL
    if GLOBAL is None:
        GLOBAL = table()
    return GLOBAL


def keep_by_the_name_of_a_global_variable() -> Tensor:
    if globals().get("UNDECLARED") is None:
        globals()["UNDECLARED"] = table()
    return globals()["UNDECLARED"]


def keep_in_a_default_argument(cache: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    return remember(cache)


def keep_in_a_default_keyword(*, cache: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    return remember(cache)


def keep_in_an_attribute_of_the_function() -> Tensor:
    return remember(vars(keep_in_an_attribute_of_the_function))


def keep_in_an_attribute_of_a_class() -> Tensor:
    if Holder.table is None:
        Holder.table = table()
    return Holder.table


def keep_in_a_dictionary_of_a_class() -> Tensor:
    return remember(Holder.shared)


def keep_in_an_attribute_of_an_object() -> Tensor:
    if HOLDER.last is None:
        HOLDER.last = table()
    return HOLDER.last


def keep_in_a_dictionary_of_an_object() -> Tensor:
    return remember(HOLDER.own)


def keep_in_a_slot_of_an_object() -> Tensor:
    if SLOTTED.last is None:
        SLOTTED.last = table()
    return SLOTTED.last


def keep_in_a_namespace() -> Tensor:
    if SPACE.table is None:
        SPACE.table = table()
    return SPACE.table


def keep_in_a_variable_of_a_thread() -> Tensor:
    return remember(vars(LOCAL))


def keep_in_a_variable_of_the_context() -> Tensor:
    if VARIABLE.get() is None:
        VARIABLE.set(table())
    found = VARIABLE.get()
    assert found is not None
    return found


@functools.lru_cache
def keep_in_a_bounded_cache() -> Tensor:
    return table()


@functools.cache
def keep_in_an_unbounded_cache() -> Tensor:
    return table()


class Memo:
    """A decorator of the script's own."""

    def __init__(self, function: Callable[[], Tensor]):
        self.function, self.cache = function, {}

    def __call__(self) -> Tensor:
        if not self.cache:
            self.cache[0] = self.function()
        return self.cache[0]


@Memo
def keep_in_a_decorator() -> Tensor:
    return table()


def _closure() -> Callable[[], Tensor]:
    kept = None

    def keep_in_a_variable_of_a_closure() -> Tensor:
        nonlocal kept
        if kept is None:
            kept = table()
        return kept

    return keep_in_a_variable_of_a_closure


keep_in_a_variable_of_a_closure = _closure()


KINDS = [
    keep_in_a_dictionary, keep_in_an_ordered_dictionary, keep_in_nested_containers, replace_an_entry, keep_in_a_list,
    keep_in_a_deque, keep_in_a_set, keep_in_a_function, keep_in_a_global_variable,
    keep_by_the_name_of_a_global_variable, keep_in_a_default_argument, keep_in_a_default_keyword,
    keep_in_an_attribute_of_the_function, keep_in_an_attribute_of_a_class, keep_in_a_dictionary_of_a_class,
    keep_in_an_attribute_of_an_object, keep_in_a_dictionary_of_an_object, keep_in_a_slot_of_an_object,
    keep_in_a_namespace, keep_in_a_variable_of_a_thread, keep_in_a_variable_of_the_context, keep_in_a_bounded_cache,
    keep_in_an_unbounded_cache, keep_in_a_decorator, keep_in_a_variable_of_a_closure,
]  # fmt: skip


def name_of(kind: Any) -> str:
    return getattr(kind, "__name__", "keep_in_a_decorator")


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_fake_tensors_leave_no_trace(kind: Callable[[], Tensor]) -> None:
    with kept_caches(kind), FakeTensorMode():
        assert type(kind()) is FakeTensor
        assert type(kind()) is FakeTensor  # what it keeps is used while they run
    assert kind().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_what_was_there_stays(kind: Callable[[], Tensor]) -> None:
    kept = kind()
    with kept_caches(kind), FakeTensorMode():
        table()
    assert kind() is kept or kind in (keep_in_a_deque, keep_in_a_set)  # these keep one more


def test_an_entry_that_is_replaced_comes_back() -> None:
    before = FULL["table"] = torch.zeros(3)
    with kept_caches(replace_an_entry), FakeTensorMode():
        replace_an_entry()
    assert FULL["table"] is before


def test_what_holds_no_fake_tensor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was loaded, or a counter, is as the code left it."""
    counts = {"calls": 0}

    def count() -> None:
        counts["calls"] += 1

    with kept_caches(count):
        count()
    assert counts == {"calls": 1}


def test_an_object_of_ours_that_a_script_keeps_stays() -> None:
    """A job holds what it has captured; the script may bind it while that runs again."""
    with kept_caches(replace_an_entry), FakeTensorMode():
        made = FULL["job"] = MadeInput("prologue_0", None, table())  # type: ignore[assignment]
    assert FULL.pop("job") is made


def test_objects_that_no_code_names_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    slots = script_caches._slots
    monkeypatch.setattr(script_caches, "_slots", lambda owner, *names: looked_at.append(owner) or slots(owner, *names))
    with kept_caches(keep_in_a_dictionary):
        pass
    assert any(owner is DICT for owner in looked_at)
    assert not any(owner is ORDERED for owner in looked_at)


MADE: dict[str, Tensor] = {}


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = remember(MADE)

    def forward(self) -> Tensor:
        return torch.arange(4.0)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions()

    def forward(self) -> Tensor:
        return self.inner()  # type: ignore[no-any-return]


class Again(Alone):
    def forward(self) -> Tensor:
        return super().forward() + Positions().table


class FromTable(Alone):
    kinds = {"positions": Positions}

    def forward(self) -> Tensor:
        return self.kinds["positions"]().table


@pytest.mark.parametrize("kind", [Alone, Again, FromTable])
def test_what_a_module_keeps_as_it_is_made_is_looked_at_if_forward_can_make_one(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Any] = []
    slots = script_caches._slots
    model = kind()
    MADE.clear()
    monkeypatch.setattr(script_caches, "_slots", lambda owner, *names: looked_at.append(owner) or slots(owner, *names))
    caches = ScriptCaches([], model.modules())
    with FakeTensorMode():
        model()
    caches.put_back()
    assert not MADE
    assert any(owner is MADE for owner in looked_at) == (kind is not Alone)


def test_a_module_that_imports_at_a_name_is_asked_for_none() -> None:
    """As tensorboard's modules do, which may not be there to import."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(name)

    module = Lazy("of_a_script")

    def read() -> str:
        return module.__name__

    with kept_caches(read):
        assert read() == "of_a_script"
