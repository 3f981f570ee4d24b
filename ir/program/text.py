"""A program as Python text, and back: `parse_program(print_program(p))` is the same program.

The text is the `step(rt, batch)` (or `evaluate(rt, batch)`) of a generated file: one op a line, types, bytes, memories
and streams as end-of-line comments, which parsing ignores.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

from torch import fx

from .. import ops
from ..errors import VerifyError
from ..stages.interface import Interface
from ..units import format_bytes
from .program import Program, values_of, work_of

SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool",
}  # fmt: skip
COMMENT_COLUMN = 88


def print_program(program: Program, comments: bool = False) -> str:
    """The program's text; `comments` adds types, bytes and streams, which needs inferred types."""
    return "\n".join(program_lines(program, comments)) + "\n"


def program_lines(program: Program, comments: bool = False) -> list[str]:
    lines = [f"def {program.function}(rt, batch):"]
    for node in program.graph.nodes:
        statement = print_node(node)
        if statement is not None:
            comment = _comment(program, node) if comments and node.op != "output" else ""
            lines.append(f"    {statement}".ljust(COMMENT_COLUMN) + f"  # {comment}" if comment else f"    {statement}")
    if not any(node.op == "output" for node in program.graph.nodes):
        lines.append("    return {}")
    return lines


def print_node(node: Any) -> str | None:
    """One statement, or None for nodes that have no line of their own."""
    if node.op == "output":
        results = ", ".join(f'"{name}": [{", ".join(n.name for n in nodes)}]' for name, nodes in node.args[0].items())
        return f"return {{{results}}}"
    if node.op != "call_function" or not isinstance(node.target, ops.Op):
        return None
    arguments = [_literal(a) for a in node.args] + [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    call = f"rt.{node.target.name}({', '.join(arguments)})"
    types = node.meta.get("type")
    if types is None or types == ():
        return call
    names = [value.name for value in values_of(node)]
    if isinstance(types, tuple):
        return f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}"
    return f"{names[0]} = {call}"


def line_numbers(program: Program) -> dict[fx.Node, int]:
    """The 1-based line of each op in the program's text."""
    numbers, line = {}, 1
    for node in program.graph.nodes:
        if print_node(node) is not None:
            line += 1
            numbers[node] = line
    return numbers


def excerpt(program: Program, node: fx.Node, around: int = 4) -> str:
    """The text around a node, its own line marked, for error messages."""
    number = line_numbers(program)[node]
    lines = program_lines(program)
    first, last = max(1, number - around), min(len(lines), number + around)
    return "\n".join(f"{'-->' if n == number else '   '} {n:5d} {lines[n - 1]}" for n in range(first, last + 1))


def describe(value: ops.Value) -> str:
    """A value's type for a comment: `f32[2, 512, 768] 3.0 MiB`."""
    if value.kind == "tensor":
        return f"{SHORT_DTYPES.get(value.dtype, value.dtype)}{list(value.shape)} {format_bytes(value.bytes)}"
    return f"{value.kind} {format_bytes(value.bytes)}" + ("" if value.memory == ops.DEVICE else f" in {value.memory}")


def parse_program(text: str, interface: Interface, device: int, function: str = "step") -> Program:
    """The program that `text` (a whole generated file, or one function) holds.

    Raises `VerifyError` with the line where the text is not a straight line of known ops on known names.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise VerifyError(f"line {error.lineno}: not Python: {error.msg}", device=device, line=error.lineno) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise VerifyError(f"not Python that can be read: {type(error).__name__}: {error}", device=device) from error
    found = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == function]
    if len(found) != 1:
        raise VerifyError(f"expected one function `{function}(rt, batch)`, found {len(found)}", device=device)
    try:
        return _Parser(text, interface, device, function).run(found[0])
    except RecursionError as error:
        raise VerifyError("an expression is nested too deeply to be read", device=device) from error


class _Parser:
    def __init__(self, text: str, interface: Interface, device: int, function: str):
        self.lines = text.splitlines()
        self.program = Program(device, interface, function=function)
        self.names: dict[str, fx.Node] = {"batch": self.program.batch}

    def run(self, function: ast.FunctionDef) -> Program:
        returned = False
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if returned:
                self.fail(statement, "nothing may follow the return")
            if isinstance(statement, ast.Return):
                results = self.value(statement.value) if statement.value is not None else {}
                if not isinstance(results, dict):
                    self.fail(statement, "a step returns a dict of lists")
                if results:
                    self.program.returns(results)
                returned = True
            elif isinstance(statement, ast.Expr):
                self.call(statement, statement.value, [])
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self.call(statement, statement.value, self.targets(statement, statement.targets[0]))
            else:
                self.fail(statement, "only `names = rt.op(...)`, `rt.op(...)` and `return` are allowed")
        return self.program

    def targets(self, statement: ast.stmt, target: ast.expr) -> list[str]:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        if len(names) != len(parts):
            self.fail(statement, "results must be plain names")
        for name in names:
            if name == "rt":
                self.fail(statement, "`rt` is the runtime; a value needs another name")
            if name in self.names:
                self.fail(statement, f"`{name}` is already a value; every value has one name and is produced once")
        return names

    def call(self, statement: ast.stmt, call: ast.expr, names: list[str]) -> None:
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "rt"
        ):
            self.fail(statement, "every statement calls an op of `rt`")
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        op = ops.ALL.get(call.func.attr)
        if op is None:
            self.fail(statement, f"no op `{call.func.attr}`; there are {', '.join(ops.ALL)}")
        assert op is not None
        args = tuple(self.value(a) for a in call.args)
        if any(k.arg is None for k in call.keywords):
            self.fail(statement, "`**` is no argument of an op")
        kwargs = {str(k.arg): self.value(k.value) for k in call.keywords}
        try:
            nodes = self.program.emit(op, *args, names=names, **kwargs)
        except VerifyError as error:
            self.fail(statement, str(error))
        if len(nodes) != len(names):
            self.fail(statement, f"`{op.name}` has {len(nodes)} results here, {len(names)} names are given")
        for name, node in zip(names, nodes):
            if node.name != name:  # fx reserves a few names; keep the text's
                node.name = name
            self.names[name] = node
        source = nodes[0] if nodes else next(iter(reversed(self.program.graph.nodes)))
        while source.target is operator.getitem:
            source = source.args[0]
        source.meta["line"] = statement.lineno

    def value(self, expression: ast.expr | None) -> Any:
        if isinstance(expression, ast.Name):
            if expression.id not in self.names:
                self.fail(expression, f"`{expression.id}` is used before it is produced")
            return self.names[expression.id]
        if isinstance(expression, ast.List | ast.Tuple):
            return [self.value(item) for item in expression.elts]
        if isinstance(expression, ast.Dict):
            keys = [
                k.value if isinstance(k, ast.Constant) else self.fail(expression, "keys are literals")
                for k in expression.keys
            ]
            return {key: self.value(v) for key, v in zip(keys, expression.values)}
        try:
            return ast.literal_eval(expression)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            self.fail(expression, "arguments are names and literals")

    def fail(self, place: Any, message: str) -> Any:
        line = place.lineno
        first, last = max(1, line - 4), min(len(self.lines), line + 4)
        around = "\n".join(
            f"{'-->' if n == line else '   '} {n:5d} {self.lines[n - 1]}" for n in range(first, last + 1)
        )
        device = self.program.device
        raise VerifyError(f"device {device}, line {line}: {message}\n{around}", device=device, line=line)


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(v) for v in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _comment(program: Program, node: fx.Node) -> str:
    work = work_of(program, node)
    values = [value.meta["type"] for value in values_of(node)]
    parts = ["; ".join(describe(v) for v in values)] if values else []
    if node.target is ops.fetch and values[0].kind == "weights":
        staying = program.interface.stages[values[0].stage].staying_bytes
        parts += [f"{format_bytes(staying)} stay here"] if staying else []
    if work.stream != ops.HOST:
        parts.append(work.stream)
    return "  ".join(parts)
