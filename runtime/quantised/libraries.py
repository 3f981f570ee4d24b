"""The libraries whose own functions unpack quantised weights, or cast operands to float8, imported where a device file
or a script needs them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from typing import Any

from ...ir.errors import PlanError


def bitsandbytes() -> Any:
    return _library("bitsandbytes")


def torchao() -> Any:
    """The part of torchao that has the classes of quantised tensors."""
    return _library("torchao", "quantization")


def float8() -> Any:
    """The part of torchao that trains in float8."""
    try:
        importlib.import_module("torchao.float8.float8_ops")
    except ImportError as error:
        raise PlanError(
            f"precision: products in float8 are torchao's, which is {why_missing('torchao', error, 'torchao')}"
        ) from error
    return importlib.import_module("torchao.float8")


def is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def why_missing(name: str, error: ImportError, extra: str = "") -> str:
    """The reason why a library cannot be imported, after "which is": it is not there, and `extra` of Penstock brings
    it, or it is there and fails with a message of its own."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, which a test made
        found = False
    if found:
        return f"installed and cannot be imported: {' '.join(str(error).split())}"
    wanted = f"'penstock[{extra}]'" if extra else name
    return f"not installed here: pip install {wanted}"


def _library(name: str, part: str = "") -> Any:
    try:
        return importlib.import_module(f"{name}.{part}" if part else name)
    except ImportError as error:
        raise PlanError(
            f"model: its weights are quantised by {name}, which unpacks them and is {why_missing(name, error, name)}"
        ) from error


OF_FUNCTIONS = {
    "linear_4bit": bitsandbytes, "linear_8bit": bitsandbytes, "linear_torchao": torchao, "linear_float8": float8,
}  # fmt: skip


def import_libraries(text: str) -> None:
    """Import what the functions of a device file unpack or cast by: a process has its memory from the start, and what
    is not installed is told before a step."""
    called = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    for name in sorted(called & OF_FUNCTIONS.keys()):
        OF_FUNCTIONS[name]()
