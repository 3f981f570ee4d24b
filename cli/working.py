"""Says on a terminal how far planning is, in one line that is gone afterwards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

SEARCH = "penstock.compiler.search"  # the logger that tells of every plan that was tried


class _Line(logging.Handler):
    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """While the body plans, what the search says, and what the body tells, stands on the terminal; elsewhere nothing
    does."""
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda text: None
        return
    logger = logging.getLogger(SEARCH)
    level = logger.level
    with screen.status("planning") as status, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of libraries about themselves, in the middle of the line
        line = _Line(lambda text: status.update(f"planning: {text}"))
        logger.addHandler(line)
        logger.setLevel(logging.INFO)
        try:
            yield lambda text: status.update(f"planning: {text}")
        finally:
            logger.removeHandler(line)
            logger.setLevel(level)
