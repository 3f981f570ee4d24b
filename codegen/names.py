"""The names of values in generated code: those that the user's source line gives them, else names after the op.

In: node meta (`source`, `module_path`). Out: suggestions, and `LiveNames`, which makes them unique among live values.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable

from torch import fx

from ..ir.calls import function_name
from ..ir.names import identifier, is_index
from .imports import TAKEN

FOREVER = 1 << 60
_SOURCE = re.compile(r"^[^:]*:\d+: (.*)$")
_ASSIGNMENT = re.compile(r"^((?:[a-zA-Z_]\w*)(?:, [a-zA-Z_]\w*)*)(?:: [^=]+)? (?:[-+*/@&|^]|//|\*\*)?= (.+)$")
_UNWANTED = TAKEN | set(keyword.kwlist) | set(dir(builtins)) | {"_"}
_OPERATORS = {"and_": "both", "or_": "either", "getitem": "part", "truediv": "quotient", "floordiv": "quotient"}
# The result of these ops is the operand in another form, so it keeps the operand's name.
_SAME_THING = {
    "to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone", "detach", "view", "reshape",
    "expand", "expand_as", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "getitem", "getattr",
}  # fmt: skip
_SHORTER = {
    "scaled_dot_product_attention": "attention", "multi_head_attention_forward": "attention", "layer_norm": "norm",
}  # fmt: skip
RESULT = "out"  # the name of a block's result if the user's code has none


def code_of(node: fx.Node) -> str:
    """The user's source line, without its place."""
    match = _SOURCE.match(node.meta.get("source", ""))
    return match.group(1) if match else ""


def assigned_names(node: fx.Node) -> tuple[str, ...]:
    """The names that the user's line of this node assigns, if the node may be what they stand for."""
    match = _ASSIGNMENT.match(code_of(node))
    if not match:
        return ()
    outermost = re.match(r"self\.([\w.]+)\(", match.group(2))
    if outermost and node.op == "call_module" and not str(node.target).endswith(outermost.group(1)):
        return ()  # `x = self.block(self.norm(x))`: norm's result is not what is called x
    return tuple(name.strip() for name in match.group(1).split(","))


def usable(name: str) -> str:
    """A name that hides neither a keyword nor a builtin nor a name of the file."""
    name = identifier(name).strip("_") or "value"
    name = f"v_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in _UNWANTED else name


def op_name(node: fx.Node) -> str:
    """A name after what the node does."""
    if "size" in node.meta:
        return usable(str(node.meta["size"]))
    if node.op in ("call_module", "get_attr"):
        return module_name(str(node.target), str(node.meta.get("module_type", "")))
    if node.op == "placeholder":
        return usable(str(node.target))
    target = function_name(node.target, "value")
    if target == "apply" and not isinstance(node.target, str):
        target = node.target.__qualname__.split(".")[-2].lower()
    target = _OPERATORS.get(target, _SHORTER.get(target, target))
    return usable(target.strip("_"))


def renamed_operand(node: fx.Node) -> fx.Node | None:
    """The operand that the node only reshapes, converts or cuts, if it does no more than that."""
    if node.op in ("call_method", "call_function") and function_name(node.target) in _SAME_THING and node.args:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def name_in_source(reader: fx.Node, operand: fx.Node) -> str:
    """The name of one of its operands in the user's line of `reader`; "" where it has none."""
    try:
        tree = ast.parse(code_of(reader).removeprefix("return "))
    except SyntaxError:  # a part of a longer statement
        return ""
    called = function_name(reader.target).rpartition(".")[2]
    args = [*reader.args[1:], reader.args[0]] if reader.op == "call_method" else list(reader.args)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and called == getattr(call.func, "attr", getattr(call.func, "id", "")):
            texts = [*call.args, call.func.value] if isinstance(call.func, ast.Attribute) else call.args
            for text, arg in zip(texts, args):
                if arg is operand and isinstance(text, ast.Name):
                    return usable(text.id)
    return ""


def module_name(path: str, kind: str) -> str:
    """The last part of a dotted path, or, if that is a number in a list, the module's class: `conv2d`, `layer_norm`."""
    last = path.rpartition(".")[2]
    return usable(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind or "value").lower() if is_index(last) else last)


class LiveNames:
    """Names in one function body: a name may be taken again once its value is dead, as people do."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.holder: dict[str, int] = dict.fromkeys(reserved, FOREVER)  # name -> last step at which its value is read
        self.holder["i"] = FOREVER  # loops count with it

    def take(self, wanted: str, now: int, last_use: int) -> str:
        """A name for a value that is made at step `now` and read until `last_use`."""
        name, number = wanted, 1
        while self.holder.get(name, -1) > now:
            number += 1
            name = f"{wanted}_{number}"
        self.holder[name] = last_use
        return name
