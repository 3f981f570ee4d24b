"""The line of its generated file at which a device is, as text for people, from what its streams noted on the board."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...ir import ops
from ..device.named_streams import STREAM_SLOTS


def describe_position(file: Path, board: Sequence[int]) -> tuple[str, str]:
    """Two texts: the lines of the running streams for people, and the code of the first one. Running streams come
    first, the compute stream before others. For `board` see `worker.open_board`."""
    numbers = {name: board[i] for i, name in enumerate(STREAM_SLOTS) if board[i]}
    if not numbers:
        return "before its first op", ""
    order = sorted(numbers, key=lambda name: (numbers[name] < 0, name != ops.COMPUTE))
    lines = file.read_text().splitlines()
    texts = [_describe_line(lines, abs(numbers[name]), name, numbers[name] < 0) for name in order]
    running = [t for t, name in zip(texts, order) if numbers[name] > 0] or texts[:1]
    return "; ".join(running), _code(lines, abs(numbers[order[0]]))


def _code(lines: list[str], number: int) -> str:
    return lines[number - 1].split("  #")[0].strip() if number <= len(lines) else ""


def _describe_line(lines: list[str], number: int, stream: str, over: bool) -> str:
    code = _code(lines, number)
    micro_batch = re.search(r"micro_batch=(\d+)", code)
    where = f"micro-batch {micro_batch.group(1)}, " if micro_batch else ""
    return f"{'behind ' if over else ''}line {number}: `{code}` ({where}{stream})"
