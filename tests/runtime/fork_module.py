"""The module of the forks of `test_forks.py`: each writes a line about itself, and ends as its argument says."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PREPARED = []


def prepare() -> None:
    PREPARED.append(os.getpid())
    if os.environ.get("FORKS_FAIL"):
        raise ImportError("nothing works here")


def main(descriptors: Sequence[int], arguments: Sequence[str]) -> None:
    (how,) = arguments
    print(PREPARED[0], os.getpid(), os.getsid(0), os.environ.get("FORKS_TEXT"), os.environ["OMP_NUM_THREADS"], how)
    print("to stderr", file=sys.stderr)
    sys.stdout.flush()
    os.write(descriptors[0], b"!")
    if how == "wait":
        signal.pause()
    if how == "raise":
        raise ValueError("no such thing")
    os._exit(int(how))
