"""Rules about the values of one program: produced once and before use, typed right, and ended exactly once."""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from .. import ops
from ..calls import op_of
from ..errors import VerifyError
from ..program import Program, describe, donated_operands, infer, operands, values_of
from .case import Case, fail, line_of


def check_structure(case: Case) -> None:
    """A graph has only ops and their unpacked results, and every operand is produced before it is used."""
    for program in case.programs:
        seen: set[fx.Node] = set()
        for node in program.graph.nodes:
            place = _op_of(node)
            if place is None and node is not program.batch and node.op != "output":
                raise VerifyError(f"device {program.device}: `{node.format_node()}` calls no op", device=program.device)
            for value in node.all_input_nodes:
                if value not in seen:
                    fail(program, place or node, f"`{value.name}` is used before it is produced")
            if place is not None and place is node:
                _check_call(program, node)
            seen.add(node)


def _check_call(program: Program, node: fx.Node) -> None:
    """Check that operands are in their places, where every reader of the program looks for them."""
    parameters = op_of(node).signature.parameters
    for name in node.kwargs:
        parameter = parameters.get(name)
        if parameter is not None and parameter.default is parameter.empty and parameter.kind != parameter.KEYWORD_ONLY:
            fail(program, node, f"write `{name}` in its place, without its name")
    if node.target is ops.load and node.args[:1] != (program.batch,):
        fail(program, node, "a load reads from `batch`")


def _op_of(node: fx.Node) -> fx.Node | None:
    """The node that has a line of the text: the op itself, or the op whose result a node unpacks."""
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.op == "call_function" and isinstance(node.target, ops.Op) else None


def check_types(case: Case) -> None:
    """Every op's inference, run again on its operands, gives the types that the program carries."""
    for program in case.programs:
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            carried = node.meta.get("type")
            found = _unpack(program, node) if node.target is operator.getitem else _infer(program, node)
            if carried != found:
                node.meta["type"] = carried
                message = f"stale type of `{node.name}`: {_spell(carried)}, but its operands give {_spell(found)}"
                fail(program, _op_of(node) or node, message)
        for node in program.ops():
            _check_unpacked(program, node)


def _infer(program: Program, node: fx.Node) -> object:
    try:
        return infer(program, node)
    except VerifyError as error:
        fail(program, node, str(error))


def _unpack(program: Program, node: fx.Node) -> ops.Value:
    source, index = node.args
    assert isinstance(source, fx.Node)
    types = source.meta["type"]
    if not isinstance(types, tuple) or not isinstance(index, int) or not 0 <= index < len(types):
        fail(program, source, f"there is no result {index} to unpack")
    found: ops.Value = types[index]
    return found


def _check_unpacked(program: Program, node: fx.Node) -> None:
    types = node.meta["type"]
    if isinstance(types, tuple):
        taken = [value.args[1] for value in values_of(node)]
        if taken != list(range(len(types))):
            fail(program, node, f"has {len(types)} results and each needs one name; unpacked are {taken}")


def _spell(types: object) -> str:
    if types is None:
        return "none"
    return ", ".join(describe(value) for value in (types if isinstance(types, tuple) else (types,)))


def check_lifetimes(case: Case) -> None:
    """No value is used after it was freed or taken over, none is freed twice or leaked, results live to the end."""
    for program in case.programs:
        gone: dict[fx.Node, fx.Node] = {}
        for node in program.ops():
            for value in operands(node):
                if value in gone:
                    verb = "freed again" if node.target is ops.free else "used"
                    fail(program, node, f"`{value.name}` is {verb} after it was {_ending(program, gone[value])}")
            _end_lives(program, node, gone)
        _check_ends(program, gone)


def _end_lives(program: Program, node: fx.Node, gone: dict[fx.Node, fx.Node]) -> None:
    """Note in `gone` which op ended which value."""
    freeing = node.target is ops.free
    ended = list(node.args) if freeing else donated_operands(node)
    if not ended:
        return
    counts: Counter[fx.Node] = Counter()
    fx.node.map_arg((node.args, node.kwargs), lambda value: counts.update([value]))
    for value in ended:
        assert isinstance(value, fx.Node)
        if counts[value] > 1:
            message = "freed twice" if freeing else f"taken over by `{op_of(node).name}`, which also reads it"
            fail(program, node, f"`{value.name}` is {message}")
        if not value.meta["type"].owned:
            fail(program, node, f"`{value.name}` stays across steps and cannot be taken over")
        gone[value] = node


def _ending(program: Program, node: fx.Node) -> str:
    how = "freed" if node.target is ops.free else f"taken over by `{op_of(node).name}`"
    return f"{how} in line {line_of(program, node)}"


def _check_ends(program: Program, gone: dict[fx.Node, fx.Node]) -> None:
    output = next((node for node in program.graph.nodes if node.op == "output"), None)
    returned = {value for values in program.results().values() for value in values}
    for value in returned:
        assert output is not None
        if value in gone:
            fail(program, output, f"`{value.name}` is returned after it was {_ending(program, gone[value])}")
        if not isinstance(value.meta.get("type"), ops.Value):
            fail(program, output, f"`{value.name}` is no value")
    for node in program.ops():
        for value in values_of(node):
            if value.meta["type"].owned and value not in gone and value not in returned:
                fail(program, node, f"`{value.name}` is never freed; add rt.free({value.name}) after its last use")
