"""Says on a terminal how far planning is, in one line that is gone afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

SEARCH = "penstock.compiler.search"  # the logger that tells of every plan that was tried


class _Line(logging.Handler):
    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Show what the body tells while it plans, and then what the search says, on a terminal; nothing elsewhere."""
    screen = Console(markup=False, emoji=False, stderr=True)
    if not screen.is_terminal:
        yield lambda text: None
        return
    logger, told = logging.getLogger(SEARCH), "planning"
    level = logger.level
    with screen.status(Text(told)) as status:

        def tell(text: str) -> None:
            nonlocal told
            told = f"planning {text}"
            status.update(Text(told))

        line = _Line(lambda text: status.update(Text(f"{told}: {text}")))
        logger.addHandler(line)
        logger.setLevel(logging.INFO)
        try:
            yield tell
        finally:
            logger.removeHandler(line)
            logger.setLevel(level)
