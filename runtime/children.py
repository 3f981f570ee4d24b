"""The start of other Python processes, all in one way: they import what this process imports, and nothing because it is
in the current directory, which may be a stranger's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Python puts "" in front of the paths of `-c`, unless PYTHONSAFEPATH is set and known (3.11).
_BEGIN = "import sys; sys.path[:1] = filter(None, sys.path[:1]); exec(sys.argv.pop(1))"
_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def import_environment() -> dict[str, str]:
    """This process's environment, with its import paths."""
    paths = dict.fromkeys(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def start_python(
    code: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that runs this text, which has imported `sys`. `environment`: more of it; `options`: of `Popen`.
    Raises `OSError` where it cannot be started."""
    command = [sys.executable, "-c", _BEGIN, code, *arguments]
    return subprocess.Popen(command, env={**import_environment(), **(environment or {})}, **options)


def end_with_parent() -> None:
    """End this process, in whatever it does, within a second of the end of the process that started it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_module(module: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """As `start_python`, for `python -m module`."""
    return start_python(_MODULE, [module, *arguments], **options)
