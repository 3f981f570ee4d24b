"""One class per distinct block: equal blocks, whatever their place in the model, share its text.

In: calls of blocks, as `segments` found them. Out: `BlockClass`es, and the source of each. Two blocks are equal if
their members and their statements are the same text, so nothing but the printer decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from ..ir.edges import reads
from ..ir.names import is_index
from ..ir.program import dtype_bytes
from .body import Body, describe
from .imports import TAKEN, Imports
from .layout import Line, block, signature
from .members import Members, parameters_of, size, ties, used_members
from .names import RESULT, name_in_source, usable
from .paths import camel_case, is_under, one_line
from .segments import BlockCall


@dataclass(eq=False)
class BlockClass:
    """One class: what it is called, where it is used, and what its operands are called there."""

    type_name: str
    root: nn.Module
    example: BlockCall
    dtypes: Mapping[str, str]
    results: tuple[str, ...]  # the names of its results inside
    arguments: list[Counter[str]]  # what each operand is called by its callers
    paths: dict[tuple[str, str], None] = field(default_factory=dict)  # (stage, path) of every use
    name: str = ""

    def note_arguments(self, texts: Sequence[str], times: int = 1) -> None:
        """Remember what the operands of a call are called."""
        for names, text in zip(self.arguments, texts):
            names[re.sub(r"_\d+$", "", text.rpartition(".")[2])] += times


class BlockLibrary:
    """The block classes of one file."""

    def __init__(self, imports: Imports):
        self.imports = imports
        self.classes: dict[str, BlockClass] = {}  # by text
        self.of_call: dict[BlockCall, BlockClass] = {}

    def add(self, stage: str, root: nn.Module, call: BlockCall, dtypes: Mapping[str, str]) -> BlockClass:
        """The class of a call: a known one if the text is the same. `dtypes`: of parameters, by dotted name."""
        inputs = {node: f"in{i}" for i, node in enumerate(call.inputs)}
        body = Body(call.nodes, inputs, call.outputs, self.imports, call.path)
        types = [describe(n) for n in call.inputs]
        lines = [*_init_lines(root, call, dtypes), *body.lines]
        kind = _type_name(call)
        text = "\n".join([kind, *block(lines, 0), str(body.returned), str(types)])
        if text not in self.classes:
            results = tuple(r if r.isidentifier() else kind.lower() for r in body.returned)
            self.classes[text] = BlockClass(kind, root, call, dtypes, results, [Counter() for _ in call.inputs])
        found = self.of_call[call] = self.classes[text]
        found.paths[stage, call.path] = None
        return found

    def name_classes(self, stage_names: Sequence[str]) -> None:
        """Name the classes that are used, after the user's types, numbered where one type has several texts."""
        used = set(self.of_call.values())
        self.classes = {text: c for text, c in self.classes.items() if c in used}
        taken = TAKEN | set(stage_names) | set(self.imports.homes)
        for found in self.classes.values():
            number, name = 1, found.type_name
            while name in taken:
                number += 1
                name = f"{found.type_name}{number}"
            found.name = name
            taken.add(name)

    def sources(self) -> list[str]:
        return [self._source(found) for found in self.classes.values()]

    def _source(self, found: BlockClass) -> str:
        call = found.example
        names: dict[fx.Node, str] = {}
        for node, counter in zip(call.inputs, found.arguments):
            wanted = usable(counter.most_common(1)[0][0] if counter else "x")
            if wanted == RESULT:
                said = (name_in_source(reader, node) for reader in call.nodes if node in reads(reader))
                wanted = next(filter(None, said), wanted)
            number, name = 1, wanted
            while name in names.values():
                number += 1
                name = f"{wanted}_{number}"
            names[node] = name
        body = Body(call.nodes, names, call.outputs, self.imports, call.path)
        types = ", ".join(filter(None, map(describe, call.inputs)))
        lines = [
            f"class {found.name}(Scope):  # {one_line(self._comment(found))}",
            "    def __init__(self):",
            "        super().__init__()",
            *block(_init_lines(found.root, call, found.dtypes), 2),
            "",
            *signature(f"    def forward(self{''.join(f', {n}' for n in names.values())}):", types),
            *block(body.lines, 2),
            f"        return {', '.join(body.returned) or '()'}",  # a block may be run for its buffers alone
        ]
        return "\n".join(lines)

    def _comment(self, found: BlockClass) -> str:
        parameters = parameters_of(found.root, used_members(found.example.nodes))
        dtypes = {name: found.dtypes.get(name, str(p.dtype).removeprefix("torch.")) for name, p in parameters.items()}
        num_bytes = sum(p.numel() * dtype_bytes(dtypes[name]) for name, p in parameters.items())
        held = size(sum(p.numel() for p in parameters.values()), num_bytes)
        uses = len(found.paths)
        each = " each" if uses > 1 else ""
        text = f"{pattern([path for _, path in found.paths])}" + (f": one class, {uses} uses" if uses > 1 else "")
        return f"{text}; {held}{each}" if held else text


def _init_lines(root: nn.Module, call: BlockCall, dtypes: Mapping[str, str]) -> list[Line]:
    names = used_members(call.nodes)
    members = Members(root, call.path, dtypes)
    groups = [g for g in ties(root, names) if all(is_under(call.path, name) for name in g)]
    members.add_all(names, groups)
    return members.lines


def _type_name(call: BlockCall) -> str:
    """The user's class of the block, else a name after its place."""
    for node in call.nodes:
        if "block_type" in node.meta:
            return usable(str(node.meta["block_type"]))
        if node.meta.get("module_path") == call.path and node.meta.get("module_type"):
            return usable(str(node.meta["module_type"]))
    words = [part for part in call.path.split(".") if not is_index(part)]
    return camel_case(usable(words[-1])) if words else "Block"


def pattern(paths: Sequence[str]) -> str:
    """Paths in one text: parts that differ become `*`."""
    rows = [path.split(".") for path in dict.fromkeys(paths)]
    if len({len(row) for row in rows}) > 1:
        return f"{paths[0]} and others"
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*rows))
