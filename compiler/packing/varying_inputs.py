"""Inputs that differ from batch to batch in a way that no program can follow, and so may not be read by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ...ir.errors import CaptureError

_READS = (
    "__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__getitem__", "__contains__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__",
    "__rpow__", "__neg__", "__abs__", "__round__", "__ceil__", "__floor__", "__trunc__",
)  # fmt: skip
ANY = "any value"


class ValueRead(CaptureError, AttributeError):
    """Forward reads such a value. An attribute error, too, as code asks by `hasattr` what a value is."""


class Unread:
    """Stands for an input that forward may pass on, but not read."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return ANY

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Unread)).refuse()

    __hash__ = object.__hash__

    def refuse(self, *others: Any) -> NoReturn:
        raise ValueRead(
            f"forward reads {self._name!r}, which differs from batch to batch, so that a program made for one would be "
            "wrong for the next: take the borders of documents from 'position_ids', as transformers' models do with "
            'attn_implementation="sdpa" or "eager", or give the input another name if it is the same in each batch'
        )


class UnreadLeaf(Unread):
    """Stands for a text or a number of the batch while forward is found not to read it. `is_read`: it does."""

    is_read = False

    def __init__(self, name: str, value: Any):
        super().__init__(name)
        self.value, self._kind = value, type(value)

    @property
    def __class__(self) -> type:  # for isinstance
        return self._kind

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError

    def refuse(self, *others: Any) -> NoReturn:
        self.is_read = True
        super().refuse()


for _kind, _methods in ((Unread, _READS), (UnreadLeaf, (*_READS, "__hash__", "__str__", "__format__"))):
    for _method in _methods:
        setattr(_kind, _method, _kind.refuse)
