"""The `forward` of a stage or block: assignments, calls, loops over equal blocks, `with`, `del`, one `return`, and `if`
around what backward needs nothing of."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from ..modules import draw_at
from .expressions import ExpressionCheck, is_member_chain, is_self
from .names import FileNames, excerpt, refuse
from .signature import check_signature


def check_forward(function: ast.FunctionDef, names: FileNames, members: set[str]) -> None:
    """Raises `VerifyError` where the function goes beyond what is printed."""
    regions = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
    values = {argument.arg for argument in function.args.args[1:]}
    values |= {argument.arg for region in regions for argument in region.args.args}
    values |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    parts = {region.name for region in regions}
    for name in sorted(values | parts):
        if name != "_":
            names.check_new(function, name)
        if name in values and name in parts:
            refuse(function, f"{name!r} is a function and a value", beyond=False)
    _ForwardCheck(ExpressionCheck(names, values, members, parts)).function(function)


class _ForwardCheck:
    def __init__(self, expressions: ExpressionCheck):
        self.expressions = expressions
        self.kinds: dict[type[ast.stmt], Callable[..., None]] = {
            ast.Assign: self._assign,
            ast.AugAssign: self._change,
            ast.Expr: self._call,
            ast.For: self._for,
            ast.With: self._with,
            ast.If: self._if,
            ast.Delete: self._delete,
            ast.FunctionDef: self._region,
        }

    def function(self, function: ast.FunctionDef) -> None:
        """Statements, and one `return` at the end."""
        *body, last = function.body
        self.body(body)
        if not isinstance(last, ast.Return):
            refuse(last, f"`{function.name}` ends with `return`", beyond=False)
        if last.value is not None:  # a block that changes its operands in place may return nothing
            self.expressions.value(last.value)

    def _region(self, node: ast.FunctionDef) -> None:
        """The function of a region, which `functions.in_tiles` or `functions.fuse` is given."""
        check_signature(node, (), exact=False)
        self.function(node)

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            kind = self.kinds.get(type(statement))
            if kind is None:
                refuse(statement, f"{excerpt(statement)}: a statement of this kind is never printed")
            kind(statement)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                self._target(part)
        self.expressions.value(node.value)

    def _target(self, node: ast.expr) -> None:
        if isinstance(node, ast.Subscript) and not is_self(node.value):
            self.expressions.all(node.value, node.slice)
        elif not isinstance(node, ast.Name):
            refuse(node, f"{excerpt(node)}: a forward assigns to names and to parts of tensors only")

    def _change(self, node: ast.AugAssign) -> None:
        if is_member_chain(node.target):
            self.expressions.member(node.target)
        else:
            self._target(node.target)
        self.expressions.value(node.value)

    def _call(self, node: ast.Expr) -> None:
        if not self._is_place(node.value):
            self.expressions.value(node.value)

    def _is_place(self, node: ast.expr) -> bool:
        """Whether this is `draw_at(self)` or `draw_at(self, "path")`."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return False
        if self.expressions.names.objects.get(node.func.id) is not draw_at:
            return False
        scope, *path = node.args or [node]
        plain = all(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in path)
        return is_self(scope) and plain and len(path) <= 1 and not node.keywords

    def _for(self, node: ast.For) -> None:
        if not isinstance(node.target, ast.Name) or node.orelse:
            refuse(node, f"{excerpt(node)}: only `for i in range(...)` is printed")
        self.expressions.value(node.iter)
        self.body(node.body)

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                refuse(node, f"{excerpt(node)}: `with ... as` is never printed")
            self.expressions.context(item.context_expr)
        self.body(node.body)

    def _if(self, node: ast.If) -> None:
        """`if not self.recomputing:`, or of a block `if x is not None:`, where x is an argument."""
        test = node.test
        is_stage = ast.unparse(test) == "not self.recomputing"
        is_block = (
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and ast.unparse(test) == f"{test.left.id} is not None"
        )
        if not is_stage and not is_block:
            refuse(node, f"{excerpt(node)}: only what backward needs nothing of is printed below `if`")
        self.expressions.value(test)
        self.body(node.body)
        self.body(node.orelse)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                refuse(node, f"{excerpt(node)}: only names are deleted")
