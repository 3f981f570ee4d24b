"""The `__init__` of a stage or block: it builds members from torch's own layers, empty tensors and the file's classes.

Every argument is plain data, so that what it builds can be read off the text.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch
from torch import nn

from ..modules import Scope
from . import allowed
from .expressions import ExpressionCheck, is_member_chain
from .names import FileNames, excerpt, refuse

_FIRST = "super().__init__()"


def check_init(function: ast.FunctionDef, names: FileNames) -> tuple[set[str], set[str]]:
    """The names of the members that the function defines, and of the file's classes that it builds. Raises
    `VerifyError` where it goes beyond what is printed."""
    first, *rest = function.body
    if not _is_first(first):
        refuse(first, f"`__init__` begins with {_FIRST}", beyond=False)
    check = _InitCheck(names, _loop_names(rest))
    check.body(rest)
    return check.members, check.built


def _is_first(node: ast.stmt) -> bool:
    """Whether this is `super().__init__()`, perhaps with `draws={"path": (1, 2)}` and `unread=["path"]`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    plain = ast.unparse(ast.Expr(ast.Call(call.func, call.args, []))) == _FIRST
    checks = {"draws": _is_draws, "unread": _is_paths}
    names = [given.arg for given in call.keywords]
    return plain and names == [n for n in checks if n in names] and all(checks[str(k.arg)](k) for k in call.keywords)


def _is_draws(given: ast.keyword) -> bool:
    if not isinstance(given.value, ast.Dict):
        return False
    numbers = [v.elts for v in given.value.values if isinstance(v, ast.Tuple)]
    places = all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in given.value.keys)
    plain = all(isinstance(n, ast.Constant) and type(n.value) is int for row in numbers for n in row)
    return places and plain and len(numbers) == len(given.value.values)


def _is_paths(given: ast.keyword) -> bool:
    if not isinstance(given.value, ast.List):
        return False
    return all(isinstance(path, ast.Constant) and isinstance(path.value, str) for path in given.value.elts)


def _loop_names(body: Sequence[ast.stmt]) -> set[str]:
    return {s.target.id for s in body if isinstance(s, ast.For) and isinstance(s.target, ast.Name)}


class _InitCheck:
    def __init__(self, names: FileNames, indices: set[str]):
        self.names = names
        self.members: set[str] = set()
        self.built: set[str] = set()
        self.expressions = ExpressionCheck(names, indices, self.members)
        for name in indices:
            names.check_new(ast.Name(name), name)

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._define(node.targets[0])
                self._member(node.value)
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and not node.orelse:
                self.expressions.value(node.iter)
                self.body(node.body)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._call(node.value)
            else:
                refuse(node, f"{excerpt(node)}: a statement of this kind is never printed in `__init__`")

    def _define(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Attribute | ast.Subscript) or not is_member_chain(target):
            refuse(target, f"{excerpt(target)}: `__init__` defines members of `self` only")
        self.expressions.member(target)
        if isinstance(target, ast.Attribute):
            if not allowed.is_member(target.attr):
                refuse(target, f"`.{target.attr}` cannot be a member: modules have it themselves")
            self.members.add(target.attr)

    def _member(self, node: ast.expr) -> None:
        """The object of a member: a module, a parameter, or another member (a tie)."""
        if is_member_chain(node):
            self.expressions.member(node)
            return
        if not isinstance(node, ast.Call):
            refuse(node, f"{excerpt(node)} is no member that is printed")
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("to", "requires_grad_", "eval"):
            self._arguments(node)
            self._member(function.value)
        elif isinstance(function, ast.Name) and self._is_own(function.id):
            if node.args or node.keywords:
                refuse(node, f"{excerpt(node)}: {function.id} takes no arguments", beyond=False)
            self.built.add(function.id)
        elif self.names.root(function) is not None:
            self._build(node)
        else:
            refuse(node, f"{excerpt(node)} is no member that is printed")

    def _is_own(self, name: str) -> bool:
        """Whether a name stands for a class of this file, or for `Scope`, whatever it is called."""
        return name in self.names.blocks or self.names.objects.get(name) is Scope

    def _build(self, node: ast.Call) -> None:
        found = self.names.find(node.func)
        if found is nn.Parameter:
            for argument in node.args:
                self._tensor(argument)
            self._arguments(ast.Call(node.func, [], node.keywords))
        elif allowed.is_layer(found):
            self._arguments(node)
        else:
            refuse(node, f"{excerpt(node.func)} is none of torch's layers")

    def _tensor(self, node: ast.expr) -> None:
        """An empty tensor, or a tensor that is a member already."""
        if is_member_chain(node):
            self.expressions.member(node)
        elif isinstance(node, ast.Call) and self.names.root(node.func) and self.names.find(node.func) is torch.empty:
            self._arguments(node)
        else:
            refuse(node, f"{excerpt(node)}: tensors begin as torch.empty(...)")

    def _arguments(self, node: ast.Call) -> None:
        for given in node.keywords:
            if given.arg is None:
                refuse(given.value, "`**` is nothing that is printed")
        for argument in (*node.args, *(given.value for given in node.keywords)):
            if any(isinstance(part, ast.Call) for part in ast.walk(argument)):
                refuse(argument, f"{excerpt(argument)}: arguments of a member are plain data")
            self.expressions.value(argument)

    def _call(self, node: ast.Call) -> None:
        function = node.func
        if not isinstance(function, ast.Attribute) or not is_member_chain(function):
            refuse(node, f"{excerpt(node)} is nothing that is printed in `__init__`")
        self.expressions.member(function.value)
        if function.attr == "requires_grad_":
            self._arguments(node)
        elif function.attr == "register_buffer" and len(node.args) == 2:
            name, tensor = node.args
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str) and allowed.is_key(name.value)):
                refuse(node, f"{excerpt(name)} cannot be the name of a buffer")
            self.members.add(name.value)
            self._tensor(tensor)
            self._arguments(ast.Call(function, [], node.keywords))
        else:
            refuse(node, f"`.{function.attr}(...)` is nothing that is printed in `__init__`")
