"""A stage graph as the source of one class.

In: the stage's interface and graph. Out: `class Stage1(Stage)` whose state_dict has the user's dotted names and whose
forward takes `spec.inputs` and returns a tuple, in order, of `spec.outputs` and `spec.extra_outputs`.
"""

from __future__ import annotations

from torch import fx

from ..ir.program import ParamSpec, StageSpec
from .block_source import BlockClass, BlockLibrary
from .body import Body, describe
from .layout import Line, block, signature, with_comment
from .loops import Loop, find_loops
from .members import Members, size, ties, used_members
from .names import RESULT, assigned_names, usable
from .paths import camel_case, is_under, one_line, owners, quote
from .segments import BlockCall, CallOrNode, segments


class StageSource:
    """Writes one stage's class. Make all of a file's stages first, then name the library's classes, then `source()`."""

    def __init__(self, spec: StageSpec, module: fx.GraphModule, library: BlockLibrary):
        self.spec, self.module, self.library = spec, module, library
        self.class_name = camel_case(spec.name)
        self.dtypes = {p.name: p.dtype for p in spec.params}
        self.inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.outputs: list[fx.Node] = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
        self.items = self._classify(segments(module.graph))
        self.steps = find_loops(self.items, lambda call: library.of_call[call], self.outputs)
        self.body = Body(
            self.steps,
            self._input_names(),
            self.outputs,
            library.imports,
            call_text=lambda call: library.of_call[call],
            hints=self._loop_names(),
        )

    def _classify(self, items: list[CallOrNode]) -> list[CallOrNode]:
        """Give each call its class; a path whose calls have different texts is printed without a class."""
        kinds: dict[str, set[BlockClass]] = {}
        for item in items:
            if isinstance(item, BlockCall):
                kind = self.library.add(self.spec.name, self.module, item, self.dtypes)
                kinds.setdefault(item.path, set()).add(kind)
        kept: list[CallOrNode] = []
        for item in items:
            if isinstance(item, BlockCall) and len(kinds[item.path]) > 1:
                self.library.of_call.pop(item)
                kept += item.nodes
            else:
                kept.append(item)
        return kept

    def _loop_names(self) -> dict[fx.Node, str]:
        """Values that a loop carries get, before the loop, too, the name that the block gives its result."""
        names: dict[fx.Node, str] = {}
        for step in self.steps:
            if isinstance(step, Loop):
                inside = {n: t for c in step.rounds[0] for n, t in zip(c.outputs, self.library.of_call[c].results)}
                for start, result in step.carried:
                    if inside[result] != RESULT:
                        names[start] = usable(inside[result])
        return names

    def _input_names(self) -> dict[fx.Node, str]:
        """Inputs have the names of the user's lines that made them; inputs of the batch have names of their own."""
        names: dict[fx.Node, str] = {}
        for node in self.inputs:
            assigned = assigned_names(node)
            made_elsewhere = "x" if node.meta.get("source") else str(node.target)
            names[node] = usable(assigned[0] if len(assigned) == 1 else made_elsewhere)
        return names

    def source(self) -> str:
        """The class's source. Needs the library's classes to be named."""
        arguments = [self.body.first_names[node] for node in self.inputs]
        types = ", ".join(map(describe, self.inputs))
        results = [o.name for o in (*self.spec.outputs, *self.spec.extra_outputs)]
        returned = ", ".join(self.body.returned) or "()"  # nothing reads a layer whose result is not used
        returned = f"({returned},)" if len(self.outputs) == 1 else returned
        lines = [
            f"class {self.class_name}(Stage):  # {one_line(self._comment())}",
            "    def __init__(self):",
            f"        super().__init__({', '.join(filter(None, (self._draws(), self._unread())))})",
            *block(self._init_lines(), 2),
            "",
            *signature(f"    def forward(self{''.join(f', {a}' for a in arguments)}):", types),
            *block(self.body.lines, 2),
            with_comment(f"        return {returned}", ", ".join(results)),
        ]
        return "\n".join(lines)

    def _comment(self) -> str:
        specs: tuple[ParamSpec, ...] = self.spec.params
        held = size(sum(p.numel for p in specs), sum(p.bytes for p in specs)) or "no parameters"
        held += "; backward computes pointwise results again" if self.spec.pointwise_again else ""
        return f"{self.spec.title}: {held}" if self.spec.title else held

    def _draws(self) -> str:
        """The numbers of this stage's draws, at places where they are not the first ones of the model."""
        numbers: dict[str, list[int]] = {}
        for node in self.module.graph.nodes:
            if node.meta.get("random"):
                numbers.setdefault(str(node.meta["module_path"]), []).append(node.meta["draw"])
        rows = {place: tuple(found) for place, found in numbers.items() if found != list(range(len(found)))}
        return f"draws={rows!r}" if rows else ""

    def _unread(self) -> str:
        """The paths of blocks that end with parts whose results a rematerialisation does not need."""
        calls = (item for item in self.items if isinstance(item, BlockCall))
        paths = [call.path for call in calls if any(node.meta.get("unread") for node in call.nodes)]
        return f"unread=[{', '.join(map(quote, paths))}]" if paths else ""

    def _init_lines(self) -> list[Line]:
        calls = [item for item in self.items if isinstance(item, BlockCall)]
        loose = [n for n in self.items if isinstance(n, fx.Node)]
        names = used_members(loose)
        inside = used_members(n for c in calls for n in c.nodes)
        members = Members(self.module, dtypes=self.dtypes)
        paths = {c.path for c in calls}
        groups = _same_class(calls, self.library)
        for group in sorted(groups, key=lambda group: any(is_under(path, group[0].path) for path in paths)):
            members.blocks(group, self.library.of_call[group[0]].name)  # a block before those inside of it
            for call in group:
                made = {owner for name in used_members(call.nodes) for owner in owners(name)}
                members.scopes |= {call.path} | {owner for owner in made if is_under(call.path, owner)}
        tied = ties(self.module, [*names, *inside])
        tied = [group for group in tied if not any(all(is_under(path, name) for name in group) for path in paths)]
        members.add_all([n for n in names if n not in inside], tied)
        return members.lines


def _same_class(calls: list[BlockCall], library: BlockLibrary) -> list[list[BlockCall]]:
    """Distinct modules in order, grouped by class and owner."""
    groups: dict[tuple[BlockClass, str], dict[str, BlockCall]] = {}
    for call in calls:
        groups.setdefault((library.of_call[call], call.path.rpartition(".")[0]), {}).setdefault(call.path, call)
    return [list(group.values()) for group in groups.values()]
