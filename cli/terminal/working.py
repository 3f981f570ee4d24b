"""Progress of planning: on a terminal one line that is gone afterwards, and once a plan fits, its speed; elsewhere
lines on stderr: after a few seconds, when the first plan fits, and for each other plan that is asked for."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

SEARCH = "penstock.compiler.search"  # the logger that tells of every plan that was tried
NOTICE_S = 2.0  # until a pipe hears of work in progress, libraries of seconds included
Items = Callable[[], tuple[int, str]]  # the number of items of a step, and the word for one


class _Line(logging.Handler):
    def __init__(self, say: Callable[[logging.LogRecord], None]):
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record)


def answer_so_far(best_s: float, bound_s: float, number: int, item: str) -> str:
    """That a plan fits, and the rates between which the last answer is: of the best step so far, and of the bound."""
    from ...ir.units import figure

    least, most = figure(number / best_s), f" and {figure(number / bound_s)}" if bound_s > 0 else " or more"
    return f"fits; {'between ' if bound_s > 0 else ''}{least}{most} {item}s a second; so far "


def progress_text(record: logging.LogRecord, items: Items | None) -> tuple[str, bool]:
    """The words for what the search tells of, and whether they say that a plan fits, how fast."""
    from ...compiler.search.attempts import Progress  # there already, as it has told of a plan

    text, progress = record.getMessage(), record.msg
    if items is None or not isinstance(progress, Progress) or progress.best_s is None or not progress.is_asked:
        return text, False
    return answer_so_far(progress.best_s, progress.bound_s, *items()) + text, True


@contextmanager
def _listening(say: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Hand what the search tells to `say`."""
    logger, line = logging.getLogger(SEARCH), _Line(say)
    level = logger.level
    logger.addHandler(line)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(line)
        logger.setLevel(level)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Print the text on stderr where the body takes seconds."""
    timer = threading.Timer(NOTICE_S, Console(markup=False, emoji=False, stderr=True).print, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def working(items: Items | None = None) -> Iterator[Callable[[str], None]]:
    """Show what the body tells while it plans, and what the search says: on a terminal all of it, elsewhere the speed
    of the first plan that fits.

    `items`: of the plan that is asked for, until the body tells of another one."""
    screen = Console(markup=False, emoji=False, stderr=True)
    items = items and functools.cache(items)
    told = "planning"
    show: Callable[[str], None] = screen.print

    def tell(text: str) -> None:
        nonlocal told, items
        told, items = f"planning {text}", None
        show(told)

    if not screen.is_terminal:
        is_answered, begun_s = False, time.monotonic()

        def say_first(record: logging.LogRecord) -> None:
            nonlocal is_answered
            if not is_answered and time.monotonic() - begun_s > NOTICE_S:
                text, is_answered = progress_text(record, items)
                if is_answered:
                    screen.print(text, soft_wrap=True)

        with notice("planning; a large model takes a minute or more"), _listening(say_first):
            yield tell
        return
    with screen.status(Text(told)) as status:

        def update(text: str) -> None:
            status.update(Text(text))

        show = update
        with _listening(lambda record: show(f"{told}: {progress_text(record, items)[0]}")):
            yield tell
