"""Progress of planning: on a terminal one line that is gone afterwards, and once a plan fits, its speed; elsewhere a
line on stderr after a few seconds, and another for each other plan."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

SEARCH = "penstock.compiler.search"  # the logger that tells of every plan that was tried
NOTICE_S = 2.0  # until a pipe hears of planning, libraries of seconds included
Items = Callable[[], tuple[int, str]]  # the number of items of a step, and the word for one


class _Line(logging.Handler):
    def __init__(self, say: Callable[[logging.LogRecord], None]):
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record)


def answer_so_far(best_s: float, bound_s: float, number: int, item: str) -> str:
    """That a plan fits, and the rates between which the last answer is: of the best step so far, and of the bound."""
    from ..ir.units import figure

    least, most = figure(number / best_s), f" and {figure(number / bound_s)}" if bound_s > 0 else " or more"
    return f"fits; {'between ' if bound_s > 0 else ''}{least}{most} {item}s a second; so far "


@contextmanager
def working(items: Items | None = None) -> Iterator[Callable[[str], None]]:
    """Show what the body tells while it plans, and on a terminal also what the search says.

    `items`: of the plan that is asked for, until the body tells of another one."""
    screen = Console(markup=False, emoji=False, stderr=True)
    if not screen.is_terminal:
        notice = threading.Timer(NOTICE_S, screen.print, ["planning; a large model takes a minute or more"])
        notice.daemon = True
        notice.start()
        try:
            yield lambda text: screen.print(f"planning {text}")
        finally:
            notice.cancel()
        return
    logger, told = logging.getLogger(SEARCH), "planning"
    items = items and functools.cache(items)
    level = logger.level
    with screen.status(Text(told)) as status:

        def tell(text: str) -> None:
            nonlocal told, items
            told, items = f"planning {text}", None
            status.update(Text(told))

        def say(record: logging.LogRecord) -> None:
            from ..compiler.search.attempts import Progress  # there already, as it has told of a plan

            text, progress = record.getMessage(), record.msg
            if items is not None and isinstance(progress, Progress) and progress.best_s is not None:
                text = answer_so_far(progress.best_s, progress.bound_s, *items()) + text
            status.update(Text(f"{told}: {text}"))

        line = _Line(say)
        logger.addHandler(line)
        logger.setLevel(logging.INFO)
        try:
            yield tell
        finally:
            logger.removeHandler(line)
            logger.setLevel(level)
