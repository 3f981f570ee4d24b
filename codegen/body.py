"""The body of one `forward`: steps (ops, calls of blocks, loops over blocks) as lines with their types at the end.

In: steps in order, the names of the inputs, the wanted outputs. Out: lines, and the text of each output.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from ..ir.names import is_index
from ..ir.regions import FusedRegion, Region, TiledRegion, TileMark, mark_of, with_regions
from ..runtime.functions import fuse
from ..runtime.functions.tiles import in_tiles
from .expressions import IN_PLACE, Expressions, Text, literal
from .imports import Imports
from .layout import Line, statement, type_text
from .loops import Loop
from .names import FOREVER, RESULT, LiveNames, assigned_names, code_of, module_name, op_name, renamed_operand, usable
from .paths import is_under, local, member, one_line
from .segments import BlockCall, Mode, is_first_only, is_switch, mode_of
from .statements import Statement, Statements, step_reads

_LARGE_BYTES = 1 << 20
_PLAIN = Mode()


class CallText(Protocol):
    """The class of a block, as far as a body must know it."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names that its results have inside."""

    def note_arguments(self, texts: Sequence[str], times: int = 1) -> None:
        """Take note of what the operands of a call are called."""


class Body:
    """Writes one forward when it is made. `path` is the dotted path of the module that the forward belongs to.

    `hints` are wanted names; `is_region`: the steps are those of a region. The results are `lines`, `returned` (the
    text of each output) and `first_names` (the names of the inputs as arguments).
    """

    def __init__(
        self,
        steps: Sequence[Statement],
        inputs: dict[fx.Node, str],
        outputs: Sequence[fx.Node],
        imports: Imports,
        path: str = "",
        call_text: Callable[[BlockCall], CallText] | None = None,
        hints: dict[fx.Node, str] | None = None,
        is_region: bool = False,
    ):
        self.steps = [s for s in steps if not (isinstance(s, fx.Node) and is_switch(s))]
        self.steps = self.steps if is_region else with_regions(self.steps)
        self.describe = describe_inside if is_region else describe
        self.inputs, self.outputs, self.path, self.imports = inputs, list(outputs), path, imports
        self.call_text = call_text
        self.hints = hints or {}
        self.expressions = Expressions(imports, path, self._name, self._device)
        for step in self.steps:  # what is imported must be known before anything is named
            for node in step.nodes if isinstance(step, Region) else [step] if isinstance(step, fx.Node) else []:
                self.expressions.prepare(node)
            if isinstance(step, Region):
                self.imports.function(in_tiles if isinstance(step, TiledRegion) else fuse)
        roots = (n for n in self.steps if isinstance(n, fx.Node) and n.meta.get("module_path") == "")
        self.leaves = {str(n.target) for n in self.steps if isinstance(n, fx.Node) and n.op == "call_module"}
        self.root_type = next((str(n.meta.get("module_type", "")) for n in roots), "")
        apart: set[Any] = set()  # steps too wide to hold their operands
        self.places: dict[str, list[int]] = {}  # per name, the steps that bind it
        while True:
            self.statements = Statements(self.steps, self.outputs, apart)
            expected = self.places
            wide = self._write(expected)
            if wide <= apart and (not self.deletes or self.places == expected):
                break
            apart |= wide
        for call, texts, times in self.calls:
            assert self.call_text is not None
            self.call_text(call).note_arguments(texts, times)

    def _write(self, expected: dict[str, list[int]]) -> set[Any]:
        """Write everything; return the steps whose statement is too wide for a line and holds other ops.

        `expected` has the steps that bind each name, as an earlier call found them.
        """
        self.expected, self.places, self.deletes = expected, {}, False
        self.lines: list[Line] = []
        self.calls: list[tuple[BlockCall, list[str], int]] = []
        self.text: dict[fx.Node, Text] = {}
        self.bound: dict[str, fx.Node] = {}  # what each name stands for now
        self.first_names: dict[fx.Node, str] = {}
        self.names = LiveNames(self.imports.names())
        self.mode, self.section = _PLAIN, ""
        self.absent: list[str] = []  # names that other statements read, of values below this `if`
        self.draws: list[Text] = []  # below this `if`
        self.optional: set[str] = set()  # names that are None where they have no value
        self.now = -1
        wide: set[Any] = set()
        for node, name in self.inputs.items():
            last = FOREVER if node is self._condition() else self.statements.last_use(node, 0)
            self.first_names[node] = self._take(node, name, last)
        for step in self.statements.order:
            self.now += 1
            if isinstance(step, fx.Node):
                self._sections(step)
                self._switch(mode_of(step))
                if _bytes(step) >= _LARGE_BYTES and step.meta.get("alias_of") is None:
                    self._release(at_least=2 * _bytes(step))
                self._node(step)
                if self.lines[-1].is_wide and any(n in self.statements.inlined for n in step_reads(step)):
                    wide.add(step)
            else:
                self._switch(_PLAIN)
                self._release()
                if isinstance(step, Loop):
                    self._loop(step)
                elif isinstance(step, TiledRegion):
                    self._tiles(step)
                elif isinstance(step, FusedRegion):
                    self._chain(step)
                elif isinstance(step, BlockCall):
                    self._call(step)
        self.now += 1
        self._switch(_PLAIN)
        self.returned = [self._name(node).text for node in self.outputs]
        return wide

    # --- statements

    def _node(self, node: fx.Node) -> None:
        types = self.describe(node)
        args: tuple[Any, ...] = node.args
        if node.meta.get("random"):
            draw = _call_text("draw_at", ["self", *self._place(node)])
            self._emit("", draw)
            self.draws += [draw] if self.mode.first_only else []  # those that come after it keep their numbers
        if node.target is operator.setitem:
            target = f"{self.expressions.value(args[0]).text}[{self.expressions.index(args[1])}]"
            self._emit(f"{target} = ", self.expressions.value(args[2]))
        elif node in self.statements.same_object:
            receiver = self.text[node] = self._name(args[0])
            if node.target in IN_PLACE:
                self._emit(f"{receiver.text} {IN_PLACE[node.target]} ", self.expressions.value(args[1]), types)
            else:
                self._emit("", self.expressions.node(node), types)
        elif node in self.statements.unpacked:
            self._unpack(node, types)
        elif node not in self.statements.readers:
            self._emit("", self.expressions.node(node), types)
        else:
            text = self.expressions.node(node)  # before the result takes the name of an operand
            self._emit(f"{self._bind(node, self._suggest(node))} = ", text, types)
        items = (item for row in self.statements.unpacked.get(node, ()) for item in row)
        self._note_absent(node, *items)

    def _note_absent(self, *nodes: fx.Node) -> None:
        """Note the names of values that a rematerialisation leaves out and that other statements read."""
        for node in nodes if self.mode.first_only else ():
            readers = self.statements.readers.get(node, ())
            if any(not (isinstance(reader, fx.Node) and is_first_only(reader)) for reader in readers):
                self.absent.append(self.text[node].text)

    def _unpack(self, node: fx.Node, types: str) -> None:
        """Write a tuple-valued op: its parts get their names in its own statement."""
        text = self.expressions.node(node)
        rows = self.statements.unpacked[node]
        wanted = assigned_names(node)
        names = []
        for position, row in enumerate(rows):
            name = wanted[position] if len(wanted) == len(rows) else f"{op_name(node)}_{position}"
            last = max((self.statements.last_use(item, self.now) for item in row), default=self.now)
            names.append(self._take(row[0], usable(name), last) if row else "_")
            self.text |= {item: Text(names[-1]) for item in row}
        self._emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = ", text, types)

    def _call(self, call: BlockCall) -> None:
        assert self.call_text is not None
        arguments = [self._name(n).text for n in call.inputs]
        self.calls.append((call, arguments, 1))
        results = self.call_text(call).results
        if results == (RESULT,):  # no name of its own: take that of the operand that it replaces
            dying = [n for n in call.inputs if n in self.text and self.statements.last_use(n, 0) == self.now]
            results = (self._name_of(dying[0]) or RESULT,) if dying else results
        names = [self._bind(n, usable(name)) for n, name in zip(call.outputs, results)]
        left = f"{', '.join(names)} = " if names else ""
        self._emit(left, _call_text(member("self", "", call.path), arguments), describe_all(call.outputs))

    def _tiles(self, part: TiledRegion) -> None:
        """Write a region as a function of a tile, and the call that runs it over all tiles."""
        name, texts, returned = self._function(part, "tile", f"of {part.tokens} tokens; backward computes it again")
        rows = [f"[{', '.join(map(str, row))}]" for row in (texts, part.dims, part.results)]
        weights = [member("self", self.path, weight) for weight in part.weights]
        if weights:  # one by one, so that lines break between them
            weights[0] = f"weights=[{weights[0]}"
            weights[-1] += "]"
        unread = ["unread=self.recomputing"] if self._may_be_unread(part) else []
        function = self.imports.function(in_tiles)
        call = _call_text(function, [name, str(part.tokens), *rows, *weights, *unread])
        results = [self._bind(n, usable(r) if r.isidentifier() else name) for n, r in zip(part.outputs, returned)]
        self._emit(f"{', '.join(results)} = ", call, describe_all(part.outputs))

    def _chain(self, region: FusedRegion) -> None:
        """Write a region as a function, and the call that runs it as one kernel."""
        name, texts, _ = self._function(region, "chain", "one kernel, which backward computes again")
        rows = [f"[{', '.join(row)}]" for row in (texts, map(str, region.needed))]
        call = _call_text(self.imports.function(fuse), [name, *rows])
        self._emit(f"{self._bind(region.result, self._suggest(region.result))} = ", call, describe(region.result))

    def _function(self, region: Region, wanted: str, comment: str) -> tuple[str, list[str], list[str]]:
        """Write a region as a function: its name, the texts of what it reads, and those of its results inside."""
        texts = [self._name(n).text for n in region.inputs]
        names = {n: text if text.isidentifier() else usable(op_name(n)) for n, text in zip(region.inputs, texts)}
        body = Body(region.nodes, _distinct(names), region.outputs, self.imports, self.path, is_region=True)
        name = self.names.take(wanted, self.now, self.now)
        self.lines += [Line(0, [""])] if self.lines and self.lines[-1].texts != [""] else []
        self.lines.append(Line(0, [f"def {name}({', '.join(body.first_names.values())}):"], comment))
        self.lines += [replace(line, depth=line.depth + 1) for line in body.lines]
        self.lines += [Line(1, [f"return {', '.join(body.returned)}"]), Line(0, [""])]
        return name, texts, body.returned

    def _may_be_unread(self, part: TiledRegion) -> bool:
        """Whether a rematerialisation may need no results of a part. A stage knows; in a block it is so where the stage
        says it (`Stage.unread`), as others of its class are elsewhere."""
        if not self.path:
            return all(node.meta.get("unread", False) for node in part.nodes)
        return all(reader == "output" for node in part.outputs for reader in self.statements.readers.get(node, ()))

    def _loop(self, loop: Loop) -> None:
        """Write `for i in range(...)`; each round takes the results of the round before under the same names."""
        assert self.call_text is not None
        carried: dict[fx.Node, str] = {}
        for start, result in loop.carried:
            carried[start] = carried[result] = self._carry(start, result)
        self.lines.append(Line(0, [f"for i in {loop.range_text}:"]))
        inside = self.text | {n: Text(name) for n, name in carried.items()}
        for call in loop.rounds[0]:
            arguments = [inside[n].text if n in inside else self._name(n).text for n in call.inputs]
            self.calls.append((call, arguments, len(loop.rounds)))
            names = []
            for node, name in zip(call.outputs, self.call_text(call).results):
                names.append(carried.get(node) or self._take(node, usable(name), FOREVER))
                inside[node] = Text(names[-1])
            left = f"{', '.join(names)} = " if names else ""
            self._emit(left, _call_text(loop.member_text(call), arguments), describe_all(call.outputs), depth=1)
        for node, twin in loop.results():
            self.text[node] = inside[twin]
            self.names.holder[inside[twin].text] = self.statements.last_use(node, self.now)

    def _carry(self, start: fx.Node, result: fx.Node) -> str:
        """The name that a loop carries; it is copied first if its value is still needed after the loop."""
        name = self._name(start).text
        if self.statements.last_use(start, self.now) > self.now or not name.isidentifier():
            first, name = name, self.names.take(self.hints.get(start, usable(op_name(start))), self.now, FOREVER)
            self.lines.append(Line(0, [f"{name} = {first}"]))
        self.names.holder[name] = FOREVER
        self.bound[name] = result
        return name

    # --- names

    def _name(self, node: fx.Node) -> Text:
        return self.text[node] if node in self.text else self.expressions.node(node)

    def _take(self, node: fx.Node, wanted: str, last_use: int) -> str:
        name = self.names.take(wanted, self.now, last_use)
        self.text[node] = Text(name)
        self.bound[name] = node
        if not is_first_only(node):
            self.places.setdefault(name, []).append(self.now)
        return name

    def _bind(self, node: fx.Node, wanted: str) -> str:
        return self._take(node, self.hints.get(node, wanted), self.statements.last_use(node, self.now))

    def _suggest(self, node: fx.Node) -> str:
        """The name that the user's line gives to this value, if it is the line's last value; else one after the op."""
        following = self.statements.follows(self.now)
        source = node.meta.get("source")
        is_last = not (isinstance(following, fx.Node) and source and following.meta.get("source") == source)
        if is_last and len(assigned_names(node)) == 1:
            return usable(assigned_names(node)[0])
        operand = renamed_operand(node)
        if operand is not None and self._name_of(operand):
            return self._name_of(operand)
        path = str(node.meta.get("module_path", ""))
        if following is None and self.path and node in self.outputs and code_of(node).startswith("return"):
            return RESULT
        is_result = is_last and node.op != "call_module" and code_of(node).startswith("return")
        if is_result and path != self.path and is_under(self.path, path) and _leaves(node, following):
            return module_name(path, str(node.meta.get("module_type", "")))
        return op_name(node)

    def _name_of(self, node: fx.Node) -> str:
        """A value's name, without the number that tells it from other values of that name."""
        if node.op == "get_attr":
            return op_name(node)
        if node in self.statements.inlined:
            operand = renamed_operand(node)
            return self._name_of(operand) if operand is not None else ""
        text = self.text[node].text if node in self.text else ""
        return re.sub(r"_\d+$", "", text) if text.isidentifier() else ""

    def _device(self) -> str:
        """An expression for the device at hand: that of any tensor with a name."""
        for name, node in self.bound.items():
            if is_first_only(node) and not self.mode.first_only:
                continue
            if "val" not in node.meta or isinstance(node.meta["val"], torch.Tensor):
                return f"{name}.device"
        return "self.device"

    # --- layout

    def _release(self, at_least: int = 0) -> None:
        """`del` large tensors that are not read again, as a function's end would free them in the user's code.

        This is done only if they hold `at_least` bytes together, lest every other line of a section be a `del`.
        """
        dead = [name for name, node in self.bound.items() if self._is_waste(name, node)]
        if dead and sum(_bytes(self.bound[name]) for name in dead) >= at_least:
            self.deletes = True
            self.lines.append(Line(self._depth(), [f"del {', '.join(dead)}"]))
            for name in dead:
                del self.bound[name]

    def _is_waste(self, name: str, node: fx.Node) -> bool:
        """A large value that nothing reads any more, and whose name nothing takes over at once."""
        is_dead = self.names.holder.get(name, -1) < self.now and node not in self.inputs
        if self.mode.first_only != is_first_only(node) and name not in self.optional:
            return False
        soon = range(self.now, self.now + 3)
        return is_dead and _bytes(node) >= _LARGE_BYTES and not any(p in soon for p in self.expected.get(name, ()))

    def _sections(self, node: fx.Node) -> None:
        """A comment where the ops of another part of the model begin."""
        path = str(node.meta.get("module_path", self.path))
        if path in self.leaves:
            path = path.rpartition(".")[0]
        if self.path:
            section = _heading(local(self.path, path)) if is_under(self.path, path) else ""
        else:
            section = path or self.root_type
        if section != self.section:
            stays = self.mode.first_only and is_first_only(node)
            self._switch(Mode(first_only=stays))
            self._release()
            self.lines.append(Line(int(stays), [f"# {one_line(section)}" if section else ""]))
        self.section = section

    def _place(self, node: fx.Node) -> list[str]:
        """The path of the node's module as seen from the module that this forward belongs to, unless they are one."""
        path = str(node.meta.get("module_path", self.path))
        return [] if path == self.path else [literal(local(self.path, path)).text]

    def _switch(self, mode: Mode) -> None:
        """Open or close `if` around what a rematerialisation leaves out, and `with` where gradients or autocast
        change."""
        if mode == self.mode:
            return
        if mode.first_only != self.mode.first_only:
            self._release()
            self._close() if self.mode.first_only else self._open()
        self.mode = mode
        contexts = ["torch.no_grad()"] if mode.no_grad else []
        if mode.autocast is not None:
            kind, dtype, enabled, cache = mode.autocast
            place = f"{self._device()}.type" if kind == "cpu" else f'"{kind}"'
            contexts.append(f"torch.autocast({place}, dtype={dtype}, enabled={enabled}, cache_enabled={cache})")
        if contexts:
            self.lines.append(Line(int(mode.first_only), [f"with {', '.join(contexts)}:"]))

    def _condition(self) -> fx.Node | None:
        """The input that is None in a rematerialisation; a stage knows without one."""
        return next(filter(is_first_only, self.inputs), None) if self.path else None

    def _open(self) -> None:
        given = self._condition()
        test = f"{self.first_names[given]} is not None" if given is not None else "not self.recomputing"
        self.lines.append(Line(0, [f"if {test}:"], "backward needs nothing of this"))
        self.absent, self.draws = [], []

    def _close(self) -> None:
        names = list(dict.fromkeys(self.absent))
        if names or self.draws:
            self.lines.append(Line(0, ["else:"]))
            self.lines += [Line(1, [draw.text]) for draw in self.draws]
            self.lines += [Line(1, [f"{' = '.join(names)} = None"])] if names else []
        self.optional.update(names)
        for name, node in list(self.bound.items()):
            if is_first_only(node) and node not in self.inputs and self.names.holder.get(name, -1) < self.now:
                del self.bound[name]

    def _depth(self) -> int:
        return self.mode.first_only + (self.mode.no_grad or self.mode.autocast is not None)

    def _emit(self, left: str, text: Text, comment: str = "", depth: int = 0) -> None:
        self.lines.append(statement(left, text, comment, depth + self._depth()))


def _distinct(wanted: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """The names, numbered where several nodes would have the same."""
    found: dict[fx.Node, str] = {}
    for node, name in wanted.items():
        number, free = 1, name
        while free in found.values():
            number += 1
            free = f"{name}_{number}"
        found[node] = free
    return found


def _call_text(function: str, arguments: list[str]) -> Text:
    return Text(f"{function}({', '.join(arguments)})", arguments=(function, *arguments))


def _leaves(node: fx.Node, following: Statement | None) -> bool:
    """Whether the module call that the node was recorded in ends after it."""
    return not isinstance(following, fx.Node) or following.meta.get("module_call") != node.meta.get("module_call")


def _heading(path: str) -> str:
    """The first part of a dotted path, with the index that may follow it."""
    parts = path.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and is_index(parts[1]) else parts[0]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def describe(node: fx.Node) -> str:
    """The type of a node's value for a comment: `f32[2, 512, 768]`, or `f32[2, sequence, 768]`."""
    return _type_texts(node.meta.get("val"), node.meta.get("shown"))


def describe_inside(node: fx.Node) -> str:
    """The same inside a region; of tiles: `f32[2, tile, 768]`."""
    value, mark = node.meta.get("val"), mark_of(node)
    if not isinstance(mark, TileMark):
        return describe(node)
    if mark.result is None or not isinstance(value, torch.Tensor):
        return ""
    size = "tile" if mark.each == 1 else f"{mark.each}*tile"
    return _type_texts(value, [size if dim == mark.result else str(n) for dim, n in enumerate(value.shape)])


def _type_texts(value: Any, shape: Sequence[str] | None = None) -> str:
    if isinstance(value, torch.Tensor):
        return type_text(value.shape if shape is None else shape, value.dtype)
    if isinstance(value, (tuple, list)):
        texts = [_type_texts(v) for v in value if isinstance(v, torch.Tensor)]
        return f"{len(texts)} x {texts[0]}" if len(texts) > 1 and len(set(texts)) == 1 else ", ".join(texts)
    return ""


def describe_all(nodes: Sequence[fx.Node]) -> str:
    """The types of several values, for a comment."""
    return ", ".join(map(describe, nodes))
