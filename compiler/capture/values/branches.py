"""Branches of a model on a value that no trace knows, of which a program can take one way: what it records is a check.

In: the frame that asks for the truth of a tensor, and the node of the tensor. Out: the answer with which forward goes
on. `if labels.max() >= n: raise` gets False and `assert lengths.all()` True, as after the other answer forward ends in
an error; `if not torch.isfinite(h).all(): h = h.clamp(...)` the answer for finite numbers, without which nothing is
trained. A draw of `torch.rand` that is compared with a bound outside of its numbers needs no check.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import sys
from types import FrameType
from typing import Any

from torch import fx

from ....ir.calls import function_name

_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False}
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE")
_MOST = 400  # instructions that are looked at
# Comparisons of a number of things by which 0 and all others are told apart -> their truth for others.
ANSWERS = {("==", 0): False, ("!=", 0): True, (">", 0): True, (">=", 1): True, ("<", 1): False, ("<=", 0): False}


def answer_without_error(frame: FrameType) -> tuple[bool, str] | None:
    """The answer after which the frame need not raise, and the name of the error after the other one. None if none or
    both can go on. Where the frame returns the answer, the branch of its caller counts."""
    code, negated = _Code(frame), False
    while (negates := code.negates_result(code.here)) is not None and (caller := _caller(frame)) is not None:
        code, frame, negated = _Code(caller), caller, negated ^ negates
    errors = {answer: code.error_after(code.here, answer ^ negated) for answer in (True, False)}
    raising = [answer for answer, error in errors.items() if error is not None]
    return (not raising[0], str(errors[raising[0]])) if len(raising) == 1 else None


def answer_if_finite(condition: fx.Node) -> bool | None:
    """The truth of a condition where every number is finite; None for a condition that asks something else."""
    flips, node = False, condition
    while (name := function_name(node.target)) not in _OF_FINITE:
        if name not in ("all", "any", "invert", "logical_not", "bitwise_not"):
            return None
        flips ^= name not in ("all", "any")
        node = node.args[0]  # type: ignore[assignment]
    return _OF_FINITE[name] ^ flips


def answer_of_draw(condition: fx.Node) -> bool | None:
    """The truth of a comparison of what `torch.rand` draws, in [0, 1), with 0 and less or 1 and more, as of layers that
    are dropped with probability 0; None for another condition. A drawn 0 itself counts as more than 0."""
    name, operands = function_name(condition.target), condition.args
    if name not in ("gt", "ge", "lt", "le") or len(operands) != 2:
        return None
    draw, bound = operands
    is_draw = isinstance(draw, fx.Node) and function_name(draw.target) == "rand"
    if not is_draw or not isinstance(bound, (int, float)) or 0 < bound < 1:
        return None
    return (bound <= 0) == (name in ("gt", "ge"))


def span_of_branch(frame: FrameType, answer: bool) -> range | None:
    """The instructions that a frame runs only after this answer to a question: up to where both ways meet, or to the
    end of the turn of a loop. None where the other way does anything else, or this one leaves by another way."""
    code = _Code(frame)
    return code.span(code.here, answer)


def answer_about_length(frame: FrameType) -> bool | None:
    """The answer of a branch on `len(...)`, which a frame calls, where that is not 0; None where it asks more."""
    code = _Code(frame)
    _, place, compared = code.question(code.here)
    if compared is None:
        return True if place is not None else None
    return ANSWERS.get(compared)


def _caller(frame: FrameType) -> FrameType | None:
    """The frame that calls a function by its name; None where another function, such as `map`, does, and where source
    does not tell."""
    caller = frame.f_back
    if caller is None:
        return None
    calls = _calls_at(caller) if sys.version_info >= (3, 11) else _calls_in_line(caller)
    names = {getattr(call.func, "id", getattr(call.func, "attr", None)) for call in calls}
    return caller if names == {frame.f_code.co_name} else None


def _calls_at(frame: FrameType) -> list[ast.Call]:
    """The call in source that a frame makes; none where it runs something else, or there is no source."""
    assert sys.version_info >= (3, 11)
    first, last, begin, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if first is None or last is None:
        return []
    lines = [line.encode() for line in linecache.getlines(frame.f_code.co_filename)[first - 1 : last]]
    if not lines:
        return []
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        found = ast.parse(b"".join(lines), mode="eval").body
    except SyntaxError:
        return []
    return [found] if isinstance(found, ast.Call) else []


def _calls_in_line(frame: FrameType) -> list[ast.Call]:
    """The calls in source around the line of a frame that makes one of them: before 3.11 Python knows no columns."""
    code = _Code(frame)
    if "CALL" not in code.all[code.here].opname:
        return []
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return []
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return [each for each in calls if each.lineno <= frame.f_lineno <= (each.end_lineno or each.lineno)]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


class _Code:
    """The instructions of a function; `here`: the place of the instruction that runs."""

    def __init__(self, frame: FrameType):
        code, self.names = frame.f_code, {**frame.f_builtins, **frame.f_globals}
        self.all: list[dis.Instruction] = []
        self.place_of: dict[int, int] = {}
        for each in dis.get_instructions(code):
            self.place_of[each.offset] = len(self.all)
            if each.opname not in ("CACHE", "EXTENDED_ARG"):
                self.all.append(each)
        now = frame.f_lasti
        while now not in self.place_of:  # of an instruction that calls, one of its caches
            now -= 2
        self.here = self.place_of[now]
        entries = getattr(dis.Bytecode(code), "exception_entries", ())  # of Python 3.11 and later
        self.caught = [range(e.start, e.end) for e in entries if not self._is_with(self.place_of[e.target])]
        setups = [each for each in self.all if each.opname == "SETUP_FINALLY"]  # the same before 3.11
        self.caught += [range(each.offset, int(each.argval)) for each in setups]

    def _is_with(self, handler: int) -> bool:
        """Whether what handles an error is the end of a `with`, which raises it again."""
        return any(each.opname == "WITH_EXCEPT_START" for each in self.all[handler : handler + 2])

    def error_after(self, place: int, answer: bool) -> str | None:
        """The name of an error that is raised on every way after this instruction has given an answer; None where a way
        goes on."""
        flips, jump, _ = self.question(place)
        if jump is None:
            return None
        jumps = ("IF_TRUE" in self.all[jump].opname) == answer ^ flips
        return self._error_from(self._target(jump) if jumps else jump + 1)

    def question(self, place: int) -> tuple[bool, int | None, tuple[str, Any] | None]:
        """Whether what this instruction gives, or a comparison of it with a number, is negated, the jump by it, and the
        comparison. None where there is no jump."""
        flips, end, compared = self._truth(place)
        is_jump = any(way in self.all[end].opname for way in ("IF_TRUE", "IF_FALSE"))
        return flips, end if is_jump else None, compared

    def negates_result(self, place: int) -> bool | None:
        """Whether the function returns what this instruction gives negated; None where it returns something else."""
        flips, end, compared = self._truth(place)
        return flips if self.all[end].opname == "RETURN_VALUE" and compared is None else None

    def _truth(self, place: int) -> tuple[bool, int, tuple[str, Any] | None]:
        """As `question`, with the instruction that takes the answer."""
        flips, compared = False, None
        while "CALL" in self.all[place].opname:
            place += 1
        if self.all[place].opname.startswith("LOAD_") and self.all[place + 1].opname == "COMPARE_OP":
            compared = str(self.all[place + 1].argval).removeprefix("bool(").removesuffix(")"), self.all[place].argval
            place += 1
        place += self.all[place].opname == "COMPARE_OP"
        while self.all[place].opname in ("UNARY_NOT", "TO_BOOL"):
            flips ^= self.all[place].opname == "UNARY_NOT"
            place += 1
        return flips, place, compared

    def span(self, place: int, answer: bool) -> range | None:
        """The offsets of the instructions that are left out after the other answer."""
        flips, jump, _ = self.question(place)
        if jump is None:
            return None
        place = jump
        meet = self._target(place) if ("IF_TRUE" in self.all[place].opname) != answer ^ flips else place + 1
        while (name := self.all[meet].opname) == "NOP" or ("JUMP" in name and "_IF_" not in name):
            meet = meet + 1 if name == "NOP" else self._target(meet)
        begin, head = place + 1, meet
        if self.all[meet].opname == "FOR_ITER" and meet < place:
            meet = self._target(meet)
        inside = range(begin, meet)
        for each in self.all[begin:meet]:
            leaves = "JUMP" in each.opname and not begin <= self.place_of[int(each.argval)] <= meet
            if each.opname in _ENDS or (leaves and self.place_of[int(each.argval)] != head):
                return None
        return range(self.all[begin].offset, self.all[meet - 1].offset + 1) if inside else None

    def _error_from(self, start: int) -> str | None:
        name, waiting, seen = "an error", [start], set[int]()
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            if place >= len(self.all) or len(seen) > _MOST:
                return None
            each = self.all[place]
            if each.opname == "RAISE_VARARGS" and not any(each.offset in span for span in self.caught):
                continue
            if each.opname in _ENDS or each.opname in ("RAISE_VARARGS", "FOR_ITER", "SEND", "SETUP_FINALLY"):
                return None
            if each.opname == "LOAD_ASSERTION_ERROR" or each.argval is AssertionError:
                name = "AssertionError"
            elif each.opname == "LOAD_GLOBAL" and _is_error(self.names.get(each.argval)):
                name = each.argval
            if "JUMP" in each.opname:
                waiting.append(self._target(place))
            if "JUMP" not in each.opname or "_IF_" in each.opname:
                waiting.append(place + 1)
        return name

    def _target(self, place: int) -> int:
        return self.place_of[int(self.all[place].argval)]
