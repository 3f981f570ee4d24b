"""Rewrites programs so that activations leave the device between forward and backward (Fuyou 4.4).

In: programs in which the inputs and saved tensors of all stages stay on the device from forward to backward. Out: the
decided stages keep only some classes of their saved tensors, and values for other memories are offloaded after the op
that makes them, written to SSD some turns later, read some turns before it is needed, and fetched. A turn is one
forward or backward of one micro-batch; what is used first is fetched first, as far ahead as memory holds. Text order is
memory order: the streams themselves run ahead of it.

A value moves once, however many stages read it: away after it is made, back before the first backward that reads it.
Inputs of the batch are loaded again. A value that would come back before it has left stays where it is, and one that
would be read before it is written stays in DRAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.program import Program, infer, place_frees, producer_of, values_of
from ..decisions import Activations


@dataclass(frozen=True)
class Ahead:
    """The number of turns before its use in which a value is fetched, and of turns that it may spend in DRAM on its way
    to SSD, and again on its way back."""

    fetch: int = 1
    passing: int = 1


@dataclass
class _Way:
    """The way of one value: it is made before turn `made`, last read by a forward in turn `left`, first used by a
    backward, or by the members of a team for one, in turn `used`; `readers` are all ops of backward that use it."""

    value: fx.Node
    memory: str
    made: int
    left: int
    used: int
    readers: list[fx.Node] = field(default_factory=list)


def move_activations(program: Program, choices: Mapping[str, Activations], ahead: Ahead) -> None:
    """Rewrite one program, in which `keep_classes` has already set what stages keep."""
    _Mover(program, choices, ahead).emit()


def keep_classes(program: Program, choices: Mapping[str, Activations]) -> None:
    """Let the stages that `choices` names, of any device, keep their classes only, or nothing. `move_activations` puts
    the frees in order afterwards."""
    for node in list(program.ops()):
        choice = choices.get(str(node.args[0])) if node.target is ops.forward else None
        if choice is None or not node.kwargs.get("keep", True):
            continue
        kept = values_of(node)[-1]
        node.kwargs = {**node.kwargs, "keep": tuple(choice.classes) or False}
        infer(program, node)
        if choice.classes:
            kept.meta["type"] = node.meta["type"][-1]
            continue
        for user in list(kept.users):
            if op_of(user).takes_kept:
                user.update_arg(2, None)
            else:
                user.args = tuple(arg for arg in user.args if arg is not kept)
        program.graph.erase_node(kept)


def turn_bytes(program: Program, choices: Mapping[str, Activations], memories: tuple[str, ...]) -> int:
    """The most bytes that come back for one turn from these memories, in a program that `keep_classes` has
    rewritten."""
    sizes: dict[int, int] = {}
    for way in _Mover(program, choices, Ahead(0, 0)).ways():
        if way.memory in memories and way.value.target is not ops.load:
            sizes[way.used] = sizes.get(way.used, 0) + way.value.meta["type"].bytes
    return max(sizes.values(), default=0)


def input_bytes(program: Program, choices: Mapping[str, Activations]) -> dict[str, int]:
    """Per stage the bytes, for all micro-batches, of inputs that can move and come back for it."""
    found: dict[str, int] = {}
    mover = _Mover(program, choices, Ahead(0, 0))
    for way in mover.ways():
        if way.value.meta["type"].kind == "tensor" and way.value.target is not ops.load:
            stage = str(mover.turns[way.used].args[0])
            found[stage] = found.get(stage, 0) + way.value.meta["type"].bytes
    return found


class _Mover:
    def __init__(self, program: Program, choices: Mapping[str, Activations], ahead: Ahead):
        self.program, self.choices, self.ahead = program, choices, ahead
        self.turns = [n for n in program.ops() if op_of(n).parts]
        self.turn_of = {node: i for i, node in enumerate(self.turns)}
        self.exchanges = self.turns_of_exchanges()
        self.whole = {  # stages that keep all saved tensors on the device, perhaps inputs and outputs among them
            str(n.args[0]) for n in self.turns if n.target is ops.forward and n.kwargs.get("keep", True) is True
        }

    def turns_of_exchanges(self) -> dict[fx.Node, int]:
        """For each op in which members of a team meet, the turn that comes next."""
        found, turn = {}, 0
        for node in self.program.ops():
            turn += node in self.turn_of
            if op_of(node).passes_on and op_of(node).meets:
                found[node] = turn
        return found

    def emit(self) -> None:
        ways = sorted(self.ways(), key=lambda way: way.used)
        self.note_positions()
        stored = [(way, self.store(way)) for way in sorted(ways, key=lambda way: way.made)]
        copies = {way.value: copy for way, copy in stored}
        # Of what is put before one turn, writes come first: they free what reads and fetches take.
        on_ssd = [way for way in ways if way.memory == ops.SSD and copies[way.value] is not None]
        for way in sorted(on_ssd, key=lambda way: way.made):
            copies[way.value] = self.put(
                self.write_turn(way), ops.write, copies[way.value], name=f"{way.value.name}_ssd"
            )
        for way in on_ssd:
            copies[way.value] = self.put(
                self.read_turn(way), ops.read, copies[way.value], name=f"{way.value.name}_read"
            )
        for way in ways:
            back = self.bring(way, copies[way.value])
            for reader in way.readers:
                reader.replace_input_with(way.value, back)
        place_frees(self.program)

    def ways(self) -> Iterator[_Way]:
        """The ways of all values that move, each once."""
        returned = {value for values in self.program.results().values() for value in values}
        found: dict[fx.Node, _Way] = {}
        for node in self.turns:
            if node.target is not ops.backward:
                continue
            stage = str(node.args[0])
            choice = self.choices.get(stage, Activations())
            bound = ops.backward.bind(node.args, node.kwargs)
            kept = bound["kept"]
            wanted: list[tuple[Any, str]] = [(i, choice.inputs_to) for i in bound["inputs"] if i is not None]
            wanted += [(kept, choice.classes_to)] if kept is not None and choice.classes else []
            for value, memory in wanted:
                if value in found:
                    found[value].readers.append(node)
                elif producer_of(value) in self.turn_of or any(user.target is ops.forward for user in value.users):
                    found[value] = self.way(value, memory, node)  # others go round a ring again for backward
        for value, way in found.items():
            if way.memory != ops.DEVICE and value not in returned and not self.is_pinned(value) and self.pays(way):
                if way.memory == ops.SSD and self.read_turn(way) <= self.write_turn(way):
                    way.memory = ops.DRAM  # it would not be on SSD for a single turn
                yield way

    def way(self, value: fx.Node, memory: str, reader: fx.Node) -> _Way:
        forwards = [self.turn_of[user] for user in value.users if user.target is ops.forward]
        producer = producer_of(value)
        made = self.turn_of[producer] + 1 if producer in self.turn_of else min(forwards)
        left = max([*forwards, made - 1])
        met = {user: turn for user in value.users if (turn := self.exchanges.get(user, left)) > left}
        return _Way(value, memory, made, left, min([self.turn_of[reader], *met.values()]), [reader, *met])

    def is_pinned(self, value: fx.Node) -> bool:
        """Whether autograd may hold a value: a stage that keeps everything made it or reads it."""
        readers = {str(user.args[0]) for user in value.users if user in self.turn_of}
        producer = producer_of(value)
        is_output = producer.target is ops.forward and value.meta["type"].kind == "tensor"
        makers = {str(producer.args[0])} if is_output else set()
        return bool((readers | makers) & self.whole)

    def pays(self, way: _Way) -> bool:
        """Whether the value is away for at least one turn."""
        return way.used - self.ahead.fetch > way.left + 1

    def write_turn(self, way: _Way) -> int:
        return min(way.made + self.ahead.passing, len(self.turns) - 1)

    def fetch_turn(self, way: _Way) -> int:
        return max(way.used - self.ahead.fetch, way.left + 1)

    def read_turn(self, way: _Way) -> int:
        return max(way.used - self.ahead.fetch - self.ahead.passing, way.left + 1)

    def store(self, way: _Way) -> fx.Node | None:
        """The value's copy in DRAM, taken as soon as the value is made; None for inputs of the batch."""
        if way.value.target is ops.load:
            return None
        producer = producer_of(way.value)
        place = max([producer, *values_of(producer)], key=lambda node: self.position[node])
        while place.next.target is ops.offload:
            place = place.next
        with self.program.graph.inserting_after(place):
            return self.make(ops.offload, way.value, name=f"{way.value.name}_dram")

    def note_positions(self) -> None:
        self.position = {node: i for i, node in enumerate(self.program.graph.nodes)}

    def bring(self, way: _Way, copy: fx.Node | None) -> fx.Node:
        name = f"{way.value.name}_back"
        if copy is None:
            return self.put(self.fetch_turn(way), ops.load, *way.value.args, name=name, **way.value.kwargs)
        return self.put(self.fetch_turn(way), ops.fetch, copy, name=name)

    def put(self, turn: int, op: ops.Op, *args: Any, name: str, **fields: Any) -> fx.Node:
        """Insert an op before a turn, after what was put there earlier."""
        with self.program.graph.inserting_before(self.turns[turn]):
            return self.make(op, *args, name=name, **fields)

    def make(self, op: ops.Op, *args: Any, name: str, **fields: Any) -> fx.Node:
        node = self.program.graph.call_function(op, args, fields)
        node.name = name
        infer(self.program, node)
        return node
