"""Expressions in the body of a `forward`: allowed are those that are printed there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection

from ..functions.chains import fuse
from ..functions.tiles import in_tiles
from . import allowed
from .names import FileNames, excerpt, is_autograd_function, refuse

RUN_REGIONS = {function.__name__: function for function in (in_tiles, fuse)}


class ExpressionCheck:
    """Checks expressions of one function. `values`: its local names; `members`: the names that its class, and the
    classes that it builds, give parts of the model; `regions`: the functions inside it. Raises `VerifyError` at the
    first that goes beyond what is printed."""

    def __init__(self, names: FileNames, values: set[str], members: set[str], regions: Collection[str] = ()):
        self.names, self.values, self.members, self.regions = names, values, members, regions
        self.kinds: dict[type[ast.AST], Callable[..., None]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Call: self._call,
            ast.BinOp: lambda node: self.all(node.left, node.right),
            ast.UnaryOp: lambda node: self.all(node.operand),
            ast.Compare: lambda node: self.all(node.left, *node.comparators),
            ast.IfExp: lambda node: self.all(node.test, node.body, node.orelse),
            ast.Tuple: lambda node: self.all(*node.elts),
            ast.List: lambda node: self.all(*node.elts),
            ast.Dict: self._dict,
            ast.Slice: lambda node: self.all(*(part for part in (node.lower, node.upper, node.step) if part)),
        }

    def all(self, *nodes: ast.expr) -> None:
        for node in nodes:
            self.value(node)

    def value(self, node: ast.expr) -> None:
        """Check an expression that stands for a value."""
        kind = self.kinds.get(type(node))
        if kind is None:
            refuse(node, f"{excerpt(node)}: an expression of this kind ({type(node).__name__}) is never printed")
        kind(node)

    def _constant(self, node: ast.Constant) -> None:
        pass  # numbers, text, bytes, None, True, False and ...

    def _name(self, node: ast.Name) -> None:
        if node.id not in self.values and node.id not in allowed.TYPES:
            refuse(node, f"`{node.id}` is no value here")

    def _attribute(self, node: ast.Attribute) -> None:
        if self.names.root(node) is not None:
            if not allowed.is_constant(self.names.find(node)):
                refuse(node, f"{excerpt(node)} is no constant")
        elif is_member_chain(node):
            self.member(node)
        elif node.attr not in allowed.VALUE_ATTRIBUTES:
            refuse(node, f"`.{node.attr}` is no attribute of a value that a file reads")
        else:
            self.value(node.value)

    def _dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values):
            if key is None:
                refuse(node, f"{excerpt(node)}: `**` is nothing that is printed")
            self.all(key, value)

    def _subscript(self, node: ast.Subscript) -> None:
        if is_member_chain(node):
            self.member(node)
        else:
            self.all(node.value, node.slice)

    def member(self, node: ast.expr) -> None:
        """`self.h[3].attn.weight`: every part of it is the name of a member."""
        if isinstance(node, ast.Name):
            return
        assert isinstance(node, ast.Attribute | ast.Subscript)
        self.member(node.value)
        if isinstance(node, ast.Subscript):
            self.value(node.slice)
        elif isinstance(node.value, ast.Name) and node.attr in allowed.MODE:
            return
        elif not allowed.is_member(node.attr) and node.attr not in allowed.VALUE_ATTRIBUTES:
            refuse(node, f"`.{node.attr}` is no member of a model: modules and tensors have it themselves")

    # --- calls

    def _call(self, node: ast.Call) -> None:
        for argument in node.args[1:] if self._runs_region(node) else node.args:
            self.value(argument)
        for given in node.keywords:
            if given.arg is None:
                refuse(node, f"{excerpt(node)}: `**` is nothing that is printed")
            self.value(given.value)
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in self.values or function.id not in allowed.BUILTINS:
                refuse(node, f"`{function.id}(...)` is no function that a stage may call")
        elif self.names.root(function) is not None:
            self._function(function)
        elif isinstance(function, ast.Subscript):
            if not is_member_chain(function):
                refuse(node, f"{excerpt(function)} is no member of the model, so it is not called")
            self.member(function)
        elif isinstance(function, ast.Attribute):
            self._method(function)
        else:
            refuse(node, f"{excerpt(function)} is nothing that a stage may call")

    def _runs_region(self, node: ast.Call) -> bool:
        """Whether this is `functions.in_tiles(tile, ...)`, or `fuse`: these alone are given a function, one of this
        forward."""
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = RUN_REGIONS.get(called)
        if function is None or self.names.root(node.func) is None or self.names.find(node.func) is not function:
            return False
        first = node.args[0] if node.args else node
        if not isinstance(first, ast.Name) or first.id not in self.regions:
            refuse(node, f"{excerpt(node)}: its first argument is a function of the same forward")
        return True

    def _function(self, function: ast.expr) -> None:
        if self.names.is_called(function):
            return
        owner = function.value if isinstance(function, ast.Attribute) and function.attr == "apply" else None
        if owner is not None and is_autograd_function(self.names.find(owner)):
            return
        found = self.names.find(function)
        if not allowed.is_function(found) and not any(found is kind for kind in allowed.CONSTRUCTORS):
            refuse(function, f"{excerpt(function)} is no function that a stage may call")

    def _method(self, function: ast.Attribute) -> None:
        if is_member_chain(function) and function.attr in self.members:
            self.member(function)
        elif function.attr not in allowed.methods():
            if is_member_chain(function):
                reason = "is no member that its class, or one that it builds, defines"
                refuse(function, f"{excerpt(function)} {reason}", beyond=False)
            refuse(function, f"`.{function.attr}(...)` is no method of a tensor that a stage may call")
        else:
            self.value(function.value)

    def context(self, node: ast.expr) -> None:
        """Check the expression after `with`."""
        if not isinstance(node, ast.Call) or self.names.root(node.func) is None:
            refuse(node, f"`with` {excerpt(node)}: only torch.no_grad() and torch.autocast(...) are printed")
        found = self.names.find(node.func)
        if not any(found is kind for kind in allowed.CONTEXTS):
            refuse(node, f"`with` {excerpt(node)}: only torch.no_grad() and torch.autocast(...) are printed")
        if any(given.arg is None for given in node.keywords):
            refuse(node, f"{excerpt(node)}: `**` is nothing that is printed")
        self.all(*node.args, *(given.value for given in node.keywords))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def is_member_chain(node: ast.expr) -> bool:
    """Whether an expression is `self` followed by attributes and indices."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return is_self(node)
