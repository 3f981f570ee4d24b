"""The body of one `forward`: steps (ops, calls of blocks, loops over blocks) as statements.

In: steps in order, the names of the inputs, the wanted outputs. Out: lines with their types at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ..runtime.text import SHORT_DTYPES
from .expressions import IN_PLACE, Expressions, Text
from .imports import Imports
from .inlining import inlined, is_in_place_method
from .layout import Line, statement
from .loops import Loop
from .names import LiveNames, assigned_names, code_of, module_name, op_name, usable
from .paths import is_under, local, member
from .segments import Call, is_switch, item_reads, mode_of

Step = fx.Node | Call | Loop
FOREVER = 1 << 60
_MAX_UNPACKED = 16


class CallText(Protocol):
    """What a body must know of a block's class."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names that its results have inside."""

    def note_arguments(self, texts: Sequence[str], times: int = 1) -> None:
        """Take note of what the operands of a call are called."""


class Body:
    """Writes one forward. `lines` and `returned` (the text of each output) are ready after `write`."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: dict[fx.Node, str],
        outputs: Sequence[fx.Node],
        imports: Imports,
        path: str = "",
        call_text: Callable[[Call], CallText] | None = None,
        hints: dict[fx.Node, str] | None = None,
    ):
        self.steps = [s for s in steps if not (isinstance(s, fx.Node) and is_switch(s))]
        self.inputs, self.outputs, self.path = inputs, list(outputs), path
        self.call_text = call_text
        self.hints = hints or {}
        self.lines: list[Line] = []
        self.text: dict[fx.Node, Text] = {}
        self.first_names: dict[fx.Node, str] = {}  # of the inputs
        self.names = LiveNames()
        self.expressions = Expressions(imports, path, self._name, self._device)
        self.mode: tuple[bool, Any] = (False, None)
        self.section = ""
        roots = (n for n in self.steps if isinstance(n, fx.Node) and n.meta.get("module_path") == "")
        self.root_type = next((str(n.meta.get("module_type", "")) for n in roots), "")
        self.now = 0
        self._plan()

    # --- what is a statement, and how long each value is needed

    def _plan(self) -> None:
        readers: dict[fx.Node, list[Any]] = {}
        for step in self.steps:
            for read in _step_reads(step):
                readers.setdefault(read, []).append(step)
        for node in self.outputs:
            readers.setdefault(node, []).append("output")
        self.readers = readers
        self.unpacked = {n: items for n in self.steps if isinstance(n, fx.Node) and (items := self._items(n))}
        items_of = {item: n for n, items in self.unpacked.items() for row in items for item in row}
        self.inlined = inlined([s for s in self.steps if s not in items_of], readers)
        self.statements = [s for s in self.steps if s not in items_of and s not in self.inlined]
        self.place = {step: i for i, step in enumerate(self.statements)}
        self.same_object = self._in_place_results()
        self.last_use: dict[fx.Node, int] = {}
        for i, step in enumerate(self.statements):
            for read in self._reads_through(step):
                self.last_use[self._root(read)] = i
        for node in self.outputs:
            for read in self._reads_through(node) if node in self.inlined else [node]:
                self.last_use[self._root(read)] = FOREVER

    def _items(self, node: fx.Node) -> list[list[fx.Node]]:
        """Per position of a tuple-valued op, the nodes that take it out, if nothing else reads the tuple."""
        value, users = node.meta.get("val"), self.readers.get(node, [])
        if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= _MAX_UNPACKED or not users:
            return []
        rows: list[list[fx.Node]] = [[] for _ in value]
        for user in users:
            is_item = isinstance(user, fx.Node) and user.target is operator.getitem and isinstance(user.args[1], int)
            if not is_item or user.args[0] is not node:
                return []
            rows[user.args[1]].append(user)
        return rows if sum(map(bool, rows)) > 1 or len(value) == 1 else []

    def _in_place_results(self) -> dict[fx.Node, fx.Node]:
        found = {}
        for step in self.statements:
            if isinstance(step, fx.Node) and (is_in_place_method(step) or step.target in IN_PLACE):
                receiver = step.args[0]
                if isinstance(receiver, fx.Node) and (receiver not in self.inlined or receiver.op == "get_attr"):
                    found[step] = receiver
        return found

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.same_object:
            node = self.same_object[node]
        return node

    def _reads_through(self, step: Step) -> list[fx.Node]:
        """Named values that a statement reads, also through what is printed inside of it."""
        found: list[fx.Node] = []
        for read in _step_reads(step):
            found += self._reads_through(read) if read in self.inlined else [read]
        return found

    # --- writing

    def write(self) -> None:
        for node, name in self.inputs.items():
            self.first_names[node] = self.names.take(name, -1, self.last_use.get(node, 0))
            self.text[node] = Text(self.first_names[node])
        for i, step in enumerate(self.statements):
            self.now = i
            if isinstance(step, fx.Node):
                self._sections(step)
                self._switch(mode_of(step))
                self._node(step)
            else:
                self._switch((False, None))
                self._call(step)
        self.now = len(self.statements)
        self._switch((False, None))
        self.returned = [self._name(node).text for node in self.outputs]

    def _node(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.setitem:
            base, index, new = node.args
            target = f"{self.expressions.value(base).text}[{self.expressions.index(index)}]"
            return self._emit(f"{target} = ", self.expressions.value(new))
        if node in self.same_object:
            receiver = self.text[node] = self._name(self.same_object[node])
            if node.target in IN_PLACE:
                new = self.expressions.value(node.args[1])
                return self._emit(f"{receiver.text} {IN_PLACE[node.target]} ", new, describe(value))
            return self._emit("", self.expressions.node(node), describe(value))
        text = self.expressions.node(node)
        if node in self.unpacked:
            return self._unpack(node, text)
        if node not in self.readers:
            return self._emit("", text, describe(value))
        self._emit(f"{self._bind(node, self._suggest(node))} = ", text, describe(value))

    def _unpack(self, node: fx.Node, text: Text) -> None:
        rows = self.unpacked[node]
        wanted = assigned_names(node)
        last = [max([self.last_use.get(self._root(i), self.now) for i in row], default=-1) for row in rows]
        names = []
        for position, row in enumerate(rows):
            if len(wanted) == len(rows):
                name = usable(wanted[position])
            else:
                name = usable(f"{op_name(node)}_{position}")
            names.append(self.names.take(name, self.now, last[position]) if row else "_")
            for item in row:
                self.text[item] = Text(names[-1])
        self._emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = ", text, describe(node.meta.get("val")))

    def _call(self, step: Call | Loop) -> None:
        assert self.call_text is not None
        if isinstance(step, Loop):
            return self._loop(step)
        results = self.call_text(step).results
        arguments = [self._name(n).text for n in step.inputs]
        self.call_text(step).note_arguments(arguments)
        names = [self._bind(n, usable(name)) for n, name in zip(step.outputs, results)]
        self._emit(f"{', '.join(names)} = " if names else "", _call(member("self", "", step.path), arguments), _describe_all(step.outputs))

    def _loop(self, loop: Loop) -> None:
        """`for i in range(...)`: what one round gives, the next one takes under the same name."""
        assert self.call_text is not None
        first = loop.rounds[0]
        carried: dict[fx.Node, str] = {}
        for start, result in loop.carried:
            name = self._name(start).text
            if self.last_use[self._root(start)] > self.now or not name.isidentifier():
                wanted = self.names.take(self.hints.get(start, name.rpartition(".")[2]), self.now, FOREVER)
                self.lines.append(Line(0, [f"{wanted} = {name}"]))
                name = wanted
            self.names.holder[name] = FOREVER
            carried[start] = carried[result] = name
        self.lines.append(Line(0, [f"for i in {loop.range_text}:"]))
        inside = dict(self.text) | {n: Text(name) for n, name in carried.items()}
        for call in first:
            arguments = [inside[n].text if n in inside else self._name(n).text for n in call.inputs]
            self.call_text(call).note_arguments(arguments, len(loop.rounds))
            names = []
            for node, name in zip(call.outputs, self.call_text(call).results):
                names.append(carried.get(node) or self.names.take(usable(name), self.now, FOREVER))
                inside[node] = Text(names[-1])
            code = _call(loop.member_text(call), arguments)
            self._emit(f"{', '.join(names)} = " if names else "", code, _describe_all(call.outputs), depth=1)
        for node, twin in loop.results():
            self.text[node] = inside[twin]
            self.names.holder[inside[twin].text] = self.last_use.get(self._root(node), self.now)

    # --- names

    def _name(self, node: fx.Node) -> Text:
        if node in self.text:
            return self.text[node]
        return self.expressions.node(node)

    def _bind(self, node: fx.Node, wanted: str) -> str:
        last = self.last_use.get(self._root(node), self.now)
        name = self.names.take(self.hints.get(node, wanted), self.now, last)
        self.text[node] = Text(name)
        return name

    def _suggest(self, node: fx.Node) -> str:
        """The name that the user's line gives to this value, if it is the line's last; else after the op."""
        following = self.statements[self.now + 1] if self.now + 1 < len(self.statements) else None
        source = node.meta.get("source")
        is_last = not (isinstance(following, fx.Node) and source and following.meta.get("source") == source)
        if is_last and len(assigned_names(node)) == 1:
            return usable(assigned_names(node)[0])
        path = str(node.meta.get("module_path", ""))
        if is_last and path != self.path and node.op != "call_module" and is_under(self.path, path):
            if code_of(node).startswith("return") and _leaves(node, following):
                return module_name(path)
        return op_name(node)

    def _device(self) -> str:
        for node, text in self.text.items():
            if isinstance(node.meta.get("val", torch.empty(0)), torch.Tensor) and text.text.isidentifier():
                return f"{text.text}.device"
        return "self.device"

    # --- layout

    def _sections(self, node: fx.Node) -> None:
        """A comment where the ops of another part of the model begin."""
        path = str(node.meta.get("module_path", self.path))
        if node.op == "call_module" and path == str(node.target):
            path = path.rpartition(".")[0]
        section = _heading(local(self.path, path)) if self.path and is_under(self.path, path) else ""
        if not self.path:
            section = path or self.root_type
        if section != self.section:
            self._switch((False, None))
            self.lines.append(Line(0, [f"# {section}" if section else ""]))
        self.section = section

    def _switch(self, mode: tuple[bool, Any]) -> None:
        """Open or close `with` where gradients or autocast change."""
        if mode == self.mode:
            return
        self.mode = mode
        contexts = ["torch.no_grad()"] if mode[0] else []
        if mode[1] is not None:
            kind, dtype, enabled, cache = mode[1]
            place = f"{self._device()}.type" if kind == "cpu" else f'"{kind}"'
            contexts.append(f"torch.autocast({place}, dtype={dtype}, enabled={enabled}, cache_enabled={cache})")
        if contexts:
            self.lines.append(Line(0, [f"with {', '.join(contexts)}:"]))

    def _emit(self, left: str, text: Text, comment: str = "", depth: int = 0) -> None:
        inside = self.mode != (False, None)
        self.lines.append(statement(left, text, comment, depth + inside))


def _step_reads(step: Any) -> list[fx.Node]:
    return step.reads() if isinstance(step, Loop) else item_reads(step)


def _call(function: str, arguments: list[str]) -> Text:
    return Text(f"{function}({', '.join(arguments)})", arguments=(function, *arguments))


def _leaves(node: fx.Node, following: Step | None) -> bool:
    """Whether the module call that the node was recorded in ends behind it."""
    return not isinstance(following, fx.Node) or following.meta.get("module_call") != node.meta.get("module_call")


def _heading(path: str) -> str:
    """The first part of a dotted path, with the index that may follow it."""
    parts = path.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]


def describe(value: Any) -> str:
    """The type of a value for a comment: `f32[2, 512, 768]`."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{SHORT_DTYPES.get(name, name)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        texts = [describe(v) for v in value if isinstance(v, torch.Tensor)]
        return f"{len(texts)} x {texts[0]}" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)
    return ""


def _describe_all(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(describe(n.meta.get("val")) for n in nodes)
