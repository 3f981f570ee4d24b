"""The source line of an op or an error, and whose code it is.

A model of one's own often calls a library's (transformers), which calls torch. The code that a person can change is
their own, the code that says what went wrong may be the library's: errors name both, in this order.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from types import CodeType, FrameType, TracebackType

import torch

_LIBRARIES = ("site-packages", "dist-packages")  # the folders in which packages are installed
_TRACE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trace.py")  # what called the model is outside it


class SourceLines:
    """Finds lines of the user's and of libraries' code: not those of torch, Python's own library and `compiler/`."""

    def __init__(self) -> None:
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        self.own = os.path.join(here, "")
        self.skip = (os.path.join(os.path.dirname(torch.__file__), ""), self.own)
        self.stdlib = os.path.join(sysconfig.get_paths()["stdlib"], "")
        self.known: dict[CodeType, bool] = {}
        self.lines: dict[tuple[str, int], str] = {}

    def is_shown(self, code: CodeType) -> bool:
        """Whether a line of this code says something about the model."""
        if code not in self.known:
            self.known[code] = self.is_shown_file(code.co_filename)
        return self.known[code]

    def is_shown_file(self, file: str) -> bool:
        stdlib = file.startswith(self.stdlib) and not _is_library(file)
        return not (stdlib or file.startswith(("<frozen", *self.skip)))

    def text(self, file: str, line: int) -> str:
        """A line as "modeling.py:42: code"."""
        if (file, line) not in self.lines:
            code = linecache.getline(file, line).strip()
            self.lines[file, line] = f"{os.path.basename(file)}:{line}: {code}".rstrip(": ")
        return self.lines[file, line]

    def current(self) -> str:
        """The innermost line of the running stack, the user's or a library's; "" if there is none."""
        return next((self.text(*place) for place in self._running()), "")

    def where(self) -> str:
        """The places to name in an error: the innermost line of the user's own code in the model that is being traced,
        and on a line of its own that of a library which it called, if that is further in."""
        return self._places(self._running())

    def place_of_error(self, traceback: TracebackType | None) -> str:
        """The same for an exception of the model."""
        found: list[tuple[str, int]] = []
        while traceback is not None:
            if self.is_shown(traceback.tb_frame.f_code):
                found.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
            traceback = traceback.tb_next
        return self._places(reversed(found))

    def asking(self) -> FrameType | None:
        """The frame that called what is recorded now, which may be torch's own."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(self.own):
            frame = frame.f_back
        return frame

    def frames(self, most: int | None = None) -> list[FrameType]:
        """The frames of the model that runs now, in the user's code or a library's, innermost first."""
        return [*islice(self._frames(), most)]

    def _running(self) -> Iterator[tuple[str, int]]:
        """File and line of the frames of the model that runs now, innermost first."""
        return ((frame.f_code.co_filename, frame.f_lineno) for frame in self._frames())

    def _frames(self) -> Iterator[FrameType]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _TRACE:
            if self.is_shown(frame.f_code):
                yield frame
            frame = frame.f_back

    def _places(self, frames: Iterable[tuple[str, int]]) -> str:
        inner = ""
        for file, line in frames:
            if not _is_library(file):
                return self.text(file, line) + (f"\n  in {inner}" if inner else "")
            inner = inner or self.text(file, line)
        return inner


def _is_library(file: str) -> bool:
    return any(name in file.split(os.sep) for name in _LIBRARIES)
